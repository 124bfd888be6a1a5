//! Connection management: from an address to a connection a worker can drive.
//!
//! The [`ConnectionManager`] binds and listens, connects, and carries every TCP connection through
//! MPA start-up with the state machines of [`rnic_core::stream::startup`]; a connection request is
//! an object here before any QP is named for it. A connect whose destination is one of this
//! daemon's own listeners needs no TCP connection: the same machines then exchange their frames in
//! memory, so that both paths negotiate alike. Queue pairs of datagrams are not connected: which
//! one serves a port is asked and answered by messages (`sidr`), with the same listeners and
//! requests. What comes out are [`CmEvent`]s.
//!
//! It refuses to know who may do what, sessions' object tables, and QPs beyond their number; limits
//! are plain numbers in [`CmOptions`]. It reads no clock and never blocks: the control thread, its
//! only caller, hands it readiness and time. Every phase has a deadline.

mod active;
mod ask_back;
mod deadlines;
mod direct;
mod listener;
mod net;
mod no_connection;
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
use rnic_core::abi::control::{ListenerRow, Refusal};
use rnic_core::roce::sidr::Bytes as Mad;
use rnic_core::stream::startup::{Negotiated, Options, PrivateDataTooLong, ResponderError};
use rnic_core::types::{AddressPair, ListenerId, QpId, RequestId, SessionId, TerminateCode, Time};
use slab::Slab;

use deadlines::Deadlines;
pub use listener::BindTo;
use listener::{Listener, Shedding};
pub use net::SocketBuffers;
pub use no_connection::NoConnection;
pub use passed::examine;
pub use quota::Quota;
use quota::Quotas;
use sidr::Sidr;
use slots::{Index, Slot, SlotEntry};
use stag_guesses::StagGuessLimiter;
use startups::Startups;

use crate::config::{PortMap, Tcp};
use crate::socket::Socket;

/// The session of the daemon itself, which no client has.
pub const DAEMON: SessionId = SessionId(0);

/// Numbers the connection manager works within.
#[derive(Clone, Debug)]
pub struct CmOptions {
    /// What to offer and to ask for in MPA start-up; IRD and ORD are the device's defaults.
    pub startup: Options,
    /// Most inbound and outbound reads an accepted connection may get.
    pub max_ird: u16,
    /// Most outbound reads that an accepted connection may get.
    pub max_ord: u16,
    /// How soon a peer that is gone is noticed, of connections that begin from now on.
    pub tcp: Tcp,
    /// Ports of the addresses that programs name, and of those on the wire. What comes in and goes
    /// out of here are the former.
    pub ports: PortMap,
    /// Whether connects to this daemon's own listeners stay in memory.
    pub direct: bool,
    /// Connections in start-up that hold a descriptor and no QP, of all users. Who has most gives
    /// way to a new one.
    pub startups: usize,
    /// The key that says so.
    pub startups_key: String,
    /// What the kernel may keep for a connection of the daemon's own.
    pub buffers: SocketBuffers,
    /// Connections that one remote host may begin per second to one user; more are reset.
    pub peer_connections_per_second: u32,
    /// Wrong STags of one user's that a peer's address may name in a minute before that user's
    /// listeners turn it away.
    pub stag_guesses_per_minute: u32,
    /// For a TCP connection to come about.
    pub connect_deadline: Duration,
    /// For the peer's reply, once our request is on its way.
    pub reply_deadline: Duration,
    /// For a peer's request, once it is connected.
    pub request_deadline: Duration,
    /// For the application to accept or reject a request.
    pub decision_deadline: Duration,
    /// For the peer to close after a rejection.
    pub close_deadline: Duration,
}

/// What a QP is to be connected to, and how.
#[derive(Clone, Debug)]
pub struct ConnectParams {
    /// Owner of the QP.
    pub session: SessionId,
    /// The QP to connect, which is Idle.
    pub qp: QpId,
    /// Address and port of the peer.
    pub peer: SocketAddr,
    /// From where, if it matters.
    pub local: Option<SocketAddr>,
    /// Inbound reads to offer; `None` for the device's default.
    pub ird: Option<u16>,
    /// Outbound reads wanted; `None` for the device's default.
    pub ord: Option<u16>,
    /// For the peer's application.
    pub private_data: Vec<u8>,
    /// Ask for the peer-to-peer model (RFC 6581 section 8).
    pub peer_to_peer: bool,
}

