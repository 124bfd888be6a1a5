//! The deadlines of an engine, in one set. Whoever sets one remembers when, to take it out again.

use std::collections::BTreeSet;

use super::schedule::Key;
use crate::types::Time;

/// What is to be done when a deadline comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Due {
    /// The phase of this QP's stream has lasted as long as it may.
    Phase(Key),
    /// A Send to this QP has waited for a receive as long as it may.
    Rnr(Key),
    /// This QP's stream is to be looked at: it may have stopped inside an FPDU.
    Stall(Key),
    /// A clock of this QP, which is wired by hand, runs out.
    Wired(Key),
    /// The copy with this number has taken as long as it may.
    Copy(u64),
}

/// All deadlines, earliest first.
#[derive(Default)]
pub(super) struct Deadlines(BTreeSet<(Time, Due)>);

impl Deadlines {
    pub(super) fn set(&mut self, at: Time, due: Due) {
        self.0.insert((at, due));
    }

    /// Takes out what was set for this time.
    pub(super) fn clear(&mut self, at: Time, due: Due) {
        self.0.remove(&(at, due));
    }

    /// When the first is due.
    pub(super) fn next(&self) -> Option<Time> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Takes out the first if it is due by now.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<Due> {
        let (at, due) = *self.0.first()?;
        (at <= now).then(|| {
            self.0.pop_first();
            due
        })
    }

    /// Whether nothing is awaited of any kind but phases.
    #[cfg(test)]
    pub(super) fn only_of_phases(&self) -> bool {
        self.0.iter().all(|(_, due)| matches!(due, Due::Phase(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_comes_first_and_none_before_its_time() {
        let mut d = Deadlines::default();
        d.set(Time(30), Due::Phase(1));
        d.set(Time(10), Due::Copy(7));
        d.set(Time(20), Due::Rnr(1));
        d.set(Time(20), Due::Stall(1));
        d.clear(Time(20), Due::Stall(1));
        // Not what was set.
        d.clear(Time(30), Due::Copy(7));
        assert_eq!((d.next(), d.pop_due(Time(9))), (Some(Time(10)), None));
        assert_eq!(d.pop_due(Time(25)), Some(Due::Copy(7)));
        assert_eq!(d.pop_due(Time(25)), Some(Due::Rnr(1)));
        assert_eq!(d.pop_due(Time(25)), None);
        assert_eq!((d.pop_due(Time(30)), d.next()), (Some(Due::Phase(1)), None));
    }
}
