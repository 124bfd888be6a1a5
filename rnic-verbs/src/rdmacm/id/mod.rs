//! Ids (`rdma_create_id(3)`): their state and the effect of events.

pub(crate) mod entry;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rnic_client::{AddressPair, ConnectionRequest, Listener, Qp, QpId};

use super::port::ReservedPort;
use super::retry::Attempt;
use super::{CmEvent, EventChannel, Parameters};
use crate::c;
use crate::errno::Errno;
use crate::ffi::handles::Foreign;
use crate::log;
use crate::verbs::async_events::Unacknowledged;
use crate::verbs::device::{Device, DeviceKind};
use crate::verbs::qp::QpBody;

/// An id: one end of a connection, or a listener.
pub(crate) struct IdBody {
    pub(super) device: Arc<Device>,
    /// Device of the id: iWARP for `RDMA_PS_TCP`, RoCE for `RDMA_PS_UDP`.
    kind: DeviceKind,
    head: OnceLock<Foreign<c::rdma_cm_id>>,
    /// The channel of its events; `None` once the id is destroyed.
    channel: Mutex<Option<Arc<EventChannel>>>,
    /// Events that the program has fetched and not acknowledged.
    pub(crate) unacknowledged: Unacknowledged,
    pub(super) state: Mutex<State>,
}

/// State of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Created.
    Idle,
    /// Bound to an address.
    Bound,
    /// The addresses of both ends are known.
    AddressResolved,
    /// Ready to connect.
    RouteResolved,
    /// Accepts connection requests.
    Listening,
    /// Created by a connection request that is not decided yet.
    Undecided,
    /// Has requested or accepted a connection and waits for the peer.
    Connecting,
    /// Connected.
    Connected,
    /// The connection, or the attempt, has ended.
    Ended,
}

pub(super) struct State {
    pub(super) phase: Phase,
    /// Local address, if known.
    pub(super) source: Option<SocketAddr>,
    /// The program chose the local address.
    pub(super) source_chosen: bool,
    pub(super) peer: Option<SocketAddr>,
    /// The address bound in the daemon. An id with an undecided request shares it with its
    /// listener, because closing the address rejects the request.
    pub(super) listener: Option<Arc<Listener>>,
    /// For a listener: maximum number of connection requests that wait to be fetched.
    pub(super) backlog: usize,
    /// The port chosen by `rdma_resolve_addr(3)`, held until there is a connection.
    pub(super) port: Option<ReservedPort>,
    pub(super) request: Option<ConnectionRequest>,
    /// A connection request created the id.
    pub(super) passive: bool,
    /// The queue pair that `rdma_create_qp(3)` created for the id.
    pub(super) own_qp: Option<QpId>,
    /// The queue pair of the connection, or of `lookup`.
    pub(super) qp: Option<QpId>,
    /// The QP of a UD lookup that has no reply yet.
    pub(super) lookup: Option<Arc<Qp>>,
    /// Data that precedes the private data of the connection request (`ai_connect` of
    /// `rdma_create_ep(3)`).
    pub(super) connect_data: Vec<u8>,
    /// The connection attempt, for retries.
    pub(super) attempt: Option<Attempt>,
    /// `rdma_disconnect(3)` was called while connecting: the connection ends as soon as it is
    /// established.
    pub(super) ends_at_once: bool,
    /// Restricted to its own address family on a wildcard address.
    pub(super) family_only: bool,
    /// Shares its address with other ids that have this option (`RDMA_OPTION_ID_REUSEADDR`).
    pub(super) reuses_address: bool,
    /// Timeout reported by `ibv_query_qp(3)` for the queue pair of the id.
    ack_timeout: Option<u8>,
}

impl IdBody {
    /// Creates an id with this event channel.
    pub(crate) fn create(
        device: Arc<Device>,
        kind: DeviceKind,
        channel: Arc<EventChannel>,
    ) -> Arc<IdBody> {
        Self::make(device, kind, channel, None, None)
    }

    /// Creates the id of a connection request.
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
            phase: if request.is_some() { Phase::Undecided } else { Phase::Idle },
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

