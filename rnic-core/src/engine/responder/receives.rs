//! Where a QP's receives come from: a receive queue of its own, or one that it shares.
//!
//! A receive is taken when a message begins, never earlier, so that QPs on a shared queue do not
//! take from each other what they may never need.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::{Receiving, Responder};
use crate::abi::control::Event;
use crate::device::Srq;
use crate::device::srq::{Got, Notices, Turn};
use crate::engine::interface::Output;
use crate::engine::phase::StreamPhase;
use crate::engine::qp_core::QpCore;
use crate::engine::reason::{PlacementError, Reason};
use crate::engine::state::EngineState;
use crate::shm::queue::{QueueFault, ReceiveConsumer, ReceiveEntry, TakeError};
use crate::types::Time;

/// Where a QP takes its receives from.
pub enum Receives {
    /// Its own receive queue.
    Own(ReceiveConsumer),
    /// One that it shares with other QPs of its session.
    Shared(Arc<Srq>),
}

impl Receives {
    /// Receives that would be flushed with the QP: those of a shared queue are not its own.
    pub(super) fn look_at_own(&mut self) -> Result<u32, QueueFault> {
        match self {
            Receives::Own(rq) => rq.look(),
            Receives::Shared(_) => Ok(0),
        }
    }

    pub(super) fn shared(&self) -> Option<&Arc<Srq>> {
        match self {
            Receives::Own(_) => None,
            Receives::Shared(srq) => Some(srq),
        }
    }
}

impl Responder {
    /// The buffer for a Send: the one in use, or for a new message the next one posted. False if there
    /// is none and this QP waits for one: see [`Responder::await_receive`].
    #[inline]
    pub(in crate::engine) fn take_receive(
        &mut self,
        core: &QpCore,
        now: Time,
        outputs: &mut VecDeque<Output>,
    ) -> Result<bool, PlacementError> {
        if self.receiving.is_some() {
            return Ok(true);
        }
        let turn = if self.rnr_timeout.is_some() { Turn::InTurn } else { Turn::AtOnce };
        if self.take_next(turn, core, now, outputs)? {
            Ok(true)
        } else if self.rnr_timeout.is_some() {
            Ok(false)
        } else {
            Err(Reason::NoReceive { held: false }.into())
        }
    }

    /// Takes a receive, if there is one for this QP.
    pub(super) fn take_next(
        &mut self,
        turn: Turn,
        core: &QpCore,
        now: Time,
        outputs: &mut VecDeque<Output>,
    ) -> Result<bool, PlacementError> {
        let mut entry = ReceiveEntry::default();
        let got = match &mut self.receives {
            Receives::Own(rq) => match rq.take_into(&mut entry) {
                Ok(true) => Got::Receive,
                Ok(false) => Got::Nothing,
                Err(TakeError::Entry(error)) => Got::Malformed(error.wr_id),
                Err(TakeError::Queue(fault)) => return Err(PlacementError::Queue(fault)),
            },
            Receives::Shared(srq) => {
                let taken = srq.take(core.id, turn, now, &mut entry);
                let (got, notices) = taken.map_err(PlacementError::Srq)?;
                emit_notices(srq, notices, outputs);
                got
            }
        };
        self.got(got, entry)
    }

    /// A receive, nothing, or something that is none.
    pub(super) fn got(&mut self, got: Got, entry: ReceiveEntry) -> Result<bool, PlacementError> {
        match got {
            Got::Nothing => Ok(false),
            Got::Malformed(wr_id) => {
                Err(PlacementError::MalformedReceive(wr_id, Reason::MalformedReceive))
            }
            Got::Receive => {
                let capacity = entry.sges.as_slice().iter().map(|s| u64::from(s.length)).sum();
                self.receiving = Some(Receiving { entry, capacity });
                Ok(true)
            }
        }
    }

    /// Tells the owner of a QP in Error, once, that it has taken its last receive from its shared
    /// queue, and that what it took has been flushed (IBV_EVENT_QP_LAST_WQE_REACHED).
    pub(in crate::engine) fn emit_last_wqe_reached(
        &mut self,
        core: &QpCore,
        phase: StreamPhase,
        engine: &mut EngineState,
    ) {
        let none_is_left = self.receiving.is_none() || core.recv_cq.is_dead();
        if phase != StreamPhase::Ended
            || !none_is_left
            || self.receives.shared().is_none()
            || std::mem::replace(&mut self.last_wqe_told, true)
        {
            return;
        }
        let context = core.shared.context.load(Relaxed);
        engine.emit(core.session, Event::LastReceive { qp: core.id, context });
    }
}

/// Tells the owner of a shared queue what a taking showed.
pub(super) fn emit_notices(srq: &Srq, notices: Notices, outputs: &mut VecDeque<Output>) {
    let Notices { limit, unfair } = notices;
    let context = srq.context.load(Relaxed);
    let limit = limit.then_some(Event::SrqLimit { srq: srq.id(), context });
    let unfair = unfair.map(|u| Event::SrqUnfair {
        srq: srq.id(),
        context,
        qp: u.qp,
        taken: u.taken,
        window: u.window,
    });
    let session = srq.session();
    outputs.extend(limit.into_iter().chain(unfair).map(|event| Output::Event { session, event }));
}
