//! Ids and their events: the data.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rnic_client::{
    AddressPair, CallObject, ConnectionRequest, DatagramAddress, DeviceKind, Function, LibraryCall,
    Listener, PortSpace, Qp, QpId, RcPeer,
};

use super::devices::device_with;
use super::port::ReservedPort;
use super::rc_attr::{RcConnection, Reads};
use super::service::Service;
use crate::c;
use crate::errno::Errno;
use crate::event_queue::EventQueue;
use crate::ffi::handles::{Body, Foreign, Kind};
use crate::verbs::adapter::Adapter;
use crate::verbs::async_events::Unacknowledged;
use crate::verbs::device::Device;
use crate::verbs::qp::{QpBody, find};

/// An id: one end of a connection, or a listener.
pub(crate) struct IdBody {
    pub(super) device: Arc<Device>,
    /// Device and port space of the id.
    pub(super) service: Service,
    /// Device of the id, once its local address is known.
    adapter: OnceLock<Arc<Adapter>>,
    head: OnceLock<Foreign<c::rdma_cm_id>>,
    /// The channel of its events; `None` once the id is destroyed.
    pub(super) channel: Mutex<Option<Arc<EventChannel>>>,
    /// Events that the program has fetched and not acknowledged.
    pub(crate) unacknowledged: Unacknowledged,
    pub(super) state: Mutex<State>,
}

/// Parts of the `AF_IB` addresses of an id that IP addresses lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IbForm {
    /// Port space of the own port. An id of `RDMA_PS_IB` may use that of `RDMA_PS_TCP`.
    pub(super) own: PortSpace,
    /// Port space of the peer's port.
    pub(super) peer: PortSpace,
}

/// State of an id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Created.
    #[default]
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

#[derive(Default)]
pub(super) struct State {
    pub(super) phase: Phase,
    /// Local address, if known.
    pub(super) source: Option<SocketAddr>,
    /// The program chose the local address.
    pub(super) source_chosen: bool,
    pub(super) peer: Option<SocketAddr>,
    /// Set if the addresses are of the family `AF_IB`.
    pub(super) ib: Option<IbForm>,
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
    /// Parameters of a connection of RC or UC QPs.
    pub(super) rc: RcConnection,
    /// The connection attempt, for retries.
    pub(super) attempt: Option<Attempt>,
    /// `rdma_disconnect(3)` was called while connecting: the connection ends as soon as it is
    /// established.
    pub(super) ends_at_once: bool,
    /// The attempt ended while `rdma_establish` had set `Connected` before its request.
    pub(super) end_missed: bool,
    /// Restricted to its own address family on a wildcard address.
    pub(super) family_only: bool,
    /// Shares its address with other ids that have this option (`RDMA_OPTION_ID_REUSEADDR`).
    pub(super) reuses_address: bool,
    /// Maximum path MTU in bytes, if the program has set it (`RDMA_OPTION_IB_PATH`).
    pub(super) most_mtu: Option<u16>,
    /// Type of service of the next route (`RDMA_OPTION_ID_TOS`).
    pub(super) tos: u8,
    /// Traffic class of the resolved route.
    pub(super) traffic_class: u8,
    /// Acknowledgement timeout of the QP of the id. `ibv_query_qp(3)` reports it for an iWARP QP,
    /// which does not use it.
    pub(super) ack_timeout: Option<u8>,
}

impl IdBody {
    /// Creates an id with this event channel.
    pub(crate) fn create(
        device: Arc<Device>,
        service: Service,
        channel: Arc<EventChannel>,
    ) -> Arc<IdBody> {
        Self::make(device, service, channel, None, None)
    }

    /// Creates the id of a connection request.
    pub(crate) fn with_request(
        listener: &IdBody,
        channel: Arc<EventChannel>,
        request: ConnectionRequest,
    ) -> Arc<IdBody> {
        let device = listener.device.clone();
        let (bound, ib) = {
            let state = listener.state.lock();
            (state.listener.clone(), state.ib)
        };
        let new = Self::make(device, listener.service, channel, bound, Some(request));
        new.state.lock().ib = ib;
        new
    }

