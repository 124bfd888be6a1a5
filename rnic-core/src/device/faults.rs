//! Fault rules in force, shared by the resource manager and the workers.

use rnic_abi::faults::{Action, Counter, FaultName, FaultRule, Opcode, Point};
use rnic_abi::types::Time;

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
    /// Occasions and faults so far.
    pub counter: Counter,
}

impl ArmedFault {
    /// Counts an occasion that the selector matches. Returns true if the fault takes place.
    pub fn strikes(&self, now: Time) -> bool {
        self.is_in_force(now) && self.counter.strikes(&self.rule.trigger)
    }

    /// Returns true if the time before the rule takes effect has passed.
    pub fn is_in_force(&self, now: Time) -> bool {
        now >= self.set_at.after(self.rule.trigger.after)
    }

    /// Returns the action if the fault takes place at this occasion.
    pub fn at(&self, point: Point, opcode: Option<Opcode>, now: Time) -> Option<Action> {
        let FaultRule { select, action, .. } = &self.rule;
        let matches = self.rule.point == point
            && select.opcode.is_none_or(|wanted| opcode == Some(wanted))
            && self.strikes(now);
        matches.then_some(*action)
    }
}

#[cfg(test)]
impl ArmedFault {
    /// Returns a rule with this text that has just been set.
    pub(crate) fn of_test(text: &str) -> Self {
        let rule = FaultRule::parse_all(text).unwrap().remove(0);
        let name = FaultName::parse("test").unwrap();
        ArmedFault { name, number: 1, rule, set_at: Time(0), counter: Counter::default() }
    }
}
