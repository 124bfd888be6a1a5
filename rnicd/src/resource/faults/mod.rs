//! Fault rules: permission to set them, selection of sessions and QPs, and effects outside of the
//! engine.
//!
//! A rule acts on the sessions of the user who set it, or on one session. An administrator may
//! select other users. Workers evaluate the rules of work requests, messages and completions. Each
//! QP has its own list of rules ([`qps`]), so that rules cost other QPs nothing. The control thread
//! evaluates the rules of verbs ([`verbs`], [`calls`]) and the rules with a timer ([`effects`]).

mod calls;
mod changes;
mod effects;
pub(super) mod held;
mod later;
mod messages;
mod profile;
pub(super) mod qp_faults;
mod qps;
mod queues;
mod replies;
mod requests;
mod verbs;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Weak};

use rnic_abi::abi::control::DeviceKind;
use rnic_abi::faults::{FaultName, FaultRule, Point};
use rnic_abi::types::*;
use rnic_core::device::ArmedFault;
use rnic_core::engine::EmulatedLink;

use crate::resource::ledger::Charge;
use crate::resource::session::Session;
pub(super) use changes::Viewer;
use held::{HeldAccept, HeldReply, Later};
use qp_faults::LinkKey;

/// The rules in force, and their timers.
#[derive(Default)]
pub(super) struct FaultRules {
    /// By number, in the order in which they were set.
    rules: BTreeMap<u64, Rule>,
    /// Last number of a rule or a delayed action.
    last: u64,
    /// Rules with a timer, by time.
    due: BTreeSet<(Time, u64)>,
    /// Delayed actions of sessions, by time and number.
    later: BTreeMap<(Time, u64), (SessionId, Later)>,
    /// Accepts that rules delay or suppress, by request.
    accepts: HashMap<RequestId, HeldAccept>,
    /// Rule that holds back the reply of the accept in progress.
    pub(super) held_reply: Option<HeldReply>,
    /// Rules that workers have reported in this round of the control thread, once per report. These
    /// reports count against the rule's maximum of waiting reports until the next round, so that
    /// rules cannot keep the control thread busy.
    reported: Vec<Arc<ArmedFault>>,
    /// QPs with a request that waits for the effect of a rule.
    waiting: Vec<QpId>,
    /// The rules have changed, and QPs may still have the previous ones.
    are_stale: bool,
    /// Emulated links that QPs have.
    links: HashMap<LinkKey, Weak<EmulatedLink>>,
    /// Number of faults of rules that have been cleared.
    past: u64,
}

/// A rule with its owner.
struct Rule {
    armed: Arc<ArmedFault>,
    /// User who set the rule.
    owner: u32,
    /// User whose sessions the rule selects; `None` for all users.
    user: Option<u32>,
    /// The only session that the rule selects. The rule ends with this session.
    session: Option<SessionId>,
    /// The objects with a lasting effect of the rule.
    lasts: Option<Lasting>,
    /// Kind of device, for a rule of the profile. Such a rule selects only QPs of this kind, is not
    /// listed and cannot be cleared.
    of_profile: Option<DeviceKind>,
    /// `None` for a rule of the profile.
    _charge: Option<Charge>,
}

/// Objects with a lasting effect of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lasting {
    /// All objects that the rule selects.
    All,
    /// One QP.
    Qp(QpId),
}

impl Rule {
    /// Returns true if the rule selects a session.
    fn selects(&self, session: &Session) -> bool {
        let client = &session.client;
        let of_user = || self.user.is_none_or(|uid| client.account() == Some(uid));
        self.session.map_or_else(of_user, |only| only == session.id)
            && self.armed.rule.select.selects_program(client.pid, &client.command)
    }

    /// Returns true if the rule may select messages of the connection manager.
    fn concerns_messages(&self) -> bool {
        let FaultRule { action, point, .. } = &self.armed.rule;
        *point == Point::CmMessage || action.holds_reply()
    }

    fn name(&self) -> FaultName {
        self.armed.name
    }
}

impl FaultRules {
    /// Returns the time at which [`Manager::run_faults`](crate::resource::Manager::run_faults) is
    /// due.
    fn next(&self) -> Option<Time> {
        let rule = self.due.first().map(|(at, _)| *at);
        let later = self.later.keys().next().map(|(at, _)| *at);
        let report = (!self.reported.is_empty()).then_some(Time(0));
        rule.into_iter().chain(later).chain(report).min()
    }

    /// Returns the number of faults that users' rules have injected since the start.
    pub fn injected(&self) -> u64 {
        let set = self.rules.values().filter(|rule| rule.of_profile.is_none());
        self.past + set.map(|rule| rule.armed.counter.injected()).sum::<u64>()
    }
}
