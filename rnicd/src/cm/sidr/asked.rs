//! Being asked which queue pair serves a port: listeners of datagrams, their undecided requests,
//! and what was answered.
//!
//! Requests cost nothing but memory, and their senders can forge where they come from. So what has
//! no room is dropped without a word, since who means it asks again; nothing gives way to a
//! request; and an answer is as long as its request and goes where that came from.

use std::collections::VecDeque;
use std::net::IpAddr;

use rnic_core::abi::control::Refusal;
use rnic_core::roce::sidr::{self, Exchange, Reply, Request, ServiceId, Status, filled_up};
use rnic_core::types::{AddressPair, ListenerId, QpId, RequestId, SessionId, Time};
use rustix::io::Errno;

use crate::cm::listener::{BindTo, Listener, in_use};
use crate::cm::startups::WaitsFor;
use crate::cm::{CmEvent, ConnectionManager, Slot};
use crate::system;

/// A request that the program has not decided about.
#[derive(Debug)]
pub struct Asked {
    pub(in crate::cm) session: SessionId,
    pub(in crate::cm) listener: ListenerId,
    pub(in crate::cm) request: RequestId,
    pub(in crate::cm) from: IpAddr,
    to: IpAddr,
    pub(in crate::cm) exchange: Exchange,
    service: ServiceId,
}

/// The latest answers of a listener, for requesters that did not get theirs.
#[derive(Debug, Default)]
pub struct Answers(VecDeque<Answer>);

#[derive(Debug)]
struct Answer {
    to: IpAddr,
    exchange: Exchange,
    reply: Box<sidr::Bytes>,
}

impl Answers {
    fn keep(&mut self, to: IpAddr, exchange: Exchange, reply: &sidr::Bytes) {
        if self.0.len() >= MOST_ANSWERS {
            self.0.pop_front();
        }
        self.0.push_back(Answer { to, exchange, reply: Box::new(*reply) });
    }

    fn find(&self, to: IpAddr, exchange: Exchange) -> Option<sidr::Bytes> {
        let answer = self.0.iter().find(|a| (a.to, a.exchange) == (to, exchange));
        answer.map(|answer| *answer.reply)
    }
}

