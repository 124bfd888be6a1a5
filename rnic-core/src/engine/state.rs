//! State shared by all QPs of an engine. It is separate from them so that a QP and this state can
//! be borrowed at the same time.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::change_requests::ChangeRequests;
use super::charge::{Charges, Excess};
use super::copies::PendingCopies;
use super::datagram::in_flight::DelayedDatagram;
use super::deadlines::Deadlines;
use super::doorbells::Doorbells;
use super::interface::{Broadcast, EngineOptions, Freed, Notification, Output};
use super::link::tcp::partial::PartialBuffers;
use super::link::tcp::slabs::Slabs;
use super::order::HELD;
use super::qp_core::QpCore;
use super::schedule::{Key, MAX_DEBT, QUANTUM, Schedule};
use super::teardown_queue::{DeadQueue, EndingSession};
use crate::device::copier::{CopyJob, Direction, Pieces};
use crate::device::cq::{CqFault, Published};
use crate::device::memory::{MemoryFault, Unreachable};
use crate::device::srq::SrqFault;
use crate::device::{Copier, Cq, Srq, StagTable};
use rnic_abi::abi::control::Event;
use rnic_abi::types::{QpId, SessionId, Time};

/// Shared state of an engine.
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
    /// Charges for bytes that TCP has not accepted.
    pub unsent: Charges,
    /// Charges for data that QPs with an order rule hold.
    pub held: Charges,
    /// QPs with an order rule.
    pub ordered: BTreeSet<Key>,
    pub outputs: VecDeque<Output>,
    pub signals: VecDeque<(Peer, PeerSignal)>,
    /// QPs that waited for the other end of a direct connection, and may try again.
    pub awakened: Vec<Peer>,
    /// Datagrams to QPs of this engine that have passed an emulated link.
    pub datagrams: VecDeque<DelayedDatagram>,
    /// QPs to be disconnected because a limit is exceeded, with the reason.
    pub evicted: Vec<(Key, String)>,
    /// Queues that died, with QPs of this engine still to be ended.
    pub dying: VecDeque<DeadQueue>,
    /// Sessions that were closed, with QPs still to be ended.
    pub ending: VecDeque<EndingSession>,
    pub changes: ChangeRequests,
    pub slabs: Slabs,
    /// Cost of the work that may still be done in this round.
    pub round: i64,
    pub turns: u64,
}

/// The other end of a direct connection. Its key may later belong to another QP, so `id` is
/// compared too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub key: Key,
    pub id: QpId,
}

/// Action of the other end of a direct connection, other than moving data.
pub(super) enum PeerSignal {
    Terminate(Vec<u8>),
    /// The waiting segment was refused: a Terminate follows.
    SegmentTaken,
    /// A copier has placed the last segment.
    Placed,
    Fin,
    Reset,
    /// It has closed gracefully, whether or not its FIN has been handled. Its key may be reused.
    Closed,
}

