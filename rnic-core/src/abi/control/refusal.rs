//! Why a request was refused.

use serde::{Deserialize, Serialize};

/// Why a request was refused. Each says what, and which limit, value and key or field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// A configured limit is reached.
    #[error("{key} = {limit} reached (asked for {wanted} more, {used} in use)")]
    Limit {
        /// The configuration key.
        key: String,
        /// Its effective value.
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
        /// Its value.
        value: u64,
        /// The configuration key or device maximum.
        key: String,
        /// Its effective value.
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
        /// The handle.
        handle: u32,
        /// What uses it.
        by: String,
    },
    /// The object is in the wrong state.
    #[error("{kind} {handle} is in state {state}, needs {needs}")]
    WrongState {
        /// "QP", "listener", ...
        kind: String,
        /// The handle.
        handle: u32,
        /// Its state.
        state: String,
        /// The state needed.
        needs: String,
    },
    /// The administrator's rules do not allow it.
    #[error("not allowed by {rule}: {what}")]
    NotAllowed {
        /// The configuration key of the rule.
        rule: String,
        /// What was refused.
        what: String,
    },
    /// This daemon does not do that.
    #[error("{what} is not supported by this daemon")]
    Unsupported {
        /// What was asked for.
        what: String,
    },
    /// The operating system refused.
    #[error("{what}: {error}")]
    System {
        /// What was tried.
        what: String,
        /// The system's error in words.
        error: String,
    },
    /// The message did not decode, or lacked or had a descriptor it should not; the session ends.
    #[error("malformed request: {why}")]
    Malformed {
        /// What is wrong.
        why: String,
    },
    /// An administrator has the daemon refuse everything new.
    #[error("the daemon is draining: nothing new is taken (`rnicctl drain off` ends that)")]
    Draining,
}
