//! Ids (`rdma_create_id(3)`) and what becomes of them.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rnic_client::{AddressPair, ConnectionRequest, Listener, Qp, QpId};

use super::port::ReservedPort;
use super::retry::Attempt;
use super::{Arrived, EventChannel, Parameters};
use crate::async_events::Unacknowledged;
use crate::c;
use crate::device::{Device, DeviceKind};
use crate::errno::Errno;
use crate::log;
use crate::object::Foreign;
use crate::qp::QpBody;

/// An id: one end of a connection to be, or a listener.
pub(crate) struct IdBody {
    pub(super) device: Arc<Device>,
    /// Of which device it is: that of connections, or that of datagrams.
    kind: DeviceKind,
    head: OnceLock<Foreign<c::rdma_cm_id>>,
    /// Where its events go; nowhere once it is destroyed.
    channel: Mutex<Option<Arc<EventChannel>>>,
    /// Events that the program has fetched and not acknowledged.
    pub(crate) unacknowledged: Unacknowledged,
    pub(super) state: Mutex<State>,
}

/// How far an id has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Made.
    Idle,
    /// Has an address.
    Bound,
    /// Knows its own address and the peer's.
    AddressResolved,
    /// May connect.
    RouteResolved,
    /// Takes connection requests.
    Listening,
    /// Was made by a connection request that is not decided yet.
    Asked,
    /// Has asked, or accepted, and waits for the peer.
    Connecting,
    /// Has a connection.
    Connected,
    /// Had one, or did not get one.
    Ended,
}

pub(super) struct State {
    pub(super) phase: Phase,
    /// Its own address, once it is known.
    pub(super) source: Option<SocketAddr>,
    /// Whether the program chose that.
    pub(super) source_chosen: bool,
    pub(super) peer: Option<SocketAddr>,
    /// The daemon's bound address. An id with an undecided request shares that of its listener:
    /// closing it rejects the request.
    pub(super) listener: Option<Arc<Listener>>,
    /// Connection requests that may wait to be fetched, of a listener.
    pub(super) backlog: usize,
    /// The port that `rdma_resolve_addr(3)` chose, until there is a connection.
    pub(super) port: Option<ReservedPort>,
    pub(super) request: Option<ConnectionRequest>,
    /// Whether a connection request made it.
    pub(super) passive: bool,
    /// The queue pair that `rdma_create_qp(3)` made for it.
    pub(super) own_qp: Option<QpId>,
    /// The queue pair of its connection, or that of `lookup`.
    pub(super) qp: Option<QpId>,
    /// The QP of a datagram lookup that has no answer yet.
    pub(super) lookup: Option<Arc<Qp>>,
    /// Precedes the private data of its connection request (`ai_connect` of `rdma_create_ep(3)`).
    pub(super) connect_data: Vec<u8>,
    /// What it asks its peer for, while it connects.
    pub(super) attempt: Option<Attempt>,
    /// `rdma_disconnect(3)` has been called before there was a connection: it ends as soon as it is
    /// established.
    pub(super) ends_at_once: bool,
    /// Only its own address family, on a wildcard address.
    pub(super) family_only: bool,
    /// Shares its address with others that do as well (`RDMA_OPTION_ID_REUSEADDR`).
    pub(super) reuses_address: bool,
    /// What `ibv_query_qp(3)` says of the queue pair that is made for it.
    ack_timeout: Option<u8>,
}

impl IdBody {
    /// A new id whose events come on this channel.
    pub(crate) fn create(
        device: Arc<Device>,
        kind: DeviceKind,
        channel: Arc<EventChannel>,
    ) -> Arc<IdBody> {
        Self::make(device, kind, channel, None, None)
    }

    /// The id of a peer that asks a listener to connect.
    pub(crate) fn with_request(
        listener: &IdBody,
        channel: Arc<EventChannel>,
        request: ConnectionRequest,
    ) -> Arc<IdBody> {
        let device = listener.device.clone();
        let bound = listener.state.lock().listener.clone();
        Self::make(device, listener.kind, channel, bound, Some(request))
    }