    fn make(
        device: Arc<Device>,
        service: Service,
        channel: Arc<EventChannel>,
        listener: Option<Arc<Listener>>,
        request: Option<ConnectionRequest>,
    ) -> Arc<IdBody> {
        let addresses = request.as_ref().map(ConnectionRequest::addresses);
        let peer = request.as_ref().and_then(ConnectionRequest::rc_peer);
        let state = State {
            phase: if request.is_some() { Phase::Undecided } else { Phase::Idle },
            source: addresses.map(|a| a.local),
            peer: addresses.map(|a| a.peer),
            listener,
            passive: request.is_some(),
            rc: peer.map_or_else(RcConnection::default, |peer| {
                RcConnection::of_request(peer, Reads::most(&device.attributes))
            }),
            request,
            ..State::default()
        };
        let new = Arc::new(IdBody {
            device,
            service,
            adapter: OnceLock::new(),
            head: OnceLock::new(),
            channel: Mutex::new(Some(channel)),
            unacknowledged: Unacknowledged::default(),
            state: Mutex::new(state),
        });
        new.ids().keep(&new);
        new
    }

    /// Returns the queue pair of the device with this number.
    pub(super) fn find_qp(&self, qp: QpId) -> Option<Arc<QpBody>> {
        find(&self.device, qp)
    }

    /// Returns true for an id of `RDMA_PS_UDP`, which makes no connections.
    pub(crate) fn is_ud(&self) -> bool {
        self.service == Service::Ud
    }

    /// Returns true for an id that connects RC or UC QPs of the RoCE device.
    pub(crate) fn is_rc(&self) -> bool {
        matches!(self.service, Service::Rc(_))
    }

    /// Returns the kind of device of the id.
    pub(crate) fn device_kind(&self) -> DeviceKind {
        self.service.device()
    }

    /// Returns the device of the id. It does not change after the id has a local address.
    ///
    /// # Errors
    ///
    /// The errors of [`device_with`].
    pub(crate) fn adapter(&self) -> Result<Arc<Adapter>, Errno> {
        if let Some(adapter) = self.adapter.get() {
            return Ok(adapter.clone());
        }
        let source = self.state.lock().source.map(|source| source.ip());
        let source = source.filter(|ip| !ip.is_unspecified());
        let found = device_with(&self.device, self.device_kind(), source)?;
        Ok(if source.is_some() { self.adapter.get_or_init(|| found).clone() } else { found })
    }

    /// Returns true if the id has a local address of this device.
    pub(super) fn is_bound_to(&self, device: &Arc<Adapter>) -> bool {
        self.adapter.get().is_some_and(|own| Arc::ptr_eq(own, device))
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
        if self.service != Service::Iwarp {
            return;
        }
        if is_asked {
            // Some servers post their first Sends before they accept.
            qp.allow_sends();
        }
        if let Some(timeout) = timeout {
            qp.states.lock().timeout = timeout;
        }
    }

    /// Sets the acknowledgement timeout of its QP (`RDMA_OPTION_ID_ACK_TIMEOUT`). An RC QP applies
    /// it at the transition to RTS; an iWARP QP only reports it.
    pub(crate) fn set_ack_timeout(&self, timeout: u8) {
        let own_qp = {
            let mut state = self.state.lock();
            state.ack_timeout = Some(timeout);
            state.own_qp.filter(|_| self.service == Service::Iwarp)
        };
        if let Some(qp) = own_qp.and_then(|qp| self.find_qp(qp)) {
            qp.states.lock().timeout = timeout;
        }
    }

    /// Sets data to send before the private data of the connection request.
    pub(crate) fn set_connect_data(&self, data: &[u8]) {
        self.state.lock().connect_data = data.to_vec();
    }

