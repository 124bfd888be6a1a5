//! The SIDR server: listeners for UD QPs, undecided requests, and replies.
//!
//! Requests cost only memory, and a sender can forge its address. So a request without room is
//! dropped without a reply (a real requester sends it again), nothing is evicted for a request, and
//! a reply is as long as its request and is sent to that request's source.

use std::net::IpAddr;

use rnic_abi::abi::control::Refusal;
use rnic_abi::roce::sidr::{self, Exchange, Reply, Request, ServiceId, Status, zero_padded};
use rnic_abi::types::{AddressPair, ListenerId, QpId, RequestId, SessionId, Time};
use rustix::io::Errno;

use super::state::SidrRequest;
use crate::cm::listener::{BindTo, Listener, in_use};
use crate::cm::startups::WaitsFor;
use crate::cm::{CmEvent, ConnectionManager, Slot};
use crate::system;

impl ConnectionManager {
    /// Binds an address of the UD port space without listening. Returns it with the chosen port.
    pub fn bind_datagrams(
        &mut self,
        session: SessionId,
        id: ListenerId,
        to: BindTo,
    ) -> Result<std::net::SocketAddr, Refusal> {
        let mut to = to;
        let ip = to.address.ip();
        let none = |errno: Errno| {
            system::refusal(&format!("bind {} for UD QPs", to.address), &errno.into())
        };
        if !ip.is_unspecified() && self.sidr.index_of(ip).is_none() {
            return Err(none(Errno::ADDRNOTAVAIL));
        }
        if to.address.port() == 0 {
            let port = self.free_port().ok_or_else(|| none(Errno::ADDRINUSE))?;
            to.address.set_port(port);
        }
        for other in self.sidr.listeners_at(to.address.port()) {
            if let Some(other) = self.listeners.get(&other).filter(|l| l.overlaps(to)) {
                return Err(in_use(to.address, other.address));
            }
        }
        let key = self.insert(Slot::Listener { id, session });
        self.sidr.listeners.insert((to.address.port(), id));
        self.listeners.insert(id, Listener::new_ud(session, to, key));
        Ok(to.address)
    }

    /// Returns true if a request asks for a UD QP.
    pub fn is_for_ud(&self, request: RequestId) -> bool {
        let slot = self.requests.get(&request).and_then(|key| self.slots.get(*key));
        slot.is_some_and(|entry| matches!(entry.slot, Slot::SidrRequest(_)))
    }

    /// Handles a SIDR request.
    pub(super) fn handle_request(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        request: &Request,
        now: Time,
    ) {
        // The addresses in the request must be those of its packet.
        if (request.from.ip(), request.to) != (from, to) {
            return;
        }
        let exchange = request.exchange;
        let Some(listener) = self.serves(to, request.service) else {
            return self.send_refusal(from, to, request, Status::UNSUPPORTED, now);
        };
        // If this request was sent before, it is still undecided, or its reply was lost.
        if self.sidr.undecided.contains_key(&(from, exchange)) {
            return;
        }
        let Some(l) = self.listeners.get(&listener) else { return };
        if let Some(reply) = l.answers().and_then(|answers| answers.find(from, exchange)) {
            return self.send_message(to, from, reply, now);
        }
        let session = l.session;
        if self.draining {
            return self.send_refusal(from, to, request, Status::REJECTED, now);
        }
        if !self.can_queue(listener) || !self.has_room_for(session) {
            return;
        }
        // Only requests with room count, so a flood does not exhaust the user's connection rate.
        if !self.sidr.stays_local(to, from) && !self.is_within_rates(session, from, now) {
            return;
        }
        let asked = SidrRequest {
            session,
            listener,
            request: RequestId(0),
            from,
            to,
            exchange,
            service: request.service,
        };
        let key = self.insert(Slot::SidrRequest(Box::new(asked)));
        let id = self.new_request(key);
        if let Slot::SidrRequest(asked) = &mut self.slots[key].slot {
            asked.request = id;
        }
        self.sidr.undecided.insert((from, exchange), key);
        if let Some(l) = self.listeners.get_mut(&listener) {
            l.pending += 1;
        }
        self.charge(key, session, from, WaitsFor::Decision);
        // A requester with the same configuration waits for `reply_deadline`.
        let patience = self.options.reply_deadline.min(self.options.decision_deadline);
        self.set_deadline(key, Some(now.after(patience)));
        let local = (to, request.service.port().unwrap_or(0)).into();
        self.events.push_back(CmEvent::Request {
            listener,
            request: id,
            addresses: AddressPair { local, peer: request.from },
            peer_ird: None,
            peer_ord: None,
            revision: 0,
            peer_to_peer: false,
            private_data: request.private_data.to_vec(),
        });
    }

