//! Units in flight on an emulated link, in the order in which they arrive.

use std::collections::VecDeque;

use rnic_abi::types::Time;

/// Units in flight, oldest first.
pub(in crate::engine) struct DelayLine<T> {
    units: VecDeque<Delayed<T>>,
    bytes: usize,
}

struct Delayed<T> {
    at: Time,
    bytes: usize,
    unit: T,
}

impl<T> Default for DelayLine<T> {
    fn default() -> Self {
        DelayLine { units: VecDeque::new(), bytes: 0 }
    }
}

impl<T> DelayLine<T> {
    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// Returns the memory that the units take, in bytes.
    pub(in crate::engine) fn room(&self) -> usize {
        self.bytes + self.units.len() * UNIT
    }

    /// Returns the number of bytes in flight.
    #[cfg(test)]
    pub(in crate::engine) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns true if another unit may enter.
    pub(in crate::engine) fn has_room(&self) -> bool {
        self.room() < WINDOW
    }

    /// Adds a unit that arrives at `at`, or with the last unit if that is later.
    pub(in crate::engine) fn push(&mut self, at: Time, bytes: usize, unit: T) {
        let at = self.units.back().map_or(at, |last| at.max(last.at));
        self.bytes += bytes;
        self.units.push_back(Delayed { at, bytes, unit });
    }

    /// Returns the time at which the first unit arrives.
    pub(in crate::engine) fn next(&self) -> Option<Time> {
        self.units.front().map(|first| first.at)
    }

    /// Returns the time after `now` at which the next unit arrives. Earlier units may be blocked.
    pub(in crate::engine) fn next_after(&self, now: Time) -> Option<Time> {
        let arrived = self.units.partition_point(|unit| unit.at <= now);
        self.units.get(arrived).map(|next| next.at)
    }

    /// Takes the first unit that qualifies if it has arrived by `now`.
    pub(in crate::engine) fn take_due(
        &mut self,
        now: Time,
        qualifies: impl Fn(&T) -> bool,
    ) -> Option<T> {
        let due = self.units.iter().take_while(|unit| unit.at <= now);
        let at = due.map(|unit| &unit.unit).position(qualifies)?;
        self.take(at)
    }

    /// Takes the first unit, due or not.
    pub(in crate::engine) fn take_first(&mut self) -> Option<T> {
        self.take(0)
    }

    fn take(&mut self, at: usize) -> Option<T> {
        let taken = self.units.remove(at)?;
        self.bytes -= taken.bytes;
        if self.units.is_empty() {
            // An idle link holds no memory.
            self.units = VecDeque::new();
        }
        Some(taken.unit)
    }
}

/// Maximum number of bytes in flight from one QP, give or take one unit. It bounds the memory of an
/// emulated link, and with its delay the bandwidth: 1 MiB per delay.
pub(in crate::engine) const WINDOW: usize = 1 << 20;
/// Number of bytes that a unit counts for in addition to its payload, so that small units do not
/// take much more memory than their bytes.
const UNIT: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_arrive_in_order() {
        let mut line = DelayLine::default();
        line.push(Time(10), 5, 'a');
        // A unit with a shorter delay does not overtake.
        line.push(Time(7), 6, 'b');
        line.push(Time(12), 7, 'c');
        assert_eq!((line.next(), line.bytes()), (Some(Time(10)), 18));
        assert_eq!(line.take_due(Time(9), |_| true), None);
        assert_eq!(line.take_due(Time(10), |unit| *unit == 'c'), None);
        assert_eq!(line.take_due(Time(10), |_| true), Some('a'));
        assert_eq!((line.next(), line.next_after(Time(10))), (Some(Time(10)), Some(Time(12))));
        assert_eq!(line.take_due(Time(10), |unit| *unit == 'b'), Some('b'));
        assert_eq!((line.next(), line.bytes()), (Some(Time(12)), 7));
        assert_eq!((line.take_first(), line.room()), (Some('c'), 0));
    }

    #[test]
    fn small_units_fill_the_window() {
        let mut line = DelayLine::default();
        while line.has_room() {
            line.push(Time(0), 1, ());
        }
        assert!(line.bytes() <= WINDOW / UNIT);
    }
}
