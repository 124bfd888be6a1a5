//! Queue pairs, from creation through connection to destruction.

mod ask_back;
mod connect;
mod datagrams;
mod parts;
mod pending_connect;
mod port;
mod qp_attr;
mod rc;
mod rc_connect;
mod reads;
mod rejection;
mod rendezvous;
mod requests;
mod resolution;
mod wired_port;

use std::net::IpAddr;
use std::sync::Arc;

use rnic_abi::abi::control::{QpRow, Refusal};
use rnic_abi::types::*;
use rnic_core::device::{Cq, QpShared, Srq};
use rnic_core::engine::QpConfig;

use crate::resource::domain::{Membership, UseOfPd};
use crate::resource::faults::held::HeldReply;
use crate::resource::faults::qp_faults::QpFaults;
use crate::resource::ledger::Charge;
use crate::resource::numbers::Handle;
use crate::resource::refuse;
use crate::resource::uses::Use;
use parts::QpParts;
pub use pending_connect::Rendezvous;
pub use port::{PassedPort, WiredPort};
pub use qp_attr::{RcAttr, UdAttr};
pub use rc_connect::RcRequest;
pub(super) use rc_connect::space_of_rc;
use reads::Reads;

pub struct Qp {
    pub pd: PdId,
    pub send_cq: CqId,
    pub recv_cq: CqId,
    /// SRQ that the QP uses instead of a receive queue.
    pub srq: Option<SrqId>,
    pub shared: Arc<QpShared>,
    pub phase: QpPhase,
    pub kind: QpType,
    /// Name of the device as given by the program, or empty.
    pub device: String,
    /// Attributes and stream of an RC or UC QP. `None` before Rtr.
    pub rc: Option<RcAttr>,
    /// PSN and reason of the last rejected connection request. Its diagnosis exists already.
    pub rejected: Option<(u32, u16)>,
    /// State and Q_Key of a UD QP. `None` before Rtr.
    pub datagrams: Option<UdAttr>,
    /// `None` until connected.
    pub connection: Option<Connection>,
    /// Charge for the Reads of the connection.
    pub reads: Option<Reads>,
    /// Fault rules of the QP.
    pub faults: QpFaults,
    /// Rule that holds back the REP with which the QP accepts a connection.
    pub held_reply: Option<HeldReply>,
    /// Membership in a named domain.
    pub membership: Option<Membership>,
    _uses: QpUses,
    parts: QpParts,
    _handle: Handle,
    _charge: Charge,
}

/// Counted uses of other objects by a QP. A CQ that serves both queues is counted once.
pub struct QpUses {
    _pd: UseOfPd,
    _send_cq: Use<Cq>,
    _recv_cq: Option<Use<Cq>>,
    _srq: Option<Use<Srq>>,
}

/// The current holder of a QP.
pub enum QpPhase {
    /// No holder: the QP may connect or accept.
    Idle(Box<QpConfig>),
    /// The connection manager, on the connecting side.
    Connecting(Box<QpConfig>),
    /// The connection manager, on the accepting side.
    Accepting(Box<QpConfig>),
    /// A worker, until the QP is reset or destroyed.
    Bound(u32),
    /// No holder: the QP is being reset or destroyed.
    Leaving,
}

impl QpPhase {
    pub fn name(&self) -> &'static str {
        match self {
            QpPhase::Idle(_) => "Idle",
            QpPhase::Connecting(_) => "connecting",
            QpPhase::Accepting(_) => "accepting",
            QpPhase::Bound(_) => "connected or ended",
            QpPhase::Leaving => "being reset or destroyed",
        }
    }
}

/// Path, addresses and Read depths of a connection.
#[derive(Clone, Copy)]
pub struct Connection {
    pub path: &'static str,
    pub addresses: AddressPair,
    pub ird: u16,
    pub ord: u16,
}

impl Qp {
    /// Returns the state. For an RC, UC or UD QP in Rtr, Rts or Sqd, it is the last requested
    /// state, which the worker may not have reached yet. A send error (Sqe) is only visible in the
    /// worker's state.
    pub fn state(&self) -> QpState {
        let requested =
            self.rc.as_ref().map(RcAttr::state).or(self.datagrams.map(|attr| attr.state));
        match (self.shared.state(), requested) {
            (QpState::Rtr | QpState::Rts | QpState::Sqd, Some(requested)) => requested,
            (state, _) => state,
        }
    }

    /// Returns true if an RC, UC or UD QP is in Rtr, Rts, Sqd or Sqe, with or without a stream.
    fn works(&self) -> bool {
        matches!(self.shared.state(), QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// Returns the address of the peer, if known.
    pub fn peer(&self) -> Option<IpAddr> {
        self.addresses().map(|[_, peer]| peer)
    }

    /// Returns the addresses of this end and of the peer, if known.
    pub fn addresses(&self) -> Option<[IpAddr; 2]> {
        let of = |rc: &RcAttr| [rc.wiring.local, rc.wiring.remote].map(Gid::address);
        let connected = |c: Connection| [c.addresses.local.ip(), c.addresses.peer.ip()];
        self.rc.as_ref().map(of).or(self.connection.map(connected))
    }

    /// Returns an error if the QP cannot connect or accept: it is not Idle or not an iWARP QP.
    pub fn refuse_unless_idle(&self, id: QpId) -> Result<(), Refusal> {
        if self.kind.is_roce() {
            return Err(wrong_state(id, "an RC, UC or UD QP", "an iWARP QP"));
        }
        match self.phase {
            QpPhase::Idle(_) => Ok(()),
            _ => Err(wrong_state(id, self.phase.name(), "Idle")),
        }
    }
}

/// Returns an error that reports the QP's state and the required state.
pub fn wrong_state(qp: QpId, state: &str, needs: &str) -> Refusal {
    refuse::wrong_state("QP", qp.0, state, needs)
}

/// Request to connect over a passed socket, as initiator.
pub struct ConnectOver {
    pub qp: QpId,
    pub ird: Option<u16>,
    pub ord: Option<u16>,
    pub private_data: Vec<u8>,
}

pub fn qp_row(session: SessionId, qp: QpId, object: &Qp) -> QpRow {
    let connection = object.connection;
    let rc = object.rc.as_ref();
    QpRow {
        qp,
        kind: object.kind,
        session,
        pd: object.pd,
        srq: object.srq,
        state: object.state(),
        path: match (connection, object.datagrams) {
            (Some(connection), _) => connection.path.to_owned(),
            (None, Some(_)) => "datagrams".to_owned(),
            (None, None) => "none".to_owned(),
        },
        addresses: connection.map(|c| c.addresses),
        worker: match object.phase {
            QpPhase::Bound(worker) => Some(worker),
            _ => None,
        },
        ird: connection.map_or(0, |c| c.ird),
        ord: connection.map_or(0, |c| c.ord),
        counters: object.shared.counters(),
        terminate: object.shared.terminate(),
        remote_qp: rc.map(|rc| rc.wiring.remote_qp),
        rq_psn: rc.map_or(0, |rc| rc.wiring.rq_psn),
        sq_psn: rc.and_then(|rc| rc.sending).map_or(0, |sending| sending.sq_psn),
    }
}
