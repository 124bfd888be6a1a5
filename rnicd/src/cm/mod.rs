//! Connection management: from an address to a connection that a worker can drive.
//!
//! The [`ConnectionManager`] binds, listens and connects, and takes every TCP connection through
//! MPA start-up with the state machines of [`rnic_core::stream::startup`]. A connection request is
//! an object here before a QP is chosen for it. A connect to one of this daemon's own listeners
//! needs no TCP connection: the same state machines exchange their frames in memory, so both paths
//! negotiate in the same way. UD QPs are not connected; messages resolve which QP serves a port
//! (`sidr`), with the same listeners and requests. The results are [`CmEvent`]s.
//!
//! This module knows no permissions, no object tables of sessions, and QPs only by their numbers.
//! Limits are plain numbers in [`CmOptions`]. The manager reads no clock and never blocks: the
//! control thread, its only caller, passes readiness and time. Every phase has a deadline.

mod active;
mod ask_back;
mod connect_failure;
mod deadlines;
mod direct;
mod listener;
mod net;
mod passed;
mod passive;
mod quota;
mod sidr;
mod slots;
mod stag_guesses;
mod startups;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rnic_abi::abi::control::{ListenerRow, Refusal};
use rnic_abi::roce::sidr::Bytes as Mad;
use rnic_abi::types::{AddressPair, ListenerId, QpId, RequestId, SessionId, TerminateCode, Time};
use rnic_core::stream::startup::{Negotiated, Options, PrivateDataTooLong, ResponderError};
use slab::Slab;

pub use connect_failure::ConnectFailure;
use deadlines::Deadlines;
pub use listener::BindTo;
use listener::{Listener, Shedding};
pub use net::SocketBuffers;
pub use passed::examine;
pub use quota::Quota;
use quota::Quotas;
use sidr::Sidr;
use slots::{Index, Slot, SlotEntry};
use stag_guesses::StagGuessLimiter;
use startups::Startups;

use crate::config::{PortMap, Tcp};
use crate::socket::Socket;

/// Session of the daemon itself. No client has this number.
pub const DAEMON: SessionId = SessionId(0);

/// Limits and deadlines of the connection manager.
#[derive(Clone, Debug)]
pub struct CmOptions {
    /// Offers and requests in MPA start-up. IRD and ORD are the device's defaults.
    pub startup: Options,
    /// Maximum IRD of an accepted connection.
    pub max_ird: u16,
    /// Maximum ORD of an accepted connection.
    pub max_ord: u16,
    /// Keepalive and timeouts of connections that begin from now on.
    pub tcp: Tcp,
    /// Maps between RDMA ports, which programs use, and TCP ports. Addresses in the API of this
    /// module have RDMA ports.
    pub ports: PortMap,
    /// Connects to this daemon's own listeners use no TCP connection.
    pub direct: bool,
    /// Maximum connections of all users in start-up that hold a descriptor and no QP. Above it, a
    /// connection of the user with the most is evicted for a new one.
    pub startups: usize,
    /// Configuration key of `startups`.
    pub startups_key: String,
    /// Kernel buffer sizes of the daemon's own connections.
    pub buffers: SocketBuffers,
    /// Connections per second that one remote host may open to the listeners of one user. Further
    /// ones are reset.
    pub peer_connections_per_second: u32,
    /// Invalid STags of one user that a peer's address may use within a minute before that user's
    /// listeners reset its connections.
    pub stag_guesses_per_minute: u32,
    /// Time limit for the TCP handshake.
    pub connect_deadline: Duration,
    /// Time limit for the peer's reply, from the time our request is sent.
    pub reply_deadline: Duration,
    /// Time limit for the peer's request, from the time its connection is accepted.
    pub request_deadline: Duration,
    /// Time limit for the application to accept or reject a request.
    pub decision_deadline: Duration,
    /// Time limit for the peer to close after a rejection.
    pub close_deadline: Duration,
}

