//! Fault rules in force, shared by the resource manager and the workers.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::faults::{Action, Counter, FaultName, FaultRule, Opcode, Point};
use rnic_abi::types::{Stag, Time};

/// A fault rule in force.
#[derive(Debug)]
pub struct ArmedFault {
    /// Name, unique among the rules of its owner.
    pub name: FaultName,
    /// Number, unique in the daemon.
    pub number: u64,
    /// The rule.
    pub rule: FaultRule,
    /// Time at which the rule was set.
    pub set_at: Time,
    /// Each fault is recorded. Those of a profile are not: they are how its device works.
    pub is_recorded: bool,
    /// Occasions and faults so far.
    pub counter: Counter,
    /// Reports of workers that the resource manager has not handled.
    reports: AtomicU32,
}

impl ArmedFault {
    /// Returns a rule that is set now, at `set_at`.
    pub fn new(name: FaultName, number: u64, rule: FaultRule, set_at: Time) -> Self {
        let counter = Counter::default();
        let reports = AtomicU32::new(0);
        ArmedFault { name, number, rule, set_at, is_recorded: true, counter, reports }
    }

    /// Counts an occasion that the selector matches. Returns true if the fault takes place.
    pub fn strikes(&self, now: Time) -> bool {
        self.is_in_force(now) && self.counter.strikes(&self.rule.trigger)
    }

    /// Returns true if the time before the rule takes effect has passed.
    pub fn is_in_force(&self, now: Time) -> bool {
        now >= self.set_at.after(self.rule.trigger.after)
    }

    /// Returns true if a worker may report an occasion to the resource manager. Programs can cause
    /// occasions faster than it handles them, so only a few may wait. Pairs with
    /// [`end_report`](Self::end_report).
    pub fn begin_report(&self) -> bool {
        let within_limit = |waiting| (waiting < MAX_REPORTS).then_some(waiting + 1);
        self.reports.fetch_update(Relaxed, Relaxed, within_limit).is_ok()
    }

    /// Marks a report as handled.
    pub fn end_report(&self) {
        self.reports.fetch_sub(1, Relaxed);
    }

    /// Returns the action if the fault takes place at this occasion.
    pub fn at(&self, occasion: &Occasion, now: Time) -> Option<Action> {
        let Occasion { point, opcode, flushed, stag } = *occasion;
        let FaultRule { select, action, .. } = &self.rule;
        let matches = self.rule.point == point
            && select.opcode.is_none_or(|wanted| opcode == Some(wanted))
            && (flushed || !select.flushed)
            && select.mr.is_none_or(|wanted| stag == Some(Stag(wanted)))
            && self.strikes(now);
        matches.then_some(*action)
    }
}

/// An occasion of a QP, with all that rules may select of it.
#[derive(Clone, Copy, Debug)]
pub struct Occasion {
    /// Kind of occasion.
    pub point: Point,
    /// Kind of the request or message.
    pub opcode: Option<Opcode>,
    /// True at the completion of a flushed request or receive.
    pub flushed: bool,
    /// STag of this side's memory that a message accesses.
    pub stag: Option<Stag>,
}

impl Occasion {
    /// Returns an occasion that has only a kind of request or message.
    pub fn new(point: Point, opcode: Option<Opcode>) -> Self {
        Occasion { point, opcode, flushed: false, stag: None }
    }
}

/// Maximum number of reports of a rule that wait for the resource manager.
const MAX_REPORTS: u32 = 8;

#[cfg(test)]
impl ArmedFault {
    /// Returns a rule with this text that has just been set.
    pub(crate) fn of_test(text: &str) -> Self {
        let rule = FaultRule::parse_all(text).unwrap().remove(0);
        let name = FaultName::parse("test").unwrap();
        ArmedFault::new(name, 1, rule, Time(0))
    }
}