    fn make(
        device: Arc<Device>,
        kind: DeviceKind,
        channel: Arc<EventChannel>,
        listener: Option<Arc<Listener>>,
        request: Option<ConnectionRequest>,
    ) -> Arc<IdBody> {
        let addresses = request.as_ref().map(ConnectionRequest::addresses);
        let state = State {
            phase: if request.is_some() { Phase::Asked } else { Phase::Idle },
            source: addresses.map(|a| a.local),
            source_chosen: false,
            peer: addresses.map(|a| a.peer),
            listener,
            backlog: 0,
            port: None,
            passive: request.is_some(),
            request,
            own_qp: None,
            qp: None,
            lookup: None,
            connect_data: Vec::new(),
            attempt: None,
            ends_at_once: false,
            family_only: false,
            reuses_address: false,
            ack_timeout: None,
        };
        Arc::new(IdBody {
            device,
            kind,
            head: OnceLock::new(),
            channel: Mutex::new(Some(channel)),
            unacknowledged: Unacknowledged::default(),
            state: Mutex::new(state),
        })
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Whether it is of the port space of datagrams: nothing is connected.
    pub(crate) fn is_of_datagrams(&self) -> bool {
        self.kind == DeviceKind::Roce
    }

    pub(crate) fn published(&self, head: Foreign<c::rdma_cm_id>) {
        let _ = self.head.set(head);
    }

    /// What the program knows it by.
    pub(crate) fn head(&self) -> Foreign<c::rdma_cm_id> {
        self.head.get().copied().unwrap_or(Foreign::NULL)
    }

    /// Its own address and the peer's, as far as they are known.
    pub(crate) fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let state = self.state.lock();
        (state.source, state.peer)
    }

    /// Whether it has a queue pair, or the connection of one.
    pub(crate) fn knows_qp(&self) -> bool {
        let state = self.state.lock();
        state.own_qp.is_some() || state.qp.is_some()
    }

    /// How far it has come.
    pub(crate) fn phase(&self) -> Phase {
        self.state.lock().phase
    }

    /// Says that this queue pair is its own: mostly `rdma_create_qp(3)` made it.
    pub(crate) fn has_qp(&self, qp: &QpBody) {
        let (timeout, is_asked) = {
            let mut state = self.state.lock();
            state.own_qp = Some(qp.id());
            (state.ack_timeout, state.passive)
        };
        if is_asked {
            // Servers post their first Sends before they accept.
            qp.begins_to_connect();
        }
        if let Some(timeout) = timeout {
            qp.states.lock().timeout = timeout;
        }
    }

    /// Remembers how long its queue pair should wait for acknowledgements
    /// (`RDMA_OPTION_ID_ACK_TIMEOUT`).
    pub(crate) fn set_ack_timeout(&self, timeout: u8) {
        let own_qp = {
            let mut state = self.state.lock();
            state.ack_timeout = Some(timeout);
            state.own_qp
        };
        if let Some(qp) = own_qp.and_then(|qp| self.device.qp(qp)) {
            qp.states.lock().timeout = timeout;
        }
    }

    /// Remembers data that its connection request begins with.
    pub(crate) fn set_connect_data(&self, data: &[u8]) {
        self.state.lock().connect_data = data.to_vec();
    }

    /// Has it share its address with others until it listens (`RDMA_OPTION_ID_REUSEADDR`).
    pub(crate) fn set_reuses_address(&self, on: bool) -> Result<(), Errno> {
        let mut state = self.state.lock();
        if state.phase == Phase::Listening || !on {
            state.expect(&[Phase::Idle])?;
        }
        state.reuses_address = on;
        Ok(())
    }

    pub(super) fn reuses_address(&self) -> bool {
        self.state.lock().reuses_address
    }

    /// Its own address, unless an id that `reuses` addresses may share it.
    pub(super) fn source_beside(&self, reuses: bool) -> Option<SocketAddr> {
        let state = self.state.lock();
        state.source.filter(|_| !(reuses && state.reuses_address))
    }

    /// The queue pair that was made for it is about to be destroyed.
    pub(crate) fn loses_qp(&self) {
        self.state.lock().own_qp = None;
    }

