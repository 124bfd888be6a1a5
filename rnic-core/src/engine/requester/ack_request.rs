//! Acknowledgement state of a QP's requests.

use arrayvec::ArrayVec;

use crate::engine::rnr_notice::Notice;
use rnic_abi::types::{CompletionStatus, Msn};

/// Acknowledgement state of an RC QP.
#[derive(Default)]
pub(in crate::engine) struct Acknowledgements {
    /// Acknowledgement requests are needed, because the stream is TCP.
    pub over_tcp: bool,
    /// Number of requests after which an acknowledgement request is sent even if more requests are
    /// ready.
    pub every: u32,
    /// Acknowledgement requests in flight, oldest first. Each covers the requests before this
    /// sequence number.
    pub covered: ArrayVec<u64, { MAX_ACK_REQUESTS as usize }>,
    /// Requests sent since the last acknowledgement request.
    pub uncovered: u32,
    /// The program waits for an uncovered request, or the delay is over.
    pub awaited: bool,
    /// MSN of the peer's Send that waits for a receive on this side: the current one, and the one
    /// in the last notice.
    pub waits: Option<Msn>,
    pub notified: Option<Msn>,
    /// MSN of the peer's last Send, if it is done and no later request of the peer has arrived,
    /// until a notice reports it.
    unreported: Option<Msn>,
    /// MSN of the peer's last Send before a request that this side has not answered yet. The
    /// response reports that the Send is done, unless a notice does so earlier.
    in_response: Option<Msn>,
    /// Number of the peer's Write that this side's Terminate reports, until its notice is sent.
    pub refused_write: Option<u32>,
    /// A request has completed in error.
    failed: bool,
}

impl Acknowledgements {
    /// Returns the state at the beginning of a stream. `depth` is the capacity of the send queue.
    pub(super) fn new(over_tcp: bool, depth: u32) -> Self {
        Acknowledgements { over_tcp, every: (depth / 2).clamp(1, MAX_INTERVAL), ..Self::default() }
    }

    /// Returns the status with which the next request completes, given its outcome. Responses and
    /// acknowledgements may pass each other, but no request succeeds after the first failure (IBTA
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

    /// Returns true if an acknowledgement request is due and may be sent: `every` requests are
    /// uncovered, or the QP is idle and some are awaited. `idle` is true if there is nothing else
    /// to send.
    pub(super) fn are_due(&self, idle: bool) -> bool {
        let many = self.uncovered >= self.every && !self.covered.is_full();
        // While an acknowledgement request is in flight, more requests may be posted, which the
        // next one can cover.
        let last = idle && self.uncovered > 0 && self.awaited && self.covered.is_empty();
        self.over_tcp && (many || last)
    }

    /// Returns the notice about missing receives if the peer was last notified of another state.
    pub(super) fn notice(&mut self) -> Option<Notice> {
        if !self.over_tcp || self.notified == self.waits {
            return None;
        }
        self.notified = self.waits;
        Some(self.waits.map_or(Notice::Resumed, Notice::Waits))
    }

    /// Records that a Send of the peer is done.
    #[inline]
    pub(super) fn send_received(&mut self, msn: Msn) {
        if self.over_tcp {
            self.unreported = Some(msn);
        }
    }

    /// Records that a request of the peer has arrived. `owes` is true if an earlier response has
    /// not been sent.
    pub(super) fn request_received(&mut self, owes: bool) {
        self.in_response = self.unreported.take().or(self.in_response.filter(|_| owes));
    }

    /// Returns the MSN of the peer's last Send that is done, if neither a notice nor a response has
    /// reported it. `owes` is true if a response has not been sent.
    pub(super) fn unreported(&self, owes: bool) -> Option<Msn> {
        self.unreported.or(self.in_response.filter(|_| owes))
    }

    /// Records that a notice reports all Sends that are done.
    pub(super) fn reported(&mut self) {
        self.unreported = None;
        self.in_response = None;
    }

    /// Returns true if requests are unacknowledged and the program does not wait for them yet.
    pub(super) fn can_wait(&self) -> bool {
        self.over_tcp && self.covered.is_empty() && self.uncovered > 0 && !self.awaited
    }
}

/// Maximum number of acknowledgement requests in flight. With two, a full queue has one at its
/// middle and one at its end, so the program can refill the acknowledged half while the other half
/// is in flight.
pub const MAX_ACK_REQUESTS: u16 = 2;

/// Maximum of [`Acknowledgements::every`], so that completions keep coming if a deep queue never
/// runs dry.
const MAX_INTERVAL: u32 = 128;
