//! Replies and actions that rules hold back.

use std::time::Duration;

use rnic_abi::abi::control::Event;
use rnic_abi::faults::FaultName;
use rnic_abi::types::{ListenerId, RequestId, SessionId};

use crate::cm::{AcceptParams, CmMessage};

/// A rule that holds back the reply to a connection request.
#[derive(Clone, Copy, Debug)]
pub struct HeldReply {
    /// Number of the rule. When the rule is cleared, REP is no longer held back.
    pub rule: u64,
    /// Name of the rule.
    pub name: FaultName,
    /// Delay; `None` for a reply that is never sent.
    pub by: Option<Duration>,
}

/// An accept of an iWARP connection that a rule holds back.
pub struct HeldAccept {
    /// Session of the accepting program.
    pub session: SessionId,
    /// Listener of the request.
    pub listener: Option<ListenerId>,
    /// Parameters of the accept.
    pub params: AcceptParams,
}

/// A delayed action of a session.
pub enum Later {
    /// Delivers an event to the session.
    Event(Event),
    /// Sends a message.
    Message(Box<CmMessage>),
    /// Accepts a connection request.
    Accept(RequestId),
}
