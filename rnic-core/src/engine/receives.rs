//! Where a QP's receives come from: a receive queue of its own, or one that it shares.
//!
//! A receive is taken when a message begins, never earlier, so that QPs on a shared queue do not
//! take from each other what they may never need.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::dying::Dying;
use super::qp::{Phase, Qp, Receiving};
use super::reason::Reason;
use super::reason::Trouble;
use super::{Output, Shard};
use crate::abi::control::Event;
use crate::abi::queue::Cqe;
use crate::device::Srq;
use crate::device::srq::{Got, Notices, SrqFault, Turn};
use crate::shm::queue::{QueueFault, ReceiveConsumer, ReceiveEntry, TakeError};
use crate::types::{CompletionOpcode, CompletionStatus, Time};

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

impl Qp {
    /// The buffer for a Send: the one in use, or for a new message the next one posted (step 12).
    /// False if there is none and this QP waits for one: see [`Qp::await_receive`].
    pub(super) fn take_receive(
        &mut self,
        now: Time,
        outputs: &mut VecDeque<Output>,
    ) -> Result<bool, Trouble> {
        if self.receiving.is_some() {
            return Ok(true);
        }
        let turn = if self.hold.is_some() { Turn::InTurn } else { Turn::AtOnce };
        if self.take_in(turn, now, outputs)? {
            Ok(true)
        } else if self.hold.is_some() {
            Ok(false)
        } else {
            Err(Reason::NoReceive { held: false }.into())
        }
    }

    /// Takes a receive, if there is one for this QP.
    pub(super) fn take_in(
        &mut self,
        turn: Turn,
        now: Time,
        outputs: &mut VecDeque<Output>,
    ) -> Result<bool, Trouble> {
        let mut entry = ReceiveEntry::default();
        let got = match &mut self.rq {
            Receives::Own(rq) => match rq.take_into(&mut entry) {
                Ok(true) => Got::Receive,
                Ok(false) => Got::Nothing,
                Err(TakeError::Entry(error)) => Got::Malformed(error.wr_id),
                Err(TakeError::Queue(fault)) => return Err(Trouble::BadQueue(fault)),
            },
            Receives::Shared(srq) => {
                let taken = srq.take(self.id, turn, now, &mut entry);
                let (got, notices) = taken.map_err(Trouble::BadSrq)?;
                tell(srq, notices, outputs);
                got
            }
        };
        self.got(got, entry)
    }

    /// A receive, nothing, or something that is none.
    pub(super) fn got(&mut self, got: Got, entry: ReceiveEntry) -> Result<bool, Trouble> {
        match got {
            Got::Nothing => Ok(false),
            Got::Malformed(wr_id) => {
                Err(Trouble::MalformedReceive(wr_id, Reason::MalformedReceive))
            }
            Got::Receive => {
                let capacity = entry.sges.as_slice().iter().map(|s| u64::from(s.length)).sum();
                self.receiving = Some(Receiving { entry, capacity });
                Ok(true)
            }
        }
    }

    /// The completion of a receive, but for what it received.
    pub(super) fn receive_cqe(&self, wr_id: u64, status: CompletionStatus) -> Cqe {
        let mut cqe = Cqe::new(self.id.0, wr_id, CompletionOpcode::Receive, status);
        cqe.srq = self.rq.shared().map_or(0, |srq| srq.id().0);
        cqe
    }

    /// The shared receive queue of this QP is dead: say so once, and end its QPs.
    pub(super) fn srq_failed(&mut self, shard: &mut Shard, fault: SrqFault) {
        let Some(srq) = self.rq.shared() else { return };
        if srq.kill() {
            let context = srq.context.load(Relaxed);
            let event = Event::SrqError { srq: srq.id(), context };
            shard.outputs.push_back(Output::Event { session: srq.session(), event });
            shard.outputs.push_back(Output::SrqFailed(srq.id()));
            shard.dying.push_back(Dying::of_srq(srq));
            if let SrqFault::Scribbled(fault) = fault {
                let why = format!("shared receive queue {}: {fault}", srq.id());
                shard.outputs.push_back(Output::Misbehaved { session: srq.session(), why });
            }
        }
        let reason = Reason::Srq(srq.id(), fault);
        self.fail_locally(shard, SRQ_IS_DEAD, reason);
    }

    /// Tells the owner of a QP in Error, once, that it has taken its last receive from its shared
    /// queue, and that what it took has been flushed.
    pub(super) fn say_last_receive(&mut self, shard: &mut Shard) {
        let none_is_left = self.receiving.is_none() || self.recv_cq.is_dead();
        if self.phase != Phase::Dead
            || !none_is_left
            || self.rq.shared().is_none()
            || std::mem::replace(&mut self.last_receive_told, true)
        {
            return;
        }
        let event = Event::LastReceive { qp: self.id, context: self.shared.context.load(Relaxed) };
        shard.outputs.push_back(Output::Event { session: self.session, event });
    }
}

/// Tells the owner of a shared queue what a taking showed.
pub(super) fn tell(srq: &Srq, notices: Notices, outputs: &mut VecDeque<Output>) {
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

/// What the owner of a QP is told when its shared receive queue dies.
pub(super) const SRQ_IS_DEAD: &str = "its shared receive queue is dead";
