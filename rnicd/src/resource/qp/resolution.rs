//! Queue pairs of datagrams by the ports that they serve (`RDMA_PS_UDP`): who may ask and answer,
//! and what becomes of it.
//!
//! A program that asks names one of its own queue pairs, which stays as it is; one that is asked
//! answers with any of its own that receives.

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;

use rnic_core::abi::control::Event;
use rnic_core::roce::{Datagram, packet, sidr};
use rnic_core::types::*;

use super::datagrams::DATAGRAM_WORKER;
use super::wired::state_name;
use super::wrong_state;
use crate::clock;
use crate::cm::{AcceptParams, CmEvent, ConnectParams, NoConnection};
use crate::resource::answer::{Answer, Outcome};
use crate::resource::{Manager, find};

impl Manager {
    /// Asks which queue pair serves the peer's port.
    pub(super) fn resolve(&mut self, id: SessionId, params: ConnectParams, now: Time) -> Answer {
        let peer = params.peer;
        let who = &find(&mut self.sessions, id)?.client.identity;
        self.policy.may_connect(who, peer)?;
        self.policy.may_reach(who, "ask", peer)?;
        // What is asked goes where datagrams would.
        let wire = SocketAddr::new(peer.ip(), self.config.wired.port);
        self.policy.may_connect(who, wire)?;
        if let Some(local) = params.local.filter(|local| !local.ip().is_unspecified()) {
            self.policy.may_reach(who, "ask from", local)?;
        }
        self.take_rate(id, now)?;
        self.cm.resolve(params, now)?;
        Outcome::done()
    }

    /// Answers a request with a queue pair that receives.
    pub(super) fn accept_datagrams(
        &mut self,
        id: SessionId,
        params: AcceptParams,
        now: Time,
    ) -> Answer {
        let AcceptParams { request, qp, private_data, .. } = params;
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        let Some(told) = object.datagrams.filter(|_| object.works()) else {
            return Err(wrong_state(
                qp,
                state_name(object),
                "one of datagrams in Rtr, Rts, Sqd or Sqe",
            ));
        };
        self.cm.accept_datagrams(request, (qp, told.q_key), &private_data, now)?;
        find(&mut self.sessions, id)?.requests.remove(&request);
        Outcome::done()
    }

    /// Whether a queue pair is one of datagrams, which is not connected.
    pub(super) fn is_of_datagrams(&self, qp: QpId) -> bool {
        let owner = self.handles.qps.owner(qp.0);
        let object = owner.and_then(|owner| self.sessions.get(&owner)?.qps.get(&qp));
        object.is_some_and(|object| object.kind == QpType::Datagrams)
    }

    /// The question of a queue pair of datagrams has an answer, or there will be none.
    pub(super) fn handle_resolution(&mut self, event: CmEvent) {
        let (qp, of_qp): (QpId, Box<dyn FnOnce(u64) -> Event>) = match event {
            CmEvent::Resolved { qp, addresses, source, remote_qp, q_key, private_data } => {
                let of_qp = move |context| Event::Resolved {
                    qp,
                    context,
                    addresses,
                    source,
                    remote_qp,
                    q_key,
                    private_data,
                };
                (qp, Box::new(of_qp))
            }
            CmEvent::Rejected { qp, private_data } => {
                (qp, Box::new(move |context| Event::Rejected { qp, context, private_data }))
            }
            CmEvent::Unreachable { qp, why: NoConnection { errno, reason } } => {
                if let Some(session) = self.handles.qps.owner(qp.0) {
                    let rule = "IBTA specification, volume 1, section 12.11: whose service ID is \
                                resolved says which queue pair serves it";
                    self.not_connected(session, qp, rule, &reason);
                }
                (qp, Box::new(move |context| Event::Unreachable { qp, context, errno, reason }))
            }
            _ => return,
        };
        let Some((session, object)) = self.qp_of(qp) else { return };
        let event = of_qp(object.shared.context.load(Relaxed));
        self.tell(session, &event);
    }

    /// Gives up what a queue pair of datagrams asks for. There is nothing else of it to be ended.
    pub(super) fn give_up_resolution(&mut self, qp: QpId) -> Answer {
        if !self.cm.is_busy(qp) {
            return Err(wrong_state(qp, "one of datagrams", "asking for one, or a connection"));
        }
        self.cm.cancel(qp);
        let why = NoConnection::reset("given up by this side");
        self.handle_resolution(CmEvent::Unreachable { qp, why });
        Outcome::done()
    }

    // --- Management datagrams --------------------------------------------------------------------

    /// Hands those that have come from other daemons to the connection manager.
    pub(in crate::resource) fn take_management(&mut self) {
        for came in self.workers.take_management() {
            self.cm.handle_management(came.from, came.to, &came.mad, clock::now());
        }
    }

    /// Sends one to another daemon.
    pub(super) fn send_management(
        &mut self,
        from: std::net::IpAddr,
        to: std::net::IpAddr,
        mad: &sidr::Bytes,
    ) {
        let datagram = Datagram {
            from: Gid::from(from),
            source: sidr::QP,
            to: Gid::from(to),
            qp: sidr::QP,
            q_key: sidr::Q_KEY,
            psn: 0,
            immediate: None,
            solicited: false,
        };
        let port = self.config.wired.port;
        let packet = packet::emit(&datagram, mad, (port, port));
        self.workers.send_datagram(DATAGRAM_WORKER, from, to, packet);
    }
}
