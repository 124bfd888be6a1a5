//! Why a connection did not come about.

use std::fmt::Display;
use std::io;

use rustix::io::Errno;

use crate::system;

/// In words, and by the number that programs know such a failure by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoConnection {
    /// `errno(3)`.
    pub errno: u16,
    /// As a sentence for people.
    pub reason: String,
}

impl NoConnection {
    /// The system said so, at this step.
    pub fn system(step: &str, error: &io::Error) -> Self {
        NoConnection { errno: system::number(error), reason: format!("{step}: {error}") }
    }

    /// The peer does not keep to the protocol.
    pub fn protocol(reason: impl Display) -> Self {
        Self::of(Errno::PROTO, reason)
    }

    /// The peer is there and let go.
    pub fn reset(reason: impl Display) -> Self {
        Self::of(Errno::CONNRESET, reason)
    }

    /// Nobody listens.
    pub fn refused(reason: impl Display) -> Self {
        Self::of(Errno::CONNREFUSED, reason)
    }

    /// Nobody answered in time.
    pub fn timed_out(reason: impl Display) -> Self {
        Self::of(Errno::TIMEDOUT, reason)
    }

    fn of(errno: Errno, reason: impl Display) -> Self {
        NoConnection { errno: system::number(&errno.into()), reason: reason.to_string() }
    }
}