/// Parameters of a connect.
#[derive(Clone, Debug)]
pub struct ConnectParams {
    /// Owner of the QP.
    pub session: SessionId,
    /// The QP to connect, in state Idle.
    pub qp: QpId,
    /// Address and port of the peer.
    pub peer: SocketAddr,
    /// Local address, if the application chose one.
    pub local: Option<SocketAddr>,
    /// IRD to offer; `None` for the device's default.
    pub ird: Option<u16>,
    /// ORD to request; `None` for the device's default.
    pub ord: Option<u16>,
    /// Private data for the peer's application.
    pub private_data: Vec<u8>,
    /// Asks for the peer-to-peer model (RFC 6581 section 8).
    pub peer_to_peer: bool,
}

/// Parameters of an accept.
#[derive(Clone, Debug)]
pub struct AcceptParams {
    /// The undecided request, from its event.
    pub request: RequestId,
    /// The QP to connect.
    pub qp: QpId,
    /// IRD to offer; `None` for the ORD that the peer requests, within the maximum.
    pub ird: Option<u16>,
    /// ORD to request; `None` for the IRD that the peer offers, within the maximum.
    pub ord: Option<u16>,
    /// Private data for the peer's application.
    pub private_data: Vec<u8>,
}

/// Results of binding, listening, connecting and accepting.
#[derive(Debug)]
pub enum CmEvent {
    /// A peer asks to connect.
    Request {
        /// The listener that received it.
        listener: ListenerId,
        /// The request to accept or reject.
        request: RequestId,
        /// The listener's end and the peer.
        addresses: AddressPair,
        /// IRD that the peer offers, if negotiated.
        peer_ird: Option<u16>,
        /// ORD that the peer requests, if negotiated.
        peer_ord: Option<u16>,
        /// MPA revision of the request.
        revision: u8,
        /// The peer asked for the peer-to-peer model.
        peer_to_peer: bool,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// An undecided request has ended.
    Withdrawn {
        /// The listener that received it.
        listener: ListenerId,
        /// The request, no longer valid.
        request: RequestId,
        /// Why it ended: the peer, a deadline, or a socket error.
        reason: String,
    },
    /// No request will arrive on a connection that a client passed.
    NoRequest {
        /// The listener that serves it.
        listener: ListenerId,
        /// Reason why there is no request.
        reason: String,
    },
    /// The kernel has taken the rest of a rejection that was [`Rejection::Sending`], or its
    /// connection has ended.
    Returned {
        /// The session that rejected.
        session: SessionId,
    },
    /// The result of [`ConnectionManager::ask_back`].
    Answered {
        /// The request, still undecided.
        request: RequestId,
        /// Private data of the answer, or why there is no answer.
        answer: Result<Vec<u8>, String>,
    },
    /// TCP is connected, and the MPA request is being sent.
    Reached {
        /// The QP that connects.
        qp: QpId,
    },
    /// Start-up has finished on a TCP connection, as initiator or as responder.
    ConnectedTcp {
        /// The QP that connected or accepted.
        qp: QpId,
        /// The connection, deregistered from the manager's poll.
        stream: Socket,
        /// Parameters that both ends agreed on.
        negotiated: Box<Negotiated>,
        /// Our end and the peer.
        addresses: AddressPair,
    },
    /// Start-up has finished between two QPs of this daemon.
    ConnectedDirect {
        /// The end that connected.
        active: Box<DirectEnd>,
        /// The end that accepted.
        passive: Box<DirectEnd>,
    },
    /// The peer's application rejected the connection.
    Rejected {
        /// The QP that connected.
        qp: QpId,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// Connecting failed.
    Unreachable {
        /// The QP that connected or accepted.
        qp: QpId,
        /// The failure: TCP, MPA or a deadline.
        why: ConnectFailure,
    },
    /// A UD QP serves the requested port.
    Resolved {
        /// The QP that resolves the port.
        qp: QpId,
        /// Our end and the peer.
        addresses: AddressPair,
        /// Index of the device's GID that the peer uses for us.
        source: u16,
        /// The UD QP that serves the port.
        remote_qp: QpId,
        /// Q_Key of that QP.
        q_key: u32,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// Sends a management datagram (MAD) between the QPs 1 of two ports.
    Management {
        /// The device's own address.
        from: IpAddr,
        /// Address of the destination port.
        to: IpAddr,
        /// The datagram.
        mad: Box<Mad>,
    },
}

/// Progress of a rejection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// The caller has nothing to wait for.
    Done,
    /// The kernel has not taken all of the reply on a socket that a client passed. The client may
    /// use the socket again after [`CmEvent::Returned`].
    Sending,
}

/// One end of a connection inside this daemon.
#[derive(Debug)]
pub struct DirectEnd {
    /// The QP at this end.
    pub qp: QpId,
    /// Parameters that both ends agreed on, as this end sees them.
    pub negotiated: Negotiated,
    /// Addresses as this end sees them.
    pub addresses: AddressPair,
}

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
    guesses: StagGuessLimiter,
    sidr: Sidr,
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
            sidr: Sidr::default(),
            scratch: Box::new([0; SCRATCH]),
        }
    }

    /// Replaces the options. Deadlines that are already set stay.
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

    /// Returns true if a QP is connecting and its peer has seen nothing of it: there is no TCP
    /// connection yet.
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
            match self.slots.get(key).and_then(|e| e.slot.qp()) {
                Some(qp) => self.cancel(qp),
                None => drop(self.remove(key)),
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
        // The slot may have been emptied or reused since the event was collected. In that
        // case no arm matches, or an I/O call returns EAGAIN.
        match self.slots.get(key).map(|e| &e.slot) {
            Some(Slot::Listener { id, .. }) => self.accept_ready(*id, now),
            Some(Slot::Active(_)) => self.drive_active(key, now),
            Some(Slot::Passive(_)) => self.drive_passive(key, now),
            Some(Slot::Closing(_)) if readable || writable => self.drive_closing(key),
            Some(Slot::Returning(_)) => self.drive_returning(key),
            Some(Slot::RequestCheck(_)) => self.drive_request_check(key, now),
            Some(
                Slot::Closing(_) | Slot::Direct(_) | Slot::SidrResolution(_) | Slot::SidrRequest(_),
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
                _ => self.expire(key),
            }
        }
    }

    /// Counts a stream that ended because `peer` used an STag of `session` without a right to it.
    pub fn stag_guessed(&mut self, session: SessionId, peer: IpAddr, at: Time) {
        // Without its session, the guessed STags are gone too.
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

    /// Returns the number of connections in start-up in both directions, with undecided requests.
    pub fn in_startup(&self) -> usize {
        self.slots.len() - self.listeners.len()
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
            Slot::Closing(_) | Slot::Listener { .. } | Slot::SidrResolution(_) => {
                drop(self.remove(key))
            }
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
        let request = slot.request().unwrap_or(RequestId(0));
        let rejected = match slot {
            Slot::Direct(_) => self.reject_direct(key, private_data).map(|()| Rejection::Done),
            _ => self.reject_tcp(key, private_data, awaited, now),
        };
        rejected.map_err(|e| answer_refused(e, request))
    }
}

/// Formats a start-up failure with its error code of RFC 5044 section 8.
fn with_code(what: &impl std::fmt::Display, code: Option<TerminateCode>) -> String {
    match code {
        Some(code) => format!("{what}: {code}"),
        None => what.to_string(),
    }
}

fn too_long(e: PrivateDataTooLong) -> Refusal {
    Refusal::AboveMaximum {
        field: "private_data".into(),
        value: e.len as u64,
        key: "maximum bytes in an MPA frame".into(),
        limit: e.limit as u64,
    }
}

/// Converts an error of the responder into a refusal for the application.
fn answer_refused(e: ResponderError, request: RequestId) -> Refusal {
    match e {
        ResponderError::PrivateData(e) => too_long(e),
        other => Refusal::WrongState {
            kind: "connection request".into(),
            handle: request.0,
            state: other.to_string(),
            needs: "undecided".into(),
        },
    }
}

/// Size of the read buffer during start-up, in bytes. A frame has at most 532 bytes.
const SCRATCH: usize = 2048;
