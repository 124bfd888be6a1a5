//! The device: one session with the daemon, and all objects created with it.

use std::collections::HashMap;
use std::ffi::c_char;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, RwLock};
use rnic_client::{CompletionChannel, Context, CqId, DeviceAttributes, QpId, SrqId};

use crate::c;
use crate::errno::Errno;
use crate::ffi::handles::{Foreign, Kind, add, remove, zeroed};
use crate::memory::regions::Regions;
use crate::verbs::async_events::{AsyncEvent, AsyncEvents};
use crate::verbs::gid_table::GidTable;
use crate::verbs::registry::{AnyCq, AnyQp, AnySrq, ConnectionManager};

/// A session with the daemon, and the objects created with it.
pub(crate) struct Device {
    /// Process that opened the device.
    owner: u32,
    pub(crate) context: Context,
    pub(crate) attributes: DeviceAttributes,
    /// The C structures of the two devices, indexed by [`DeviceKind`].
    heads: [Box<DeviceBlock>; 2],
    contexts: Mutex<Vec<Weak<AsyncEvents>>>,
    /// The channel of CQs without a channel, see [`silent_channel`](Self::silent_channel).
    silent: Mutex<Option<CompletionChannel>>,
    /// GID table of the RoCE device.
    pub(crate) gids: GidTable,
    pub(crate) cqs: RwLock<HashMap<CqId, Arc<dyn AnyCq>>>,
    pub(crate) qps: RwLock<HashMap<QpId, Arc<dyn AnyQp>>>,
    pub(crate) srqs: RwLock<HashMap<SrqId, Arc<dyn AnySrq>>>,
    pub(crate) connections: OnceLock<Box<dyn ConnectionManager>>,
    pub(crate) regions: Regions,
    /// Default objects for ids, by device.
    defaults: [Defaults; 2],
}

/// Default objects of one device, for programs that use ids without creating their own. Null until
/// first used.
pub(crate) struct Defaults {
    pub(crate) context: Mutex<Foreign<c::ibv_context>>,
    pub(crate) pd: Mutex<Foreign<c::ibv_pd>>,
}

/// The C structure of a device, followed by padding. Provider libraries recognise their own devices
/// by a pointer at offset 664, after the structure, and read it for any device. The padding makes
/// it readable, and zeros match no provider.
#[repr(C, align(32))]
struct DeviceBlock {
    device: c::ibv_device,
    padding: [u64; 16],
}

// SAFETY: the block holds numbers, characters and null pointers, and is not written after
// construction.
unsafe impl Send for DeviceBlock {}
// SAFETY: as above.
unsafe impl Sync for DeviceBlock {}

impl Device {
    /// Opens a session with the daemon.
    pub(crate) fn connect() -> Result<Device, Errno> {
        let context = Context::open()?;
        let attributes = context.device()?;
        let heads = KINDS.map(|kind| {
            Box::new(DeviceBlock { device: head(&attributes, kind), padding: [0; 16] })
        });
        let device = Device {
            owner: std::process::id(),
            context,
            attributes,
            heads,
            contexts: Mutex::default(),
            silent: Mutex::default(),
            gids: GidTable::default(),
            cqs: RwLock::default(),
            qps: RwLock::default(),
            srqs: RwLock::default(),
            connections: OnceLock::new(),
            regions: Regions::default(),
            defaults: KINDS.map(|_| Defaults {
                context: Mutex::new(Foreign::NULL),
                pd: Mutex::new(Foreign::NULL),
            }),
        };
        KINDS.iter().for_each(|kind| add(Kind::Device, device.head(*kind).0.addr()));
        Ok(device)
    }

    /// Returns true if this process opened the device.
    pub(crate) fn is_ours(&self) -> bool {
        self.owner == std::process::id()
    }

    /// Returns true if this process opened the device and the daemon is alive.
    pub(crate) fn is_usable(&self) -> bool {
        self.is_ours() && self.context.is_alive()
    }

    /// Returns the C structure of a device.
    pub(crate) fn head(&self, kind: DeviceKind) -> Foreign<c::ibv_device> {
        let block = &self.heads[kind as usize];
        Foreign(std::ptr::from_ref(&block.device).cast_mut())
    }

