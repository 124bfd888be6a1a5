//! The send queue of a UC or UD QP after a request has failed (SQE; IBTA specification, volume 1,
//! section 10.3.1.6).
//!
//! A request that fails on this side stops only the send queue: later requests are flushed, and
//! receives continue. The transition to RTS ends this state. Requests posted before the transition
//! are flushed even if the CQ has no room for them yet. Requests posted after it are executed.

use super::qp::Qp;
use super::reason::Reason;
use super::schedule::END_COST;
use super::send_queue::SendQueue;
use super::state::EngineState;
use rnic_abi::types::QpState;

impl Qp {
    /// Completes a request of a UC or UD QP in error and stops the send queue.
    pub(super) fn fail_send_queue(&mut self, engine: &mut EngineState, seq: u64, reason: Reason) {
        let wr_id = self.requester.wr_id(seq).unwrap_or_default();
        let why = self.life.record_send_error(&self.core, engine, wr_id, reason);
        self.requester.failed(seq, reason.status(), why);
        self.core.turn.charge(END_COST);
        self.send_queue = SendQueue::Failed;
        self.set_pace();
        // Publishes the QP state.
        self.enter(self.life.phase());
        self.flush_sends(engine);
    }

    /// Leaves SQE. Requests posted before this call are still flushed.
    pub(super) fn leave_send_error(&mut self) {
        if self.send_queue == SendQueue::Failed {
            // A fault of the queue is found again when the queue works.
            let left = self.requester.posted().unwrap_or(0);
            self.send_queue = SendQueue::Flushes { left };
        }
    }

    /// Begins posted requests or holds them back, as the state of the QP requires.
    pub(super) fn set_pace(&mut self) {
        let Some(state) = self.roce_state() else { return };
        let begins = self.send_queue == SendQueue::Works && state == QpState::Rts;
        self.requester.set_pace(begins, self.rc.as_ref().map_or(0, |rc| rc.ord()));
    }

    /// Flushes send requests during and after SQE, at most as many as one turn allows. Called in
    /// each turn, and when TCP has accepted bytes of earlier requests, which complete first.
    pub(super) fn flush_sends(&mut self, engine: &mut EngineState) {
        let most = match self.send_queue {
            SendQueue::Works => return,
            SendQueue::Failed => u32::MAX,
            SendQueue::Flushes { left } => left,
        };
        if self.life.phase().flushes() {
            return;
        }
        if let Err(fault) = self.requester.posted() {
            return self.queue_fault(engine, "send queue", fault);
        }
        self.life.take_flush_pending();
        self.retire(engine);
        let Qp { core, requester, life, .. } = self;
        let flushed = match requester.flush_posted(most, core, life, engine) {
            Ok(flushed) => flushed,
            Err(fault) => {
                let cq = self.core.send_cq.clone();
                return self.cq_failed(engine, &cq, fault);
            }
        };
        let SendQueue::Flushes { left } = &mut self.send_queue else { return };
        *left -= flushed;
        if *left == 0 {
            self.send_queue = SendQueue::Works;
            self.life.end_send_error();
            self.set_pace();
            engine.wake(&mut self.core);
        }
    }
}
