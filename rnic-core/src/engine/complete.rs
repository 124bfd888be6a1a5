//! Completions: retiring requests in order, completing receives, flushing what will never be done.

use arrayvec::ArrayVec;

use super::dying::Dying;
use super::ledger::Entry;
use super::qp::{Phase, Qp};
use super::reason::Reason;
use super::receives::Receives;
use super::schedule::REQUEST_COST;
use super::{Output, Shard};
use crate::abi::control::Event;
use crate::abi::queue::{Cqe, SendOpcode};
use crate::device::Cq;
use crate::device::cq::{CqFault, Published};
use crate::shm::queue::{SgeList, TakeError};
use crate::types::{CompletionOpcode, CompletionStatus};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Completions published under one lock and with one look at the arm.
const PUBLISH_BATCH: usize = 32;
/// Requests, and receives, that are flushed in one turn.
const FLUSH_BATCH: u32 = PUBLISH_BATCH as u32;
/// What the owner of a QP is told when its completion queue dies.
pub(super) const CQ_IS_DEAD: &str = "its completion queue is dead";

/// Which of a QP's two completion queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Send,
    Receive,
}

impl Qp {
    /// Completes the requests at the head of the ledger that are done; of a stream that has ended
    /// some, the rest in its next turns.
    pub(super) fn retire(&mut self, shard: &mut Shard) {
        let accepted = self.accepted();
        let mut silent = 0;
        let mut cqes = ArrayVec::<Cqe, PUBLISH_BATCH>::new();
        loop {
            let mut retired = 0;
            while !cqes.is_full()
                && let Some((entry, status)) = self.ledger.pop_done(accepted)
            {
                retired += 1;
                if status == CompletionStatus::Success && !entry.signaled {
                    silent += 1;
                    continue;
                }
                let mut cqe = Cqe::new(self.id.0, entry.wr_id, entry.opcode, status);
                cqe.byte_len = entry.byte_len;
                cqe.detail = entry.detail;
                if status != CompletionStatus::Success {
                    self.shared.errors.add(1);
                    cqe.why_id = match entry.why {
                        0 => self.flushed(shard, entry.wr_id),
                        why => why,
                    };
                }
                cqes.push(cqe);
            }
            if retired == 0 {
                break;
            }
            let batch_is_full = cqes.is_full();
            self.shared.sends_completed.add(u64::from(retired));
            // The ring slots come back first: who sees the completion may post again at once.
            self.sq.retire(retired);
            if !cqes.is_empty() {
                notify(self.send_cq.publish_reserved(&cqes), &self.send_cq, shard);
                cqes.clear();
            }
            if self.phase.flushes() {
                self.deficit -= REQUEST_COST * i64::from(retired);
                if batch_is_full {
                    self.flush_later(shard);
                }
                break;
            }
        }
        shard.unreserve(&self.send_cq, silent);
    }

    /// Completes a receive. Receives hold no slot: without one the CQ overflows.
    pub(super) fn publish_receive(&mut self, cqe: &Cqe, shard: &mut Shard) {
        if cqe.status != CompletionStatus::Success as u8 {
            self.shared.errors.add(1);
        }
        self.shared.receives_completed.add(1);
        match self.recv_cq.publish(cqe) {
            Ok(published) => notify(published, &self.recv_cq, shard),
            Err(fault) => self.cq_failed(shard, Side::Receive, fault),
        }
    }

    /// A completion queue of this QP is dead: say so once, and end its QPs.
    pub(super) fn cq_failed(&mut self, shard: &mut Shard, side: Side, fault: CqFault) {
        let cq = match side {
            Side::Send => &self.send_cq,
            Side::Receive => &self.recv_cq,
        };
        if cq.kill() {
            let context = cq.context.load(Relaxed);
            let event = Event::CqError { cq: cq.id(), context };
            shard.outputs.push_back(Output::Event { session: cq.session(), event });
            shard.outputs.push_back(Output::CqFailed(cq.id()));
            shard.dying.push_back(Dying::of_cq(cq));
            if let CqFault::Scribbled(fault) = fault {
                let why = format!("completion queue {}: {fault}", cq.id());
                shard.outputs.push_back(Output::Misbehaved { session: cq.session(), why });
            }
        }
        let reason = Reason::Cq(cq.id(), fault);
        self.fail_locally(shard, CQ_IS_DEAD, reason);
    }

    /// Flushes what was posted and is not done: as much as a turn is worth, of what is there now;
    /// the rest is for the next turns, and what is posted meanwhile rings for one. What finds no CQ
    /// slot stays in its queue until there is one. All of it waits for a mover that is writing:
    /// whoever gets a receive back, or a read, may use its memory for something else at once.
    pub(super) fn flush(&mut self, shard: &mut Shard) {
        if self.is_landing() {
            self.flush_pending = true;
            return;
        }
        self.lift(shard);
        let accepted = self.accepted();
        if let Some(held) = self.held.take() {
            let kind = SendOpcode::from_u8(held.header.opcode).unwrap_or(SendOpcode::Send);
            self.slots -= 1;
            self.ledger.push(Entry::new(held.header.wr_id, kind, true));
        }
        self.ledger.flush(accepted);
        self.reads.clear();
        self.owed.clear();
        self.changing.clear();
        self.take_limit = None;
        self.flush_pending = false;
        self.retire(shard);
        self.flush_posted(shard);
        self.flush_receives(shard);
        self.say_last_receive(shard);
        if self.phase == Phase::Dead && !self.flush_pending {
            self.say_how_it_ended(shard);
        }
    }

