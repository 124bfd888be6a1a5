//! Queue pairs, from their creation through a connection to their end.

mod ask_back;
mod connect;
mod datagrams;
mod dials;
mod parts;
mod port;
mod reads;
mod rejection;
mod rendezvous;
mod requests;
mod resolution;
mod told;
mod wired;
mod wired_port;

use std::sync::Arc;

use rnic_core::abi::control::{QpRow, Refusal};
use rnic_core::device::{Cq, QpShared, Srq};
use rnic_core::engine::QpConfig;
use rnic_core::types::*;

use crate::resource::domain::{Membership, UseOfPd};
use crate::resource::ledger::Charge;
use crate::resource::numbers::Handle;
use crate::resource::uses::Use;
pub use dials::Rendezvous;
use parts::QpParts;
pub use port::{PassedPort, WiredPort};
use reads::Reads;
pub use told::{ToldDatagrams, Wired};

pub struct Qp {
    pub pd: PdId,
    pub send_cq: CqId,
    pub recv_cq: CqId,
    /// Where its receives come from, if it has no receive queue of its own.
    pub srq: Option<SrqId>,
    pub shared: Arc<QpShared>,
    pub phase: QpPhase,
    /// How it comes by its peer.
    pub kind: QpType,
    /// What it was told on its way to Rtr, if it is wired by hand.
    pub wired: Option<Wired>,
    /// What it was told, if it is one of datagrams and was.
    pub datagrams: Option<ToldDatagrams>,
    /// Known once it has been connected.
    pub connection: Option<Connection>,
    /// What its connection was charged.
    pub reads: Option<Reads>,
    /// In a named domain.
    pub membership: Option<Membership>,
    _uses: QpUses,
    parts: QpParts,
    _handle: Handle,
    _charge: Charge,
}

/// What a queue pair uses. A CQ that it uses for both its queues has one user more all the same.
pub struct QpUses {
    _pd: UseOfPd,
    _send_cq: Use<Cq>,
    _recv_cq: Option<Use<Cq>>,
    _srq: Option<Use<Srq>>,
}

/// Who holds a QP.
pub enum QpPhase {
    /// Nobody: it may connect or accept.
    Idle(Box<QpConfig>),
    /// The connection manager, as the side that connects.
    Connecting(Box<QpConfig>),
    /// The connection manager, as the side that accepted.
    Accepting(Box<QpConfig>),
    /// A worker, for the rest of its life.
    Bound(u32),
    /// Nobody any more: it is being destroyed.
    Leaving,
}

impl QpPhase {
    pub fn name(&self) -> &'static str {
        match self {
            QpPhase::Idle(_) => "Idle",
            QpPhase::Connecting(_) => "connecting",
            QpPhase::Accepting(_) => "accepting",
            QpPhase::Bound(_) => "connected or ended",
            QpPhase::Leaving => "being destroyed",
        }
    }
}

/// What was agreed when a QP was connected.
#[derive(Clone, Copy)]
pub struct Connection {
    pub path: &'static str,
    pub addresses: AddressPair,
    pub ird: u16,
    pub ord: u16,
}

impl Qp {
    /// Its state: of one that is wired by hand and works the one it was told to take, though its
    /// worker may not have come to that. A send error (Sqe) is the worker's to tell.
    pub fn state(&self) -> QpState {
        let told = self.wired.as_ref().map(Wired::state).or(self.datagrams.map(|told| told.state));
        match (self.shared.state(), told) {
            (QpState::Rtr | QpState::Rts | QpState::Sqd, Some(told)) => told,
            (state, _) => state,
        }
    }

    /// Whether one that is wired by hand works, with a stream or without.
    fn works(&self) -> bool {
        matches!(self.shared.state(), QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// Refuses a QP that cannot connect or accept: one that has left Idle, naming its state, or one
    /// that is wired by hand.
    pub fn refuse_unless_idle(&self, id: QpId) -> Result<(), Refusal> {
        if self.kind.is_wired() {
            return Err(wrong_state(id, "wired by hand", "a connection"));
        }
        match self.phase {
            QpPhase::Idle(_) => Ok(()),
            _ => Err(wrong_state(id, self.phase.name(), "Idle")),
        }
    }
}

/// A QP is in the wrong state for what was asked.
pub fn wrong_state(qp: QpId, state: &str, needs: &str) -> Refusal {
    Refusal::WrongState {
        kind: "QP".to_owned(),
        handle: qp.0,
        state: state.to_owned(),
        needs: needs.to_owned(),
    }
}

/// What a client asks for with the socket of a connection that it wants to be the initiator on.
pub struct ConnectOver {
    pub qp: QpId,
    pub ird: Option<u16>,
    pub ord: Option<u16>,
    pub private_data: Vec<u8>,
}

pub fn qp_row(session: SessionId, qp: QpId, object: &Qp) -> QpRow {
    let connection = object.connection;
    QpRow {
        qp,
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
    }
}