impl EngineState {
    /// Returns the state of an engine without sessions.
    pub(super) fn new(options: EngineOptions, unsent: Charges) -> Self {
        let partials = PartialBuffers::new(options.partial);
        let held = Charges::new(options.unsent, HELD);
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
            held,
            ordered: BTreeSet::new(),
            outputs: VecDeque::new(),
            signals: VecDeque::new(),
            awakened: Vec::new(),
            datagrams: VecDeque::new(),
            evicted: Vec::new(),
            dying: VecDeque::new(),
            ending: VecDeque::new(),
            changes: ChangeRequests::default(),
            slabs: Slabs::default(),
            round: QUANTUM,
            turns: 0,
        }
    }

    // --- Turns -------------------------------------------------------------------------------

    /// Schedules a QP for a turn.
    pub(super) fn wake(&mut self, core: &mut QpCore) {
        core.turn.wanted = true;
        self.enqueue(core);
    }

    /// Puts a QP into the schedule if its session has turns.
    pub(super) fn enqueue(&mut self, core: &mut QpCore) {
        if !core.turn.scheduled {
            core.turn.scheduled = self.schedule.push(core.slot, core.key);
        }
    }

    /// Charges a QP's session and user for the work since its deficit was `before`.
    pub(super) fn settle(&mut self, core: &mut QpCore, before: i64) {
        let cost = before - core.turn.deficit;
        if cost > 0 {
            self.schedule.charge(core.slot, cost);
            self.round -= cost;
            core.turn.deficit = core.turn.deficit.max(-MAX_DEBT);
        }
    }

    // --- Effects on others -------------------------------------------------------------------

    /// Queues a signal to another QP of this engine, handled after the current call.
    pub(super) fn signal(&mut self, to: Peer, signal: PeerSignal) {
        self.signals.push_back((to, signal));
    }

    /// Queues the end of a stream that exceeds a limit, carried out after the current call.
    pub(super) fn evict(&mut self, excess: Option<Excess>) {
        if let Some(Excess { victim, why }) = excess {
            self.evicted.push((victim, why));
        }
    }

    pub(super) fn emit(&mut self, session: SessionId, event: Event) {
        self.outputs.push_back(Output::Event { session, event });
    }

    /// Queues a request to the engines of all workers.
    pub(super) fn broadcast(&mut self, request: Broadcast) {
        self.outputs.push_back(Output::Broadcast(request));
    }

    /// Queues a notification for the resource manager.
    pub(super) fn report(&mut self, notification: Notification) {
        self.outputs.push_back(Output::Notification(notification));
    }

    /// Reports a session's memory that could not be reached, if that concerns the session as a
    /// whole.
    pub(super) fn memory_unreachable(&mut self, fault: MemoryFault) {
        let MemoryFault { owner: session, cause, .. } = fault;
        match cause {
            // Fails only the request or the stream that used the memory.
            Unreachable::Unmapped => {}
            Unreachable::Detached => self.report(Notification::Detached { session }),
            Unreachable::Truncated => {
                self.report(Notification::Misbehaved { session, why: cause.to_string() });
            }
        }
    }

    /// Hands a copy to a copier. Returns the number of the copy.
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

    // --- Queues for which QPs wait ----------------------------------------------------------

    /// Wakes the QPs on `workers` that wait.
    pub(super) fn freed(&mut self, freed: Freed, workers: u64) {
        let ours = 1 << (self.worker % u64::BITS);
        if workers & ours != 0 {
            self.wake_waiting(&freed);
        }
        if workers & !ours != 0 {
            self.broadcast(Broadcast::Freed { freed, workers: workers & !ours });
        }
    }

    /// Wakes the QPs of this worker that wait.
    pub(super) fn wake_waiting(&mut self, freed: &Freed) {
        match freed {
            Freed::Slots(cq) => self.doorbells.space_freed(cq, self.worker, &self.schedule),
            Freed::Receives(srq) => {
                self.doorbells.receives_posted(srq, self.worker, &mut self.schedule);
            }
        }
    }

    // --- Completion queues -------------------------------------------------------------------

    /// Notifies the waiter of a CQ if the published completion requires it.
    pub(super) fn notify(&mut self, published: Published, cq: &Arc<Cq>) {
        if published == Published::Notify && cq.begin_event() {
            self.outputs.push_back(Output::NotifyCq(cq.clone()));
        }
    }

    /// Returns reserved CQ slots, and wakes QPs that wait for some.
    pub(super) fn unreserve(&mut self, cq: &Arc<Cq>, n: u32) {
        let waiting = cq.unreserve(n);
        if waiting != 0 {
            self.freed(Freed::Slots(cq.clone()), waiting);
        }
    }

    /// Handles a dead CQ: reports it once, and ends its QPs.
    pub(super) fn cq_died(&mut self, cq: &Cq, fault: CqFault) {
        if !cq.kill() {
            return;
        }
        let context = cq.context.load(Relaxed);
        self.emit(cq.session(), Event::CqError { cq: cq.id(), context });
        self.dying.push_back(DeadQueue::of_cq(cq));
        if let CqFault::BadIndex(fault) = fault {
            let why = format!("completion queue {}: {fault}", cq.id());
            self.report(Notification::Misbehaved { session: cq.session(), why });
        }
    }

    // --- Shared receive queues ---------------------------------------------------------------

    /// Handles a dead SRQ: reports it once, and ends its QPs.
    pub(super) fn srq_died(&mut self, srq: &Srq, fault: SrqFault) {
        if !srq.kill() {
            return;
        }
        let context = srq.context.load(Relaxed);
        self.emit(srq.session(), Event::SrqError { srq: srq.id(), context });
        self.dying.push_back(DeadQueue::of_srq(srq));
        if let SrqFault::BadIndex(fault) = fault {
            let why = format!("shared receive queue {}: {fault}", srq.id());
            self.report(Notification::Misbehaved { session: srq.session(), why });
        }
    }
}