    /// Goes on with a flush in the turn of its QP.
    pub(super) fn resume_flush(&mut self, shard: &mut Shard) {
        if self.phase.flushes() {
            self.flush(shard);
        } else if std::mem::take(&mut self.flush_pending) {
            self.flush_receives(shard);
        }
    }

    /// There is more to be flushed than this turn was worth.
    fn flush_later(&mut self, shard: &mut Shard) {
        self.flush_pending = true;
        shard.wake(self);
    }

    /// Flushes requests still in the send queue. A fresh look at the queue finds those that were rung
    /// for before this turn began, and no others are waited for.
    fn flush_posted(&mut self, shard: &mut Shard) {
        // Requests that were taken complete before those that were not.
        if self.send_cq.is_dead() || !self.ledger.is_empty() {
            return self.return_slots(shard);
        }
        let posted = self.sq.look().unwrap_or(0);
        let most = posted.min(FLUSH_BATCH);
        let mut cqes = ArrayVec::<Cqe, PUBLISH_BATCH>::new();
        while (cqes.len() as u32) < most {
            if !self.have_slot(shard, most - cqes.len() as u32) {
                self.flush_pending = true;
                break;
            }
            let (wr_id, opcode) = match self.sq.take(&mut SgeList::new()) {
                Ok(None) | Err(TakeError::Queue(_)) => break,
                Ok(Some(e)) => (e.header.wr_id, e.header.opcode),
                Err(TakeError::Entry(e)) => (e.wr_id, e.opcode),
            };
            self.slots -= 1;
            let opcode = SendOpcode::from_u8(opcode);
            let opcode = opcode.map_or(CompletionOpcode::Send, |o| o.completion());
            let mut cqe = Cqe::new(self.id.0, wr_id, opcode, CompletionStatus::WrFlush);
            cqe.why_id = self.flushed(shard, wr_id);
            cqes.push(cqe);
        }
        if !cqes.is_empty() {
            let flushed = cqes.len() as u32;
            self.deficit -= REQUEST_COST * i64::from(flushed);
            self.shared.sends_completed.add(flushed.into());
            self.shared.errors.add(flushed.into());
            self.sq.retire(flushed);
            notify(self.send_cq.publish_reserved(&cqes), &self.send_cq, shard);
        }
        if posted > most {
            self.flush_later(shard);
        }
        self.return_slots(shard);
    }

    /// Flushes the receive that is being filled and those still in the receive queue; those in a
    /// shared one stay for others. As for requests: some, of those that are there.
    pub(super) fn flush_receives(&mut self, shard: &mut Shard) {
        if self.recv_cq.is_dead() {
            return;
        }
        let posted = self.rq.look_at_own().unwrap_or(0) + u32::from(self.receiving.is_some());
        let most = posted.min(FLUSH_BATCH);
        let mut cqes = ArrayVec::<Cqe, PUBLISH_BATCH>::new();
        let mut slots = 0;
        while (cqes.len() as u32) < most {
            if slots == 0 {
                slots = self.receive_slots(shard, most - cqes.len() as u32);
                if slots == 0 {
                    self.flush_pending = true;
                    break;
                }
            }
            let Some(wr_id) = self.next_receive_to_flush() else { break };
            slots -= 1;
            let mut cqe = self.receive_cqe(wr_id, CompletionStatus::WrFlush);
            cqe.why_id = self.flushed(shard, wr_id);
            cqes.push(cqe);
        }
        shard.unreserve(&self.recv_cq, slots);
        if !cqes.is_empty() {
            let flushed = cqes.len() as u32;
            self.deficit -= REQUEST_COST * i64::from(flushed);
            self.shared.receives_completed.add(flushed.into());
            self.shared.errors.add(flushed.into());
            notify(self.recv_cq.publish_reserved(&cqes), &self.recv_cq, shard);
        }
        if posted > most {
            self.flush_later(shard);
        }
    }

    fn next_receive_to_flush(&mut self) -> Option<u64> {
        match (self.receiving.take(), &mut self.rq) {
            (Some(receiving), _) => Some(receiving.entry.wr_id),
            (None, Receives::Own(rq)) => match rq.take() {
                Ok(None) | Err(TakeError::Queue(_)) => None,
                Ok(Some(e)) => Some(e.wr_id),
                Err(TakeError::Entry(e)) => Some(e.wr_id),
            },
            (None, Receives::Shared(_)) => None,
        }
    }

    /// Reserves slots for flushed receives, at most so many, or arranges to be woken when there are
    /// some.
    fn receive_slots(&mut self, shard: &mut Shard, wanted: u32) -> u32 {
        for wait in [false, true] {
            if wait {
                self.recv_cq.wait_for_space(shard.worker);
            }
            match self.recv_cq.reserve(wanted) {
                Ok(0) => {}
                Ok(n) => return n,
                Err(fault) => {
                    self.cq_failed(shard, Side::Receive, fault);
                    return 0;
                }
            }
        }
        shard.sessions.stall(self.seat, &self.recv_cq, self.key);
        0
    }
}

impl Shard {
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
            self.outputs.push_back(Output::SpaceFreed { cq, workers: waiting & !ours });
        }
    }

    /// Wakes the QPs that wait for a slot of a CQ.
    pub(super) fn space_freed(&mut self, cq: &Cq) {
        self.sessions.unstall(cq, self.worker, &self.schedule);
    }
}

fn notify(published: Published, cq: &Arc<Cq>, shard: &mut Shard) {
    if published == Published::Notify && cq.begin_notice() {
        shard.outputs.push_back(Output::Notify(cq.clone()));
    }
}
