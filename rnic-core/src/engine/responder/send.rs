//! A Send and its receive: takes a receive for the message and places its bytes in the SGEs.
//!
//! A receive is taken when a message begins, never earlier, so that a QP on an SRQ withholds no
//! receive from other QPs.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

use super::Responder;
use super::placement::{Placed, ScatterFault, scatter};
use super::receives::{Receives, Receiving, emit_notices};
use crate::device::memory::{Payload, Unreachable};
use crate::device::srq::{TakeMode, TakeOutcome};
use crate::device::stag::StagTable;
use crate::engine::interface::Output;
use crate::engine::phase::StreamPhase;
use crate::engine::qp_core::QpCore;
use crate::engine::reason::{PlacementError, Reason};
use crate::engine::state::EngineState;
use crate::engine::transport::MissingReceive;
use crate::rdmap::codes;
use crate::stream::inbound::send_fits;
use rnic_abi::abi::control::Event;
use rnic_abi::shm::attached::CopyEnd;
use rnic_abi::shm::queue::{ReceiveEntry, TakeError};
use rnic_abi::types::Time;

impl Responder {
    /// Takes the receive for a Send: the receive in use, or for a new message the next receive
    /// posted. Returns false if the queue is empty and this QP waits for a receive; see
    /// [`Responder::await_receive`].
    #[inline]
    pub(in crate::engine) fn take_receive(
        &mut self,
        core: &QpCore,
        now: Time,
        outputs: &mut VecDeque<Output>,
    ) -> Result<bool, PlacementError> {
        //= RDMAP-5.3-2
        if self.receiving.is_some() {
            return Ok(true);
        }
        let waits = matches!(self.missing, MissingReceive::Waits { .. });
        let turn = if waits { TakeMode::InTurn } else { TakeMode::AtOnce };
        if self.take_next(turn, core, now, outputs)? {
            Ok(true)
        } else if waits {
            Ok(false)
        } else {
            Err(Reason::NoReceive { waited: false }.into())
        }
    }

    /// Takes a receive if there is one for this QP. Returns true if there was.
    pub(super) fn take_next(
        &mut self,
        turn: TakeMode,
        core: &QpCore,
        now: Time,
        outputs: &mut VecDeque<Output>,
    ) -> Result<bool, PlacementError> {
        let mut entry = ReceiveEntry::default();
        let got = match &mut self.receives {
            Receives::Own(rq) => match rq.take_into(&mut entry) {
                Ok(true) => TakeOutcome::Receive,
                Ok(false) => TakeOutcome::Nothing,
                Err(TakeError::Entry(error)) => TakeOutcome::Malformed(error.wr_id),
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

    /// Handles the result of taking a receive. Returns true if it is a receive.
    pub(super) fn got(
        &mut self,
        got: TakeOutcome,
        entry: ReceiveEntry,
    ) -> Result<bool, PlacementError> {
        match got {
            TakeOutcome::Nothing => Ok(false),
            TakeOutcome::Malformed(wr_id) => {
                Err(PlacementError::MalformedReceive(wr_id, Reason::MalformedReceive))
            }
            TakeOutcome::Receive => {
                let capacity = entry.sges.as_slice().iter().map(|s| u64::from(s.length)).sum();
                self.receiving = Some(Receiving { entry, capacity });
                Ok(true)
            }
        }
    }

    /// Places a Send segment into the receive in use. All SGEs are checked before the first
    /// byte is placed.
    #[inline]
    pub(in crate::engine) fn place_send(
        &self,
        core: &QpCore,
        stags: &StagTable,
        mo: u32,
        payload: Payload<'_>,
    ) -> Result<Placed, PlacementError> {
        let Some(receiving) = &self.receiving else { return Ok(Placed::Done) };
        let len = payload.len();
        let capacity = receiving.capacity;
        send_fits(mo, len, capacity).map_err(|fault| match fault.code {
            codes::UNTAGGED_TOO_LONG => Reason::TooLong { mo, len, capacity }.into(),
            _ => PlacementError::from(fault),
        })?;
        let elements = receiving.entry.sges.as_slice();
        scatter(&payload, elements, mo, core, stags).map_err(|fault| match fault {
            ScatterFault::Element(reason) => PlacementError::Receive(None, reason),
            ScatterFault::Memory(fault) => match (fault.cause, fault.end) {
                (Unreachable::Truncated, _) | (_, CopyEnd::Source) => PlacementError::Memory(fault),
                (_, CopyEnd::Sink) => PlacementError::Receive(Some(fault), Reason::Memory(fault)),
            },
        })
    }

    /// Notifies the owner of a QP in Error, once, that it has taken its last receive from the SRQ
    /// and flushed the receives that it took (`IBV_EVENT_QP_LAST_WQE_REACHED`).
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
            || std::mem::replace(&mut self.last_wqe_reported, true)
        {
            return;
        }
        let context = core.shared.context.load(Relaxed);
        engine.emit(core.session, Event::LastWqeReached { qp: core.id, context });
    }
}
