//! Errors of measurements.

use std::io;

use rnic_client::{Error, PostError};

/// Why a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum PerfError {
    /// The arguments are not valid.
    #[error("{0}")]
    Arguments(String),
    /// A library call failed.
    #[error(transparent)]
    Rnic(#[from] Error),
    /// Nothing has completed for a long time.
    #[error("no {what} for {seconds} s")]
    Stuck {
        /// The awaited event.
        what: &'static str,
        /// Time waited, in seconds.
        seconds: u64,
    },
    /// The process at the other end failed.
    #[error("peer failed: {0}")]
    Peer(String),
    /// A daemon could not be used.
    #[error("daemon failed: {0}")]
    Daemon(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl PerfError {
    /// Returns a function for `map_err` that adds the failed operation to the system's error.
    pub fn io(what: &'static str) -> impl FnOnce(io::Error) -> PerfError {
        move |source| PerfError::Io { what, source }
    }
}

impl From<PostError> for PerfError {
    fn from(e: PostError) -> Self {
        PerfError::Rnic(e.source)
    }
}