    /// Allows the id to share its address with other ids until it listens
    /// (`RDMA_OPTION_ID_REUSEADDR`).
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

    /// Evaluates the fault rules of a call that concerns the id. Must not be called while the state
    /// is locked.
    pub(super) fn admit_call(&self, function: Function) -> Result<(), Errno> {
        self.device.admit(function.of(CallObject::of_peer(self.addresses().1)))
    }

    /// Returns true if events of the id wait to be fetched.
    pub(crate) fn has_events(&self) -> bool {
        self.channel.lock().as_ref().is_some_and(|channel| channel.has(self))
    }

    /// Queues an event.
    pub(crate) fn push(self: &Arc<Self>, kind: c::rdma_cm_event_type, status: i32) {
        self.push_event(CmEvent::new(self, kind, status));
    }

    /// Queues an event, unless a fault rule loses it. A repeated event is acknowledged like any
    /// other. May call the daemon.
    pub(super) fn push_event(&self, arrived: CmEvent) {
        let kind = arrived.kind;
        let peer = arrived.addresses.map(|ends| ends.peer).or(self.addresses().1);
        let times = self.device.context.times_queued(LibraryCall::CmEvent { kind, peer });
        let again = if times > 1 { arrived.repeated() } else { None };
        // The channel must not be locked while a lost request is rejected.
        let queued = (times > 0).then_some(arrived);
        if let Some(channel) = &*self.channel.lock() {
            queued.into_iter().chain(again).for_each(|arrived| channel.push(arrived));
        }
    }
}

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

    /// Returns `EINVAL` unless the phase is one of `phases`.
    pub(super) fn expect(&self, phases: &[Phase]) -> Result<(), Errno> {
        if phases.contains(&self.phase) {
            return Ok(());
        }
        let phase = self.phase;
        let wanted: Vec<_> = phases.iter().map(|wanted| format!("{wanted:?}")).collect();
        Err(invalid!("the id is in phase {phase:?}, and must be in phase {}", wanted.join(" or ")))
    }
}

/// An event channel.
pub(crate) struct EventChannel {
    device: Arc<Device>,
    queue: EventQueue<CmEvent>,
}

impl Body for Arc<EventChannel> {
    type Head = c::rdma_event_channel;
    const KIND: Kind = Kind::EventChannel;
}

impl EventChannel {
    pub(crate) fn create(device: Arc<Device>) -> Result<Arc<EventChannel>, Errno> {
        Ok(Arc::new(EventChannel { device, queue: EventQueue::new()? }))
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.queue.fd()
    }

    pub(super) fn push(&self, arrived: CmEvent) {
        self.queue.push(arrived);
    }

    /// Returns the next event. Waits for it unless the descriptor is non-blocking.
    ///
    /// # Errors
    ///
    /// That of a fault rule, and those of `read(2)`.
    pub(crate) fn next(&self) -> Result<CmEvent, Errno> {
        self.device.admit(LibraryCall::GetCmEvent)?;
        Ok(self.queue.next(|arrived| arrived.id.unacknowledged.handed_out())?)
    }

    /// Returns true if an event of the id waits to be fetched.
    pub(super) fn has(&self, id: &IdBody) -> bool {
        self.queue.count(|arrived| std::ptr::eq(&*arrived.id, id)) > 0
    }

    /// Returns the number of connection requests of a listener that wait to be fetched.
    pub(super) fn requests(&self, listener: &IdBody) -> usize {
        let asks = |a: &CmEvent| a.request.is_some() && std::ptr::eq(&*a.id, listener);
        self.queue.count(asks)
    }

    /// Removes and returns the events of an id that wait to be fetched.
    pub(super) fn take_back(&self, id: &IdBody) -> Vec<CmEvent> {
        self.queue.take_back(|arrived| std::ptr::eq(&*arrived.id, id))
    }
}