    /// Sends a reply without a program's decision. Replies to other daemons are rate-limited.
    fn send_refusal(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        request: &Request,
        status: Status,
        now: Time,
    ) {
        if self.sidr.stays_local(to, from) || self.sidr.refusals.take((), REFUSALS_PER_SECOND, now)
        {
            let reply = rejection(request.exchange, request.service, status);
            self.send_message(to, from, reply.emit(), now);
        }
    }

    /// Returns the listener for a service at an address.
    fn serves(&self, to: IpAddr, service: ServiceId) -> Option<ListenerId> {
        let port = service.port()?;
        let serves = |l: &Listener| l.backlog > 0 && l.serves_address((to, port).into());
        let mut at_port = self.sidr.listeners_at(port);
        at_port.find(|id| self.listeners.get(id).is_some_and(serves))
    }

    /// Checks and counts the request against the rate of the remote host and of the session's user.
    /// Returns true if it is within both.
    fn is_within_rates(&mut self, session: SessionId, from: IpAddr, now: Time) -> bool {
        let user = self.quotas.user(session);
        let rate = self.options.peer_connections_per_second;
        let may =
            self.quotas.take_rate(user, from, rate, now) && self.quotas.may_accept(session, now);
        if may {
            self.quotas.count_accept(session, now);
        }
        may
    }

    /// Returns true if the session's user may have one more start-up without an eviction.
    fn has_room_for(&self, session: SessionId) -> bool {
        let user = self.quotas.user(session);
        let of_user = self.startups.of(user);
        let may = self.quotas.of(session).is_none_or(|q| of_user < q.startups as usize);
        may && self.startups.total() < self.options.startups
    }

    /// Accepts a request with a UD QP and its Q_Key.
    pub fn accept_datagrams(
        &mut self,
        request: RequestId,
        qp: QpId,
        q_key: u32,
        private_data: &[u8],
        now: Time,
    ) -> Result<(), Refusal> {
        let key = self.undecided(request)?;
        let data =
            zero_padded(private_data).ok_or_else(|| too_long(private_data, sidr::REPLY_DATA))?;
        self.answer(key, now, |asked| Reply {
            exchange: asked.exchange,
            service: asked.service,
            status: Status::VALID,
            qp,
            q_key,
            private_data: data,
        });
        Ok(())
    }

    /// Rejects an undecided request.
    pub(in crate::cm) fn reject_ud(
        &mut self,
        key: usize,
        private_data: &[u8],
        now: Time,
    ) -> Result<(), Refusal> {
        let data =
            zero_padded(private_data).ok_or_else(|| too_long(private_data, sidr::REPLY_DATA))?;
        self.answer(key, now, |asked| {
            let away = rejection(asked.exchange, asked.service, Status::REJECTED);
            Reply { private_data: data, ..away }
        });
        Ok(())
    }

    fn answer(&mut self, key: usize, now: Time, reply: impl FnOnce(&SidrRequest) -> Reply) {
        let Some(Slot::SidrRequest(asked)) = self.remove(key) else { return };
        let reply = reply(&asked);
        let bytes = reply.emit();
        if let Some(l) = self.listeners.get_mut(&asked.listener) {
            l.pending -= 1;
            match reply.status {
                Status::VALID => l.accepted += 1,
                _ => l.rejected += 1,
            }
            if let Some(answers) = l.answers_mut() {
                answers.keep(asked.from, asked.exchange, &bytes);
            }
        }
        self.send_message(asked.to, asked.from, bytes, now);
    }
}

/// Returns a reply without a QP.
fn rejection(exchange: Exchange, service: ServiceId, status: Status) -> Reply {
    let private_data = [0; sidr::REPLY_DATA];
    Reply { exchange, service, status, qp: QpId(0), q_key: 0, private_data }
}

pub(super) fn too_long(private_data: &[u8], limit: usize) -> Refusal {
    Refusal::AboveMaximum {
        field: "private_data".into(),
        value: private_data.len() as u64,
        key: "maximum bytes in a SIDR message".into(),
        limit: limit as u64,
    }
}

/// Maximum replies per second to other daemons without a program's decision.
const REFUSALS_PER_SECOND: u32 = 1000;
