//! When memory goes back to the kernel: the allocator keeps what a burst of objects has freed, so
//! it is asked to give that up some time after most of them have gone.

use std::time::Duration;

use rnic_core::types::Time;

/// Objects that there are, and were.
#[derive(Debug, Default)]
pub(super) struct HighWater {
    /// The most since memory was last given back.
    most: u64,
    due: Option<Time>,
}

impl HighWater {
    /// Takes note of the number of objects.
    pub(super) fn observe(&mut self, objects: u64, now: Time) {
        self.most = self.most.max(objects);
        let is_burst = self.most - objects >= BURST && objects < self.most / 2;
        if is_burst && self.due.is_none() {
            self.due = Some(now.after(PAUSE));
        }
    }

    /// When memory is to be given back, if it is.
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    /// Returns true, once, when memory is to be given back. `objects` are those that there are.
    pub(super) fn is_over(&mut self, objects: u64, now: Time) -> bool {
        let over = self.due.is_some_and(|due| due <= now);
        if over {
            self.due = None;
            self.most = objects;
        }
        over
    }
}

/// Objects that must have gone.
const BURST: u64 = 256;
/// Until the last of them have been dropped. Bursts that follow each other are one.
const PAUSE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time(0).after(Duration::from_secs(seconds))
    }

    #[test]
    fn memory_goes_back_once_after_a_burst() {
        let mut water = HighWater::default();
        for (objects, second) in [(0, 0), (10_000, 1), (6_000, 2)] {
            water.observe(objects, at(second));
            assert_eq!(water.due(), None, "{objects}");
        }
        water.observe(4_000, at(3));
        assert_eq!(water.due(), Some(at(5)));
        water.observe(100, at(4));
        assert!(!water.is_over(100, at(4)));
        assert!(water.is_over(100, at(5)));
        assert!(!water.is_over(100, at(6)));
        water.observe(100, at(7));
        water.observe(0, at(8));
        assert_eq!(water.due(), None);
    }
}
