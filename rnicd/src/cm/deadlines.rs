//! Deadlines in order, so that ten thousand waiting connections cost nothing per event.

use std::collections::BTreeSet;

use rnic_core::types::Time;

/// A set of (time, slot); each slot stands in it at most once, which its owner sees to by keeping
/// the time it put in.
#[derive(Debug, Default)]
pub(super) struct Deadlines(BTreeSet<(Time, usize)>);

impl Deadlines {
    pub(super) fn insert(&mut self, at: Time, slot: usize) {
        self.0.insert((at, slot));
    }

    pub(super) fn remove(&mut self, at: Time, slot: usize) {
        self.0.remove(&(at, slot));
    }

    /// The earliest, if any.
    pub(super) fn first(&self) -> Option<(Time, usize)> {
        self.0.first().copied()
    }

    /// Takes the earliest if its time has come.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<usize> {
        let (at, slot) = self.first()?;
        (at <= now).then(|| {
            self.0.remove(&(at, slot));
            slot
        })
    }
}
