//! The ids of a session.

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rnic_client::{Context, DatagramAddress, Event, Gid, Listener, ListenerId, QpId};

use super::delays::Delays;
use super::failed_resolutions::FailedResolutions;
use super::lookup::Lookups;
use super::service::Service;
use super::state::{IdBody, Parameters, Phase};
use crate::c;
use crate::errno::Errno;
use crate::verbs::adapter::Adapter;
use crate::verbs::device::Device;
use crate::verbs::registry::ConnectionManager;

/// Ids, by the QP or listener whose events they receive.
#[derive(Default)]
pub(crate) struct Ids {
    by_qp: Mutex<HashMap<QpId, Holder>>,
    by_listener: Mutex<HashMap<ListenerId, Arc<IdBody>>>,
    /// All ids, by their address in memory.
    all: Mutex<HashMap<usize, Weak<IdBody>>>,
    /// Bound addresses that other ids may share.
    reusable: Mutex<Vec<Reusable>>,
    /// Ids that have resolved a peer, and so have a source port, by their address in memory.
    sources: Mutex<HashMap<usize, Weak<IdBody>>>,
    /// Held while an event takes effect, so that an id changes its phase and gets its event
    /// atomically. True once the daemon has dropped events.
    events_lost: Mutex<bool>,
    /// Signals that an event has taken effect, or that a QP was destroyed.
    delivered: Condvar,
    pub(super) delays: Delays,
    pub(super) lookups: Lookups,
    pub(super) failed_resolutions: FailedResolutions,
    /// Number of `rdma_init_qp_attr(3)` calls for the transition to RTR, minus the transitions made
    /// since. Ids with a known QP are not counted.
    rtr_attr_count: AtomicUsize,
}

/// The id that receives the events of a QP.
struct Holder {
    id: Arc<IdBody>,
    /// The connection, or the attempt, has ended: another id may take the QP.
    has_ended: bool,
}

/// A bound address that other ids of the program may share.
struct Reusable {
    service: Service,
    /// If true, only ids with `RDMA_OPTION_ID_REUSEADDR` may share the address. If false, only
    /// pending connection requests keep the address bound, and any id may take it.
    reuse_addr: bool,
    listener: Weak<Listener>,
}

impl Ids {
    /// Returns the ids of a session.
    pub(super) fn of(device: &Device) -> &Ids {
        let connections = device.connections.get_or_init(|| Box::new(Ids::default()));
        let connections: &dyn Any = &**connections;
        connections.downcast_ref().expect("connection management is always an `Ids`")
    }

    /// Routes the events of a QP to an id.
    ///
    /// # Errors
    ///
    /// `EINVAL` if another id is connected or connecting with the QP.
    pub(super) fn claim_qp(&self, qp: QpId, id: &Arc<IdBody>) -> Result<(), Errno> {
        let mut by_qp = self.by_qp.lock();
        if by_qp.get(&qp).is_some_and(|held| !held.has_ended && !Arc::ptr_eq(&held.id, id)) {
            return Err(invalid!("QP {qp} is already used by another id"));
        }
        by_qp.insert(qp, Holder { id: id.clone(), has_ended: false });
        Ok(())
    }

    /// Releases a QP for other ids after its connection or attempt has ended.
    pub(super) fn release_qp(&self, qp: QpId, id: &IdBody) {
        let mut by_qp = self.by_qp.lock();
        if let Some(held) = by_qp.get_mut(&qp).filter(|held| std::ptr::eq(&*held.id, id)) {
            held.has_ended = true;
        }
    }

    /// Stops routing the events of a QP to an id.
    pub(super) fn forget_qp(&self, qp: QpId, id: &IdBody) {
        let mut by_qp = self.by_qp.lock();
        if by_qp.get(&qp).is_some_and(|held| std::ptr::eq(&*held.id, id)) {
            by_qp.remove(&qp);
        }
    }

    /// Wakes the threads in [`await_established`](Self::await_established). Must not be called by
    /// the event thread.
    pub(super) fn wake_pollers(&self) {
        drop(self.events_lost.lock());
        self.delivered.notify_all();
    }

    /// Routes the events of a listener to an id. Fails with `EADDRINUSE` if another id has them.
    pub(super) fn claim_listener(
        &self,
        listener: ListenerId,
        id: &Arc<IdBody>,
    ) -> Result<(), Errno> {
        match self.by_listener.lock().entry(listener) {
            Entry::Vacant(free) => {
                free.insert(id.clone());
                Ok(())
            }
            Entry::Occupied(_) => Err(errno!(
                libc::EADDRINUSE,
                "another id with RDMA_OPTION_ID_REUSEADDR listens on this address"
            )),
        }
    }