    /// The queue pair of its connection is gone: the daemon will say nothing of it any more.
    pub(super) fn loses_connection(self: &Arc<Self>, qp: QpId) {
        let was = {
            let mut state = self.state.lock();
            if state.qp != Some(qp) {
                return;
            }
            state.qp = None;
            std::mem::replace(&mut state.phase, Phase::Ended)
        };
        self.ended(was);
    }

    /// Moves it to another channel, with the events that have not been fetched
    /// (`rdma_migrate_id(3)`). Waits until those that have been are acknowledged.
    pub(crate) fn migrate(self: &Arc<Self>, to: &Arc<EventChannel>) {
        let from = {
            // Held until the old channel is empty of it, so that events stay in order.
            let mut channel = self.channel.lock();
            let from = channel.replace(to.clone());
            let waiting = from.as_ref().map(|from| from.take_back(self));
            waiting.into_iter().flatten().for_each(|arrived| to.push(arrived));
            from
        };
        drop(from);
        self.unacknowledged.wait();
    }

    /// Ends it (`rdma_destroy_id(3)`): its connection, its listener, its events.
    pub(crate) fn destroy(self: &Arc<Self>) {
        let (listener, request, qp, lookup) = {
            let mut state = self.state.lock();
            let listens = state.phase == Phase::Listening;
            let connected = matches!(state.phase, Phase::Connecting | Phase::Connected);
            state.phase = Phase::Ended;
            let qp = state.qp.take();
            if let Some(qp) = qp {
                self.device.ids.forget_qp(qp, self);
            }
            let listener = state.listener.take();
            if let Some(listener) = listener.as_ref().filter(|_| listens) {
                self.device.ids.forget_listener(listener.id());
                self.device.ids.may_be_reused(self.kind, false, listener);
            }
            (listener, state.request.take(), qp.filter(|_| connected), state.lookup.take())
        };
        // An undecided request is rejected on the wire, and a lookup ends.
        drop((listener, request, lookup));
        if let Some(qp) = qp.and_then(|qp| self.device.qp(qp)) {
            // It may have ended meanwhile.
            let _ = qp.client().abort();
        }
        self.device.ids.forget_source(self);
        self.device.ids.wake_pollers();
        // What is about to arrive is nobody's from here on.
        let channel = self.channel.lock().take();
        drop(channel.map(|channel| channel.take_back(self)));
        self.unacknowledged.wait();
    }

    /// Whether the program has not fetched all of its events.
    pub(crate) fn has_events(&self) -> bool {
        self.channel.lock().as_ref().is_some_and(|channel| channel.has(self))
    }

    /// Queues an event.
    pub(crate) fn push(self: &Arc<Self>, kind: c::rdma_cm_event_type, status: i32) {
        self.push_arrived(Arrived::new(self, kind, status));
    }

    fn push_arrived(&self, arrived: Arrived) {
        if let Some(channel) = &*self.channel.lock() {
            channel.push(arrived);
        }
    }

    // --- What the daemon says --------------------------------------------------------------

    /// A peer asks to connect. Rejects it if the backlog is full: that counts the requests that the
    /// program has not fetched, as the kernel's does.
    pub(super) fn asked(self: &Arc<Self>, request: ConnectionRequest) {
        let backlog = self.state.lock().backlog;
        let waiting = self.channel.lock().as_ref().map_or(0, |channel| channel.requests(self));
        if waiting >= backlog {
            log::debug(|| {
                let peer = request.peer();
                format!("rejected {peer}: backlog {backlog} of rdma_listen is not fetched")
            });
            // Undecided, it is rejected on the wire.
            return;
        }
        let mut arrived = Arrived::new(self, c::RDMA_CM_EVENT_CONNECT_REQUEST, 0);
        arrived.addresses = Some(request.addresses());
        arrived.connection = Some(Parameters {
            private_data: request.private_data().to_vec(),
            // What the peer wants of us is what it may have outstanding, and the other way round.
            inbound: request.peer_ord().unwrap_or(0),
            outbound: request.peer_ird().unwrap_or(0),
            ..Parameters::default()
        });
        arrived.request = Some(request);
        self.push_arrived(arrived);
    }

