//! Why a measurement could not be made.

use std::io;

use rnic_client::{Error, PostError};

/// Why a measurement could not be made. Whose fault it was stands in the texts.
#[derive(Debug, thiserror::Error)]
pub enum PerfError {
    /// The arguments make no sense together.
    #[error("{0}")]
    Arguments(String),
    /// The RNIC's library failed.
    #[error(transparent)]
    Rnic(#[from] Error),
    /// Nothing has completed for a long time.
    #[error("no {what} for {seconds} s")]
    Stuck {
        /// What was awaited, in words.
        what: &'static str,
        /// How long was waited, in seconds.
        seconds: u64,
    },
    /// The process at the other end failed.
    #[error("the peer process: {0}")]
    Peer(String),
    /// A private daemon could not be used.
    #[error("the private daemon: {0}")]
    Daemon(String),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed, in words.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl PerfError {
    /// For `map_err`: the system's error in what was tried.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> PerfError {
        move |source| PerfError::Io { what, source }
    }
}

impl From<PostError> for PerfError {
    fn from(e: PostError) -> Self {
        PerfError::Rnic(e.source)
    }
}
