//! The requested end: REQ, REP, REJ and RTU.
//!
//! As with SIDR, requests cost only memory, and a sender can forge its address. So a request
//! without room is dropped without an answer, and nothing is evicted for it.

use std::net::IpAddr;

use rnic_abi::abi::control::{RcPeer, Refusal};
use rnic_abi::roce::PortSpace;
use rnic_abi::roce::connection::{Delay, Ids, Reason, Reject, Rejected, Reply, Request, Service};
use rnic_abi::roce::mad::Exchange;
use rnic_abi::types::{AddressPair, Gid, RequestId, Time};

use super::state::{Phase, RcConnection, RcRequest};
use super::{FIRST_QP, LONGEST_DELAY, REPEATS, RcAcceptParams, mtu_of, padded, rejection};
use crate::cm::startups::WaitsFor;
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
        let Some(listener) = self.serves(to, asked.service) else {
            return self.refuse(from, to, &asked, Reason::INVALID_SERVICE, now);
        };
        let Some(l) = self.listeners.get(&listener) else { return };
        // If the program has rejected this request, the rejection was lost.
        if let Some(answer) = l.answers().and_then(|answers| answers.find(from, asked.exchange)) {
            return self.send_message(to, from, answer, now);
        }
        let session = l.session;
        if self.draining {
            return self.refuse(from, to, &asked, Reason::NO_RESOURCES, now);
        }
        if !self.can_queue(listener) {
            return;
        }
        // Requests of this daemon are bounded by the requester's QPs and connection rate, and must
        // not use up those of the listener's user. Only requests with room count, so a flood does
        // not exhaust the user's connection rate.
        let is_local = self.service.stays_local(to, from);
        let may_ask =
            is_local || self.has_room_for(session) && self.is_within_rates(session, from, now);
        if !may_ask {
            return;
        }
        let id = self.new_connection_id();
        let exchange = asked.exchange;
        let port = asked.service.port().map_or(0, |(_, port)| port);
        let addresses = AddressPair { local: (to, port).into(), peer: asked.from };
        let peer = peer_of_request(&asked, source, path_mtu);
        let private_data = asked.private_data.to_vec();
        let request = RequestId(0);
        let slot = RcRequest { session, listener, request, id, asked };
        let key = self.insert(Slot::RcRequest(Box::new(slot)));
        let request = self.new_request(key);
        if let Slot::RcRequest(asked) = &mut self.slots[key].slot {
            asked.request = request;
        }
        self.connections.by_id.insert(id, key);
        self.connections.by_request.insert((from, exchange), key);
        if let Some(l) = self.listeners.get_mut(&listener) {
            l.pending += 1;
        }
        if !is_local {
            self.charge(key, session, from, WaitsFor::Decision);
        }
        self.set_deadline(key, Some(now.after(self.options.decision_deadline)));
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
        let (from, to, message) = match self.slots.get(key).map(|entry| &entry.slot) {
            Some(Slot::RcRequest(asked)) => {
                let delay =
                    Delay { ids: asked.ids(), of: Rejected::REQUEST, timeout: LONGEST_DELAY };
                (asked.from(), asked.asked.to, delay.emit())
            }
            Some(Slot::Rc(c)) if c.phase == Phase::Accepting => {
                (c.addresses.peer.ip(), c.addresses.local.ip(), *c.message)
            }
            _ => return,
        };
        self.send_message(to, from, message, now);
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
        // Otherwise the QPs would find another host than the one that asks.
        if gids != [asked.from_gid, asked.to_gid] {
            return Err(Reason::INVALID_GID);
        }
        let path_mtu = mtu_of(asked.path_mtu).ok_or(Reason::INVALID_MTU)?;
        let is_tcp = matches!(asked.service.port(), Some((PortSpace::Tcp, _)));
        if is_tcp && asked.kind == Service::Unreliable {
            return Err(Reason::INVALID_SERVICE_TYPE);
        }
        // 0 would stand for an unknown ID.
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
        self.send_unasked(to, from, reject.emit(), now);
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
        self.send_message(asked.asked.to, from, message, now);
        Ok(())
    }

    /// Ends an undecided request whose program has not decided in time.
    pub(in crate::cm) fn expire_rc_request(&mut self, key: usize, now: Time) {
        let Some(Slot::RcRequest(asked)) = self.slots.get(key).map(|entry| &entry.slot) else {
            return;
        };
        let reject = rejection(asked.ids(), Rejected::REQUEST, Reason::TIMEOUT);
        let (from, to) = (asked.from(), asked.asked.to);
        self.withdraw_rc_request(key, "the deadline passed");
        self.send_message(to, from, reject.emit(), now);
    }

    /// Ends an undecided request without an answer.
    pub(in crate::cm) fn withdraw_rc_request(&mut self, key: usize, why: &str) {
        if let Some(Slot::RcRequest(asked)) = self.remove(key) {
            self.withdraw(asked.listener, asked.request, why);
        }
    }

    /// Handles RTU.
    pub(super) fn handle_ready_to_use(&mut self, from: IpAddr, to: IpAddr, ids: Ids) {
        let Some(key) = self.connection(from, to, ids) else { return };
        let Some(Slot::Rc(c)) = self.slots.get(key).map(|entry| &entry.slot) else { return };
        if c.phase != Phase::Accepting || c.ids.exchange.transaction != ids.exchange.transaction {
            return;
        }
        let (qp, addresses, offer) = (c.qp, c.addresses, c.offer);
        self.set_phase(key, Phase::Established);
        self.set_deadline(key, None);
        self.events.push_back(CmEvent::RcEstablished { qp, addresses, offer });
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
        srq: asked.srq,
    }
}
