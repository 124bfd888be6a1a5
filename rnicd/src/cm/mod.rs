//! Connection management: from an address to a connection that a worker can drive.
//!
//! The [`ConnectionManager`] binds, listens and connects, and takes every TCP connection through
//! MPA start-up with the state machines of [`rnic_core::stream::startup`]. A connection request is
//! an object of its own, because its QP is chosen later. A connect to one of this daemon's own
//! listeners needs no TCP connection: the same state machines exchange their frames in memory, so
//! both paths negotiate in the same way. UD QPs are not connected; messages resolve which QP serves
//! a port (`sidr`). RC and UC QPs are connected by messages too (`connection`), with the same
//! listeners and requests. The results are [`CmEvent`]s.
//!
//! This module has no permissions or object tables, and identifies QPs by number. Limits are plain
//! numbers in [`CmOptions`]. The manager reads no clock and never blocks: the control thread, its
//! only caller, passes readiness and time. Every phase has a deadline.

mod admission;
mod connect_failure;
mod connection;
mod deadlines;
mod direct;
mod event;
mod listener;
mod net;
mod params;
mod quota;
mod recent_replies;
mod service_port;
mod services;
mod shedding;
mod sidr;
mod slots;
mod stag_guesses;
mod startups;
mod tcp;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::AsFd;

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rnic_abi::abi::control::{ListenerRow, Refusal};
use rnic_abi::types::{ListenerId, QpId, RequestId, SessionId, Time};
use slab::Slab;

pub use connect_failure::ConnectFailure;
use connect_failure::answer_refused;
use connection::Connections;
pub use connection::{RcAcceptParams, RcConnectParams};
use deadlines::Deadlines;
pub use event::{CmEvent, CmMessage, DirectEnd, Rejection, Sender};
pub use listener::BindTo;
use listener::Listener;
pub use net::SocketBuffers;
pub use params::{AcceptParams, CmOptions, ConnectParams};
pub use quota::Quota;
use quota::Quotas;
use service_port::ServicePort;
use shedding::Shedding;
use slots::{Index, Slot, SlotEntry};
use stag_guesses::StagGuessLimiter;
use startups::{Startups, WaitsFor};
pub use tcp::passed::examine;

/// Session of the daemon itself. No client has this number.
pub const DAEMON: SessionId = SessionId(0);

/// Listeners, connection requests and connections in start-up. See the module's documentation.
#[derive(Debug)]
pub struct ConnectionManager {
    registry: Registry,
    first_token: usize,
    options: CmOptions,
    listeners: HashMap<ListenerId, Listener>,
    slots: Slab<SlotEntry>,
    of_session: Index<SessionId>,
    of_listener: Index<ListenerId>,
    deadlines: Deadlines,
    startups: Startups,
    /// Slots of the undecided requests.
    requests: HashMap<RequestId, usize>,
    /// Slots of the queries to peers about undecided requests.
    request_checks: HashMap<RequestId, usize>,
    /// QPs that connect, resolve a port, or have accepted and still send the reply.
    qps: HashMap<QpId, usize>,
    next_request: u32,
    events: VecDeque<CmEvent>,
    shedding: Shedding,
    quotas: Quotas,
    /// Rejects requests of peers.
    draining: bool,
    /// Reports messages of sessions before they are sent.
    reports_messages: bool,
    guesses: StagGuessLimiter,
    service: ServicePort,
    connections: Connections,
    scratch: Box<[u8; SCRATCH]>,
}