impl ConnectionManager {
    /// Binds an address of the port space of datagrams, without listening; returns it with the port
    /// that was chosen.
    pub fn bind_datagrams(
        &mut self,
        session: SessionId,
        id: ListenerId,
        to: BindTo,
    ) -> Result<std::net::SocketAddr, Refusal> {
        let mut to = to;
        let ip = to.address.ip();
        let none = |errno: Errno| {
            system::refusal(&format!("bind {} for datagrams", to.address), &errno.into())
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
        self.listeners.insert(id, Listener::of_datagrams(session, to, key));
        Ok(to.address)
    }

    /// Whether a request is one for a queue pair of datagrams.
    pub fn is_for_datagrams(&self, request: RequestId) -> bool {
        let slot = self.requests.get(&request).and_then(|key| self.slots.get(*key));
        slot.is_some_and(|entry| matches!(entry.slot, Slot::Asked(_)))
    }

    /// A request has come.
    pub(super) fn was_asked(&mut self, from: IpAddr, to: IpAddr, request: &Request, now: Time) {
        // Nobody speaks for an address from which he does not come.
        if (request.from.ip(), request.to) != (from, to) {
            return;
        }
        let exchange = request.exchange;
        let Some(listener) = self.serves(to, request.service) else {
            return self.turn_away_unheard(from, to, request, Status::UNSUPPORTED, now);
        };
        // Asked again: it is waiting, or its answer was lost.
        if self.sidr.undecided.contains_key(&(from, exchange)) {
            return;
        }
        let Some(l) = self.listeners.get(&listener) else { return };
        if let Some(reply) = l.answers().and_then(|answers| answers.find(from, exchange)) {
            return self.send_message(to, from, reply, now);
        }
        let session = l.session;
        if self.draining {
            return self.turn_away_unheard(from, to, request, Status::REJECTED, now);
        }
        if !self.takes(listener) || !self.has_room_for(session) {
            return;
        }
        // Only what has room counts: a flood leaves the user his rate of connections.
        if !self.sidr.stay_here(to, from) && !self.may_ask(session, from, now) {
            return;
        }
        let asked = Asked {
            session,
            listener,
            request: RequestId(0),
            from,
            to,
            exchange,
            service: request.service,
        };
        let key = self.insert(Slot::Asked(Box::new(asked)));
        let id = self.new_request(key);
        if let Slot::Asked(asked) = &mut self.slots[key].slot {
            asked.request = id;
        }
        self.sidr.undecided.insert((from, exchange), key);
        if let Some(l) = self.listeners.get_mut(&listener) {
            l.pending += 1;
        }
        self.charge(key, session, from, WaitsFor::Decision);
        // Who asks waits no longer than that, with the same configuration.
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

    /// Says no without having asked anybody, which others are told only so often.
    fn turn_away_unheard(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        request: &Request,
        status: Status,
        now: Time,
    ) {
        if self.sidr.stay_here(to, from) || self.sidr.unheard.take((), MOST_UNHEARD, now) {
            let reply = turned_away(request.exchange, request.service, status);
            self.send_message(to, from, reply.emit(), now);
        }
    }

    /// The listener that serves this at an address.
    fn serves(&self, to: IpAddr, service: ServiceId) -> Option<ListenerId> {
        let port = service.port()?;
        let serves = |l: &Listener| l.backlog > 0 && l.takes_those_to((to, port).into());
        let mut at_port = self.sidr.listeners_at(port);
        at_port.find(|id| self.listeners.get(id).is_some_and(serves))
    }

    /// Whether a host asks no more often than it may, and a session's user is asked no more often
    /// than others can bear.
    fn may_ask(&mut self, session: SessionId, from: IpAddr, now: Time) -> bool {
        let user = self.quotas.user(session);
        let rate = self.options.peer_connections_per_second;
        let may =
            self.quotas.take_rate(user, from, rate, now) && self.quotas.may_accept(session, now);
        if may {
            self.quotas.count_accept(session, now);
        }
        may
    }

    /// Whether one more of a session's user may be in start-up without another giving way.
    fn has_room_for(&self, session: SessionId) -> bool {
        let user = self.quotas.user(session);
        let of_user = self.startups.of(user);
        let may = self.quotas.of(session).is_none_or(|q| of_user < q.startups as usize);
        may && self.startups.total() < self.options.startups
    }

    /// Answers a request with a queue pair that has this key.
    pub fn accept_datagrams(
        &mut self,
        request: RequestId,
        (qp, q_key): (QpId, u32),
        private_data: &[u8],
        now: Time,
    ) -> Result<(), Refusal> {
        let key = self.undecided(request)?;
        let data =
            filled_up(private_data).ok_or_else(|| too_long(private_data, sidr::REPLY_DATA))?;
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
    pub(in crate::cm) fn reject_datagrams(
        &mut self,
        key: usize,
        private_data: &[u8],
        now: Time,
    ) -> Result<(), Refusal> {
        let data =
            filled_up(private_data).ok_or_else(|| too_long(private_data, sidr::REPLY_DATA))?;
        self.answer(key, now, |asked| {
            let away = turned_away(asked.exchange, asked.service, Status::REJECTED);
            Reply { private_data: data, ..away }
        });
        Ok(())
    }

    fn answer(&mut self, key: usize, now: Time, reply: impl FnOnce(&Asked) -> Reply) {
        let Some(Slot::Asked(asked)) = self.remove(key) else { return };
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

/// A reply without a queue pair.
fn turned_away(exchange: Exchange, service: ServiceId, status: Status) -> Reply {
    let private_data = [0; sidr::REPLY_DATA];
    Reply { exchange, service, status, qp: QpId(0), q_key: 0, private_data }
}

pub(super) fn too_long(private_data: &[u8], limit: usize) -> Refusal {
    Refusal::AboveMaximum {
        field: "private_data".into(),
        value: private_data.len() as u64,
        key: "bytes that a message of SIDR carries".into(),
        limit: limit as u64,
    }
}

/// Answers that a listener remembers: requests of so many requesters may cross with them.
const MOST_ANSWERS: usize = 64;
/// How often in a second others are told no without anybody having been asked.
const MOST_UNHEARD: u32 = 1000;
