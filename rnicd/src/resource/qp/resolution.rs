//! Resolution of UD service ports to QPs (`RDMA_PS_UDP`): checks and events.
//!
//! The requesting program specifies one of its own UD QPs, whose state does not change. The
//! responding program specifies any of its UD QPs in Rtr or later.

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::abi::control::{Event, Refusal};
use rnic_abi::roce::mad;
use rnic_abi::types::*;

use super::datagrams::DATAGRAM_WORKER;
use super::rc::state_name;
use super::wrong_state;
use crate::clock;
use crate::cm::{AcceptParams, CmEvent, ConnectFailure, ConnectParams};
use crate::resource::answer::{Answer, Outcome};
use crate::resource::{Manager, find};
use crate::worker::{Command, ManagementDatagram};

impl Manager {
    /// Requests the number and the Q_Key of the UD QP that serves the peer's port.
    pub(super) fn resolve(&mut self, id: SessionId, params: ConnectParams, now: Time) -> Answer {
        self.may_ask(id, "resolve a service at", params.peer, params.local)?;
        self.take_rate(id, now)?;
        self.cm.resolve(params, now)?;
        Outcome::done()
    }

    /// Returns an error if the rules do not allow a session to send requests to a port of the peer.
    pub(super) fn may_ask(
        &mut self,
        id: SessionId,
        verb: &str,
        peer: SocketAddr,
        local: Option<SocketAddr>,
    ) -> Result<(), Refusal> {
        let who = &find(&mut self.sessions, id)?.client.identity;
        self.policy.may_connect(who, peer)?;
        self.policy.may_reach(who, verb, peer)?;
        // Requests are sent to `wired.port`, like datagrams.
        let wire = SocketAddr::new(peer.ip(), self.config.wired.port);
        self.policy.may_connect(who, wire)?;
        match local.filter(|local| !local.ip().is_unspecified()) {
            Some(local) => self.policy.may_reach(who, "send requests from", local),
            None => Ok(()),
        }
    }

    /// Accepts a request with a UD QP in Rtr or later.
    pub(super) fn accept_datagrams(
        &mut self,
        id: SessionId,
        params: AcceptParams,
        now: Time,
    ) -> Answer {
        let AcceptParams { request, qp, private_data, .. } = params;
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        let Some(attr) = object.datagrams.filter(|_| object.works()) else {
            return Err(wrong_state(qp, state_name(object), "a UD QP in Rtr, Rts, Sqd or Sqe"));
        };
        self.cm.accept_datagrams(request, qp, attr.q_key, &private_data, now)?;
        find(&mut self.sessions, id)?.requests.remove(&request);
        Outcome::done()
    }

    /// Returns true for a UD QP, which has no connection.
    pub(super) fn is_ud(&mut self, qp: QpId) -> bool {
        self.qp_of(qp).is_some_and(|(_, object)| object.kind == QpType::Ud)
    }

    /// Reports the result of a resolution to the session.
    pub(super) fn handle_resolution(&mut self, event: CmEvent) {
        let (CmEvent::Resolved { qp, .. }
        | CmEvent::Rejected { qp, .. }
        | CmEvent::Unreachable { qp, .. }) = event
        else {
            return;
        };
        let Some((session, object)) = self.qp_of(qp) else { return };
        let context = object.shared.context.load(Relaxed);
        let event = match event {
            CmEvent::Resolved { addresses, source, remote_qp, q_key, private_data, .. } => {
                Event::Resolved { qp, context, addresses, source, remote_qp, q_key, private_data }
            }
            CmEvent::Rejected { private_data, .. } => Event::Rejected { qp, context, private_data },
            CmEvent::Unreachable { why: ConnectFailure { errno, reason }, .. } => {
                let rule = "IBTA specification, volume 1, section 12.11: the host that serves a \
                            service ID answers with its QP";
                self.not_connected(session, qp, rule, &reason);
                Event::Unreachable { qp, context, errno, reason }
            }
            _ => return,
        };
        self.tell(session, &event);
    }

    /// Cancels a resolution. A UD QP has no connection to end.
    pub(super) fn cancel_resolution(&mut self, qp: QpId) -> Answer {
        if !self.cm.is_busy(qp) {
            return Err(wrong_state(qp, "a UD QP without a request", "a pending request"));
        }
        self.cm.cancel(qp);
        let why = ConnectFailure::reset("cancelled by this side");
        self.handle_resolution(CmEvent::Unreachable { qp, why });
        Outcome::done()
    }

    // --- Management datagrams --------------------------------------------------------------------

    /// Passes received management datagrams to the connection manager.
    pub(in crate::resource) fn handle_management(&mut self, datagrams: Vec<ManagementDatagram>) {
        for ManagementDatagram { from, to, mad } in datagrams {
            self.cm.handle_management(from, to, &mad, clock::now());
        }
    }

    /// Sends a management datagram to another daemon.
    pub(super) fn send_management(
        &mut self,
        from: std::net::IpAddr,
        to: std::net::IpAddr,
        mad: &mad::Bytes,
    ) {
        let packet = mad::packet(from, to, mad, self.config.wired.port);
        self.workers.one(DATAGRAM_WORKER, Command::SendDatagram { from, to, packet });
    }
}
