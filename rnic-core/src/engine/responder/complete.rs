//! Completions of receives. Receives hold no slot of their CQ, which overflows if it is full.
//! Flushed receives reserve their slots.

use arrayvec::ArrayVec;

use super::Responder;
use super::receives::Receives;
use crate::device::cq::CqFault;
use crate::engine::life::LifeCycle;
use crate::engine::numbers::count;
use crate::engine::qp_core::QpCore;
use crate::engine::requester::complete::{FLUSH_BATCH, PUBLISH_BATCH};
use crate::engine::schedule::REQUEST_COST;
use crate::engine::state::EngineState;
use rnic_abi::abi::queue::Cqe;
use rnic_abi::shm::queue::TakeError;
use rnic_abi::types::{CompletionOpcode, CompletionStatus};

impl Responder {
    /// Returns the completion of a receive, without the details of its message.
    pub(in crate::engine) fn cqe(
        &self,
        core: &QpCore,
        wr_id: u64,
        status: CompletionStatus,
    ) -> Cqe {
        let mut cqe = Cqe::new(core.id.0, wr_id, CompletionOpcode::Receive, status);
        cqe.srq = self.receives.shared().map_or(0, |srq| srq.id().0);
        cqe
    }

    /// Counts a receive as completed and writes its CQE. Fails if the CQ is dead or full.
    #[inline]
    pub(in crate::engine) fn publish(
        &self,
        cqe: &Cqe,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<(), CqFault> {
        if cqe.status != CompletionStatus::Success as u8 {
            core.shared.errors.add(1);
        }
        core.shared.receives_completed.add(1);
        core.publish_receive(cqe, engine)
    }

    /// Flushes the receive in use and a limited number of the receives that are now in the QP's own
    /// receive queue. Receives of an SRQ stay for other QPs. Fails if the CQ dies.
    pub(in crate::engine) fn flush(
        &mut self,
        core: &mut QpCore,
        life: &mut LifeCycle,
        engine: &mut EngineState,
    ) -> Result<(), CqFault> {
        if core.recv_cq.is_dead() {
            return Ok(());
        }
        // Must precede the check of the queue: the client rings for every later receive.
        if life.phase().flushes() {
            self.receives.set_waits_own(engine.worker);
        }
        let posted = self.receives.peek_own().unwrap_or(0) + u32::from(self.receiving.is_some());
        let most = posted.min(FLUSH_BATCH);
        let mut cqes = ArrayVec::<Cqe, PUBLISH_BATCH>::new();
        let mut slots = 0;
        let mut result = Ok(());
        while count(cqes.len()) < most {
            if slots == 0 {
                let reserved = reserve(most - count(cqes.len()), core, engine);
                slots = reserved.unwrap_or(0);
                if slots == 0 {
                    life.flush_later();
                    result = reserved.map(|_| ());
                    break;
                }
            }
            let Some(wr_id) = self.next_to_flush() else { break };
            slots -= 1;
            let mut cqe = self.cqe(core, wr_id, CompletionStatus::WrFlush);
            cqe.diagnosis_id = life.flush_record(core, engine, wr_id);
            cqes.push(cqe);
        }
        engine.unreserve(&core.recv_cq, slots);
        if !cqes.is_empty() {
            let flushed = count(cqes.len());
            core.turn.charge(REQUEST_COST * i64::from(flushed));
            core.shared.receives_completed.add(flushed.into());
            core.shared.errors.add(flushed.into());
            core.publish_flushed(&cqes, engine);
        }
        // If the CQ has no room, its doorbell wakes the QP.
        if posted > most && count(cqes.len()) == most {
            life.flush_later();
            engine.wake(core);
        }
        result
    }

    fn next_to_flush(&mut self) -> Option<u64> {
        match (self.take_receiving(), &mut self.receives) {
            (Some(wr_id), _) => Some(wr_id),
            (None, Receives::Own(rq)) => match rq.take() {
                Ok(None) | Err(TakeError::Queue(_)) => None,
                Ok(Some(e)) => Some(e.wr_id),
                Err(TakeError::Entry(e)) => Some(e.wr_id),
            },
            (None, Receives::Shared(_)) => None,
        }
    }
}

/// Reserves at most `wanted` slots for flushed receives. If the CQ is full, the QP is woken when
/// slots are free.
fn reserve(wanted: u32, core: &QpCore, engine: &mut EngineState) -> Result<u32, CqFault> {
    for wait in [false, true] {
        if wait {
            core.recv_cq.wait_for_space(engine.worker);
        }
        match core.recv_cq.reserve(wanted)? {
            0 => {}
            n => return Ok(n),
        }
    }
    engine.doorbells.await_space(core.slot, &core.recv_cq, core.key);
    Ok(0)
}
