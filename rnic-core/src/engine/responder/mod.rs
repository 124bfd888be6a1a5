//! Receives of a QP and the placement of incoming messages, with the waits for a receive or a copy.
//!
//! A Send takes a receive when it begins ([`receives`]), is placed into it ([`send`],
//! [`placement`]) and completes it ([`complete`]). Until then the incoming direction may be blocked
//! ([`waiting`], [`rnr_wait`]). On an RC QP, ULPDUs for the other direction pass a blocked Send
//! ([`rnr_backlog`]). A UC QP drops a message without a receive ([`uc_drop`]).

mod complete;
mod long_run;
pub(super) mod placement;
pub(super) mod receives;
mod rnr_backlog;
pub(super) mod rnr_wait;
mod send;
mod uc_drop;
mod waiting;

use long_run::LongRun;
use placement::PendingPlacement;
use receives::{Receives, Receiving};
use rnr_backlog::RnrBacklog;
pub(super) use rnr_backlog::passes as is_about_own_requests;
use rnr_wait::WaitingSend;

use super::transport::MissingReceive;
use crate::device::Srq;

/// Messages in progress whose remaining segments are dropped, because earlier segments were
/// dropped.
#[derive(Clone, Copy, Debug, Default)]
struct Dropping {
    send: bool,
    /// The RDMA Write placed last. Immediate Data after it belongs to its message.
    write: bool,
}

/// Receives and incoming messages of a QP.
pub(super) struct Responder {
    receives: Receives,
    /// The receive that a message is being placed into.
    receiving: Option<Receiving>,
    missing: MissingReceive,
    /// Bytes of the RDMA Write placed last, or of its part that has arrived.
    written: u64,
    /// The RDMA Write placed last is not complete.
    writing: bool,
    /// RDMA Writes that have been placed in full since the stream began, modulo 2^32.
    writes: u32,
    /// Runs of long Writes, and of long Read Responses.
    pub long_writes: LongRun,
    pub long_reads: LongRun,
    /// The Write placed last or the Send in progress was dropped in part.
    dropping: Dropping,
    /// The Send that blocks the incoming direction while it waits for a receive.
    held: Option<Box<WaitingSend>>,
    /// The segment that blocks the incoming direction while a copier writes it.
    copying: Option<Box<PendingPlacement>>,
    /// ULPDUs that arrived after a waiting Send and do not pass it.
    behind: RnrBacklog,
    /// Over TCP: later bytes that were read and not yet parsed.
    unread: Vec<u8>,
    /// A copier has written for this QP, which from then on reads little at a time.
    has_copied: bool,
    /// The owner was warned that the response to a Read is queued after a message that waits for a
    /// receive.
    warned_of_read: bool,
    /// The owner was notified that the QP takes no more receives.
    last_wqe_reported: bool,
}

impl Responder {
    pub(super) fn new(receives: Receives, missing: MissingReceive) -> Self {
        Responder {
            receives,
            receiving: None,
            missing,
            written: 0,
            writing: false,
            writes: 0,
            long_writes: LongRun::default(),
            long_reads: LongRun::default(),
            dropping: Dropping::default(),
            held: None,
            copying: None,
            behind: RnrBacklog::default(),
            unread: Vec::new(),
            has_copied: false,
            warned_of_read: false,
            last_wqe_reported: false,
        }
    }

    /// Makes the client ring this worker's doorbell when it posts.
    pub(super) fn set_worker(&self, worker: u32) {
        if let Receives::Own(rq) = &self.receives {
            rq.queue().set_worker(worker);
        }
    }

    /// Returns the SRQ, if the QP uses one.
    pub(super) fn srq(&self) -> Option<&Srq> {
        self.receives.shared().map(|srq| &**srq)
    }

    /// Begins a stream. The rest of a Write of an earlier stream cannot follow.
    pub(super) fn begin_stream(&mut self) {
        self.written = 0;
        self.writing = false;
        self.dropping = Dropping::default();
        self.writes = 0;
    }

    /// Returns the number of the RDMA Write in progress, or of the next one, within its stream.
    pub(super) fn write_number(&self) -> u32 {
        self.writes
    }

    /// Accounts for a placed segment of an RDMA Write.
    #[inline]
    pub(super) fn write_placed(&mut self, len: usize, last: bool) {
        let before = if self.writing { self.written } else { 0 };
        self.dropping.write &= self.writing;
        self.written = before.saturating_add(len as u64);
        self.writing = !last;
        self.writes = self.writes.wrapping_add(u32::from(last));
    }

    /// Returns true if RDMA Writes of one segment may be placed at once, because nothing precedes
    /// them.
    #[inline]
    pub(super) fn takes_short_writes(&self) -> bool {
        !self.is_blocked() && !self.writing
    }

    /// Returns the length of the RDMA Write before Immediate Data, or 0 if earlier Immediate Data
    /// consumed it.
    pub(super) fn take_written(&mut self) -> u32 {
        u32::try_from(std::mem::take(&mut self.written)).unwrap_or(u32::MAX)
    }

    /// Ends the use of the receive that a message is being placed into, and returns its `wr_id`.
    pub(super) fn take_receiving(&mut self) -> Option<u64> {
        self.receiving.take().map(|receiving| receiving.entry.wr_id)
    }
}
