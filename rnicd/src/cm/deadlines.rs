//! Deadlines, sorted by time, so that waiting connections cost nothing per event.

use std::collections::BTreeSet;

use rnic_abi::types::Time;

/// A set of (time, slot). Each slot is in the set at most once: its owner stores the inserted time,
/// and removes that entry before it inserts another.
#[derive(Debug, Default)]
pub(super) struct Deadlines(BTreeSet<(Time, usize)>);

impl Deadlines {
    pub(super) fn insert(&mut self, at: Time, slot: usize) {
        self.0.insert((at, slot));
    }

    pub(super) fn remove(&mut self, at: Time, slot: usize) {
        self.0.remove(&(at, slot));
    }

    /// Returns the earliest deadline, if any.
    pub(super) fn first(&self) -> Option<(Time, usize)> {
        self.0.first().copied()
    }

    /// Removes and returns the slot with the earliest deadline if it has passed.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<usize> {
        let (at, slot) = self.first()?;
        (at <= now).then(|| {
            self.0.remove(&(at, slot));
            slot
        })
    }
}
