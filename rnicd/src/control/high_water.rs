//! Decides when to return memory to the kernel. The allocator keeps the memory of freed objects.
//! Some time after most objects of a burst were freed, the daemon tells the allocator to release
//! it.

use std::time::Duration;

use rnic_abi::types::Time;

/// High-water mark of the number of objects.
#[derive(Debug, Default)]
pub(super) struct HighWater {
    /// Maximum since memory was last returned.
    most: u64,
    due: Option<Time>,
}

impl HighWater {
    /// Records the number of objects.
    pub(super) fn observe(&mut self, objects: u64, now: Time) {
        self.most = self.most.max(objects);
        let is_burst = self.most - objects >= BURST && objects < self.most / 2;
        if is_burst && self.due.is_none() {
            self.due = Some(now.after(PAUSE));
        }
    }

    /// Returns the time to return memory, if it is set.
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    /// Returns true once when it is time to return memory. `objects` is the current number of
    /// objects.
    pub(super) fn take_due(&mut self, objects: u64, now: Time) -> bool {
        let over = self.due.is_some_and(|due| due <= now);
        if over {
            self.due = None;
            self.most = objects;
        }
        over
    }
}

/// Minimum number of freed objects.
const BURST: u64 = 256;
/// Delay, during which the last objects are dropped. Bursts within this time count as one.
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
        assert!(!water.take_due(100, at(4)));
        assert!(water.take_due(100, at(5)));
        assert!(!water.take_due(100, at(6)));
        water.observe(100, at(7));
        water.observe(0, at(8));
        assert_eq!(water.due(), None);
    }
}
