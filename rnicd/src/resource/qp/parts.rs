//! Parts of a QP, from which its [`QpConfig`] is built at creation and at each reset.

use std::sync::Arc;
use std::time::Duration;

use rnic_abi::abi::control::{QueueLocation, Refusal};
use rnic_abi::abi::queue::QueueKind;
use rnic_abi::shm::queue::{ReceiveConsumer, SendConsumer};
use rnic_abi::types::*;
use rnic_core::device::{Cq, QpShared, Srq};
use rnic_core::engine::{QpConfig, Receives};

use crate::resource::numbers::Doorbell;
use crate::resource::queue::QueuePlace;

/// Contents of a [`QpConfig`], and the locations of the queues.
pub struct QpParts {
    pub qp: QpId,
    pub session: SessionId,
    pub pd: PdId,
    pub send_cq: Arc<Cq>,
    pub recv_cq: Arc<Cq>,
    /// SRQ that the QP uses instead of a receive queue.
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
    /// Formats the queues and returns the configuration of an Idle QP. Must not be called while a
    /// worker holds an earlier configuration.
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
            unreliable: self.kind == QpType::Uc,
            datagrams: None,
            shared: self.shared.clone(),
            faults: Vec::new(),
            stopped: None,
        }))
    }

    /// Returns the locations of the queues.
    pub fn locations(&self) -> (QueueLocation, Option<QueueLocation>) {
        (self.sq.location(), self.rq.as_ref().map(QueuePlace::location))
    }
}