/// An event (`rdma_get_cm_event(3)`).
pub(crate) struct CmEvent {
    /// The id of the event, or the listener of a connection request.
    pub(crate) id: Arc<IdBody>,
    pub(crate) kind: c::rdma_cm_event_type,
    /// 0, a negative `errno(3)` number, or a positive number of the peer: the SIDR status of a
    /// failed UD lookup, or the reason for which it rejects the connection of an RC or UC QP.
    pub(crate) status: i32,
    pub(crate) connection: Option<Parameters>,
    /// The addresses of both ends, if known.
    pub(crate) addresses: Option<AddressPair>,
    /// The connection request.
    pub(crate) request: Option<ConnectionRequest>,
}

/// Parameters of a connection, or the result of a UD lookup.
#[derive(Clone, Default)]
pub(crate) struct Parameters {
    pub(crate) private_data: Vec<u8>,
    /// Maximum number of outstanding Reads from the peer.
    pub(crate) inbound: u16,
    /// Maximum number of outstanding Reads to the peer.
    pub(crate) outbound: u16,
    /// The queue pair, if known.
    pub(crate) qp: Option<QpId>,
    /// Destination of datagrams, for an id of `RDMA_PS_UDP`.
    pub(crate) address: Option<DatagramAddress>,
    /// The peer's parameters, for a connection of an RC or UC QP.
    pub(crate) rc_peer: Option<RcPeer>,
}

impl CmEvent {
    /// Returns the same event again. `None` for a connection request, which creates one id.
    fn repeated(&self) -> Option<Self> {
        let CmEvent { ref id, kind, status, ref connection, addresses, ref request } = *self;
        let connection = connection.clone();
        let id = id.clone();
        let again = CmEvent { id, kind, status, connection, addresses, request: None };
        request.is_none().then_some(again)
    }

    pub(super) fn new(id: &Arc<IdBody>, kind: c::rdma_cm_event_type, status: i32) -> Self {
        CmEvent { id: id.clone(), kind, status, connection: None, addresses: None, request: None }
    }
}

/// Parameters of a connection, given by the program (`struct rdma_conn_param`).
#[derive(Clone, Debug)]
pub(crate) struct ConnectParams {
    pub(crate) private_data: Vec<u8>,
    /// Maximum number of outstanding Reads from the peer; `None` for the device's maximum.
    pub(crate) inbound: Option<u16>,
    /// Maximum number of outstanding Reads to the peer; `None` for the device's maximum.
    pub(crate) outbound: Option<u16>,
    /// A QP that the program created without the id. Used if the id has none.
    pub(crate) qp: Option<QpId>,
    /// Retries after an ACK timeout. Only for RC QPs, like the following parameters.
    pub(crate) retry_count: u8,
    /// Retries of the peer after an RNR NAK.
    pub(crate) rnr_retry: u8,
    /// `qp` has an SRQ.
    pub(crate) srq: bool,
}

/// Parameters of a call without a `struct rdma_conn_param`. The retry counts are librdmacm's.
impl Default for ConnectParams {
    fn default() -> Self {
        ConnectParams {
            private_data: Vec::new(),
            inbound: None,
            outbound: None,
            qp: None,
            retry_count: 7,
            rnr_retry: 7,
            srq: false,
        }
    }
}

/// Time after which a refusal is reported.
const RETRY_GRACE: Duration = Duration::from_millis(500);
/// Pause before the next attempt.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// A connection attempt and its deadline.
#[derive(Clone)]
pub(super) struct Attempt {
    pub(super) wanted: ConnectParams,
    until: Instant,
}

impl Attempt {
    pub(super) fn new(wanted: &ConnectParams) -> Self {
        Attempt { wanted: wanted.clone(), until: Instant::now() + RETRY_GRACE }
    }

    /// Returns true if it is too early to report a refusal.
    pub(super) fn can_retry(&self) -> bool {
        Instant::now() + RETRY_PAUSE < self.until
    }
}
