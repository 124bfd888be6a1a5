//! The fault rules of one QP. A QP without rules has no [`Faults`], so each occasion costs it one
//! branch.

use std::collections::VecDeque;
use std::sync::Arc;

use super::reason::Reason;
use crate::device::{ArmedFault, Occasion};
use rnic_abi::abi::queue::Cqe;
use rnic_abi::faults::{Action, FaultName, Opcode, Point};
use rnic_abi::types::{CompletionOpcode, CompletionStatus, Time};

/// Rules of a QP, and the completions that they hold back.
#[derive(Default)]
pub(super) struct Faults {
    pub rules: Vec<Arc<ArmedFault>>,
    /// Completions to be published later, in order. Each holds a reserved slot of its CQ.
    pub held: VecDeque<HeldCompletion>,
    /// Times of completion events to be sent later: of the receive CQ, of the send CQ.
    pub events: [Option<Time>; 2],
    /// Progress of the next request, if a rule with an effect outside of the engine selects it.
    pub request: RequestWait,
    /// A rule has already delayed the next Send and does not apply to it again.
    pub passes_send: bool,
}

/// Progress of a request that a rule with an effect outside of the engine selects.
#[derive(Default)]
pub(super) enum RequestWait {
    /// No rule has selected the next request yet.
    #[default]
    None,
    /// The request waits until the rule has taken effect.
    Waits,
    /// The request waits until this time.
    Until(Time),
    /// The rule has taken effect, and the request begins.
    Ended,
}

/// Effect of the rules of a QP on a request that is about to begin.
pub(super) enum RequestFault {
    /// The request begins.
    None,
    /// The request waits for the effect of a rule.
    Waits,
    /// The request fails.
    Fails(Reason),
}

/// A completion to be published later.
pub(super) struct HeldCompletion {
    pub at: Time,
    pub cqe: Cqe,
    pub of_send: bool,
}

/// A stream that ends inside an FPDU, once TCP has accepted the bytes before the end.
pub(super) struct StreamCut {
    pub fault: FaultName,
    /// Close with RST instead of FIN.
    pub reset: bool,
}

/// A fault that ends a QP or its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpFault {
    /// Ends the connection, as an administrator does.
    Disconnect,
    /// Fails the QP.
    Fatal,
}

impl Faults {
    /// Returns rules for a new QP, or `None` without any.
    pub(super) fn new(rules: Vec<Arc<ArmedFault>>) -> Option<Box<Self>> {
        let faults = Faults { rules, ..Faults::default() };
        (!faults.rules.is_empty()).then(|| Box::new(faults))
    }

    /// Returns the rule that takes effect at this occasion, with its action.
    pub(super) fn strikes(
        &self,
        point: Point,
        opcode: Option<Opcode>,
        now: Time,
    ) -> Option<(&ArmedFault, Action)> {
        self.strikes_at(&Occasion::new(point, opcode), now)
    }

    /// Like [`strikes`](Self::strikes), for an occasion that concerns a completion.
    pub(super) fn strikes_completion(
        &self,
        point: Point,
        cqe: &Cqe,
        now: Time,
    ) -> Option<(&ArmedFault, Action)> {
        let opcode = CompletionOpcode::from_u8(cqe.opcode).map(Opcode::of_completion);
        let flushed = cqe.status == CompletionStatus::WrFlush as u8;
        self.strikes_at(&Occasion { flushed, ..Occasion::new(point, opcode) }, now)
    }

    /// Like [`strikes`](Self::strikes), for any occasion.
    pub(super) fn strikes_at(
        &self,
        occasion: &Occasion,
        now: Time,
    ) -> Option<(&ArmedFault, Action)> {
        let struck = |rule: &Arc<ArmedFault>| rule.at(occasion, now);
        self.rules.iter().find_map(|rule| Some((&**rule, struck(rule)?)))
    }
}

/// Returns the rule that a diagnosis names for a fault.
pub fn rule_of_fault(fault: FaultName) -> String {
    format!("injected by fault {fault}")
}
