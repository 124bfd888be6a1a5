//! Completions: retiring requests in order, completing receives, flushing what will never be done.

use super::ledger::Entry;
use super::qp::Qp;
use super::{Output, Shard};
use crate::abi::control::Event;
use crate::abi::queue::{Cqe, SendOpcode};
use crate::device::Cq;
use crate::device::cq::{CqFault, Published};
use crate::shm::queue::TakeError;
use crate::types::{CompletionOpcode, CompletionStatus};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Which of a QP's two completion queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Send,
    Receive,
}

impl Qp {
    /// Completes the requests at the head of the ledger that are done.
    pub(super) fn retire(&mut self, shard: &mut Shard) {
        let accepted = self.accepted();
        let (mut retired, mut silent) = (0, 0);
        while let Some((entry, status)) = self.ledger.pop_done(accepted) {
            retired += 1;
            self.shared.sends_completed.add(1);
            if status == CompletionStatus::Success && !entry.signaled {
                silent += 1;
                continue;
            }
            // The ring slots come back first: who sees the completion may post again at once.
            self.sq.retire(retired);
            retired = 0;
            let mut cqe = Cqe::new(self.id.0, entry.wr_id, entry.opcode, status);
            cqe.byte_len = entry.byte_len;
            cqe.detail = entry.detail;
            self.publish_send(&cqe, shard);
        }
        if retired > 0 {
            self.sq.retire(retired);
        }
        if silent > 0 {
            self.send_cq.unreserve(silent);
        }
    }

    fn publish_send(&mut self, cqe: &Cqe, shard: &mut Shard) {
        if cqe.status != CompletionStatus::Success as u8 {
            self.shared.errors.add(1);
        }
        notify(self.send_cq.publish_reserved(cqe), &self.send_cq, shard);
    }

    /// Completes a receive. Receives hold no slot: without one the CQ overflows.
    pub(super) fn publish_receive(&mut self, cqe: &Cqe, shard: &mut Shard) {
        if cqe.status != CompletionStatus::Success as u8 {
            self.shared.errors.add(1);
        }
        self.shared.receives_completed.add(1);
        match self.recv_cq.publish(cqe) {
            Ok(published) => notify(published, &self.recv_cq, shard),
            Err(CqFault::Full | CqFault::Dead) => self.cq_failed(shard, Side::Receive),
        }
    }

    /// A completion queue of this QP is dead: say so once, and end the QP.
    pub(super) fn cq_failed(&mut self, shard: &mut Shard, side: Side) {
        let cq = match side {
            Side::Send => &self.send_cq,
            Side::Receive => &self.recv_cq,
        };
        if cq.kill() {
            let context = cq.context.load(Relaxed);
            let event = Event::CqError { cq: cq.id(), context };
            shard.outputs.push_back(Output::Event { session: cq.session(), event });
            shard.outputs.push_back(Output::CqFailed(cq.id()));
        }
        self.fail_locally(shard, "its completion queue is dead");
    }

    /// Flushes everything that was posted and is not done. What finds no CQ slot stays in its queue
    /// until there is one.
    pub(super) fn flush(&mut self, shard: &mut Shard) {
        let accepted = self.accepted();
        if let Some(held) = self.held.take() {
            let kind = SendOpcode::from_u8(held.header.opcode).unwrap_or(SendOpcode::Send);
            self.slots -= 1;
            self.ledger.push(Entry::new(held.header.wr_id, kind, true));
        }
        self.ledger.flush(accepted);
        self.reads.clear();
        self.owed.clear();
        self.invalidating = None;
        self.take_limit = None;
        self.retire(shard);
        self.flush_posted(shard);
        self.flush_receives(shard);
    }

    /// Flushes requests still in the send queue.
    fn flush_posted(&mut self, shard: &mut Shard) {
        self.flush_pending = false;
        while !self.send_cq.is_dead() {
            let pending = self.sq.pending().unwrap_or(0);
            if pending == 0 {
                break;
            }
            if !self.have_slot(shard, pending) {
                self.flush_pending = true;
                break;
            }
            let (wr_id, opcode) = match self.sq.take() {
                Ok(None) => break,
                Ok(Some(e)) => {
                    let opcode = SendOpcode::from_u8(e.header.opcode);
                    (e.header.wr_id, opcode.map_or(CompletionOpcode::Send, |o| o.completion()))
                }
                Err(TakeError::Entry(e)) => (e.wr_id, CompletionOpcode::Send),
                Err(TakeError::Queue(_)) => break,
            };
            self.slots -= 1;
            self.sq.retire(1);
            self.shared.sends_completed.add(1);
            let cqe = Cqe::new(self.id.0, wr_id, opcode, CompletionStatus::WrFlush);
            self.publish_send(&cqe, shard);
        }
        self.return_slots();
    }

    /// Flushes the receive that is being filled and those still in the receive queue.
    pub(super) fn flush_receives(&mut self, shard: &mut Shard) {
        if let Some(receiving) = self.receiving.take() {
            self.flush_receive(receiving.entry.wr_id, shard, false);
        }
        while !self.recv_cq.is_dead() && self.rq.pending().is_ok_and(|n| n > 0) {
            if !self.receive_slot(shard) {
                self.flush_pending = true;
                break;
            }
            let wr_id = match self.rq.take() {
                Ok(None) | Err(TakeError::Queue(_)) => {
                    self.recv_cq.unreserve(1);
                    break;
                }
                Ok(Some(e)) => e.wr_id,
                Err(TakeError::Entry(e)) => e.wr_id,
            };
            self.flush_receive(wr_id, shard, true);
        }
    }

    fn flush_receive(&mut self, wr_id: u64, shard: &mut Shard, reserved: bool) {
        let cqe = Cqe::new(self.id.0, wr_id, CompletionOpcode::Receive, CompletionStatus::WrFlush);
        if !reserved {
            self.publish_receive(&cqe, shard);
            return;
        }
        self.shared.receives_completed.add(1);
        self.shared.errors.add(1);
        notify(self.recv_cq.publish_reserved(&cqe), &self.recv_cq, shard);
    }

    /// Reserves a slot for a flushed receive, or arranges to be woken when there is one.
    fn receive_slot(&mut self, shard: &mut Shard) -> bool {
        for wait in [false, true] {
            if wait {
                self.recv_cq.wait_for_space(shard.worker);
            }
            match self.recv_cq.reserve(1) {
                Ok(0) => {}
                Ok(_) => return true,
                Err(_) => {
                    self.cq_failed(shard, Side::Receive);
                    return false;
                }
            }
        }
        shard.sessions.stall(self.session, self.recv_cq.doorbell(), self.key);
        false
    }
}

fn notify(published: Published, cq: &Arc<Cq>, shard: &mut Shard) {
    if published == Published::Notify {
        shard.outputs.push_back(Output::Notify(cq.clone()));
    }
}