/// How a connection request is accepted.
#[derive(Clone, Debug)]
pub struct AcceptParams {
    /// The request, as its event named it; undecided so far.
    pub request: RequestId,
    /// The QP to connect.
    pub qp: QpId,
    /// Inbound reads to offer; `None` for as many as the peer wants, within the maximum.
    pub ird: Option<u16>,
    /// Outbound reads wanted; `None` for as many as the peer offers, within the maximum.
    pub ord: Option<u16>,
    /// For the peer's application.
    pub private_data: Vec<u8>,
}

/// What came of binding, listening, connecting and accepting.
#[derive(Debug)]
pub enum CmEvent {
    /// A peer asks to connect.
    Request {
        /// The listener it came to.
        listener: ListenerId,
        /// To be accepted or rejected.
        request: RequestId,
        /// Our end, that of the listener, and the peer.
        addresses: AddressPair,
        /// Inbound reads the peer offers, if negotiated.
        peer_ird: Option<u16>,
        /// Outbound reads the peer wants, if negotiated.
        peer_ord: Option<u16>,
        /// MPA revision of the request.
        revision: u8,
        /// Whether the peer asked for the peer-to-peer model.
        peer_to_peer: bool,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// A request is gone undecided.
    Withdrawn {
        /// The listener it came to.
        listener: ListenerId,
        /// The request, no longer valid.
        request: RequestId,
        /// What ended it, in words: the peer, a deadline, or an error of the socket.
        reason: String,
    },
    /// No request will come on a connection that was passed.
    NoRequest {
        /// The listener that serves it.
        listener: ListenerId,
        /// What came instead of a request, in words.
        reason: String,
    },
    /// A rejection that was [`Rejection::Sending`] is with the kernel, or its connection has ended.
    Returned {
        /// The session that rejected.
        session: SessionId,
    },
    /// The answer to a question about a request ([`ConnectionManager::ask_back`]).
    Answered {
        /// The request, still undecided.
        request: RequestId,
        /// Private Data of the answer, or the reason why there is none.
        answer: Result<Vec<u8>, String>,
    },
    /// TCP has been accepted, and our request is on its way.
    Reached {
        /// The QP that connects.
        qp: QpId,
    },
    /// Start-up is done on a TCP connection, as initiator or as responder.
    ConnectedTcp {
        /// The QP that connected or accepted.
        qp: QpId,
        /// The connection, registered nowhere.
        stream: Socket,
        /// What both ends agreed on in start-up.
        negotiated: Box<Negotiated>,
        /// Our end and the peer.
        addresses: AddressPair,
    },
    /// Start-up is done between two QPs of this daemon.
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
    /// No connection came about.
    Unreachable {
        /// The QP that connected or accepted.
        qp: QpId,
        /// What failed: TCP, MPA or a deadline.
        why: NoConnection,
    },
    /// A queue pair of datagrams serves the port that was asked for.
    Resolved {
        /// The QP that asked.
        qp: QpId,
        /// Our end and the peer.
        addresses: AddressPair,
        /// Index of the device's GID that the peer knows us by.
        source: u16,
        /// The queue pair that serves.
        remote_qp: QpId,
        /// Its key.
        q_key: u32,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// A management datagram is to be sent between the queue pairs 1 of two ports.
    Management {
        /// The device's own address.
        from: IpAddr,
        /// Address of the other port.
        to: IpAddr,
        /// What it says.
        mad: Box<Mad>,
    },
}

/// How far a rejection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// Nothing of it is left to be done, as far as the one who rejected is concerned.
    Done,
    /// The kernel has not taken all of the reply on a socket that was passed, which is not the
    /// client's again before [`CmEvent::Returned`].
    Sending,
}

/// One end of a connection inside this daemon.
#[derive(Debug)]
pub struct DirectEnd {
    /// The QP at this end.
    pub qp: QpId,
    /// What both ends agreed on, as this end sees it.
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
    /// Slots of the questions about undecided requests.
    questions: HashMap<RequestId, usize>,
    /// QPs that connect or whose acceptance is on its way.
    qps: HashMap<QpId, usize>,
    next_request: u32,
    events: VecDeque<CmEvent>,
    shedding: Shedding,
    quotas: Quotas,
    /// Requests of peers are turned away.
    draining: bool,
    guesses: StagGuessLimiter,
    sidr: Sidr,
    scratch: Box<[u8; SCRATCH]>,
}

impl ConnectionManager {
    /// A manager that registers its sockets with `registry` under `first_token` and above.
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
            questions: HashMap::new(),
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

