//! Where a queue pair puts what its peer sends: its receives, and the wait for one or for a copy.
//!
//! A Send takes a receive when it begins ([`receives`]), is placed into it ([`send`],
//! [`placement`]) and completes it ([`complete`]). Meanwhile the incoming direction may stand still
//! ([`waiting`], [`held`]); at a queue pair that is wired by hand, what is about the other
//! direction passes ([`behind`]), or what lacks a receive is lost ([`lost`]).

mod behind;
mod complete;
pub(super) mod held;
mod long_run;
mod lost;
pub(super) mod placement;
pub(super) mod receives;
mod send;
mod waiting;

use std::time::Duration;

use behind::Behind;
pub(super) use behind::passes as is_about_own_requests;
use held::Held;
use long_run::LongRun;
use placement::PendingPlacement;
use receives::{Receives, Receiving};

use crate::device::Srq;

/// What becomes of a Send that finds no receive.
#[derive(Clone, Copy, Debug)]
pub(super) enum MissingReceive {
    /// It ends the stream.
    Ends,
    /// It waits for one for so long; what is about the other direction may pass it.
    Waits { time: Duration, passes: bool },
    /// It is lost, and the stream goes on.
    Loses,
}

/// Messages in progress of which a part was lost.
#[derive(Clone, Copy, Debug, Default)]
struct Losing {
    send: bool,
    /// The RDMA Write placed last; Immediate Data behind it are part of its message.
    write: bool,
}

/// What a queue pair receives into.
pub(super) struct Responder {
    receives: Receives,
    /// The receive that a message is being placed into.
    receiving: Option<Receiving>,
    missing: MissingReceive,
    /// Bytes of the RDMA Write placed last, or of the part of it that has come.
    written: u64,
    /// That Write goes on.
    writing: bool,
    /// RDMA Writes that have been placed in full since the stream began, modulo 2^32.
    writes: u32,
    /// Writes, and what Reads have brought.
    pub long_writes: LongRun,
    pub long_reads: LongRun,
    /// Of that Write, or of the Send in progress, a part was lost: the rest is, too.
    losing: Losing,
    /// The Send for which the incoming direction stands still.
    held: Option<Box<Held>>,
    /// The segment that a copier is writing, for which it stands still as well.
    copying: Option<Box<PendingPlacement>>,
    /// What has come behind such a Send, and does not pass.
    behind: Behind,
    /// Over TCP: what was read behind all that and not looked at.
    unread: Vec<u8>,
    /// A copier has written for it: from then on little is received at a time.
    has_copied: bool,
    /// The owner was warned that a Read of its own is behind a message that waits for a receive.
    warned_of_read: bool,
    /// The owner was told that no more receives are taken.
    last_wqe_told: bool,
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
            losing: Losing::default(),
            held: None,
            copying: None,
            behind: Behind::default(),
            unread: Vec::new(),
            has_copied: false,
            warned_of_read: false,
            last_wqe_told: false,
        }
    }

    /// From now on posting rings this worker's doorbell.
    pub(super) fn set_worker(&self, worker: u32) {
        if let Receives::Own(rq) = &self.receives {
            rq.queue().set_worker(worker);
        }
    }

    /// The shared receive queue it takes its receives from, if it does.
    pub(super) fn srq(&self) -> Option<&Srq> {
        self.receives.shared().map(|srq| &**srq)
    }

    /// A stream begins: of a Write that came by an earlier one nothing follows.
    pub(super) fn begin_stream(&mut self) {
        (self.written, self.writing, self.losing) = (0, false, Losing::default());
        self.writes = 0;
    }

    /// Returns the number of the RDMA Write in progress, or of the next one, within its stream.
    pub(super) fn write_number(&self) -> u32 {
        self.writes
    }

    /// A segment of an RDMA Write has been placed.
    #[inline]
    pub(super) fn write_placed(&mut self, len: usize, last: bool) {
        let before = if self.writing { self.written } else { 0 };
        self.losing.write &= self.writing;
        self.written = before.saturating_add(len as u64);
        self.writing = !last;
        self.writes = self.writes.wrapping_add(u32::from(last));
    }

    /// Whether an RDMA Write that is one segment is placed as it comes: nothing is before it.
    #[inline]
    pub(super) fn takes_short_writes(&self) -> bool {
        !self.is_blocked() && !self.writing
    }

    /// The length of the RDMA Write that Immediate Data is about: the one before it, if no other
    /// Immediate Data were.
    pub(super) fn take_written(&mut self) -> u32 {
        u32::try_from(std::mem::take(&mut self.written)).unwrap_or(u32::MAX)
    }

    /// Ends the use of the receive that a message is being placed into: its name.
    pub(super) fn take_receiving(&mut self) -> Option<u64> {
        self.receiving.take().map(|receiving| receiving.entry.wr_id)
    }
}
