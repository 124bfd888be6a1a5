//! Connection management (`rdma_cm(7)`): ids, their event channels, and what the daemon's events
//! mean to them.
//!
//! An id is an [`IdBody`]. What happens to it is queued on its [`EventChannel`] and takes effect on
//! the structure of C when the program fetches the event: the thread that brings events never
//! touches what the program reads.
//!
//! Ids of `RDMA_PS_UDP` are of the device that has queue pairs of datagrams. Nothing is connected:
//! `rdma_connect(3)` asks which queue pair serves the peer's port.

mod addrinfo;
mod arrived;
mod channel;
mod connect;
mod id;
mod listen;
mod lookup;
mod port;
mod resolve;
mod retry;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rnic_client::{DatagramAddress, Event, Gid, Listener, ListenerId, QpId};

use crate::c;
use crate::device::{Device, DeviceKind};
use crate::errno::Errno;

pub(crate) use addrinfo::{Hints, look_up};
pub(crate) use arrived::{Arrived, Parameters};
pub(crate) use channel::EventChannel;
pub(crate) use connect::ConnectWanted;
pub(crate) use id::{IdBody, Phase};
use lookup::Lookups;
pub(crate) use retry::Retries;

/// How long a connection that ends may take to send what was posted. RNICs flush it at once, so
/// programs wait for what matters to them before they disconnect; but some count on the order of
/// their messages, and peers may be slow to take them. Programs that wait for the end are seldom
/// patient for longer than some seconds.
const LAST_SENDS: Duration = Duration::from_millis(500);

/// Ids by what the daemon's events name.
#[derive(Default)]
pub(crate) struct Ids {
    by_qp: Mutex<HashMap<QpId, Holder>>,
    by_listener: Mutex<HashMap<ListenerId, Arc<IdBody>>>,
    /// Bound addresses that other ids may share.
    reusable: Mutex<Vec<Reusable>>,
    /// Ids that have a peer's address, and with it a source port, by where they are in memory.
    sources: Mutex<HashMap<usize, Weak<IdBody>>>,
    /// Held while an event of the daemon takes effect: an id changes its phase and gets its event
    /// in one step. True once the daemon has dropped events.
    delivery: Mutex<bool>,
    /// An event has taken effect, or a QP is gone.
    delivered: Condvar,
    pub(crate) retries: Retries,
    lookups: Lookups,
    /// How often `rdma_init_qp_attr(3)` has returned attributes for the step to RTR, less the steps
    /// that QPs have made with them. An id that knows its QP is not counted.
    given_attributes: AtomicUsize,
}

/// The id that gets the events of a QP.
struct Holder {
    id: Arc<IdBody>,
    /// Its connection, or its attempt to connect, has ended: another id may take the QP.
    has_ended: bool,
}

/// A bound address that other ids of the program may share.
struct Reusable {
    kind: DeviceKind,
    /// Only with `RDMA_OPTION_ID_REUSEADDR`. Without, undecided requests alone keep it open.
    by_option: bool,
    listener: Weak<Listener>,
}

impl Ids {
    /// Gives the events of a QP to an id.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the QP has the connection of another id.
    fn claim_qp(&self, qp: QpId, id: &Arc<IdBody>) -> Result<(), Errno> {
        let mut by_qp = self.by_qp.lock();
        if by_qp.get(&qp).is_some_and(|held| !held.has_ended && !Arc::ptr_eq(&held.id, id)) {
            return Err(Errno::invalid(format_args!("QP {qp} has the connection of another id")));
        }
        by_qp.insert(qp, Holder { id: id.clone(), has_ended: false });
        Ok(())
    }

    /// Lets another id take a QP whose connection has ended, or did not come about.
    fn release_qp(&self, qp: QpId, id: &IdBody) {
        let mut by_qp = self.by_qp.lock();
        if let Some(held) = by_qp.get_mut(&qp).filter(|held| std::ptr::eq(&*held.id, id)) {
            held.has_ended = true;
        }
    }

    /// Takes the events of a QP from an id, if it gets them.
    fn forget_qp(&self, qp: QpId, id: &IdBody) {
        let mut by_qp = self.by_qp.lock();
        if by_qp.get(&qp).is_some_and(|held| std::ptr::eq(&*held.id, id)) {
            by_qp.remove(&qp);
        }
    }

