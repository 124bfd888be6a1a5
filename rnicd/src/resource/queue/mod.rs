//! Completion channels, completion queues, shared receive queues, and the memory of all queues.

mod arena;
mod channels;
mod cqs;
mod extents;
mod resize;
mod srqs;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::abi::control::CqRow;
use rnic_abi::types::*;
use rnic_core::device::{Cq, Srq};

use crate::events::ChannelSender;
use crate::resource::domain::UseOfPd;
use crate::resource::ledger::Charge;
use crate::resource::numbers::{Doorbell, Handle};
use crate::resource::uses::{Use, Users};
pub use arena::{Arenas, QueuePlace, Room};
pub use srqs::{srq_for_qp, srq_row};

/// A counted use of a channel.
pub type UseOfChannel = Use<AtomicU32>;

pub struct Channel {
    pub sender: Arc<ChannelSender>,
    pub cqs: Users,
    _handle: Handle,
    _charge: Charge,
}

pub struct CqObject {
    pub cq: Arc<Cq>,
    pub channel: Option<(ChannelId, UseOfChannel)>,
    pub place: QueuePlace,
    pub doorbell: Doorbell,
    _handle: Handle,
    pub entries: Charge,
    _charge: Charge,
}

/// A shared receive queue.
pub struct SrqObject {
    pub srq: Arc<Srq>,
    pub pd: PdId,
    _pd: UseOfPd,
    _place: (QueuePlace, Doorbell),
    _handle: Handle,
    _charge: Charge,
}

pub fn cq_row(cq: &Cq) -> CqRow {
    let (unread, reserved, completions) = cq.usage();
    CqRow {
        cq: cq.id(),
        session: cq.session(),
        capacity: cq.capacity(),
        unread,
        reserved,
        qps: cq.qps.load(Relaxed),
        completions,
        in_error: cq.is_dead(),
    }
}
