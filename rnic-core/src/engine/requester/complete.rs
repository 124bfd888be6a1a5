//! Completes requests in posting order, and flushes requests that can no longer be executed.
//! Signaled requests have a reserved CQ slot, unless sends may overrun the CQ. An unsignaled
//! request that fails waits for a slot.

use arrayvec::ArrayVec;

use super::Requester;
use super::in_flight::Request;
use crate::device::cq::CqFault;
use crate::engine::life::LifeCycle;
use crate::engine::numbers::count;
use crate::engine::qp_core::QpCore;
use crate::engine::schedule::REQUEST_COST;
use crate::engine::state::EngineState;
use rnic_abi::abi::queue::{Cqe, SendOpcode};
use rnic_abi::shm::queue::{SgeList, TakeError};
use rnic_abi::types::{CompletionOpcode, CompletionStatus};

/// Maximum number of completions published under one lock and with one check of the arm state.
pub(in crate::engine) const PUBLISH_BATCH: usize = 32;
/// Maximum number of requests, and of receives, flushed in one turn.
pub(in crate::engine) const FLUSH_BATCH: u32 = count(PUBLISH_BATCH);

impl Requester {
    /// Completes the oldest requests in flight that are done, given the number of bytes that the
    /// lower layer has accepted. After the end of the stream it completes one batch, and the next
    /// turns complete the rest.
    pub(in crate::engine) fn complete_finished(
        &mut self,
        accepted: u64,
        core: &mut QpCore,
        life: &mut LifeCycle,
        engine: &mut EngineState,
    ) {
        let mut cqes = ArrayVec::<Cqe, PUBLISH_BATCH>::new();
        loop {
            let mut retired = 0;
            let mut waits = false;
            // The next completion may overrun the CQ, once those before it are published.
            let mut overruns = false;
            // The client works on the published completions while the rest follows.
            while retired < FLUSH_BATCH
                && !cqes.is_full()
                && let Some((request, outcome)) = self.in_flight.first_done(accepted)
            {
                let request = *request;
                let status = match &mut self.acks {
                    Some(acks) => acks.status_in_order(outcome),
                    None => outcome,
                };
                let silent = status == CompletionStatus::Success && !request.signaled;
                if !silent && !request.has_slot {
                    match self.have_slot(1, core, engine) {
                        Ok(true) => self.slots -= 1,
                        Ok(false) if core.send_cq.sends_overrun() && !cqes.is_empty() => {
                            overruns = true;
                            break;
                        }
                        Ok(false) => {
                            // The CQ's doorbell wakes the QP, which completes successful requests
                            // in each turn.
                            if status != CompletionStatus::Success || life.phase().flushes() {
                                life.flush_later();
                            }
                            waits = true;
                            break;
                        }
                        // The CQ is dead, or dies now. No completion can be published to it.
                        Err(fault) => engine.cq_died(&core.send_cq, fault),
                    }
                }
                self.in_flight.drop_first();
                retired += 1;
                if silent || !request.has_slot && core.send_cq.is_dead() {
                    continue;
                }
                let mut cqe = Cqe::new(core.id.0, request.wr_id, request.opcode, status);
                cqe.byte_len = request.byte_len;
                cqe.detail = request.detail;
                if status != CompletionStatus::Success {
                    core.shared.errors.add(1);
                    cqe.diagnosis_id = match request.diagnosis {
                        0 => life.flush_record(core, engine, request.wr_id),
                        id => id,
                    };
                }
                cqes.push(cqe);
            }
            if retired == 0 {
                break;
            }
            // A full batch, unsignaled requests included, so more may follow.
            let more_may_follow = retired == FLUSH_BATCH || overruns;
            core.shared.sends_completed.add(u64::from(retired));
            // Ring slots come back first: a client that sees the completion may post at once.
            self.sq.retire(retired);
            if !cqes.is_empty() {
                core.publish_sends(&cqes, engine);
                cqes.clear();
            }
            if life.phase().flushes() {
                core.turn.charge(REQUEST_COST * i64::from(retired));
                if more_may_follow && !waits {
                    life.flush_later();
                    engine.wake(core);
                }
                break;
            }
            if waits {
                break;
            }
        }
        if self.refused.is_some_and(|(seq, _)| self.in_flight.first() == Some(seq)) {
            engine.wake(core);
        }
    }

    /// Flushes all requests taken from the queue, unless TCP has accepted them.
    pub(in crate::engine) fn flush_taken(&mut self, accepted: u64) {
        if let Some(fenced) = self.fenced.take() {
            let kind = SendOpcode::from_u8(fenced.header.opcode).unwrap_or(SendOpcode::Send);
            self.in_flight.push(Request::new(fenced.header.wr_id, kind, true));
        }
        self.in_flight.flush(accepted);
        self.expect_nothing();
        self.inbound.clear();
        self.executing = None;
        self.changing.clear();
        self.left_to_send = None;
    }

    /// Flushes at most `limit` requests still in the send queue and returns their number. The queue
    /// index is read again, so that requests posted before this turn are included; later requests
    /// are not. Fails if the CQ dies.
    pub(in crate::engine) fn flush_posted(
        &mut self,
        limit: u32,
        core: &mut QpCore,
        life: &mut LifeCycle,
        engine: &mut EngineState,
    ) -> Result<u32, CqFault> {
        // Requests taken from the queue complete first.
        if core.send_cq.is_dead() || !self.in_flight.is_empty() {
            self.return_slots(core, engine);
            return Ok(0);
        }
        let posted = self.sq.peek().unwrap_or(0).min(limit);
        let most = posted.min(FLUSH_BATCH);
        let mut cqes = ArrayVec::<Cqe, PUBLISH_BATCH>::new();
        let mut result = Ok(());
        while count(cqes.len()) < most {
            let slot = self.have_slot(most - count(cqes.len()), core, engine);
            if !matches!(slot, Ok(true)) {
                life.flush_later();
                result = slot.map(|_| ());
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
            //= DDP-6.2.1-3, RDMAP-5.4-8
            let mut cqe = Cqe::new(core.id.0, wr_id, opcode, CompletionStatus::WrFlush);
            cqe.diagnosis_id = life.flush_record(core, engine, wr_id);
            cqes.push(cqe);
        }
        let flushed = count(cqes.len());
        if flushed > 0 {
            core.turn.charge(REQUEST_COST * i64::from(flushed));
            core.shared.sends_completed.add(flushed.into());
            core.shared.errors.add(flushed.into());
            self.sq.retire(flushed);
            core.publish_sends(&cqes, engine);
        }
        // If the CQ has no room, its doorbell wakes the QP, or the next completion overruns it.
        let overruns = core.send_cq.sends_overrun() && (1..most).contains(&flushed);
        if posted > most && flushed == most || overruns {
            life.flush_later();
            engine.wake(core);
        }
        self.return_slots(core, engine);
        result.map(|()| flushed)
    }
}