    /// Returns true for an id of `RDMA_PS_UDP`, which makes no connections.
    pub(crate) fn is_ud(&self) -> bool {
        self.kind == DeviceKind::Roce
    }

    pub(crate) fn set_head(&self, head: Foreign<c::rdma_cm_id>) {
        let _ = self.head.set(head);
    }

    /// Returns the program's pointer to the id.
    pub(crate) fn head(&self) -> Foreign<c::rdma_cm_id> {
        self.head.get().copied().unwrap_or(Foreign::NULL)
    }

    /// Returns the local and the peer address, as far as known.
    pub(crate) fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let state = self.state.lock();
        (state.source, state.peer)
    }

    /// Returns true if the id has a queue pair, its own or that of its connection.
    pub(crate) fn knows_qp(&self) -> bool {
        let state = self.state.lock();
        state.own_qp.is_some() || state.qp.is_some()
    }

    /// Returns the state of the id.
    pub(crate) fn phase(&self) -> Phase {
        self.state.lock().phase
    }

    /// Sets the id's own QP, which `rdma_create_qp(3)` has usually created.
    pub(crate) fn set_qp(&self, qp: &QpBody) {
        let (timeout, is_asked) = {
            let mut state = self.state.lock();
            state.own_qp = Some(qp.id());
            (state.ack_timeout, state.passive)
        };
        if is_asked {
            // Some servers post their first Sends before they accept.
            qp.allow_sends();
        }
        if let Some(timeout) = timeout {
            qp.states.lock().timeout = timeout;
        }
    }

    /// Sets the acknowledgement timeout that its queue pair reports
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

    /// Sets data to send before the private data of the connection request.
    pub(crate) fn set_connect_data(&self, data: &[u8]) {
        self.state.lock().connect_data = data.to_vec();
    }

    /// Lets the id share its address with others until it listens (`RDMA_OPTION_ID_REUSEADDR`).
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

    /// Returns the local address, or `None` if this id may share it with an id that `reuses`.
    pub(super) fn exclusive_source(&self, reuses: bool) -> Option<SocketAddr> {
        let state = self.state.lock();
        state.source.filter(|_| !(reuses && state.reuses_address))
    }

    /// Forgets the queue pair that was created for the id and is about to be destroyed.
    pub(crate) fn clear_qp(&self) {
        self.state.lock().own_qp = None;
    }

    /// Handles the destruction of the connection's QP. The daemon sends no more events for it.
    pub(super) fn connection_lost(self: &Arc<Self>, qp: QpId) {
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

    /// Moves the id and its unfetched events to another channel (`rdma_migrate_id(3)`). Waits until
    /// the fetched events are acknowledged.
    pub(crate) fn migrate(self: &Arc<Self>, to: &Arc<EventChannel>) {
        let from = {
            // Held until the old channel has none of the id's events, so that they stay in order.
            let mut channel = self.channel.lock();
            let from = channel.replace(to.clone());
            let waiting = from.as_ref().map(|from| from.take_back(self));
            waiting.into_iter().flatten().for_each(|arrived| to.push(arrived));
            from
        };
        drop(from);
        self.unacknowledged.wait();
    }

    /// Destroys the id with its connection, listener and events (`rdma_destroy_id(3)`).
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
                self.device.ids.allow_reuse(self.kind, false, listener);
            }
            (listener, state.request.take(), qp.filter(|_| connected), state.lookup.take())
        };
        // Rejects an undecided request, and ends a lookup.
        drop((listener, request, lookup));
        if let Some(qp) = qp.and_then(|qp| self.device.qp(qp)) {
            // Fails if the connection has already ended.
            let _ = qp.client().abort();
        }
        self.device.ids.forget_source(self);
        self.device.ids.wake_pollers();
        // Discards later events.
        let channel = self.channel.lock().take();
        drop(channel.map(|channel| channel.take_back(self)));
        self.unacknowledged.wait();
    }

    /// Returns true if events of the id wait to be fetched.
    pub(crate) fn has_events(&self) -> bool {
        self.channel.lock().as_ref().is_some_and(|channel| channel.has(self))
    }

    /// Queues an event.
    pub(crate) fn push(self: &Arc<Self>, kind: c::rdma_cm_event_type, status: i32) {
        self.push_event(CmEvent::new(self, kind, status));
    }

    fn push_event(&self, arrived: CmEvent) {
        if let Some(channel) = &*self.channel.lock() {
            channel.push(arrived);
        }
    }

    // --- Events of the daemon --------------------------------------------------------------

    /// Handles a connection request. Rejects it if the backlog is full. As in the kernel, the
    /// backlog counts the requests that the program has not fetched.
    pub(super) fn handle_request(self: &Arc<Self>, request: ConnectionRequest) {
        let backlog = self.state.lock().backlog;
        let waiting = self.channel.lock().as_ref().map_or(0, |channel| channel.requests(self));
        if waiting >= backlog {
            log::debug(|| {
                let peer = request.peer();
                format!("rejected {peer}: the backlog of {backlog} is full")
            });
            // Dropping an undecided request rejects it.
            return;
        }
        let mut arrived = CmEvent::new(self, c::RDMA_CM_EVENT_CONNECT_REQUEST, 0);
        arrived.addresses = Some(request.addresses());
        arrived.connection = Some(Parameters {
            private_data: request.private_data().to_vec(),
            // The peer's outbound Reads are inbound here, and vice versa.
            inbound: request.peer_ord().unwrap_or(0),
            outbound: request.peer_ird().unwrap_or(0),
            ..Parameters::default()
        });
        arrived.request = Some(request);
        self.push_event(arrived);
    }

    /// Handles the establishment of the connection.
    pub(super) fn established(self: &Arc<Self>, addresses: AddressPair, connection: Parameters) {
        let (kind, own, ends) = {
            let mut state = self.state.lock();
            if state.phase != Phase::Connecting {
                return;
            }
            state.phase = Phase::Connected;
            state.port = None;
            state.source = Some(addresses.local);
            state.peer = Some(addresses.peer);
            // A program that created its QP without the id must move the QP to RTS itself first.
            let kind = match (state.own_qp, state.passive) {
                (None, false) => c::RDMA_CM_EVENT_CONNECT_RESPONSE,
                _ => c::RDMA_CM_EVENT_ESTABLISHED,
            };
            (kind, state.own_qp.is_some(), state.ends_at_once)
        };
        // The program itself moves a QP that it created without the id.
        if own && let Some(qp) = connection.qp.and_then(|qp| self.device.qp(qp)) {
            qp.states.lock().connected();
        }
        let mut arrived = CmEvent::new(self, kind, 0);
        arrived.addresses = Some(addresses);
        arrived.connection = Some(connection);
        self.push_event(arrived);
        if ends && let Err(errno) = self.disconnect() {
            errno.log();
        }
    }

    /// Handles the reply to a UD lookup: a UD QP serves the peer's port.
    pub(super) fn resolved(self: &Arc<Self>, addresses: AddressPair, found: Parameters) {
        let lookup = {
            let mut state = self.state.lock();
            if state.phase != Phase::Connecting {
                return;
            }
            state.phase = Phase::Connected;
            state.source = Some(addresses.local);
            state.peer = Some(addresses.peer);
            if let Some(qp) = state.qp.take() {
                self.device.ids.forget_qp(qp, self);
            }
            state.lookup.take()
        };
        drop(lookup);
        let mut arrived = CmEvent::new(self, c::RDMA_CM_EVENT_ESTABLISHED, 0);
        arrived.addresses = Some(addresses);
        arrived.connection = Some(found);
        self.push_event(arrived);
    }

    /// Handles the rejection by the peer's program.
    pub(super) fn rejected(self: &Arc<Self>, qp: QpId, private_data: Vec<u8>) {
        if !self.attempt_ended() {
            return;
        }
        let (kind, status) = if self.is_ud() {
            (c::RDMA_CM_EVENT_UNREACHABLE, SIDR_REJECTED)
        } else {
            (c::RDMA_CM_EVENT_REJECTED, -libc::ECONNREFUSED)
        };
        let mut arrived = CmEvent::new(self, kind, status);
        arrived.connection =
            Some(Parameters { private_data, qp: Some(qp), ..Parameters::default() });
        self.push_event(arrived);
    }

    /// Handles a failed connection attempt.
    pub(super) fn unreachable(self: &Arc<Self>, errno: i32, reason: &str) {
        let passive = {
            let state = self.state.lock();
            if errno == libc::ECONNREFUSED
                && state.phase == Phase::Connecting
                && state.attempt.as_ref().is_some_and(Attempt::can_retry)
            {
                return self.device.ids.retries.add(self);
            }
            state.passive
        };
        log::debug(|| format!("no connection: {reason}"));
        if !self.attempt_ended() {
            return;
        }
        if self.is_ud() {
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

    /// Handles a graceful close by the peer: closes this end too, which ends the connection. A
    /// program that has not yet posted receives for the last messages rarely does so later.
    pub(super) fn peer_closed(&self) {
        let qp = self.state.lock().qp;
        if let Some(qp) = qp.and_then(|qp| self.device.qp(qp)) {
            // Fails if the connection has already ended.
            let _ = qp.client().disconnect_within(super::DISCONNECT_GRACE);
        }
    }

    /// Handles the end of the connection.
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

    /// Queues the event for the end of a connection or an attempt.
    fn ended(self: &Arc<Self>, was: Phase) {
        match was {
            Phase::Connected => self.push(c::RDMA_CM_EVENT_DISCONNECTED, 0),
            Phase::Connecting => self.push(c::RDMA_CM_EVENT_CONNECT_ERROR, -libc::ECONNRESET),
            _ => {}
        }
    }

    /// Handles a fatal error of the queue pair.
    pub(super) fn fatal(self: &Arc<Self>, reason: &str) {
        log::debug(|| format!("fatal error of the queue pair: {reason}"));
        if self.state.lock().phase == Phase::Connecting && self.attempt_ended() {
            self.push(c::RDMA_CM_EVENT_CONNECT_ERROR, -libc::EIO);
        }
    }

    /// Ends a connection attempt before its event is queued. Returns false if there was none.
    pub(super) fn attempt_ended(&self) -> bool {
        let mut state = self.state.lock();
        if state.phase != Phase::Connecting {
            return false;
        }
        state.phase = Phase::Ended;
        if self.is_ud() {
            if let Some(qp) = state.qp.take() {
                self.device.ids.forget_qp(qp, self);
            }
            let lookup = state.lookup.take();
            // Destroying it calls the daemon, which must not happen under the lock.
            drop(state);
            drop(lookup);
            return true;
        }
        let qp = state.qp;
        let own_qp = state.own_qp;
        if let Some(qp) = qp {
            self.device.ids.release_qp(qp, self);
        }
        // The daemon must not be called under the lock.
        drop(state);
        if let Some(qp) = qp.and_then(|qp| self.device.qp(qp)) {
            qp.connect_failed(own_qp == Some(qp.id()));
        }
        true
    }
}

/// Status codes of a failed UD lookup, as SIDR defines them (IBTA specification, volume 1, section
/// 12.11.2.3) and the kernel reports them: no program listens, or the program rejects.
const SIDR_UNSUPPORTED: i32 = 1;
const SIDR_REJECTED: i32 = 2;

impl State {
    /// Returns the local address of a new connection; `None` leaves the choice to the daemon.
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

    /// Releases the reserved port. Returns false if there was none.
    pub(super) fn release_port(&mut self) -> bool {
        let released = self.port.take().is_some();
        if let Some(source) = self.source.as_mut().filter(|_| released) {
            source.set_port(0);
        }
        released
    }

    /// Checks that the phase is one of `phases`. Returns `EINVAL` otherwise.
    pub(super) fn expect(&self, phases: &[Phase]) -> Result<(), Errno> {
        if phases.contains(&self.phase) {
            return Ok(());
        }
        let phase = self.phase;
        Err(Errno::invalid(format_args!("the id is in phase {phase:?}, not {phases:?}")))
    }
}
