//! Admission of requests that arrive as messages: SIDR requests and connection requests.
//!
//! These requests cost only memory, and the sender can forge its address. So a request that finds
//! no room is dropped without an answer, which a real requester handles by repeating it. A request
//! evicts only another such request, and only of a host that has more of them, so hosts share the
//! room equally.

use std::net::IpAddr;
use std::time::Duration;

use rnic_abi::roce::ServiceId;
use rnic_abi::roce::mad::Exchange;
use rnic_abi::types::{ListenerId, SessionId, Time};

use super::startups::WaitsFor;
use super::{ConnectionManager, Sender, Slot};

/// A request of a peer.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
    pub(super) service: ServiceId,
    pub(super) exchange: Exchange,
}

/// Reason why a request is not admitted.
pub(super) enum NotAdmitted {
    /// No listener serves its port.
    Unserved,
    /// The daemon drains.
    Draining,
    /// The request is a repetition that was answered again, or it was dropped.
    Handled,
}

/// Room for one more request.
enum Room {
    Free,
    /// After the eviction of this slot, because of this limit.
    Evict(usize, String),
}

impl ConnectionManager {
    /// Finds the listener of a request that is not queued yet, and makes room for the request.
    pub(super) fn admit_message(
        &mut self,
        asked: Asked,
        now: Time,
    ) -> Result<(ListenerId, SessionId), NotAdmitted> {
        let Asked { from, to, service, exchange } = asked;
        let listener = self.serves(to, service).ok_or(NotAdmitted::Unserved)?;
        let l = self.listeners.get(&listener).ok_or(NotAdmitted::Unserved)?;
        let session = l.session;
        // If the program has decided this request, the reply was lost.
        if let Some(reply) = l.answers().and_then(|answers| answers.find(from, exchange)) {
            self.send_message(Some(Sender { session, qp: None }), to, from, reply, now);
            return Err(NotAdmitted::Handled);
        }
        if self.draining {
            return Err(NotAdmitted::Draining);
        }
        // Requests from this daemon are bounded by the requester's QPs and connection rate. They
        // must not consume the quota of the listener's user.
        if self.service.stays_local(to, from) {
            let has_room = self.can_queue(listener);
            return if has_room { Ok((listener, session)) } else { Err(NotAdmitted::Handled) };
        }
        let room = self.room_for_message(listener, session, from).ok_or(NotAdmitted::Handled)?;
        // Only requests with room count, so a flood does not exhaust the user's connection rate.
        if !self.is_within_rates(session, from, now) {
            return Err(NotAdmitted::Handled);
        }
        if let Room::Evict(victim, limit) = room {
            self.evict(victim, &format!("evicted for a request of another host ({limit})"));
        }
        Ok((listener, session))
    }

    /// Finds room in the backlog and in the limits of start-ups. If a limit is reached, selects a
    /// waiting request of a host with more requests to be evicted.
    fn room_for_message(
        &self,
        listener: ListenerId,
        session: SessionId,
        from: IpAddr,
    ) -> Option<Room> {
        let user = self.quotas.user(session);
        if !self.can_queue(listener) {
            let victim = self.listeners.get(&listener)?.waiting.of_larger_host(from)?;
            return Some(Room::Evict(victim, "backlog".into()));
        }
        let of_user = self.quotas.of(session).map(|q| (q.startups as usize, &q.startups_key));
        let key = match of_user {
            Some((most, key)) if self.startups.of(user) >= most => key,
            _ if self.startups.total() >= self.options.startups => &self.options.startups_key,
            _ => return Some(Room::Free),
        };
        let victim = self.startups.message_victim(user, from)?;
        Some(Room::Evict(victim, key.clone()))
    }

    /// Queues an admitted request. It waits at most `patience` for the program's decision.
    pub(super) fn queue_message(
        &mut self,
        request: Slot,
        asked: Asked,
        patience: Duration,
        now: Time,
    ) -> usize {
        let session = request.session();
        let listener = request.listener();
        let key = self.insert(request);
        if let Some(l) = listener.and_then(|listener| self.listeners.get_mut(&listener)) {
            l.pending += 1;
        }
        if let Some(session) = session.filter(|_| !self.service.stays_local(asked.to, asked.from)) {
            self.charge(key, session, asked.from, WaitsFor::MessageDecision);
        }
        self.set_deadline(key, Some(now.after(patience)));
        key
    }
}
