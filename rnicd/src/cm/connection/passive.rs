//! The requested end: REQ, REP, REJ and RTU.

use std::net::IpAddr;

use rnic_abi::abi::control::{RcPeer, Refusal};
use rnic_abi::roce::PortSpace;
use rnic_abi::roce::connection::{Delay, Ids, Reason, Reject, Rejected, Reply, Request, Service};
use rnic_abi::roce::mad::{Bytes, Exchange};
use rnic_abi::types::{AddressPair, Gid, QpId, Time};

use super::state::{Phase, RcConnection, RcRequest};
use super::{FIRST_QP, LONGEST_DELAY, REPEATS, RcAcceptParams, mtu_of, padded, rejection};
use crate::cm::admission::{Asked, NotAdmitted};
use crate::cm::{CmEvent, ConnectionManager, Slot, wrong_request};

impl ConnectionManager {
    /// Handles REQ.
    pub(super) fn handle_rc_request(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        asked: Box<Request>,
        now: Time,
    ) {
        // The addresses in the request must be those of its packet.
        if (asked.from.ip(), asked.to) != (from, to) {
            return;
        }
        if let Some(key) = self.connections.by_request.get(&(from, asked.exchange)).copied() {
            return self.handle_repeated_request(key, now);
        }
        let (source, path_mtu) = match self.check_request(from, to, &asked) {
            Ok(checked) => checked,
            Err(reason) => return self.refuse(from, to, &asked, reason, now),
        };
        if let Some(key) = self.connections.by_peer.get(&(from, asked.qp)).copied() {
            self.refuse(from, to, &asked, Reason::STALE, now);
            return self.report_stale(key);
        }
        let Request { exchange, service, .. } = *asked;
        let message = Asked { from, to, service, exchange };
        let (listener, session) = match self.admit_message(message, now) {
            Ok(admitted) => admitted,
            Err(NotAdmitted::Unserved) => {
                return self.refuse(from, to, &asked, Reason::INVALID_SERVICE, now);
            }
            Err(NotAdmitted::Draining) => {
                return self.refuse(from, to, &asked, Reason::NO_RESOURCES, now);
            }
            Err(NotAdmitted::Handled) => return,
        };
        let id = self.new_connection_id();
        let port = service.port().map_or(0, |(_, port)| port);
        let addresses = AddressPair { local: (to, port).into(), peer: asked.from };
        let peer = peer_of_request(&asked, source, path_mtu);
        let private_data = asked.private_data.to_vec();
        let request = self.new_request(self.slots.vacant_key());
        let slot = Slot::RcRequest(Box::new(RcRequest { session, listener, request, id, asked }));
        let key = self.queue_message(slot, message, self.options.decision_deadline, now);
        self.connections.by_id.insert(id, key);
        self.connections.by_request.insert((from, exchange), key);
        self.events.push_back(CmEvent::RcRequest {
            listener,
            request,
            addresses,
            peer,
            private_data,
        });
    }

    /// Answers a repeated request as before, or asks for more time.
    fn handle_repeated_request(&mut self, key: usize, now: Time) {
        let (sender, from, to, message) = match self.slots.get(key).map(|entry| &entry.slot) {
            Some(Slot::RcRequest(asked)) => {
                let delay =
                    Delay { ids: asked.ids(), of: Rejected::REQUEST, timeout: LONGEST_DELAY };
                (asked.sender(), asked.from(), asked.asked.to, delay.emit())
            }
            Some(Slot::Rc(c)) => {
                let message = match c.phase {
                    Phase::Accepting => *c.message,
                    Phase::Timewait => rejection(c.ids, Rejected::REQUEST, Reason::STALE).emit(),
                    _ => return,
                };
                (c.sender(), c.addresses.peer.ip(), c.addresses.local.ip(), message)
            }
            _ => return,
        };
        self.send_message(Some(sender), to, from, message, now);
    }

