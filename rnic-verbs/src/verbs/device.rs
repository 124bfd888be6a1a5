//! One session with the daemon, its devices, and all objects created with it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, RwLock};
use rnic_client::{CompletionChannel, Context, CqId, DeviceAttributes, LibraryCall, QpId, SrqId};
use rustix::net::{Shutdown, shutdown};

use crate::errno::Errno;
use crate::memory::regions::Regions;
use crate::verbs::adapter::Adapter;
use crate::verbs::async_events::{AsyncEvent, AsyncEvents};
use crate::verbs::device_table::{DeviceTable, Tables};
use crate::verbs::registry::{AnyCq, AnyQp, AnySrq, ConnectionManager};
use crate::{c, system};

/// A session with the daemon, and the objects created with it.
pub(crate) struct Device {
    /// Process that opened the device.
    owner: u32,
    pub(crate) context: Context,
    pub(crate) attributes: DeviceAttributes,
    /// The devices of the daemon, and removed devices that were in use when last listed.
    adapters: Mutex<Vec<Arc<Adapter>>>,
    contexts: Mutex<Vec<(Weak<AsyncEvents>, Arc<Adapter>)>>,
    /// Completion channels with the devices of their contexts.
    channels: Mutex<Vec<(Weak<CompletionChannel>, Arc<Adapter>)>>,
    /// The channel of CQs without a channel, see [`silent_channel`](Self::silent_channel).
    silent: Mutex<Option<CompletionChannel>>,
    table: DeviceTable,
    /// Number of address handles.
    pub(crate) ahs: AtomicU32,
    pub(crate) cqs: RwLock<HashMap<CqId, Arc<dyn AnyCq>>>,
    pub(crate) qps: RwLock<HashMap<QpId, Arc<dyn AnyQp>>>,
    pub(crate) srqs: RwLock<HashMap<SrqId, Arc<dyn AnySrq>>>,
    pub(crate) connections: OnceLock<Box<dyn ConnectionManager>>,
    pub(crate) regions: Regions,
}

impl Device {
    /// Opens a session with the daemon.
    pub(crate) fn connect() -> Result<Device, Errno> {
        let context = Context::open()?;
        let attributes = context.device_unruled()?;
        Ok(Device {
            owner: std::process::id(),
            context,
            attributes,
            adapters: Mutex::default(),
            contexts: Mutex::default(),
            channels: Mutex::default(),
            silent: Mutex::default(),
            table: DeviceTable::default(),
            ahs: AtomicU32::new(0),
            cqs: RwLock::default(),
            qps: RwLock::default(),
            srqs: RwLock::default(),
            connections: OnceLock::new(),
            regions: Regions::default(),
        })
    }

    /// Returns true if this process opened the device.
    pub(crate) fn is_ours(&self) -> bool {
        self.owner == std::process::id()
    }

    /// Returns true if this process opened the device and the daemon is alive.
    pub(crate) fn is_usable(&self) -> bool {
        self.is_ours() && self.context.is_alive()
    }

    /// Returns the daemon's tables of devices and GIDs.
    pub(crate) fn tables(&self) -> Result<Arc<Tables>, Errno> {
        self.table.tables(&self.context)
    }

    /// Returns the devices of the daemon: the RoCE devices, then the iWARP device.
    pub(crate) fn adapters(&self) -> Result<Vec<Arc<Adapter>>, Errno> {
        let tables = self.tables()?;
        let mut known = self.adapters.lock();
        let listed = tables.devices.iter().map(|row| {
            if let Some(adapter) = known.iter().find(|adapter| adapter.is(row)) {
                return adapter.clone();
            }
            let adapter = Adapter::new(row.clone(), &self.attributes);
            known.push(adapter.clone());
            adapter
        });
        let listed: Vec<_> = listed.collect();
        // The other devices are removed. A context, a list or an id may still use them.
        known.retain(|adapter| Arc::strong_count(adapter) > 1);
        Ok(listed)
    }

    /// Returns the device with this C structure.
    pub(crate) fn adapter_of(&self, head: *const c::ibv_device) -> Option<Arc<Adapter>> {
        self.adapters.lock().iter().find(|adapter| std::ptr::eq(adapter.head().0, head)).cloned()
    }

    /// Returns the channel of all CQs that the program creates without a channel. These CQs are
    /// never armed, so the channel gets no events. A channel for each CQ would count towards
    /// `limits.session.channels` and cost the program a descriptor.
    pub(crate) fn silent_channel(&self) -> Result<CompletionChannel, Errno> {
        let mut silent = self.silent.lock();
        if let Some(channel) = &*silent {
            return Ok(channel.clone());
        }
        let channel = self.context.create_completion_channel()?;
        Ok(silent.insert(channel).clone())
    }

