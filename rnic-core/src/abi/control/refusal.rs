//! Why a request was refused.

use serde::{Deserialize, Serialize};

/// Why a request was refused. Each says what, and which limit, value and key or field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// A configured limit is reached.
    #[error("{key} = {limit} reached (asked for {wanted} more, {used} in use)")]
    Limit {
        /// Configuration key of the limit.
        key: String,
        /// Effective value of the limit.
        limit: u64,
        /// How much is in use.
        used: u64,
        /// How much more was asked for.
        wanted: u64,
    },
    /// A value is above what the device allows for one object.
    #[error("{field} = {value} is above {key} = {limit}")]
    AboveMaximum {
        /// The field of the request.
        field: String,
        /// Value of the field in the request.
        value: u64,
        /// The configuration key or device maximum.
        key: String,
        /// Effective value of that maximum.
        limit: u64,
    },
    /// A field makes no sense.
    #[error("{field}: {why}")]
    Invalid {
        /// The field of the request.
        field: String,
        /// What is wrong with it.
        why: String,
    },
    /// No such object in this session.
    #[error("no {kind} {handle} in this session")]
    NoSuchObject {
        /// "QP", "CQ", "MR", ...
        kind: String,
        /// The handle as given.
        handle: u32,
    },
    /// Something still uses the object.
    #[error("{kind} {handle} is in use by {by}")]
    InUse {
        /// "PD", "CQ", ...
        kind: String,
        /// Handle of the object; for an address, its port.
        handle: u32,
        /// What uses it, in words, with how many.
        by: String,
    },
    /// The object is in the wrong state.
    #[error("{kind} {handle} is in state {state}, needs {needs}")]
    WrongState {
        /// "QP", "listener", ...
        kind: String,
        /// Handle of the object.
        handle: u32,
        /// Name of the state it is in.
        state: String,
        /// Name of the state that the request needs.
        needs: String,
    },
    /// The administrator's rules do not allow it.
    #[error("not allowed by {rule}: {what}")]
    NotAllowed {
        /// The configuration key of the rule.
        rule: String,
        /// The request, in words, with its address, domain or socket.
        what: String,
    },
    /// The operating system refused.
    #[error("{what}: {error}")]
    System {
        /// The operation that failed, in words.
        what: String,
        /// The system's error in words.
        error: String,
        /// Its number (`errno(3)`).
        errno: u16,
    },
    /// The message did not decode, or lacked or had a descriptor it should not; the session ends.
    #[error("malformed request: {why}")]
    Malformed {
        /// What is wrong with the message or its descriptors, in words.
        why: String,
    },
    /// An administrator has the daemon refuse everything new.
    #[error("the daemon is draining: nothing new is taken (`rnicctl drain off` ends that)")]
    Draining,
}
