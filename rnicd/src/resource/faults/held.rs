//! What rules hold back: replies, and actions that are carried out later.

use std::time::Duration;

use rnic_abi::abi::control::Event;
use rnic_abi::faults::FaultName;
use rnic_abi::types::RequestId;

use crate::cm::CmMessage;

/// A reply to a connection request.
#[derive(Clone, Copy, Debug)]
pub struct HeldReply {
    /// Number of the rule. It has no effect once it is cleared.
    pub rule: u64,
    /// Name of the rule.
    pub name: FaultName,
    /// Delay; `None` for a reply that is never sent.
    pub by: Option<Duration>,
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
