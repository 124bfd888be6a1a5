//! The requesting end: REQ, REP and RTU.

use std::net::IpAddr;

use rnic_abi::abi::control::{RcOffer, RcPeer, Refusal};
use rnic_abi::roce::ServiceId;
use rnic_abi::roce::connection::{Delay, Ids, Reason, Rejected, Reply, Request};
use rnic_abi::roce::mad::Exchange;
use rnic_abi::types::{AddressPair, Gid, QpId, Time};

use super::state::{Phase, RcConnection};
use super::{
    ACK_TIMEOUT, FIRST_QP, LONGEST_DELAY, REPEATS, RESPONSE_CODE, RcConnectParams, mtu_code,
    padded, rejection, wrong_phase,
};
use crate::cm::{CmEvent, ConnectionManager, Slot};

impl ConnectionManager {
    /// Requests a connection. The result is an event; errors are failures of the local end.
    pub fn connect_rc(&mut self, params: RcConnectParams, now: Time) -> Result<(), Refusal> {
        let RcConnectParams { session, qp, kind, space, peer, local, offer, guid, private_data } =
            params;
        self.check_unconnected(qp, now)?;
        let private_data = padded(&private_data)?;
        let (addresses, _) = self.ends_of_request(session, space, local, peer, "connect to")?;
        let AddressPair { local, peer } = addresses;
        let transaction = self.service.new_transaction();
        let exchange = Exchange { transaction, id: self.new_connection_id() };
        let gid = |ip: IpAddr| Gid::from(self.service.port_of(ip));
        let request = Request {
            exchange,
            service: ServiceId::new(space, peer.port()),
            guid,
            qp,
            psn: offer.psn,
            responder_resources: offer.responder_resources,
            initiator_depth: offer.initiator_depth,
            kind,
            response_timeout: RESPONSE_CODE,
            max_cm_retries: REPEATS,
            retry_count: offer.retry_count,
            rnr_retry: offer.rnr_retry,
            path_mtu: mtu_code(offer.path_mtu),
            srq: offer.srq,
            traffic_class: offer.traffic_class,
            ack_timeout: ACK_TIMEOUT,
            from_gid: gid(local.ip()),
            to_gid: gid(peer.ip()),
            from: local,
            to: peer.ip(),
            private_data,
        };
        let key = self.insert(Slot::Rc(Box::new(RcConnection {
            session,
            qp,
            phase: Phase::Requesting,
            ids: Ids { exchange, receiver: 0 },
            asked: None,
            addresses,
            offer,
            remote_qp: QpId(0),
            message: Box::new(request.emit()),
            repeats: REPEATS,
            delayed: false,
        })));
        self.connections.by_id.insert(exchange.id, key);
        self.connections.by_qp.insert(qp, key);
        self.send_again(key, now);
        Ok(())
    }

    /// Handles REP. Answers a repeated REP with another RTU.
    pub(super) fn handle_rc_reply(&mut self, from: IpAddr, to: IpAddr, reply: &Reply, now: Time) {
        let Some(key) = self.connection(from, to, reply.ids) else { return };
        let Some(Slot::Rc(c)) = self.slots.get_mut(key).map(|entry| &mut entry.slot) else {
            return;
        };
        if reply.ids.exchange.transaction != c.ids.exchange.transaction || c.asked.is_some() {
            return;
        }
        let sender = c.sender();
        match c.phase {
            Phase::Requesting if reply.qp.0 >= FIRST_QP => {
                // None if the device has lost the address since the request.
                let Some(source) = self.service.index_of(c.addresses.local.ip()) else { return };
                if let Some(other) = self.connections.by_peer.get(&(from, reply.qp)).copied() {
                    let ids = reply.ids.answered_by(reply.ids.receiver);
                    let reject = rejection(ids, Rejected::REPLY, Reason::STALE);
                    self.send_message(Some(sender), to, from, reject.emit(), now);
                    return self.report_stale(other);
                }
                c.ids.receiver = reply.ids.exchange.id;
                c.remote_qp = reply.qp;
                let (qp, addresses, offer) = (c.qp, c.addresses, c.offer);
                self.connections.by_peer.insert((from, reply.qp), key);
                self.set_phase(key, Phase::Replied);
                self.set_deadline(key, Some(now.after(self.options.decision_deadline)));
                let gid = Gid::from(self.service.port_of(addresses.peer.ip()));
                let peer = peer_of_reply(reply, &offer, source, gid);
                let private_data = reply.private_data.to_vec();
                self.events.push_back(CmEvent::RcReply { qp, addresses, peer, private_data });
            }
            Phase::Replied => {
                let delay = Delay { ids: c.ids, of: Rejected::REPLY, timeout: LONGEST_DELAY };
                self.send_message(Some(sender), to, from, delay.emit(), now);
            }
            Phase::Established => {
                let message = *c.message;
                self.send_message(Some(sender), to, from, message, now);
            }
            _ => {}
        }
    }

    /// Confirms a reply with RTU. At the passive end, does the same as a message of the peer's QP.
    pub fn establish_rc(&mut self, qp: QpId, now: Time) -> Result<(), Refusal> {
        let none = || wrong_phase(qp, "without a reply", "a reply to confirm");
        let key = self.connections.by_qp.get(&qp).copied().ok_or_else(none)?;
        let Some(Slot::Rc(c)) = self.slots.get_mut(key).map(|entry| &mut entry.slot) else {
            return Err(none());
        };
        match c.phase {
            Phase::Replied => {}
            Phase::Accepting => {
                self.communication_established(qp);
                return Ok(());
            }
            // The peer's message or RTU has arrived, and the program has not fetched the event.
            Phase::Established if c.asked.is_some() => return Ok(()),
            _ => return Err(none()),
        }
        let (sender, addresses, message) = (c.sender(), c.addresses, c.ids.emit_ready());
        *c.message = message;
        self.set_phase(key, Phase::Established);
        self.set_deadline(key, None);
        self.send_message(Some(sender), addresses.local.ip(), addresses.peer.ip(), message, now);
        Ok(())
    }
}

fn peer_of_reply(reply: &Reply, offer: &RcOffer, source: u16, gid: Gid) -> RcPeer {
    RcPeer {
        source,
        gid,
        qp: reply.qp,
        psn: reply.psn,
        responder_resources: reply.responder_resources,
        initiator_depth: reply.initiator_depth,
        retry_count: offer.retry_count,
        rnr_retry: reply.rnr_retry,
        ack_timeout: ACK_TIMEOUT,
        path_mtu: offer.path_mtu,
        traffic_class: offer.traffic_class,
        srq: reply.srq,
    }
}
