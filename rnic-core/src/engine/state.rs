//! What all queue pairs of an engine share. It is apart from them so that a queue pair and this can
//! be borrowed at the same time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::change_requests::ChangeRequests;
use super::charge::{Charges, Excess};
use super::copies::PendingCopies;
use super::deadlines::Deadlines;
use super::doorbells::Doorbells;
use super::dying::{DyingQueue, EndingSession};
use super::interface::{EngineOptions, Notification, Output};
use super::link::tcp::partial::PartialBuffers;
use super::link::tcp::slabs::Slabs;
use super::qp_core::QpCore;
use super::schedule::{Key, MOST_OWED, QUANTUM, Schedule};
use crate::abi::control::Event;
use crate::device::copier::{CopyJob, Direction, Pieces};
use crate::device::cq::{CqFault, Published};
use crate::device::memory::{MemoryFault, Unreachable};
use crate::device::srq::SrqFault;
use crate::device::{Copier, Cq, Srq, StagTable};
use crate::types::{QpId, SessionId, Time};

/// The shared state of an engine.
pub(super) struct EngineState {
    pub worker: u32,
    pub now: Time,
    pub options: EngineOptions,
    pub stags: StagTable,
    pub doorbells: Doorbells,
    pub schedule: Schedule,
    pub deadlines: Deadlines,
    pub copies: PendingCopies,
    pub partials: PartialBuffers,
    /// Bytes that TCP has not taken.
    pub unsent: Charges,
    pub outputs: VecDeque<Output>,
    pub signals: VecDeque<(Peer, PeerSignal)>,
    /// QPs that waited for a CQ slot, a receive or the other end of a direct connection, and may
    /// try again.
    pub awakened: Vec<Peer>,
    /// QPs that have to give way to others, and for what reason.
    pub crowded_out: Vec<(Key, String)>,
    /// Queues that died, with QPs of this engine still to be ended.
    pub dying: VecDeque<DyingQueue>,
    /// Sessions that were closed, with QPs still to be ended.
    pub ending: VecDeque<EndingSession>,
    pub changes: ChangeRequests,
    pub slabs: Slabs,
    /// What may still be done in this round.
    pub round: i64,
    pub turns: u64,
}

/// The other end of a direct connection. Its key may be another QP's one day; the number says whose
/// it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub key: Key,
    pub id: QpId,
}

/// What the other end of a direct connection does besides moving data.
pub(super) enum PeerSignal {
    Terminate(Vec<u8>),
    /// The segment at hand has been taken, and refused: a Terminate follows.
    SegmentTaken,
    /// A copier has placed the segment before.
    Placed,
    Fin,
    Reset,
    /// It has closed in order, whether its FIN has been looked at or not; its key may soon be
    /// another QP's.
    Left,
}

impl EngineState {
    /// The state of an engine without sessions.
    pub(super) fn new(options: EngineOptions, unsent: Charges) -> Self {
        let partials = PartialBuffers::new(options.partial);
        EngineState {
            worker: options.worker,
            now: Time(0),
            options,
            stags: StagTable::default(),
            doorbells: Doorbells::default(),
            schedule: Schedule::default(),
            deadlines: Deadlines::default(),
            copies: PendingCopies::default(),
            partials,
            unsent,
            outputs: VecDeque::new(),
            signals: VecDeque::new(),
            awakened: Vec::new(),
            crowded_out: Vec::new(),
            dying: VecDeque::new(),
            ending: VecDeque::new(),
            changes: ChangeRequests::default(),
            slabs: Slabs::default(),
            round: QUANTUM,
            turns: 0,
        }
    }

    // --- Turns -------------------------------------------------------------------------------

    /// Puts a QP into the schedule, for a turn.
    pub(super) fn wake(&mut self, core: &mut QpCore) {
        core.turn.wanted = true;
        self.line_up(core);
    }

    /// A QP stands in the schedule, if its session has turns.
    pub(super) fn line_up(&mut self, core: &mut QpCore) {
        if !core.turn.scheduled {
            core.turn.scheduled = self.schedule.push(core.seat, core.key);
        }
    }

    /// Has a QP's session and user pay for what it has done since its deficit was `before`.
    pub(super) fn settle(&mut self, core: &mut QpCore, before: i64) {
        let cost = before - core.turn.deficit;
        if cost > 0 {
            self.schedule.charge(core.seat, cost);
            self.round -= cost;
            core.turn.deficit = core.turn.deficit.max(-MOST_OWED);
        }
    }

    // --- What concerns others ----------------------------------------------------------------

    /// Has something done to another QP of this engine, after whatever goes on.
    pub(super) fn signal(&mut self, to: Peer, signal: PeerSignal) {
        self.signals.push_back((to, signal));
    }

