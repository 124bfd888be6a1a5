//! Reasons for refusing a request.

use serde::{Deserialize, Serialize};

/// Reason for refusing a request, with the limit, value and key or field concerned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// A configured limit is reached.
    #[error("{key} = {limit} reached (asked for {wanted} more, {used} in use)")]
    Limit {
        /// Configuration key of the limit.
        key: String,
        /// Effective value of the limit.
        limit: u64,
        /// Current use.
        used: u64,
        /// Additional amount requested.
        wanted: u64,
    },
    /// A value exceeds the maximum for one object.
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
    /// A field has an invalid value.
    #[error("{field}: {why}")]
    Invalid {
        /// The field of the request.
        field: String,
        /// Reason why the value is invalid.
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
    /// The object is still in use.
    #[error("{kind} {handle} is in use by {by}")]
    InUse {
        /// "PD", "CQ", ...
        kind: String,
        /// Handle of the object; for an address, its port.
        handle: u32,
        /// Users of the object and their number, human-readable.
        by: String,
    },
    /// The object is in the wrong state.
    #[error("{kind} {handle} is {state}, needs {needs}")]
    WrongState {
        /// "QP", "listener", ...
        kind: String,
        /// Handle of the object.
        handle: u32,
        /// Current state.
        state: String,
        /// Required state.
        needs: String,
    },
    /// A rule configured by the administrator forbids the request.
    #[error("not allowed by {rule}: {what}")]
    NotAllowed {
        /// The configuration key of the rule.
        rule: String,
        /// Human-readable request with its address, domain or socket.
        what: String,
    },
    /// A system call failed.
    #[error("{what}: {error}")]
    System {
        /// Human-readable operation that failed.
        what: String,
        /// Text of the system's error.
        error: String,
        /// Error number (`errno(3)`).
        errno: u16,
    },
    /// The message could not be decoded, or a descriptor was missing or unexpected. The session
    /// ends.
    #[error("malformed request: {why}")]
    Malformed {
        /// Human-readable defect.
        why: String,
    },
    /// The daemon is draining and refuses new objects and connections.
    #[error("the daemon is draining and refuses new objects (end this with `rnicctl drain off`)")]
    Draining,
    /// The request exceeds a maximum of the profile.
    #[error("profile {profile}: {key} = {limit}, asked for {asked}")]
    AboveProfile {
        /// Name of the profile, or the path of its file.
        profile: String,
        /// Key of the profile.
        key: String,
        /// Value of the key.
        limit: u64,
        /// Value of the request, or number of objects including the requested ones.
        asked: u64,
        /// Error number (`errno(3)`) of such a request on the device that the profile describes.
        errno: u16,
    },
}