impl ConnectionManager {
    /// Creates a manager that registers its sockets with `registry` under `first_token` and above.
    pub fn new(registry: Registry, first_token: usize, options: CmOptions) -> Self {
        let guesses = StagGuessLimiter::new(options.stag_guesses_per_minute);
        ConnectionManager {
            registry,
            first_token,
            options,
            guesses,
            listeners: HashMap::new(),
            slots: Slab::new(),
            of_session: Index::default(),
            of_listener: Index::default(),
            deadlines: Deadlines::default(),
            startups: Startups::default(),
            requests: HashMap::new(),
            request_checks: HashMap::new(),
            qps: HashMap::new(),
            next_request: 1,
            events: VecDeque::new(),
            shedding: Shedding::new(),
            quotas: Quotas::default(),
            draining: false,
            reports_messages: false,
            service: ServicePort::default(),
            connections: Connections::default(),
            scratch: Box::new([0; SCRATCH]),
        }
    }

    /// Replaces the options. Deadlines already set do not change.
    pub fn set_options(&mut self, options: CmOptions) {
        self.guesses.set_limit(options.stag_guesses_per_minute);
        self.options = options;
    }

    /// Sets the owner of a session and the start-up quota of that user.
    pub fn set_quota(&mut self, session: SessionId, quota: Quota) {
        self.quotas.set(session, quota);
    }

    /// Rejects requests of peers from now on, or accepts them again. Undecided requests stay.
    /// [`ConnectionManager::ignore_draining`] exempts a listener.
    pub fn set_draining(&mut self, on: bool) {
        self.draining = on;
    }

    /// Connects a QP. The result is an event; errors are failures of the local end.
    pub fn connect(&mut self, mut params: ConnectParams, now: Time) -> Result<(), Refusal> {
        self.check_idle(params.qp)?;
        params.peer = self.options.ports.tcp_address(params.peer);
        if self.options.direct
            && let Some((listener, source)) = self.direct_target(&params)?
        {
            return self.connect_direct(params, listener, source, now);
        }
        self.connect_tcp(params, now)
    }

    /// Returns true if a QP connects, resolves a port, or has accepted and still sends the reply.
    pub fn is_busy(&self, qp: QpId) -> bool {
        self.qps.contains_key(&qp)
    }

    /// Returns true if a QP is connecting and its TCP connection is not established yet, so the
    /// peer has not seen the attempt.
    pub fn is_unseen_by_peer(&self, qp: QpId) -> bool {
        let slot = self.qps.get(&qp).and_then(|key| self.slots.get(*key));
        slot.is_some_and(|entry| matches!(&entry.slot, Slot::Active(a) if a.is_unseen_by_peer()))
    }

    /// Accepts a request and starts to send the reply. An event follows.
    pub fn accept(&mut self, params: AcceptParams, now: Time) -> Result<(), Refusal> {
        let key = self.undecided(params.request)?;
        self.check_idle(params.qp)?;
        match &self.slots[key].slot {
            Slot::Direct(_) => self.accept_direct(key, params),
            Slot::RcRequest(_) => {
                Err(wrong_request(params.request, "for an RC or UC QP", "one of ConnectionRequest"))
            }
            _ => self.accept_tcp(key, params, now),
        }
    }

    /// Rejects a request with private data for the peer's application.
    pub fn reject(
        &mut self,
        request: RequestId,
        private_data: &[u8],
        now: Time,
    ) -> Result<Rejection, Refusal> {
        let key = self.undecided(request)?;
        self.reject_slot(key, private_data, true, now)
    }

    /// Rejects a request that the program has not decided, if it has not ended. Nothing is
    /// answered. Private data that do not fit are left out.
    pub fn reject_unasked(&mut self, request: RequestId, private_data: &[u8], now: Time) {
        if let Ok(key) = self.undecided(request)
            && self.reject_slot(key, private_data, false, now).is_err()
        {
            let _ = self.reject_slot(key, &[], false, now);
        }
    }

    /// Cancels connecting or accepting on a QP. No event for that QP follows.
    pub fn cancel(&mut self, qp: QpId) {
        let Some(key) = self.qps.get(&qp).copied() else { return };
        match self.remove(key) {
            Some(Slot::Direct(direct)) => {
                self.withdraw(direct.listener, direct.request, "the initiator gave up");
            }
            Some(Slot::SidrResolution(asking)) => self.cancel_resolution(&asking),
            _ => {}
        }
    }