    /// Allows other ids of the program to share this address until one of them listens.
    pub(super) fn allow_reuse(&self, service: Service, reuse_addr: bool, listener: &Arc<Listener>) {
        let mut reusable = self.reusable.lock();
        reusable.retain(|one| one.listener.strong_count() > 0);
        reusable.push(Reusable { service, reuse_addr, listener: Arc::downgrade(listener) });
    }

    /// Returns a bound address that an id may share, or `None`.
    pub(super) fn reusable(
        &self,
        service: Service,
        reuse_addr: bool,
        address: SocketAddr,
    ) -> Option<Arc<Listener>> {
        let mut reusable = self.reusable.lock();
        let at = reusable.iter().position(|one| {
            let is_free =
                |l: Arc<Listener>| l.local_addr() == address && self.of_listener(l.id()).is_none();
            let may_be = one.service == service && (reuse_addr || !one.reuse_addr);
            may_be && one.listener.upgrade().is_some_and(is_free)
        })?;
        if reusable[at].reuse_addr {
            return reusable[at].listener.upgrade();
        }
        // Only one id may take the listener.
        reusable.swap_remove(at).listener.upgrade()
    }

    /// Records a new id until it is dropped.
    pub(super) fn keep(&self, id: &Arc<IdBody>) {
        self.all.lock().insert(Arc::as_ptr(id).addr(), Arc::downgrade(id));
    }

    /// Records the source port of an id until the id is destroyed.
    pub(super) fn keep_source(&self, id: &Arc<IdBody>) {
        self.sources.lock().insert(Arc::as_ptr(id).addr(), Arc::downgrade(id));
    }

    pub(super) fn forget_source(&self, id: &IdBody) {
        self.sources.lock().remove(&std::ptr::from_ref(id).addr());
    }

    /// Refuses an address that conflicts with the source port of another id of this program. The
    /// kernel does this for all programs, but the daemon has no record of such ports between
    /// connections.
    pub(super) fn check_sources(&self, id: &IdBody, address: SocketAddr) -> Result<(), Errno> {
        if address.port() == 0 {
            return Ok(());
        }
        let ids: Vec<_> = self.sources.lock().values().filter_map(Weak::upgrade).collect();
        let reuses = id.reuses_address();
        let mut others =
            ids.iter().filter(|of| !std::ptr::eq(&***of, id) && of.service == id.service);
        others.try_for_each(|of| {
            let Some(source) = of.exclusive_source(reuses).filter(|s| s.port() == address.port())
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
            Err(Errno::new(number, format_args!("another id uses the source address {source}")))
        })
    }

    /// Returns true if the listener serves this id.
    pub(super) fn is_served(&self, id: &Arc<IdBody>, by: ListenerId) -> bool {
        self.by_listener.lock().get(&by).is_some_and(|served| Arc::ptr_eq(served, id))
    }

    pub(super) fn forget_listener(&self, listener: ListenerId) {
        self.by_listener.lock().remove(&listener);
    }

    pub(super) fn of_qp(&self, qp: QpId) -> Option<Arc<IdBody>> {
        self.by_qp.lock().get(&qp).map(|held| held.id.clone())
    }

    pub(super) fn of_listener(&self, listener: ListenerId) -> Option<Arc<IdBody>> {
        self.by_listener.lock().get(&listener).cloned()
    }

