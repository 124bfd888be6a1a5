//! Fault rules of the profile.

use std::sync::Arc;

use rnic_abi::faults::FaultName;
use rnic_core::device::ArmedFault;

use super::{FaultRules, Rule};
use crate::clock;
use crate::config::Profile;

impl FaultRules {
    /// Returns the rules of a profile. They select all programs.
    pub fn of_profile(profile: &Profile) -> Self {
        let mut rules = FaultRules::default();
        for rule in profile.keys.rules.iter() {
            // Cannot fail: each name of an action is also a valid name of a rule.
            let own = FaultName::parse(rule.action_name).ok();
            let Some(name) = rule.name.or(own) else { continue };
            rules.last += 1;
            let mut armed = ArmedFault::new(name, rules.last, rule.clone(), clock::now());
            armed.is_recorded = false;
            let made = Rule {
                armed: Arc::new(armed),
                owner: rustix::process::getuid().as_raw(),
                user: None,
                session: None,
                lasts: None,
                of_profile: Some(profile.keys.transport),
                _charge: None,
            };
            rules.rules.insert(rules.last, made);
        }
        rules
    }
}