    /// Returns the index of the requested GID and the path MTU, or the reason for a rejection.
    fn check_request(
        &self,
        from: IpAddr,
        to: IpAddr,
        asked: &Request,
    ) -> Result<(u16, u16), Reason> {
        let source = self.service.index_of(to).ok_or(Reason::INVALID_GID)?;
        let gids = [from, to].map(|ip| Gid::from(self.service.port_of(ip)));
        // With other GIDs, the QPs would connect to a host other than the requester.
        if gids != [asked.from_gid, asked.to_gid] {
            return Err(Reason::INVALID_GID);
        }
        let path_mtu = mtu_of(asked.path_mtu).ok_or(Reason::INVALID_MTU)?;
        let is_tcp = matches!(asked.service.port(), Some((PortSpace::Tcp, _)));
        if is_tcp && asked.kind == Service::Unreliable {
            return Err(Reason::INVALID_SERVICE_TYPE);
        }
        // 0 stands for an unknown ID.
        if asked.exchange.id == 0 {
            return Err(Reason::NO_RESOURCES);
        }
        if asked.qp.0 < FIRST_QP {
            return Err(Reason::NO_QP);
        }
        Ok((source, path_mtu))
    }

    /// Rejects a request without a program's decision.
    fn refuse(&mut self, from: IpAddr, to: IpAddr, asked: &Request, reason: Reason, now: Time) {
        let Exchange { transaction, id } = asked.exchange;
        let ids = Ids { exchange: Exchange { transaction, id: 0 }, receiver: id };
        let reject = rejection(ids, Rejected::REQUEST, reason);
        self.send_unasked(None, to, from, reject.emit(), now);
    }

    /// Accepts an undecided request (REP). An event follows.
    pub fn accept_rc(&mut self, params: RcAcceptParams, now: Time) -> Result<(), Refusal> {
        let RcAcceptParams { request, qp, kind, offer, guid, private_data } = params;
        let key = self.undecided(request)?;
        let private_data = padded(&private_data)?;
        let Slot::RcRequest(asked) = &self.slots[key].slot else {
            return Err(wrong_request(request, "for another type of QP", "one of RcRequest"));
        };
        if kind.is_some_and(|kind| kind != asked.asked.kind) {
            return Err(wrong_request(request, "for another type of QP", "a QP of its type"));
        }
        // An earlier request of the QP may have been undecided too.
        if self.connections.by_peer.contains_key(&(asked.from(), asked.asked.qp)) {
            let why = "from a QP that another connection uses";
            return Err(wrong_request(request, why, "a QP without a connection"));
        }
        self.check_unconnected(qp, now)?;
        let Some(Slot::RcRequest(asked)) = self.remove(key) else { return Ok(()) };
        if let Some(l) = self.listeners.get_mut(&asked.listener) {
            l.pending -= 1;
            l.accepted += 1;
        }
        let ids = asked.ids();
        let reply = Reply {
            ids,
            qp,
            psn: offer.psn,
            responder_resources: offer.responder_resources,
            initiator_depth: offer.initiator_depth,
            rnr_retry: offer.rnr_retry,
            srq: offer.srq,
            guid,
            private_data,
        };
        let to = asked.asked.to;
        let port = asked.asked.service.port().map_or(0, |(_, port)| port);
        let known = (asked.from(), asked.asked.exchange);
        let key = self.insert(Slot::Rc(Box::new(RcConnection {
            session: asked.session,
            qp,
            phase: Phase::Accepting,
            ids,
            asked: Some(known),
            addresses: AddressPair { local: (to, port).into(), peer: asked.asked.from },
            offer,
            remote_qp: asked.asked.qp,
            message: Box::new(reply.emit()),
            repeats: REPEATS,
            delayed: false,
        })));
        self.connections.by_id.insert(ids.exchange.id, key);
        self.connections.by_qp.insert(qp, key);
        self.connections.by_request.insert(known, key);
        self.connections.by_peer.insert((asked.from(), asked.asked.qp), key);
        self.send_again(key, now);
        Ok(())
    }

    /// Rejects an undecided request (REJ).
    pub(in crate::cm) fn reject_rc(
        &mut self,
        key: usize,
        private_data: &[u8],
        now: Time,
    ) -> Result<(), Refusal> {
        let private_data = padded(private_data)?;
        let Some(Slot::RcRequest(asked)) = self.remove(key) else { return Ok(()) };
        let reject =
            Reject { private_data, ..rejection(asked.ids(), Rejected::REQUEST, Reason::CONSUMER) };
        let message = reject.emit();
        let from = asked.from();
        if let Some(l) = self.listeners.get_mut(&asked.listener) {
            l.pending -= 1;
            l.rejected += 1;
            if let Some(answers) = l.answers_mut() {
                answers.keep(from, asked.asked.exchange, &message);
            }
        }
        self.send_message(Some(asked.sender()), asked.asked.to, from, message, now);
        Ok(())
    }