    /// Handles an event of the daemon.
    fn take_effect(&self, context: &Context, event: Event) {
        match event {
            Event::ConnectionRequest { listener, .. } | Event::RcRequest { listener, .. } => {
                let id = self.of_listener(listener);
                // Without an id the request is dropped, which rejects it.
                if let (Ok(request), Some(id)) = (context.connection_request(event), id) {
                    id.handle_request(request);
                }
            }
            // The request remains, because poll(2) may have announced it. Accepting or rejecting it
            // fails with ECONNRESET.
            Event::RequestWithdrawn { .. } => {}
            Event::Established { qp, addresses, ird, ord, private_data, .. } => {
                if let Some(id) = self.of_qp(qp) {
                    let qp = Some(qp);
                    let connection = Parameters {
                        private_data,
                        inbound: ird,
                        outbound: ord,
                        qp,
                        ..Parameters::default()
                    };
                    id.established(addresses, connection);
                }
            }
            Event::Resolved { qp, addresses, source, remote_qp, q_key, private_data, .. } => {
                if let Some(id) = self.of_qp(qp) {
                    let gid = Gid::from(addresses.peer.ip());
                    let address = Some(DatagramAddress { source, gid, qp: remote_qp, q_key });
                    let found = Parameters { private_data, address, ..Parameters::default() };
                    id.resolved(addresses, found);
                }
            }
            Event::Rejected { qp, private_data, .. } => {
                if let Some(id) = self.of_qp(qp) {
                    id.rejected(qp, private_data);
                }
            }
            Event::RcReply { qp, addresses, peer, private_data, .. } => {
                if let Some(id) = self.of_qp(qp) {
                    id.replied(addresses, peer, private_data);
                }
            }
            Event::RcRejected { qp, reason, private_data, .. } => {
                if let Some(id) = self.of_qp(qp) {
                    id.rc_rejected(reason, private_data);
                }
            }
            Event::Unreachable { qp, errno, reason, .. } => {
                if let Some(id) = self.of_qp(qp) {
                    id.unreachable(i32::from(errno), &reason);
                }
            }
            Event::PeerClosed { qp, .. } | Event::PeerClosing { qp, .. } => {
                if let Some(id) = self.of_qp(qp) {
                    id.peer_closed();
                }
            }
            Event::Disconnected { qp, reason, .. } => {
                if let Some(id) = self.of_qp(qp) {
                    id.disconnected(&reason.to_string());
                }
            }
            Event::QpFatal { qp, reason, .. } => {
                if let Some(id) = self.of_qp(qp) {
                    id.fatal(&reason);
                }
            }
            Event::ResolutionFailed { context, errno } => {
                self.failed_resolutions.failed(context, errno.into());
            }
            _ => {}
        }
    }
}

impl IdBody {
    /// Returns the ids of its session.
    pub(super) fn ids(&self) -> &Ids {
        Ids::of(&self.device)
    }
}

impl Drop for IdBody {
    fn drop(&mut self) {
        self.ids().all.lock().remove(&std::ptr::from_ref(self).addr());
    }
}

impl ConnectionManager for Ids {
    fn await_established(&self, qp: QpId) {
        let connecting = |id: Arc<IdBody>| id.phase() == Phase::Connecting;
        let mut events_lost = self.events_lost.lock();
        while !*events_lost && self.of_qp(qp).is_some_and(connecting) {
            self.delivered.wait(&mut events_lost);
        }
    }

    fn qp_destroyed(&self, qp: QpId) {
        let held = self.by_qp.lock().remove(&qp);
        if let Some(held) = held {
            held.id.connection_lost(qp);
        }
        self.wake_pollers();
    }

    fn holds_qp(&self, qp: QpId) -> bool {
        self.by_qp.lock().contains_key(&qp)
    }

    fn count_rtr_attrs(&self) {
        self.rtr_attr_count.fetch_add(1, Ordering::Relaxed);
    }

    fn uncount_rtr_attrs(&self) -> bool {
        let less = |given: usize| given.checked_sub(1);
        self.rtr_attr_count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    fn deliver(&self, context: &Context, event: Event) {
        let guard = self.events_lost.lock();
        self.take_effect(context, event);
        drop(guard);
        self.delivered.notify_all();
    }

    fn events_lost(&self) {
        *self.events_lost.lock() = true;
        self.failed_resolutions.fail_all();
        self.delivered.notify_all();
    }

    fn daemon_gone(&self) {
        self.events_lost();
        let connected: Vec<_> = self.by_qp.lock().values().map(|held| held.id.clone()).collect();
        connected.iter().for_each(|id| id.daemon_gone());
        let mut bound: Vec<_> = self.by_listener.lock().values().cloned().collect();
        let with_route: Vec<_> = self.sources.lock().values().filter_map(Weak::upgrade).collect();
        let of_roce = connected.into_iter().chain(with_route);
        bound.extend(of_roce.filter(|id| id.service != Service::Iwarp));
        bound.sort_by_key(Arc::as_ptr);
        bound.dedup_by_key(|id| Arc::as_ptr(id));
        bound.iter().for_each(|id| id.push(c::RDMA_CM_EVENT_DEVICE_REMOVAL, 0));
    }

    fn unplugged(&self, device: &Arc<Adapter>) {
        let guard = self.events_lost.lock();
        let ids: Vec<_> = self.all.lock().values().filter_map(Weak::upgrade).collect();
        // As in the kernel, the id of an undecided request has no event: accepting it fails.
        let has_event = |id: &&Arc<IdBody>| id.phase() != Phase::Undecided;
        let bound = ids.iter().filter(|id| id.is_bound_to(device));
        bound.filter(has_event).for_each(|id| id.unplugged());
        drop(guard);
        self.delivered.notify_all();
    }

    fn due_in(&self) -> Option<Duration> {
        self.delays.due_in()
    }

    fn run_due(&self) {
        self.delays.run();
    }
}