    /// A queue pair is being destroyed, and with it its connection.
    pub(crate) fn qp_destroyed(&self, qp: QpId) {
        let held = self.by_qp.lock().remove(&qp);
        if let Some(held) = held {
            held.id.loses_connection(qp);
        }
        self.wake_pollers();
    }

    /// Waits until the connection of a QP is no longer being made: its `RDMA_CM_EVENT_ESTABLISHED`
    /// can be read then. Call it for a QP with a completion that only an established connection can
    /// have: the daemon has sent the event before that, so the wait ends.
    pub(crate) fn await_established(&self, qp: QpId) {
        let connecting = |id: Arc<IdBody>| id.phase() == Phase::Connecting;
        let mut events_lost = self.delivery.lock();
        while !*events_lost && self.of_qp(qp).is_some_and(connecting) {
            self.delivered.wait(&mut events_lost);
        }
    }

    /// Lets threads in [`await_established`](Self::await_established) look again. Not for the
    /// thread that delivers events.
    fn wake_pollers(&self) {
        drop(self.delivery.lock());
        self.delivered.notify_all();
    }

    /// The daemon has dropped events, possibly one that a thread waits for.
    pub(crate) fn events_lost(&self) {
        *self.delivery.lock() = true;
        self.delivered.notify_all();
    }

    /// Notes that a program moves one QP of its own to RTR by the attributes of an id
    /// (`rdma_init_qp_attr(3)`). Which QP that is becomes known when the id connects.
    pub(crate) fn gives_attributes(&self) {
        self.given_attributes.fetch_add(1, Ordering::Relaxed);
    }