    /// The connection stands.
    pub(super) fn established(self: &Arc<Self>, addresses: AddressPair, connection: Parameters) {
        let (kind, own, ends) = {
            let mut state = self.state.lock();
            if state.phase != Phase::Connecting {
                return;
            }
            state.phase = Phase::Connected;
            state.port = None;
            (state.source, state.peer) = (Some(addresses.local), Some(addresses.peer));
            // A program that wires its queue pair itself has to move it on first.
            let kind = match (state.own_qp, state.passive) {
                (None, false) => c::RDMA_CM_EVENT_CONNECT_RESPONSE,
                _ => c::RDMA_CM_EVENT_ESTABLISHED,
            };
            (kind, state.own_qp.is_some(), state.ends_at_once)
        };
        // A queue pair of the program's own is the program's to move.
        if own && let Some(qp) = connection.qp.and_then(|qp| self.device.qp(qp)) {
            qp.states.lock().connected();
        }
        let mut arrived = Arrived::new(self, kind, 0);
        arrived.addresses = Some(addresses);
        arrived.connection = Some(connection);
        self.push_arrived(arrived);
        if ends && let Err(errno) = self.disconnect() {
            errno.log();
        }
    }

    /// A queue pair of datagrams serves the peer's port.
    pub(super) fn resolved(self: &Arc<Self>, addresses: AddressPair, found: Parameters) {
        let lookup = {
            let mut state = self.state.lock();
            if state.phase != Phase::Connecting {
                return;
            }
            state.phase = Phase::Connected;
            (state.source, state.peer) = (Some(addresses.local), Some(addresses.peer));
            if let Some(qp) = state.qp.take() {
                self.device.ids.forget_qp(qp, self);
            }
            state.lookup.take()
        };
        drop(lookup);
        let mut arrived = Arrived::new(self, c::RDMA_CM_EVENT_ESTABLISHED, 0);
        arrived.addresses = Some(addresses);
        arrived.connection = Some(found);
        self.push_arrived(arrived);
    }

    /// The peer's program has said no.
    pub(super) fn rejected(self: &Arc<Self>, qp: QpId, private_data: Vec<u8>) {
        if !self.attempt_ended() {
            return;
        }
        let (kind, status) = match self.is_of_datagrams() {
            true => (c::RDMA_CM_EVENT_UNREACHABLE, SIDR_REJECTED),
            false => (c::RDMA_CM_EVENT_REJECTED, -libc::ECONNREFUSED),
        };
        let mut arrived = Arrived::new(self, kind, status);
        arrived.connection =
            Some(Parameters { private_data, qp: Some(qp), ..Parameters::default() });
        self.push_arrived(arrived);
    }

    /// No connection came about.
    pub(super) fn unreachable(self: &Arc<Self>, errno: i32, reason: &str) {
        let passive = {
            let state = self.state.lock();
            if errno == libc::ECONNREFUSED
                && state.phase == Phase::Connecting
                && state.attempt.as_ref().is_some_and(Attempt::may_go_on)
            {
                return self.device.ids.retries.add(self);
            }
            state.passive
        };
        log::debug(|| format!("no connection: {reason}"));
        if !self.attempt_ended() {
            return;
        }
        if self.is_of_datagrams() {
            let status = if errno == libc::ECONNREFUSED { SIDR_UNSUPPORTED } else { -errno };
            return self.push(c::RDMA_CM_EVENT_UNREACHABLE, status);
        }
        let kind = match errno {
            _ if passive => c::RDMA_CM_EVENT_CONNECT_ERROR,
            libc::ECONNREFUSED | libc::ECONNRESET => c::RDMA_CM_EVENT_REJECTED,
            libc::ETIMEDOUT | libc::ENETUNREACH | libc::EHOSTUNREACH => {
                c::RDMA_CM_EVENT_UNREACHABLE
            }
            _ => c::RDMA_CM_EVENT_CONNECT_ERROR,
        };
        self.push(kind, -errno);
    }