    /// Ends the stream that gives way to others, after whatever goes on.
    pub(super) fn end_for_room(&mut self, excess: Option<Excess>) {
        if let Some(Excess { victim, why }) = excess {
            self.crowded_out.push((victim, why));
        }
    }

    pub(super) fn emit(&mut self, session: SessionId, event: Event) {
        self.outputs.push_back(Output::Event { session, event });
    }

    /// Tells the resource manager.
    pub(super) fn report(&mut self, notification: Notification) {
        self.outputs.push_back(Output::Notification(notification));
    }

    /// A session's memory could not be reached; what that costs the session.
    pub(super) fn memory_unreachable(&mut self, fault: MemoryFault) {
        let MemoryFault { owner: session, cause, .. } = fault;
        match cause {
            // It costs the request or the stream that named it.
            Unreachable::Unmapped => {}
            Unreachable::Detached => self.report(Notification::Detached { session }),
            Unreachable::Truncated => {
                self.report(Notification::Misbehaved { session, why: cause.to_string() });
            }
        }
    }

    /// Has a copier make a copy: its number.
    pub(super) fn begin_copy(
        &mut self,
        qp: QpId,
        copier: &Arc<Copier>,
        pieces: Pieces,
        direction: Direction,
    ) -> u64 {
        let due = self.now.after(self.options.copy_deadline);
        let id = self.copies.open(qp, copier, due, &mut self.deadlines);
        copier.begin(self.worker);
        self.outputs.push_back(Output::Copy(CopyJob {
            id,
            copier: copier.clone(),
            pieces,
            direction,
        }));
        id
    }

    // --- Completion queues -------------------------------------------------------------------

    /// Whoever waits for a completion is told, if what was published asks for it.
    pub(super) fn notify(&mut self, published: Published, cq: &Arc<Cq>) {
        if published == Published::Notify && cq.begin_event() {
            self.outputs.push_back(Output::NotifyCq(cq.clone()));
        }
    }

    /// Gives slots back, and tells those who wait for some.
    pub(super) fn unreserve(&mut self, cq: &Arc<Cq>, n: u32) {
        let waiting = cq.unreserve(n);
        if waiting == 0 {
            return;
        }
        let ours = 1 << (self.worker % u64::BITS);
        if waiting & ours != 0 {
            self.space_freed(cq);
        }
        if waiting & !ours != 0 {
            let cq = cq.clone();
            self.report(Notification::CqSpaceFreed { cq, workers: waiting & !ours });
        }
    }

    /// Wakes the QPs that wait for a slot of a CQ.
    pub(super) fn space_freed(&mut self, cq: &Cq) {
        self.doorbells.space_freed(cq, self.worker, &self.schedule);
    }

    /// A CQ is dead: says so once, and ends its QPs.
    pub(super) fn cq_died(&mut self, cq: &Cq, fault: CqFault) {
        if !cq.kill() {
            return;
        }
        let context = cq.context.load(Relaxed);
        self.emit(cq.session(), Event::CqError { cq: cq.id(), context });
        self.report(Notification::CqFailed(cq.id()));
        self.dying.push_back(DyingQueue::of_cq(cq));
        if let CqFault::BadIndex(fault) = fault {
            let why = format!("completion queue {}: {fault}", cq.id());
            self.report(Notification::Misbehaved { session: cq.session(), why });
        }
    }

    // --- Shared receive queues ---------------------------------------------------------------

    /// Receives of a shared queue are to be had by others than those who were called: tells the
    /// workers in the set.
    pub(super) fn receives_freed(&mut self, srq: &Arc<Srq>, workers: u64) {
        let ours = 1 << (self.worker % u64::BITS);
        if workers & ours != 0 {
            self.receives_posted(srq);
        }
        if workers & !ours != 0 {
            let srq = srq.clone();
            self.report(Notification::ReceivesFreed { srq, workers: workers & !ours });
        }
    }

    /// Wakes the QPs that may take a receive of a shared queue.
    pub(super) fn receives_posted(&mut self, srq: &Srq) {
        self.doorbells.receives_posted(srq, self.worker, &mut self.schedule);
    }

    /// A shared receive queue is dead: says so once, and ends its QPs.
    pub(super) fn srq_died(&mut self, srq: &Srq, fault: SrqFault) {
        if !srq.kill() {
            return;
        }
        let context = srq.context.load(Relaxed);
        self.emit(srq.session(), Event::SrqError { srq: srq.id(), context });
        self.report(Notification::SrqFailed(srq.id()));
        self.dying.push_back(DyingQueue::of_srq(srq));
        if let SrqFault::BadIndex(fault) = fault {
            let why = format!("shared receive queue {}: {fault}", srq.id());
            self.report(Notification::Misbehaved { session: srq.session(), why });
        }
    }
}