    /// Works with other numbers from now on; what is under way keeps its deadlines.
    pub fn set_options(&mut self, options: CmOptions) {
        self.guesses.set_limit(options.stag_guesses_per_minute);
        self.options = options;
    }

    /// Says whose a session is, and how much its user may have half open.
    pub fn set_quota(&mut self, session: SessionId, quota: Quota) {
        self.quotas.set(session, quota);
    }

    /// Turns requests of peers away from now on, or takes them again. Those that wait for a
    /// decision go on waiting. [`ConnectionManager::ignore_draining`] excludes a listener.
    pub fn set_draining(&mut self, on: bool) {
        self.draining = on;
    }

    /// Connects a QP. The outcome is an event, unless our own end already makes it impossible.
    pub fn connect(&mut self, mut params: ConnectParams, now: Time) -> Result<(), Refusal> {
        self.check_idle(params.qp)?;
        params.peer = self.options.ports.on_wire(params.peer);
        if self.options.direct
            && let Some((listener, source)) = self.direct_target(&params)?
        {
            return self.connect_direct(params, listener, source, now);
        }
        self.connect_tcp(params, now)
    }

    /// Whether a QP connects, asks for a peer, or has accepted and waits.
    pub fn is_busy(&self, qp: QpId) -> bool {
        self.qps.contains_key(&qp)
    }

    /// Whether the peer that a QP connects to cannot know of that: there is no TCP connection yet.
    pub fn is_unheard(&self, qp: QpId) -> bool {
        let slot = self.qps.get(&qp).and_then(|key| self.slots.get(*key));
        slot.is_some_and(|entry| matches!(&entry.slot, Slot::Active(a) if a.is_unheard()))
    }

    /// Accepts a request: the reply is on its way, an event follows.
    pub fn accept(&mut self, params: AcceptParams, now: Time) -> Result<(), Refusal> {
        let key = self.undecided(params.request)?;
        self.check_idle(params.qp)?;
        match &self.slots[key].slot {
            Slot::Direct(_) => self.accept_direct(key, params),
            _ => self.accept_tcp(key, params, now),
        }
    }

    /// Rejects a request, with Private Data for the peer's application.
    pub fn reject(
        &mut self,
        request: RequestId,
        private_data: &[u8],
        now: Time,
    ) -> Result<Rejection, Refusal> {
        let key = self.undecided(request)?;
        self.reject_slot(key, private_data, true, now)
    }

    /// Gives up connecting or having accepted a QP; no event about it follows.
    pub fn cancel(&mut self, qp: QpId) {
        let Some(key) = self.qps.get(&qp).copied() else { return };
        match self.remove(key) {
            Some(Slot::Direct(direct)) => {
                self.withdraw(direct.listener, direct.request, "the initiator gave up");
            }
            Some(Slot::Asking(asking)) => self.give_up_asking(&asking),
            _ => {}
        }
    }