    /// Ends an undecided request whose program has not decided in time.
    pub(in crate::cm) fn expire_rc_request(&mut self, key: usize, now: Time) {
        let Some(Slot::RcRequest(asked)) = self.slots.get(key).map(|entry| &entry.slot) else {
            return;
        };
        let (sender, from, to) = (asked.sender(), asked.from(), asked.asked.to);
        if let Some(message) = self.end_rc_request(key, "the deadline passed") {
            self.send_message(Some(sender), to, from, message, now);
        }
    }

    /// Ends an undecided request. Returns the rejection, which also answers late repetitions.
    pub(super) fn end_rc_request(&mut self, key: usize, why: &str) -> Option<Bytes> {
        let asked = self.withdraw_rc_request(key, why)?;
        let message = rejection(asked.ids(), Rejected::REQUEST, Reason::TIMEOUT).emit();
        let listener = self.listeners.get_mut(&asked.listener);
        if let Some(answers) = listener.and_then(|l| l.answers_mut()) {
            answers.keep(asked.from(), asked.asked.exchange, &message);
        }
        Some(message)
    }

    /// Ends an undecided request without an answer. A repetition is a new request.
    pub(in crate::cm) fn withdraw_rc_request(
        &mut self,
        key: usize,
        why: &str,
    ) -> Option<Box<RcRequest>> {
        let Some(Slot::RcRequest(asked)) = self.remove(key) else { return None };
        self.withdraw(asked.listener, asked.request, why);
        Some(asked)
    }

    /// Handles RTU.
    pub(super) fn handle_ready_to_use(&mut self, from: IpAddr, to: IpAddr, ids: Ids) {
        let Some(key) = self.connection(from, to, ids) else { return };
        let Some(Slot::Rc(c)) = self.slots.get(key).map(|entry| &entry.slot) else { return };
        if c.phase != Phase::Accepting || c.ids.exchange.transaction != ids.exchange.transaction {
            return;
        }
        self.confirm_accept(key);
    }

    /// Establishes an accepted connection whose peer has sent a message to the QP. Its RTU is
    /// delayed or lost.
    pub fn communication_established(&mut self, qp: QpId) {
        let Some(key) = self.connections.by_qp.get(&qp).copied() else { return };
        if matches!(&self.slots[key].slot, Slot::Rc(c) if c.phase == Phase::Accepting) {
            self.confirm_accept(key);
        }
    }

    fn confirm_accept(&mut self, key: usize) {
        let Some(Slot::Rc(c)) = self.slots.get(key).map(|entry| &entry.slot) else { return };
        let (qp, addresses, offer) = (c.qp, c.addresses, c.offer);
        self.set_phase(key, Phase::Established);
        self.set_deadline(key, None);
        self.events.push_back(CmEvent::RcEstablished { qp, addresses, offer });
    }

    /// Reports an established connection whose peer has used its QP for another request: the peer
    /// has lost the connection, or the request is forged (IBTA specification, volume 1, section
    /// 12.9.8.3).
    pub(super) fn report_stale(&mut self, key: usize) {
        let Some(Slot::Rc(c)) = self.slots.get(key).map(|entry| &entry.slot) else { return };
        if c.phase == Phase::Established {
            let (qp, remote_qp, peer) = (c.qp, c.remote_qp, c.addresses.peer.ip());
            self.events.push_back(CmEvent::RcStale { qp, remote_qp, peer });
        }
    }
}

fn peer_of_request(asked: &Request, source: u16, path_mtu: u16) -> RcPeer {
    RcPeer {
        source,
        gid: asked.from_gid,
        qp: asked.qp,
        psn: asked.psn,
        responder_resources: asked.responder_resources,
        initiator_depth: asked.initiator_depth,
        retry_count: asked.retry_count,
        rnr_retry: asked.rnr_retry,
        ack_timeout: asked.ack_timeout,
        path_mtu,
        traffic_class: asked.traffic_class,
        srq: asked.srq,
    }
}