    /// Ends all listeners, connects and accepts of a session. Peers see a close or a rejection; the
    /// session gets no events.
    pub fn drop_session(&mut self, session: SessionId, now: Time) {
        for key in self.of_session.of(&session) {
            if let Some(Slot::Listener { id, .. }) = self.slots.get(key).map(|e| &e.slot) {
                // The slot exists, so the listener does.
                let _ = self.close_listener(*id, now);
            }
        }
        for key in self.of_session.of(&session) {
            match self.slots.get(key).map(|e| &e.slot) {
                Some(Slot::Rc(_)) => {
                    self.abandon_connection(key, now);
                    self.remove(key);
                }
                Some(slot) => match slot.qp() {
                    Some(qp) => self.cancel(qp),
                    None => drop(self.remove(key)),
                },
                None => {}
            }
        }
        self.quotas.forget(session);
    }

    /// Handles readiness of a token. Returns false if the token does not belong to the manager.
    pub fn handle_ready(
        &mut self,
        token: Token,
        readable: bool,
        writable: bool,
        now: Time,
    ) -> bool {
        let Some(key) = token.0.checked_sub(self.first_token) else { return false };
        // The slot may have been emptied or reused since the event was collected. Then nothing
        // happens, or an I/O call returns EAGAIN.
        match self.slots.get(key).map(|e| &e.slot) {
            Some(Slot::Listener { id, .. }) => self.accept_ready(*id, now),
            Some(Slot::Active(_)) => self.drive_active(key, now),
            Some(Slot::Passive(_)) => self.drive_passive(key, now),
            Some(Slot::Closing(_)) if readable || writable => self.drive_closing(key),
            Some(Slot::Returning(_)) => self.drive_returning(key),
            Some(Slot::RequestCheck(_)) => self.drive_request_check(key, now),
            Some(
                Slot::Closing(_)
                | Slot::Direct(_)
                | Slot::SidrResolution(_)
                | Slot::SidrRequest(_)
                | Slot::RcRequest(_)
                | Slot::Rc(_),
            )
            | None => {}
        }
        true
    }

    /// Returns the time of the next [`handle_timeout`](Self::handle_timeout) call.
    pub fn next_timeout(&self) -> Option<Time> {
        self.deadlines.first().map(|(at, _)| at)
    }

