//! Source of a QP's receives: its own receive queue or an SRQ.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::device::Srq;
use crate::device::srq::Notices;
use crate::engine::interface::Output;
use rnic_abi::abi::control::Event;
use rnic_abi::shm::queue::{QueueFault, ReceiveConsumer, ReceiveEntry};

/// Source of a QP's receives.
pub enum Receives {
    /// Its own receive queue.
    Own(ReceiveConsumer),
    /// An SRQ of its session.
    Shared(Arc<Srq>),
}

impl Receives {
    /// Returns the number of receives in the QP's own queue, which are flushed with it. Receives of
    /// an SRQ are not.
    pub(super) fn peek_own(&mut self) -> Result<u32, QueueFault> {
        match self {
            Receives::Own(rq) => rq.peek(),
            Receives::Shared(_) => Ok(0),
        }
    }

    /// Requests a doorbell for each receive that the client posts from now on. For the fences see
    /// [`ReceiveProducer::waits`](rnic_abi::shm::queue::ReceiveProducer::waits).
    pub(super) fn set_waits_own(&mut self, worker: u32) {
        if let Receives::Own(rq) = self {
            rq.set_waits(worker);
        }
    }

    pub(super) fn shared(&self) -> Option<&Arc<Srq>> {
        match self {
            Receives::Own(_) => None,
            Receives::Shared(srq) => Some(srq),
        }
    }
}

/// A receive that a message is being placed into.
pub(super) struct Receiving {
    pub entry: ReceiveEntry,
    /// Total length of its SGEs in bytes.
    pub capacity: u64,
}

/// Emits the events of an SRQ that taking a receive has caused.
pub(super) fn emit_notices(srq: &Srq, notices: Notices, outputs: &mut VecDeque<Output>) {
    let Notices { limit, unfair } = notices;
    let context = srq.context.load(Relaxed);
    let limit = limit.then_some(Event::SrqLimit { srq: srq.id(), context });
    let unfair = unfair.map(|u| Event::SrqUnfair {
        srq: srq.id(),
        context,
        qp: u.qp,
        taken: u.taken,
        of_last: u.of_last,
    });
    let session = srq.session();
    outputs.extend(limit.into_iter().chain(unfair).map(|event| Output::Event { session, event }));
}
