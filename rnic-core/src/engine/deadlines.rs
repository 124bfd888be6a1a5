//! The deadlines of an engine. To remove a deadline, the caller passes the time for which it was
//! set.

use std::collections::BTreeSet;

use super::schedule::Key;
use rnic_abi::types::Time;

/// Purpose of a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Due {
    /// Maximum time of this QP's stream in its phase.
    Phase(Key),
    /// Maximum time that a Send to this QP waits for a receive.
    Rnr(Key),
    /// Check whether this QP's stream has stalled inside an FPDU.
    Stall(Key),
    /// The clock of this RC or UC QP.
    RcClock(Key),
    /// Publish the completions of this QP that a fault rule has held back.
    Completion(Key),
    /// Begin the request of this QP that a fault rule has delayed.
    Request(Key),
    /// Send the completion events of this QP that a fault rule has held back.
    CompletionEvent(Key),
    /// End of the time for which this QP holds data, or the response to a Read.
    Order(Key),
    /// The emulated link of this QP delivers or accepts something.
    Link(Key),
    /// Maximum time of the copy with this number.
    Copy(u64),
}

/// All deadlines, earliest first.
#[derive(Default)]
pub(super) struct Deadlines(BTreeSet<(Time, Due)>);

impl Deadlines {
    pub(super) fn set(&mut self, at: Time, due: Due) {
        self.0.insert((at, due));
    }

    /// Removes the deadline that was set for this time.
    pub(super) fn clear(&mut self, at: Time, due: Due) {
        self.0.remove(&(at, due));
    }

    /// Returns the time of the earliest deadline.
    pub(super) fn next(&self) -> Option<Time> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Returns the time of the earliest deadline if it is of an emulated link.
    pub(super) fn next_of_link(&self) -> Option<Time> {
        self.0.first().filter(|(_, due)| matches!(due, Due::Link(_))).map(|(at, _)| *at)
    }

    /// Removes and returns the earliest deadline if it is due by `now`.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<Due> {
        let (at, due) = *self.0.first()?;
        (at <= now).then(|| {
            self.0.pop_first();
            due
        })
    }

    /// Returns true if all deadlines are of kind [`Due::Phase`].
    #[cfg(test)]
    pub(super) fn only_of_phases(&self) -> bool {
        self.0.iter().all(|(_, due)| matches!(due, Due::Phase(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_come_in_order_when_due() {
        let mut d = Deadlines::default();
        d.set(Time(30), Due::Phase(1));
        d.set(Time(10), Due::Copy(7));
        d.set(Time(20), Due::Rnr(1));
        d.set(Time(20), Due::Stall(1));
        d.clear(Time(20), Due::Stall(1));
        // This deadline was not set, so nothing is removed.
        d.clear(Time(30), Due::Copy(7));
        assert_eq!((d.next(), d.pop_due(Time(9))), (Some(Time(10)), None));
        assert_eq!(d.pop_due(Time(25)), Some(Due::Copy(7)));
        assert_eq!(d.pop_due(Time(25)), Some(Due::Rnr(1)));
        assert_eq!(d.pop_due(Time(25)), None);
        assert_eq!((d.pop_due(Time(30)), d.next()), (Some(Due::Phase(1)), None));
    }
}