    /// Handles all deadlines up to `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(key) = self.deadlines.pop_due(now) {
            let Some(entry) = self.slots.get_mut(key) else { continue };
            entry.deadline = None;
            match entry.slot {
                Slot::Listener { id, .. } => self.accept_ready(id, now),
                Slot::SidrResolution(_) => self.retry_resolution(key, now),
                Slot::Rc(_) => self.retry_connection(key, now),
                Slot::RcRequest(_) => self.expire_rc_request(key, now),
                _ => self.expire(key),
            }
        }
    }

    /// Counts a stream that ended because `peer` used an STag of `session` without a right to it.
    pub fn stag_guessed(&mut self, session: SessionId, peer: IpAddr, at: Time) {
        // The guesses of a removed session are not counted.
        if let Some(quota) = self.quotas.of(session) {
            self.guesses.record(quota.user, peer, at);
        }
    }

    /// Returns true if an address has guessed too many STags of the session's user.
    pub fn is_guesser(&mut self, session: SessionId, peer: IpAddr, now: Time) -> bool {
        let user = self.quotas.user(session);
        self.guesses.rejects(user, peer, now)
    }

    /// Returns the next event, oldest first.
    pub fn poll_event(&mut self) -> Option<CmEvent> {
        self.events.pop_front()
    }

    /// Returns the number of connections in start-up or closing, including undecided requests.
    pub fn in_startup(&self) -> usize {
        self.slots.len() - self.listeners.len() - self.connections.settled()
    }

    /// Returns the number of start-ups that hold a descriptor and no QP (limit: `limits.startups`).
    pub fn startups(&self) -> usize {
        self.startups.total()
    }

    /// Returns the number of start-ups charged to a user.
    pub fn startups_of(&self, user: u32) -> usize {
        self.startups.of(user)
    }

    /// Returns the row of a listener for `rnicctl` lists.
    pub fn listener(&self, id: ListenerId) -> Option<ListenerRow> {
        self.listeners.get(&id).map(|l| l.row(id, &self.options.ports))
    }

    fn expire(&mut self, key: usize) {
        match &self.slots[key].slot {
            Slot::Active(active) => {
                let why = active.awaited(&self.options);
                self.fail_active(key, why);
            }
            Slot::Passive(_) => self.fail_passive(key, "the deadline passed"),
            Slot::RequestCheck(check) => {
                let why = check.active.awaited(&self.options).reason;
                self.end_request_check(key, Err(why));
            }
            Slot::Direct(_) => self.expire_direct(key),
            Slot::Returning(_) => self.end_returning(key),
            Slot::SidrRequest(_) => self.withdraw_sidr_request(key, "the deadline passed"),
            Slot::Closing(_)
            | Slot::Listener { .. }
            | Slot::SidrResolution(_)
            | Slot::RcRequest(_)
            | Slot::Rc(_) => drop(self.remove(key)),
        }
    }

    fn register(&self, key: usize, stream: &impl AsFd) -> std::io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.registry.register(&mut SourceFd(&net::raw(stream)), self.token(key), interest)
    }

    /// Removes a stream from our poll before another thread gets it.
    fn deregister(&self, stream: &impl AsFd) {
        // The stream is registered, so this does not fail.
        let _ = self.registry.deregister(&mut SourceFd(&net::raw(stream)));
    }

    fn token(&self, key: usize) -> Token {
        Token(self.first_token + key)
    }

    fn check_idle(&self, qp: QpId) -> Result<(), Refusal> {
        if !self.qps.contains_key(&qp) {
            return Ok(());
        }
        Err(Refusal::WrongState {
            kind: "QP".into(),
            handle: qp.0,
            state: "connecting".into(),
            needs: "Idle".into(),
        })
    }

    fn undecided(&self, request: RequestId) -> Result<usize, Refusal> {
        self.requests.get(&request).copied().ok_or_else(|| Refusal::NoSuchObject {
            kind: "connection request".into(),
            handle: request.0,
        })
    }

    /// Returns a request number that is not in use.
    fn new_request(&mut self, key: usize) -> RequestId {
        loop {
            let id = RequestId(self.next_request);
            self.next_request = self.next_request.wrapping_add(1).max(1);
            if let std::collections::hash_map::Entry::Vacant(v) = self.requests.entry(id) {
                v.insert(key);
                return id;
            }
        }
    }

    /// Returns true if a listener can queue one more request now.
    fn can_queue(&self, listener: ListenerId) -> bool {
        let listener = self.listeners.get(&listener);
        listener.is_some_and(|l| l.has_room() && (l.ignores_draining || !self.draining))
    }

    fn withdraw(&mut self, listener: ListenerId, request: RequestId, reason: &str) {
        if let Some(l) = self.listeners.get_mut(&listener) {
            l.pending -= 1;
        }
        self.events.push_back(CmEvent::Withdrawn { listener, request, reason: reason.into() });
    }

    /// Rejects an undecided request of any kind. `awaited` is true if a client waits for the
    /// result.
    fn reject_slot(
        &mut self,
        key: usize,
        private_data: &[u8],
        awaited: bool,
        now: Time,
    ) -> Result<Rejection, Refusal> {
        let slot = &self.slots[key].slot;
        if let Slot::SidrRequest(_) = slot {
            return self.reject_ud(key, private_data, now).map(|()| Rejection::Done);
        }
        if let Slot::RcRequest(_) = slot {
            return self.reject_rc(key, private_data, now).map(|()| Rejection::Done);
        }
        let request = slot.request().unwrap_or(RequestId(0));
        let rejected = match slot {
            Slot::Direct(_) => self.reject_direct(key, private_data).map(|()| Rejection::Done),
            _ => self.reject_tcp(key, private_data, awaited, now),
        };
        rejected.map_err(|e| answer_refused(e, request))
    }

    // --- Slots -------------------------------------------------------------------------------

    fn insert(&mut self, slot: Slot) -> usize {
        let session = slot.session();
        let listener = slot.listener();
        let key = self.slots.insert(SlotEntry { slot, deadline: None, charge: None });
        if let Some(session) = session {
            self.of_session.add(session, key);
        }
        if let Some(listener) = listener {
            self.of_listener.add(listener, key);
        }
        key
    }

    /// Empties a slot and removes its deadline, charge, request and QP. Dropping a stream closes
    /// it.
    fn remove(&mut self, key: usize) -> Option<Slot> {
        self.set_deadline(key, None);
        self.credit(key);
        let slot = self.slots.try_remove(key)?.slot;
        if let Some(session) = slot.session() {
            self.of_session.remove(&session, key);
        }
        if let Some(listener) = slot.listener() {
            self.of_listener.remove(&listener, key);
        }
        // Closing our descriptor does not deregister the socket if the client holds it too.
        if let Some(stream) = slot.stream().filter(|s| s.is_passed()) {
            self.deregister(stream);
        }
        if let Some(request) = slot.request() {
            self.requests.remove(&request);
            if let Some(check) = self.request_checks.remove(&request) {
                self.remove(check);
            }
        }
        if let Slot::RequestCheck(check) = &slot {
            self.request_checks.remove(&check.request);
        }
        if let Some(qp) = slot.qp() {
            self.qps.remove(&qp);
        }
        match &slot {
            Slot::SidrRequest(asked) => self.service.forget(asked.from, asked.exchange),
            Slot::RcRequest(asked) => self.connections.forget_request(asked),
            Slot::Rc(connection) => self.connections.forget(key, connection),
            _ => {}
        }
        Some(slot)
    }

    /// Replaces a slot's deadline.
    fn set_deadline(&mut self, key: usize, at: Option<Time>) {
        let Some(entry) = self.slots.get_mut(key) else { return };
        if let Some(old) = entry.deadline {
            self.deadlines.remove(old, key);
        }
        entry.deadline = at;
        if let Some(at) = at {
            self.deadlines.insert(at, key);
        }
    }

    /// Charges a session's user for a slot. Replaces an earlier charge.
    fn charge(&mut self, key: usize, session: SessionId, peer: IpAddr, awaits: WaitsFor) {
        self.credit(key);
        let user = self.quotas.user(session);
        let Some(entry) = self.slots.get_mut(key) else { return };
        let charge = self.startups.charge(user, peer, awaits, key);
        entry.charge = Some(charge);
        let listener = entry.slot.listener().filter(|_| awaits == WaitsFor::MessageDecision);
        if let Some(l) = listener.and_then(|listener| self.listeners.get_mut(&listener)) {
            l.waiting.add(&charge, key);
        }
    }

    /// Removes the charge of a slot.
    fn credit(&mut self, key: usize) {
        let Some(entry) = self.slots.get_mut(key) else { return };
        let Some(charge) = entry.charge.take() else { return };
        self.startups.credit(charge);
        let listener = entry.slot.listener();
        if let Some(l) = listener.and_then(|listener| self.listeners.get_mut(&listener)) {
            l.waiting.remove(&charge);
        }
    }
}

fn wrong_request(request: RequestId, state: &str, needs: &str) -> Refusal {
    Refusal::WrongState {
        kind: "connection request".into(),
        handle: request.0,
        state: state.into(),
        needs: needs.into(),
    }
}

/// Size of the read buffer during start-up, in bytes. A frame has at most 532 bytes.
const SCRATCH: usize = 2048;