    /// Returns the GID of the iWARP device: an address of this host, IPv4 addresses mapped to IPv6
    /// (RFC 4291 section 2.5.5.2).
    pub(crate) fn gid(&self) -> c::ibv_gid {
        let address = match crate::net::own_address() {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        c::ibv_gid { raw: address.octets() }
    }

    /// Evaluates the fault rules of a call. Must precede its effects and waits. Without a daemon a
    /// call has no rules.
    ///
    /// # Errors
    ///
    /// The error number of a rule that fails the call.
    pub(crate) fn admit(&self, call: LibraryCall) -> Result<(), Errno> {
        // A cancelled thread would leave the request without its reply.
        let _guard = system::uncancelled();
        self.context.admit(call)?;
        Ok(())
    }

    /// Returns connection management, if the program uses it.
    pub(crate) fn connections(&self) -> Option<&dyn ConnectionManager> {
        self.connections.get().map(|connections| &**connections)
    }

    /// Queues an asynchronous event of a CQ, unless it is destroyed.
    pub(crate) fn push_cq_event(&self, cq: CqId, kind: c::ibv_event_type) {
        if let Some(cq) = self.cqs.read().get(&cq) {
            cq.push_event(kind);
        }
    }

    /// Queues an asynchronous event of an SRQ, unless it is destroyed.
    pub(crate) fn push_srq_event(&self, srq: SrqId, kind: c::ibv_event_type) {
        if let Some(srq) = self.srqs.read().get(&srq) {
            srq.push_event(kind);
        }
    }

    /// Queues an asynchronous event of a QP, unless it is destroyed.
    pub(crate) fn push_qp_event(&self, qp: QpId, kind: c::ibv_event_type) {
        if let Some(qp) = self.qps.read().get(&qp) {
            qp.push_event(kind);
        }
    }

    /// Registers the event queue of a new context.
    pub(crate) fn opened(&self, events: &Arc<AsyncEvents>, adapter: &Arc<Adapter>) {
        let mut contexts = self.contexts.lock();
        contexts.retain(|(events, _)| events.strong_count() > 0);
        contexts.push((Arc::downgrade(events), adapter.clone()));
    }

    /// Returns the event queues of all contexts with their devices.
    fn event_queues(&self) -> Vec<(Arc<AsyncEvents>, Arc<Adapter>)> {
        let contexts = self.contexts.lock();
        let live =
            contexts.iter().map(|(events, adapter)| Some((events.upgrade()?, adapter.clone())));
        live.flatten().collect()
    }

    /// Queues an event of a device or its port for the contexts of that device.
    pub(crate) fn push_device_event(&self, name: &str, kind: c::ibv_event_type) {
        // The state of the port may have changed.
        self.tables_changed();
        for (events, adapter) in self.event_queues() {
            if adapter.name() == name && !adapter.is_unplugged() {
                events.push(match kind {
                    c::IBV_EVENT_DEVICE_FATAL => AsyncEvent::of_device(kind),
                    _ => AsyncEvent::of_port(PORT, kind),
                });
            }
        }
    }

    /// Registers a new completion channel.
    pub(crate) fn created_channel(&self, of: &Arc<CompletionChannel>, adapter: &Arc<Adapter>) {
        let mut channels = self.channels.lock();
        channels.retain(|(channel, _)| channel.strong_count() > 0);
        channels.push((Arc::downgrade(of), adapter.clone()));
        drop(channels);
        if adapter.is_unplugged() {
            // The device was unplugged in the meantime. The channel may have been registered too
            // late to be closed with the others.
            end_channel(of);
        }
    }

    /// Handles the removal of a device from the running system: its contexts get
    /// `IBV_EVENT_DEVICE_FATAL`, and then no more events. Returns all devices with this name that
    /// the program has used. There are several if an administrator has removed a device and added
    /// another one with its name.
    pub(crate) fn unplugged(&self, name: &str) -> Vec<Arc<Adapter>> {
        self.tables_changed();
        let is_it = |adapter: &&Arc<Adapter>| adapter.name() == name && !adapter.is_unplugged();
        let gone: Vec<_> = self.adapters.lock().iter().filter(is_it).cloned().collect();
        gone.iter().for_each(|adapter| self.close_contexts(adapter));
        gone
    }

    /// Ends the events of the contexts of a device that was unplugged.
    fn close_contexts(&self, adapter: &Arc<Adapter>) {
        adapter.unplug();
        for (events, _) in self.event_queues().iter().filter(|(_, of)| Arc::ptr_eq(of, adapter)) {
            events.push(AsyncEvent::of_device(c::IBV_EVENT_DEVICE_FATAL));
            events.close();
        }
        let channels = self.channels.lock();
        for (channel, _) in channels.iter().filter(|(_, of)| Arc::ptr_eq(of, adapter)) {
            if let Some(channel) = channel.upgrade() {
                end_channel(&channel);
            }
        }
    }

    /// Queues `IBV_EVENT_DEVICE_FATAL` for all contexts.
    pub(crate) fn push_device_fatal(&self) {
        for (events, _) in self.event_queues() {
            events.push(AsyncEvent::of_device(c::IBV_EVENT_DEVICE_FATAL));
        }
    }

    /// Handles a possible change of the daemon's devices. The next reader of the tables fetches
    /// them.
    pub(crate) fn tables_changed(&self) {
        self.table.invalidate();
    }

    /// Handles a change of the daemon's GID table. Queues an event for each context whose queue has
    /// no such event, because a program may never fetch its events.
    pub(crate) fn gids_changed(&self) {
        self.tables_changed();
        for (events, adapter) in self.event_queues() {
            if adapter.is_unplugged() {
                continue;
            }
            let event = AsyncEvent::of_port(PORT, c::IBV_EVENT_GID_CHANGE);
            events.push_unless(event, |waiting| waiting.kind == c::IBV_EVENT_GID_CHANGE);
        }
    }
}

/// Shuts down a completion channel, so that its readers fail.
fn end_channel(channel: &CompletionChannel) {
    // Fails if the daemon is gone, and then the readers fail too.
    let _ = shutdown(channel, Shutdown::Read);
}

impl Drop for Device {
    fn drop(&mut self) {
        // Ends the event thread, which keeps the session open.
        if self.is_ours() {
            self.context.end_events();
        }
    }
}

/// Number of the device's only port.
pub(crate) const PORT: u8 = 1;

/// Number of completion vectors of the device.
pub(crate) const VECTORS: u32 = 1;
