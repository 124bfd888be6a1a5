//! What a queue pair is made of, from which a worker's half is made: once, and again when it is
//! reset.

use std::sync::Arc;
use std::time::Duration;

use rnic_core::abi::control::{QueueLocation, Refusal};
use rnic_core::abi::queue::QueueKind;
use rnic_core::device::{Cq, QpShared, Srq};
use rnic_core::engine::{QpConfig, Receives};
use rnic_core::shm::queue::{ReceiveConsumer, SendConsumer};
use rnic_core::types::*;

use crate::resource::numbers::Doorbell;
use crate::resource::queue::QueuePlace;

/// Parts of a queue pair.
pub struct QpParts {
    pub qp: QpId,
    pub session: SessionId,
    pub pd: PdId,
    pub send_cq: Arc<Cq>,
    pub recv_cq: Arc<Cq>,
    /// Where its receives come from, if it has no receive queue of its own.
    pub srq: Option<Arc<Srq>>,
    pub sq: QueuePlace,
    pub rq: Option<QueuePlace>,
    pub doorbell: Doorbell,
    pub signal_all: bool,
    pub kind: QpType,
    pub rnr_timeout: Option<Duration>,
    pub shared: Arc<QpShared>,
}

impl QpParts {
    /// A queue pair in Idle with empty queues. No worker may have an earlier one.
    pub fn config(&self) -> Result<Box<QpConfig>, Refusal> {
        let QpParts { qp, doorbell, .. } = self;
        let rq = match (&self.srq, &self.rq) {
            (Some(srq), _) => Receives::Shared(srq.clone()),
            (None, Some(rq)) => {
                let memory = rq.format(QueueKind::Receive, qp.0, doorbell)?;
                Receives::Own(ReceiveConsumer::new(memory))
            }
            (None, None) => return Err(crate::resource::refuse::no_such("receive queue", qp.0)),
        };
        let sq = SendConsumer::new(self.sq.format(QueueKind::Send, qp.0, doorbell)?);
        Ok(Box::new(QpConfig {
            qp: *qp,
            session: self.session,
            pd: self.pd,
            doorbell: doorbell.index(),
            sq,
            rq,
            send_cq: self.send_cq.clone(),
            recv_cq: self.recv_cq.clone(),
            signal_all: self.signal_all,
            rnr_timeout: self.rnr_timeout,
            wiring: None,
            unreliable: self.kind == QpType::WiredUnreliable,
            datagrams: None,
            shared: self.shared.clone(),
        }))
    }

    /// Where its queues lie.
    pub fn locations(&self) -> (QueueLocation, Option<QueueLocation>) {
        (self.sq.location(), self.rq.as_ref().map(QueuePlace::location))
    }
}