    /// Ends everything a session bound, connects or has accepted; the other ends learn of it, the
    /// session itself is told nothing.
    pub fn drop_session(&mut self, session: SessionId, now: Time) {
        for key in self.of_session.of(&session) {
            if let Some(Slot::Listener { id, .. }) = self.slots.get(key).map(|e| &e.slot) {
                // It exists: its slot does.
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

    /// Handles readiness of one of its tokens; false if the token is not one of its own.
    pub fn handle_ready(
        &mut self,
        token: Token,
        readable: bool,
        writable: bool,
        now: Time,
    ) -> bool {
        let Some(key) = token.0.checked_sub(self.first_token) else { return false };
        // A token may be that of a slot emptied or filled anew since the event was collected; then
        // this finds nothing, or tries a socket in vain.
        match self.slots.get(key).map(|e| &e.slot) {
            Some(Slot::Listener { id, .. }) => self.accept_ready(*id, now),
            Some(Slot::Active(_)) => self.drive_active(key, now),
            Some(Slot::Passive(_)) => self.drive_passive(key, now),
            Some(Slot::Closing(_)) if readable || writable => self.drive_closing(key),
            Some(Slot::Returning(_)) => self.drive_returning(key),
            Some(Slot::Question(_)) => self.drive_question(key, now),
            Some(Slot::Closing(_) | Slot::Direct(_) | Slot::Asking(_) | Slot::Asked(_)) | None => {}
        }
        true
    }

    /// When [`handle_timeout`](Self::handle_timeout) wants to be called.
    pub fn next_timeout(&self) -> Option<Time> {
        self.deadlines.first().map(|(at, _)| at)
    }

    /// Ends what has waited too long.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(key) = self.deadlines.pop_due(now) {
            let Some(entry) = self.slots.get_mut(key) else { continue };
            entry.deadline = None;
            match entry.slot {
                Slot::Listener { id, .. } => self.accept_ready(id, now),
                Slot::Asking(_) => self.ask_again(key, now),
                _ => self.expire(key),
            }
        }
    }

    /// A peer's stream with a session has ended for an STag that it may not use.
    pub fn stag_guessed(&mut self, session: SessionId, peer: IpAddr, at: Time) {
        // With its session, the STags that were guessed at are gone.
        if let Some(quota) = self.quotas.of(session) {
            self.guesses.note(quota.user, peer, at);
        }
    }

    /// Whether the user of a session has had too many wrong STags from an address.
    pub fn is_guesser(&mut self, session: SessionId, peer: IpAddr, now: Time) -> bool {
        let user = self.quotas.user(session);
        self.guesses.turns_away(user, peer, now)
    }

    /// What is to be told to sessions or carried out, oldest first.
    pub fn poll_event(&mut self) -> Option<CmEvent> {
        self.events.pop_front()
    }

    /// Connections in start-up, of either direction, undecided requests included.
    pub fn in_startup(&self) -> usize {
        self.slots.len() - self.listeners.len()
    }

    /// Those of them that hold a descriptor and no QP, which `limits.startups` bounds.
    pub fn startups(&self) -> usize {
        self.startups.total()
    }

    /// Those of them that a user is charged for.
    pub fn startups_of(&self, user: u32) -> usize {
        self.startups.of(user)
    }

    /// A listener as lists show it.
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
            Slot::Question(question) => {
                let why = question.active.awaited(&self.options).reason;
                self.end_question(key, Err(why));
            }
            Slot::Direct(_) => self.expire_direct(key),
            Slot::Returning(_) => self.end_returning(key),
            Slot::Asked(_) => self.withdraw_asked(key, "the deadline passed"),
            Slot::Closing(_) | Slot::Listener { .. } | Slot::Asking(_) => drop(self.remove(key)),
        }
    }

    fn register(&self, key: usize, stream: &impl AsFd) -> std::io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.registry.register(&mut SourceFd(&net::raw(stream)), self.token(key), interest)
    }

    /// Takes a stream out of our poll, so that another thread can have it.
    fn deregister(&self, stream: &impl AsFd) {
        // It is registered; the kernel has no other reason to refuse.
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

    /// A number no undecided request has.
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

    /// Whether a request that comes to a listener now may wait.
    fn takes(&self, listener: ListenerId) -> bool {
        let listener = self.listeners.get(&listener);
        listener.is_some_and(|l| l.has_room() && (l.ignores_draining || !self.draining))
    }

    fn withdraw(&mut self, listener: ListenerId, request: RequestId, reason: &str) {
        if let Some(l) = self.listeners.get_mut(&listener) {
            l.pending -= 1;
        }
        self.events.push_back(CmEvent::Withdrawn { listener, request, reason: reason.into() });
    }

    /// Rejects an undecided request, of either path; `awaited` if somebody waits for it.
    fn reject_slot(
        &mut self,
        key: usize,
        private_data: &[u8],
        awaited: bool,
        now: Time,
    ) -> Result<Rejection, Refusal> {
        let slot = &self.slots[key].slot;
        if let Slot::Asked(_) = slot {
            return self.reject_datagrams(key, private_data, now).map(|()| Rejection::Done);
        }
        let request = slot.request().unwrap_or(RequestId(0));
        let rejected = match slot {
            Slot::Direct(_) => self.reject_direct(key, private_data).map(|()| Rejection::Done),
            _ => self.reject_tcp(key, private_data, awaited, now),
        };
        rejected.map_err(|e| answer_refused(e, request))
    }
}

/// A failure of start-up in words, with the number that RFC 5044 section 8 has for it.
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
        key: "bytes that an MPA frame carries".into(),
        limit: e.limit as u64,
    }
}

/// What to tell an application whose answer the start-up machine did not take.
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

/// Bytes read at once during start-up: a frame is at most 532.
const SCRATCH: usize = 2048;