    /// Returns the default objects for ids of a device.
    pub(crate) fn defaults(&self, kind: DeviceKind) -> &Defaults {
        &self.defaults[kind as usize]
    }

    /// Returns the channel of all CQs that the program creates without one. These CQs are never
    /// armed, so it gets no events. A channel for each CQ would count towards
    /// `limits.session.channels` and cost the program a descriptor.
    pub(crate) fn silent_channel(&self) -> Result<CompletionChannel, Errno> {
        let mut silent = self.silent.lock();
        if let Some(channel) = &*silent {
            return Ok(channel.clone());
        }
        let channel = self.context.create_completion_channel()?;
        Ok(silent.insert(channel).clone())
    }

    /// Returns the 64-bit GUID of a device, in network byte order.
    pub(crate) fn guid(&self, kind: DeviceKind) -> u64 {
        let guid = self.attributes.guid;
        match kind {
            DeviceKind::Iwarp => guid.to_be(),
            // Flips the lowest bit, so that the two devices differ.
            DeviceKind::Roce => (guid ^ 1).to_be(),
        }
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
    pub(crate) fn opened(&self, events: &Arc<AsyncEvents>) {
        let mut contexts = self.contexts.lock();
        contexts.retain(|context| context.strong_count() > 0);
        contexts.push(Arc::downgrade(events));
    }

    /// Queues `IBV_EVENT_DEVICE_FATAL` for all contexts.
    pub(crate) fn push_device_fatal(&self) {
        for events in self.contexts.lock().iter().filter_map(Weak::upgrade) {
            events.push(AsyncEvent::of_device(c::IBV_EVENT_DEVICE_FATAL));
        }
    }

    /// Handles a change of the daemon's GID table. Queues an event for each context that does not
    /// have one already: a program may never fetch them.
    pub(crate) fn gids_changed(&self) {
        self.gids.invalidate();
        for events in self.contexts.lock().iter().filter_map(Weak::upgrade) {
            let event = AsyncEvent::of_port(PORT, c::IBV_EVENT_GID_CHANGE);
            events.push_unless(event, |waiting| waiting.kind == c::IBV_EVENT_GID_CHANGE);
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for kind in KINDS {
            remove(Kind::Device, self.head(kind).0.addr());
        }
        // Ends the event thread, which keeps the session open.
        if self.is_ours() {
            self.context.end_events();
        }
    }
}

fn head(attributes: &DeviceAttributes, kind: DeviceKind) -> c::ibv_device {
    let mut device: c::ibv_device = zeroed();
    // The file names follow the kernel's `uverbs` devices.
    let (node, transport, name, file) = match kind {
        DeviceKind::Iwarp => {
            (c::IBV_NODE_RNIC, c::IBV_TRANSPORT_IWARP, &attributes.name, "uverbs0")
        }
        DeviceKind::Roce => {
            (c::IBV_NODE_CA, c::IBV_TRANSPORT_IB, &attributes.wired_name, "uverbs1")
        }
    };
    device.node_type = node;
    device.transport_type = transport;
    copy_name(&mut device.name, name);
    copy_name(&mut device.dev_name, file);
    let tree = if attributes.tree.is_empty() { "/sys" } else { &attributes.tree };
    copy_name(&mut device.dev_path, &format!("{tree}/class/infiniband_verbs/{file}"));
    copy_name(&mut device.ibdev_path, &format!("{tree}/class/infiniband/{name}"));
    device
}

/// The two devices of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    /// The iWARP device, with QPs that connect.
    Iwarp,
    /// The RoCE device, with RC, UC and UD QPs.
    Roce,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceKind::Iwarp => "iWARP",
            DeviceKind::Roce => "RoCE",
        })
    }
}

/// Number of the device's only port.
pub(crate) const PORT: u8 = 1;

/// Number of completion vectors of the device.
pub(crate) const VECTORS: u32 = 1;

/// Both devices, in the order of their indices.
pub(crate) const KINDS: [DeviceKind; 2] = [DeviceKind::Iwarp, DeviceKind::Roce];

/// Copies a name into a C field. Truncates it if necessary, so that a zero byte ends it.
pub(crate) fn copy_name(field: &mut [c_char], name: &str) {
    let bytes = name.bytes().take(field.len().saturating_sub(1));
    for (to, from) in field.iter_mut().zip(bytes) {
        *to = from as c_char;
    }
}
