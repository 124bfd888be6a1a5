//! What is known of the acknowledgements of a queue pair's requests.

use arrayvec::ArrayVec;

use crate::engine::notice::Notice;
use crate::types::{CompletionStatus, Msn};

/// How requests of one queue pair are acknowledged.
#[derive(Default)]
pub(in crate::engine) struct Acknowledgements {
    /// The peer has to be asked.
    pub asks: bool,
    /// Requests after which it is asked although there is more to send.
    pub every: u32,
    /// Requests before each of these are covered by a question under way, oldest first.
    pub asked: ArrayVec<u64, { QUESTIONS as usize }>,
    /// Requests that were sent since the last question.
    pub unasked: u32,
    /// Somebody waits for one of them.
    pub awaited: bool,
    /// The Send of the peer's that waits for a receive of this side, and what the peer was last
    /// told of it.
    pub waits: Option<Msn>,
    pub told: Option<Msn>,
    /// Number of the peer's Write that the Terminate of this side refuses, until it is said.
    pub refused_write: Option<u32>,
    /// A request has completed in error.
    failed: bool,
}

impl Acknowledgements {
    /// Of a stream over which the peer has to be asked, or not; `depth` requests may be posted.
    pub(super) fn new(asks: bool, depth: u32) -> Self {
        Acknowledgements { asks, every: (depth / 2).clamp(1, MOST), ..Self::default() }
    }

    /// The status with which the next request completes, given its outcome. Responses and
    /// acknowledgements may pass each other, but behind the first failure no request succeeds (IBTA
    /// specification, volume 1, section 10.10.2.2).
    #[inline]
    pub(super) fn status_in_order(&mut self, outcome: CompletionStatus) -> CompletionStatus {
        if outcome != CompletionStatus::Success {
            self.failed = true;
        } else if self.failed {
            return CompletionStatus::WrFlush;
        }
        outcome
    }

    /// Whether the next message is a question: there is something to ask about, and nothing under
    /// way answers it soon; `idle` if there is nothing else to send.
    pub(super) fn are_due(&self, idle: bool) -> bool {
        let many = self.unasked >= self.every && !self.asked.is_full();
        // While an answer is under way, more may be posted that one question covers as well.
        let last = idle && self.unasked > 0 && self.awaited && self.asked.is_empty();
        self.asks && (many || last)
    }

    /// What the peer is to be told of receives, if it is not what it was told.
    pub(super) fn notice(&mut self) -> Option<Notice> {
        if !self.asks || self.told == self.waits {
            return None;
        }
        self.told = self.waits;
        Some(self.waits.map_or(Notice::GoesOn, Notice::Waits))
    }

    /// Whether there is something to ask about for which nobody waits yet.
    pub(super) fn can_wait(&self) -> bool {
        self.asks && self.asked.is_empty() && self.unasked > 0 && !self.awaited
    }
}

/// Questions under way at most. With two, a full queue has one in its middle and one at its end,
/// and the half whose answer has come fills up while the other half is under way.
pub const QUESTIONS: u16 = 2;

/// Most requests after which the peer is asked although there is more to send: completions keep
/// coming while the queue never runs dry.
const MOST: u32 = 128;
