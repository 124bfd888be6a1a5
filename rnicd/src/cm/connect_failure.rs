//! Reasons why connecting failed.

use std::fmt::Display;
use std::io;

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::{RequestId, TerminateCode};
use rnic_core::stream::startup::{PrivateDataTooLong, ResponderError};
use rustix::io::Errno;

use crate::system;

/// A failed connect, as text and as the errno that programs expect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectFailure {
    /// `errno(3)` of the failure.
    pub errno: u16,
    /// Error text for the user.
    pub reason: String,
}

impl ConnectFailure {
    /// A system call failed at this step.
    pub fn system(step: &str, error: &io::Error) -> Self {
        ConnectFailure { errno: system::number(error), reason: format!("{step}: {error}") }
    }

    /// The peer broke the protocol.
    pub fn protocol(reason: impl Display) -> Self {
        Self::of(Errno::PROTO, reason)
    }

    /// The peer was reachable and closed the connection.
    pub fn reset(reason: impl Display) -> Self {
        Self::of(Errno::CONNRESET, reason)
    }

    /// There is no listener at the address.
    pub fn refused(reason: impl Display) -> Self {
        Self::of(Errno::CONNREFUSED, reason)
    }

    /// The peer did not answer before the deadline.
    pub fn timed_out(reason: impl Display) -> Self {
        Self::of(Errno::TIMEDOUT, reason)
    }

    fn of(errno: Errno, reason: impl Display) -> Self {
        ConnectFailure { errno: system::number(&errno.into()), reason: reason.to_string() }
    }
}

/// Formats a start-up failure with its error code from RFC 5044 section 8.
pub(super) fn with_code(what: &impl Display, code: Option<TerminateCode>) -> String {
    match code {
        Some(code) => format!("{what}: {code}"),
        None => what.to_string(),
    }
}

pub(super) fn too_long(e: PrivateDataTooLong) -> Refusal {
    Refusal::AboveMaximum {
        field: "private_data".into(),
        value: e.len as u64,
        key: "maximum bytes in an MPA frame".into(),
        limit: e.limit as u64,
    }
}

/// Converts an error of the responder into a refusal for the application.
pub(super) fn answer_refused(e: ResponderError, request: RequestId) -> Refusal {
    match e {
        ResponderError::PrivateData(e) => too_long(e),
        other => Refusal::WrongState {
            kind: "connection request".into(),
            handle: request.0,
            state: other.to_string(),
            needs: "undecided".into(),
        },
    }
}
