//! The set of library calls to which fault rules apply.

use std::sync::Arc;

use super::Mapping;
use super::queue::QueueError;
use super::sync::Ordering;
use super::view::View;
use crate::abi::queue::arena_header;

/// The word with the set of calls in a session's first arena.
#[derive(Clone, Debug)]
pub struct RuledCalls {
    word: View,
}

impl RuledCalls {
    /// Opens the word in the session's first arena.
    pub fn new(arena: Arc<Mapping>) -> Result<Self, QueueError> {
        let word = View::new(arena, arena_header::RULED_CALLS, 8).ok_or(QueueError::OutOfRange)?;
        Ok(RuledCalls { word })
    }

    /// Stores the set. Called by the daemon before it replies to the request that sets a rule.
    pub fn set(&self, calls: u64) {
        self.word.u64(0).store(calls, Ordering::Relaxed);
    }

    /// Returns true if fault rules apply to at least one of `calls`.
    ///
    /// Relaxed: the word guards no other memory. A load that follows the daemon's reply sees the
    /// store in [`set`](Self::set), because the reply passes through the kernel after that store.
    #[inline]
    pub fn include(&self, calls: u64) -> bool {
        self.word.u64(0).load(Ordering::Relaxed) & calls != 0
    }
}
