//! Completes requests and receives of a QP, and flushes requests and receives that can no longer be
//! carried out.

use std::sync::Arc;

use super::phase::StreamPhase;
use super::qp::Qp;
use super::reason::Reason;
use super::send_queue::SendQueue;
use super::state::EngineState;
use crate::device::Cq;
use crate::device::cq::CqFault;
use crate::device::srq::SrqFault;
use rnic_abi::abi::queue::Cqe;

impl Qp {
    /// Completes the oldest requests that are done.
    #[inline]
    pub(super) fn retire(&mut self, engine: &mut EngineState) {
        let accepted = self.link.accepted();
        self.requester.complete_finished(accepted, &mut self.core, &mut self.life, engine);
    }

    /// Writes the completion of a receive to the receive CQ, and handles a fault of that CQ.
    #[inline]
    pub(super) fn publish_receive(&mut self, engine: &mut EngineState, cqe: &Cqe) {
        if let Err(fault) = self.responder.publish(cqe, &mut self.core, engine) {
            self.recv_cq_failed(engine, fault);
        }
    }

    /// Flushes posted entries that are not done, as many as one turn allows; later turns flush the
    /// rest and later posts. An entry without a CQ slot stays in its queue until there is one. The
    /// flush waits for a copier that is writing, because the program may reuse the memory of a
    /// receive or Read as soon as it completes.
    pub(super) fn flush(&mut self, engine: &mut EngineState) {
        self.report_error_state(engine);
        self.end_order(engine);
        if self.responder.is_copying() || self.is_placing_datagrams() {
            self.life.flush_later();
            return;
        }
        self.release(engine);
        self.requester.flush_taken(self.link.accepted());
        self.core.forget_request_fault(engine);
        self.life.take_flush_pending();
        self.retire(engine);
        let Qp { core, requester, life, .. } = self;
        if let Err(fault) = requester.flush_posted(u32::MAX, core, life, engine) {
            engine.cq_died(&core.send_cq, fault);
        }
        self.flush_receives(engine);
        self.responder.emit_last_wqe_reached(&self.core, self.life.phase(), engine);
        if self.life.phase() == StreamPhase::Ended
            && !self.life.is_flush_pending()
            && self.core.transport.emits_disconnected()
        {
            self.life.emit_disconnected(&self.core, engine);
        }
    }

    /// Continues a flush in a turn of its QP.
    pub(super) fn resume_flush(&mut self, engine: &mut EngineState) {
        if self.life.phase().flushes() {
            self.flush(engine);
        } else if self.send_queue != SendQueue::Works {
            self.flush_sends(engine);
        } else if self.life.take_flush_pending() {
            self.flush_receives(engine);
        }
    }

    /// Flushes receives as [`Responder::flush`](super::responder::Responder::flush) describes.
    pub(super) fn flush_receives(&mut self, engine: &mut EngineState) {
        let Qp { core, responder, life, .. } = self;
        if let Err(fault) = responder.flush(core, life, engine) {
            self.recv_cq_failed(engine, fault);
        }
    }

    fn recv_cq_failed(&mut self, engine: &mut EngineState, fault: CqFault) {
        let cq = self.core.recv_cq.clone();
        self.cq_failed(engine, &cq, fault);
    }

    /// Kills a CQ of this QP, reports that once, and ends the QPs that use it.
    pub(super) fn cq_failed(&mut self, engine: &mut EngineState, cq: &Arc<Cq>, fault: CqFault) {
        engine.cq_died(cq, fault);
        self.fail_locally(engine, Reason::Cq(cq.id(), fault));
    }

    /// Kills the SRQ of this QP, reports that once, and ends the QPs that use it.
    pub(super) fn srq_failed(&mut self, engine: &mut EngineState, fault: SrqFault) {
        let Some(srq) = self.responder.srq() else { return };
        engine.srq_died(srq, fault);
        let reason = Reason::Srq(srq.id(), fault);
        self.fail_locally(engine, reason);
    }
}