    /// A QP that has no id yet makes the step. Returns false if all attributes are used up.
    pub(crate) fn take_attributes(&self) -> bool {
        let less = |given: usize| given.checked_sub(1);
        self.given_attributes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    /// Returns true if this QP has the connection of an id, or is about to get one.
    pub(crate) fn have_qp(&self, qp: QpId) -> bool {
        self.by_qp.lock().contains_key(&qp)
    }

    /// Events of this listener are for this id from now on, unless they are for another one.
    fn listens(&self, listener: ListenerId, id: &Arc<IdBody>) -> Result<(), Errno> {
        match self.by_listener.lock().entry(listener) {
            Entry::Vacant(free) => {
                free.insert(id.clone());
                Ok(())
            }
            Entry::Occupied(_) => {
                let reason = format_args!("another id with RDMA_OPTION_ID_REUSEADDR listens here");
                Err(Errno::new(libc::EADDRINUSE, reason))
            }
        }
    }

    /// Other ids of the program may share this address while none listens.
    fn may_be_reused(&self, kind: DeviceKind, by_option: bool, listener: &Arc<Listener>) {
        let mut reusable = self.reusable.lock();
        reusable.retain(|one| one.listener.strong_count() > 0);
        reusable.push(Reusable { kind, by_option, listener: Arc::downgrade(listener) });
    }

    /// The bound address that an id shares.
    fn reusable(
        &self,
        kind: DeviceKind,
        by_option: bool,
        address: SocketAddr,
    ) -> Option<Arc<Listener>> {
        let mut reusable = self.reusable.lock();
        let at = reusable.iter().position(|one| {
            let is_free =
                |l: Arc<Listener>| l.local_addr() == address && self.of_listener(l.id()).is_none();
            let may_be = one.kind == kind && (by_option || !one.by_option);
            may_be && one.listener.upgrade().is_some_and(is_free)
        })?;
        if reusable[at].by_option {
            return reusable[at].listener.upgrade();
        }
        // For one id.
        reusable.swap_remove(at).listener.upgrade()
    }

    /// Keeps the source port of an id until it is destroyed.
    fn keep_source(&self, id: &Arc<IdBody>) {
        self.sources.lock().insert(Arc::as_ptr(id).addr(), Arc::downgrade(id));
    }

    fn forget_source(&self, id: &IdBody) {
        self.sources.lock().remove(&std::ptr::from_ref(id).addr());
    }

    /// Refuses an address at the source port of another id of this program, as the kernel does for
    /// all programs: the daemon does not know such ports between connections.
    fn check_sources(&self, id: &IdBody, address: SocketAddr) -> Result<(), Errno> {
        if address.port() == 0 {
            return Ok(());
        }
        let ids: Vec<_> = self.sources.lock().values().filter_map(Weak::upgrade).collect();
        let reuses = id.reuses_address();
        let mut others =
            ids.iter().filter(|of| !std::ptr::eq(&***of, id) && of.kind() == id.kind());
        others.try_for_each(|of| {
            let Some(source) = of.source_beside(reuses).filter(|s| s.port() == address.port())
            else {
                return Ok(());
            };
            let number = match address.ip() {
                ip if ip == source.ip() => libc::EADDRINUSE,
                ip if ip.is_unspecified() && ip.is_ipv4() == source.is_ipv4() => {
                    libc::EADDRNOTAVAIL
                }
                _ => return Ok(()),
            };
            Err(Errno::new(number, format_args!("another id connects from {source}")))
        })
    }

    fn forget_listener(&self, listener: ListenerId) {
        self.by_listener.lock().remove(&listener);
    }

    fn of_qp(&self, qp: QpId) -> Option<Arc<IdBody>> {
        self.by_qp.lock().get(&qp).map(|held| held.id.clone())
    }

    fn of_listener(&self, listener: ListenerId) -> Option<Arc<IdBody>> {
        self.by_listener.lock().get(&listener).cloned()
    }
}

/// Tells an id what has happened to its listener or its queue pair.
pub(crate) fn deliver(device: &Device, event: Event) {
    let whole = device.ids.delivery.lock();
    take_effect(device, event);
    drop(whole);
    device.ids.delivered.notify_all();
}

fn take_effect(device: &Device, event: Event) {
    match event {
        Event::ConnectionRequest { listener, .. } => {
            let id = device.ids.of_listener(listener);
            // Without a listener it is dropped, and so rejected on the wire.
            if let (Ok(request), Some(id)) = (device.context.connection_request(event), id) {
                id.asked(request);
            }
        }
        // poll(2) may have announced the request, so its event stays. Accepting or rejecting it
        // fails with ECONNRESET.
        Event::RequestWithdrawn { .. } => {}
        Event::Established { qp, addresses, ird, ord, private_data, .. } => {
            if let Some(id) = device.ids.of_qp(qp) {
                let qp = Some(qp);
                let (inbound, outbound) = (ird, ord);
                let connection =
                    Parameters { private_data, inbound, outbound, qp, ..Parameters::default() };
                id.established(addresses, connection);
            }
        }
        Event::Resolved { qp, addresses, source, remote_qp, q_key, private_data, .. } => {
            if let Some(id) = device.ids.of_qp(qp) {
                let gid = Gid::from(addresses.peer.ip());
                let address = Some(DatagramAddress { source, gid, qp: remote_qp, q_key });
                let found = Parameters { private_data, address, ..Parameters::default() };
                id.resolved(addresses, found);
            }
        }
        Event::Rejected { qp, private_data, .. } => {
            if let Some(id) = device.ids.of_qp(qp) {
                id.rejected(qp, private_data);
            }
        }
        Event::Unreachable { qp, errno, reason, .. } => {
            if let Some(id) = device.ids.of_qp(qp) {
                id.unreachable(i32::from(errno), &reason);
            }
        }
        Event::PeerClosed { qp, .. } | Event::PeerClosing { qp, .. } => {
            if let Some(id) = device.ids.of_qp(qp) {
                id.peer_closed();
            }
        }
        Event::Disconnected { qp, reason, .. } => {
            if let Some(id) = device.ids.of_qp(qp) {
                id.disconnected(&reason.to_string());
            }
        }
        Event::QpFatal { qp, reason, .. } => {
            if let Some(id) = device.ids.of_qp(qp) {
                id.fatal(&reason);
            }
        }
        _ => {}
    }
}

/// The daemon is gone: no connection is left.
pub(crate) fn lost(device: &Device) {
    device.ids.events_lost();
    let connected: Vec<_> = device.ids.by_qp.lock().values().map(|held| held.id.clone()).collect();
    connected.iter().for_each(|id| id.disconnected("the daemon is gone"));
    let listening: Vec<_> = device.ids.by_listener.lock().values().cloned().collect();
    listening.iter().for_each(|id| id.push(c::RDMA_CM_EVENT_DEVICE_REMOVAL, 0));
}