    /// The peer has finished sending: so do we, and the connection ends. Programs that have posted
    /// no receive for its last messages will seldom do so later.
    pub(super) fn peer_closed(&self) {
        let qp = self.state.lock().qp;
        if let Some(qp) = qp.and_then(|qp| self.device.qp(qp)) {
            // Refused if it has ended meanwhile.
            let _ = qp.client().disconnect_within(super::LAST_SENDS);
        }
    }

    /// The connection has ended.
    pub(super) fn disconnected(self: &Arc<Self>, reason: &str) {
        log::debug(|| format!("disconnected: {reason}"));
        let (was, qp) = {
            let mut state = self.state.lock();
            (std::mem::replace(&mut state.phase, Phase::Ended), state.qp)
        };
        if let Some(qp) = qp {
            self.device.ids.release_qp(qp, self);
        }
        if let Some(qp) = qp.and_then(|qp| self.device.qp(qp)) {
            qp.states.lock().disconnected();
        }
        self.ended(was);
    }

    /// Tells of the end of a connection, or of an attempt.
    fn ended(self: &Arc<Self>, was: Phase) {
        match was {
            Phase::Connected => self.push(c::RDMA_CM_EVENT_DISCONNECTED, 0),
            Phase::Connecting => self.push(c::RDMA_CM_EVENT_CONNECT_ERROR, -libc::ECONNRESET),
            _ => {}
        }
    }

    /// The queue pair has died.
    pub(super) fn fatal(self: &Arc<Self>, reason: &str) {
        log::debug(|| format!("the queue pair died: {reason}"));
        if self.state.lock().phase == Phase::Connecting && self.attempt_ended() {
            self.push(c::RDMA_CM_EVENT_CONNECT_ERROR, -libc::EIO);
        }
    }

    /// Ends an attempt to connect, before its event is pushed. Returns false if there is none.
    pub(super) fn attempt_ended(&self) -> bool {
        let mut state = self.state.lock();
        if state.phase != Phase::Connecting {
            return false;
        }
        state.phase = Phase::Ended;
        if self.is_of_datagrams() {
            if let Some(qp) = state.qp.take() {
                self.device.ids.forget_qp(qp, self);
            }
            let lookup = state.lookup.take();
            // The daemon is asked to destroy it without the lock.
            drop(state);
            drop(lookup);
            return true;
        }
        let (qp, own_qp) = (state.qp, state.own_qp);
        if let Some(qp) = qp {
            self.device.ids.release_qp(qp, self);
        }
        // The daemon is asked without the lock.
        drop(state);
        if let Some(qp) = qp.and_then(|qp| self.device.qp(qp)) {
            qp.fails_to_connect(own_qp == Some(qp.id()));
        }
        true
    }
}

/// Why there is no queue pair of datagrams, by the numbers of SIDR (IBTA specification, volume 1,
/// section 12.11.2.3), as the kernel tells it: nobody listens; the program says no.
const SIDR_UNSUPPORTED: i32 = 1;
const SIDR_REJECTED: i32 = 2;

impl State {
    /// The local address that a connection has to have; `None` leaves it to the daemon.
    pub(super) fn local(&self) -> Option<SocketAddr> {
        let chosen = self.source.filter(|_| self.source_chosen);
        match (&self.port, self.peer) {
            (Some(port), Some(peer)) => {
                let port = port.local(peer);
                Some(chosen.map_or(port, |chosen| SocketAddr::new(chosen.ip(), port.port())))
            }
            _ => chosen,
        }
    }

    /// Gives up the reserved port. Returns false if there is none.
    pub(super) fn release_port(&mut self) -> bool {
        let released = self.port.take().is_some();
        if let Some(source) = self.source.as_mut().filter(|_| released) {
            source.set_port(0);
        }
        released
    }

    /// Demands a phase.
    pub(super) fn expect(&self, phases: &[Phase]) -> Result<(), Errno> {
        match phases.contains(&self.phase) {
            true => Ok(()),
            false => {
                let phase = self.phase;
                Err(Errno::invalid(format_args!("the id is in phase {phase:?}, not {phases:?}")))
            }
        }
    }
}
