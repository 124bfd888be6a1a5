//! The device of this process: one session with the daemon, and everything that it has been told
//! to make.
//!
//! It lives as long as anything of it does: a device list, a context, an event channel, an id. A
//! child made by `fork` starts without one, and leaves its parent's alone.

use std::collections::HashMap;
use std::ffi::c_char;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use rnic_client::{CompletionChannel, Context, CqId, DeviceAttributes, QpId, SrqId};

use crate::async_events::{AsyncEvent, AsyncEvents};
use crate::c;
use crate::cm;
use crate::cq::CqBody;
use crate::errno::Errno;
use crate::gid_table::GidTable;
use crate::memory::regions::Regions;
use crate::object::{Foreign, Kind, add, remove, zeroed};
use crate::qp::QpBody;
use crate::srq::SrqBody;

/// A session, and what was made with it.
pub(crate) struct Device {
    /// Process that opened it.
    owner: u32,
    pub(crate) context: Context,
    pub(crate) attributes: DeviceAttributes,
    /// What C sees of its two devices, each in a block that other providers' libraries may look
    /// behind: the one whose queue pairs connect, and the one whose queue pairs are wired by hand.
    heads: [Box<DeviceBlock>; 2],
    contexts: Mutex<Vec<Weak<AsyncEvents>>>,
    /// See [`silent_channel`](Self::silent_channel).
    silent: Mutex<Option<CompletionChannel>>,
    /// Of the RoCE device.
    pub(crate) gids: GidTable,
    pub(crate) cqs: RwLock<HashMap<CqId, Arc<CqBody>>>,
    pub(crate) qps: RwLock<HashMap<QpId, Arc<QpBody>>>,
    pub(crate) srqs: RwLock<HashMap<SrqId, Arc<SrqBody>>>,
    pub(crate) ids: cm::Ids,
    pub(crate) regions: Regions,
    /// What ids bring along for programs that bring nothing, by device; null until one is asked
    /// for.
    brought: [Brought; 2],
}

/// What ids of one of the devices bring along.
pub(crate) struct Brought {
    pub(crate) context: Mutex<Foreign<c::ibv_context>>,
    pub(crate) pd: Mutex<Foreign<c::ibv_pd>>,
}

/// Providers of real devices recognise their own by a pointer behind the structure, 664 bytes from
/// its start, which they read of any device: it must be there and be none of theirs.
#[repr(C, align(32))]
struct DeviceBlock {
    device: c::ibv_device,
    behind: [u64; 16],
}

// SAFETY: the block holds numbers, characters and null pointers, and nobody writes it after it has
// been made.
unsafe impl Send for DeviceBlock {}
// SAFETY: as above.
unsafe impl Sync for DeviceBlock {}

static CURRENT: Mutex<Option<(u32, Weak<Device>)>> = Mutex::new(None);

impl Device {
    /// The device of this process, opened if need be.
    pub(crate) fn open() -> Result<Arc<Device>, Errno> {
        let owner = std::process::id();
        let mut current = CURRENT.lock();
        if let Some((of, device)) = &*current
            && *of == owner
            && let Some(device) = device.upgrade()
            && device.is_usable()
        {
            return Ok(device);
        }
        let context = Context::open()?;
        let attributes = context.device()?;
        let heads = KINDS
            .map(|kind| Box::new(DeviceBlock { device: head(&attributes, kind), behind: [0; 16] }));
        let device = Arc::new(Device {
            owner,
            context,
            attributes,
            heads,
            contexts: Mutex::default(),
            silent: Mutex::default(),
            gids: GidTable::default(),
            cqs: RwLock::default(),
            qps: RwLock::default(),
            srqs: RwLock::default(),
            ids: cm::Ids::default(),
            regions: Regions::default(),
            brought: KINDS.map(|_| Brought {
                context: Mutex::new(Foreign::NULL),
                pd: Mutex::new(Foreign::NULL),
            }),
        });
        KINDS.iter().for_each(|kind| add(Kind::Device, device.head(*kind).0.addr()));
        *current = Some((owner, Arc::downgrade(&device)));
        drop(current);
        crate::events::listen(&device)?;
        Ok(device)
    }

    /// The device of which C has this head, if it is the present one, and which of the two it is.
    pub(crate) fn with_head(head: *const c::ibv_device) -> Option<(Arc<Device>, DeviceKind)> {
        let device = CURRENT.lock().as_ref().and_then(|(_, device)| device.upgrade())?;
        let kind = KINDS.into_iter().find(|kind| std::ptr::eq(device.head(*kind).0, head))?;
        Some((device, kind))
    }

    /// Whether this is the process that opened it.
    pub(crate) fn is_ours(&self) -> bool {
        self.owner == std::process::id()
    }

    /// Whether the daemon is there still.
    pub(crate) fn is_usable(&self) -> bool {
        self.is_ours() && self.context.is_alive()
    }

    /// What C sees of the one of this kind.
    pub(crate) fn head(&self, kind: DeviceKind) -> Foreign<c::ibv_device> {
        let block = &self.heads[kind.index()];
        Foreign(std::ptr::from_ref(&block.device).cast_mut())
    }

    /// What ids of the one of this kind bring along.
    pub(crate) fn brought(&self, kind: DeviceKind) -> &Brought {
        &self.brought[kind.index()]
    }

    /// The channel of all CQs that the program makes without one. They are never armed, so that no
    /// event arrives there. One channel for each would use up `limits.session.channels`, and a
    /// descriptor of the program's.
    pub(crate) fn silent_channel(&self) -> Result<CompletionChannel, Errno> {
        let mut silent = self.silent.lock();
        if let Some(channel) = &*silent {
            return Ok(channel.clone());
        }
        let channel = self.context.create_completion_channel()?;
        Ok(silent.insert(channel).clone())
    }

    /// The 64-bit identifier of the one of this kind, in network byte order.
    pub(crate) fn guid(&self, kind: DeviceKind) -> u64 {
        let guid = self.attributes.guid;
        match kind {
            DeviceKind::Iwarp => guid.to_be(),
            // The bit that says that nobody has registered it tells the two apart.
            DeviceKind::Roce => (guid ^ 1).to_be(),
        }
    }

    /// The one GID that it has: an address of this host, mapped as RFC 4291 section 2.5.5.2 has it.
    pub(crate) fn gid(&self) -> c::ibv_gid {
        let address = match crate::net::own_address() {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        c::ibv_gid { raw: address.octets() }
    }

    /// Does something about a CQ before it can be taken from the device.
    pub(crate) fn with_cq<T>(&self, id: CqId, does: impl FnOnce(&Arc<CqBody>) -> T) -> Option<T> {
        self.cqs.read().get(&id).map(does)
    }

    pub(crate) fn qp(&self, id: QpId) -> Option<Arc<QpBody>> {
        self.qps.read().get(&id).cloned()
    }

    /// As [`with_cq`](Self::with_cq), of a QP.
    pub(crate) fn with_qp<T>(&self, id: QpId, does: impl FnOnce(&Arc<QpBody>) -> T) -> Option<T> {
        self.qps.read().get(&id).map(does)
    }

    /// As [`with_cq`](Self::with_cq), of an SRQ.
    pub(crate) fn with_srq<T>(
        &self,
        id: SrqId,
        does: impl FnOnce(&Arc<SrqBody>) -> T,
    ) -> Option<T> {
        self.srqs.read().get(&id).map(does)
    }

    /// One more context has been opened, with these events.
    pub(crate) fn opened(&self, events: &Arc<AsyncEvents>) {
        let mut contexts = self.contexts.lock();
        contexts.retain(|context| context.strong_count() > 0);
        contexts.push(Arc::downgrade(events));
    }

    /// Tells all contexts that the device is of no more use.
    pub(crate) fn has_died(&self) {
        for events in self.contexts.lock().iter().filter_map(Weak::upgrade) {
            events.push(AsyncEvent::of_device(c::IBV_EVENT_DEVICE_FATAL));
        }
    }

    /// The daemon's GID table has changed: queues an event for each context in which none waits, as
    /// a program may never fetch them.
    pub(crate) fn gids_changed(&self) {
        self.gids.invalidate();
        for events in self.contexts.lock().iter().filter_map(Weak::upgrade) {
            let event = AsyncEvent::of_port(c::IBV_EVENT_GID_CHANGE);
            events.push_unless(event, |waiting| waiting.kind == c::IBV_EVENT_GID_CHANGE);
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for kind in KINDS {
            remove(Kind::Device, self.head(kind).0.addr());
        }
        // The thread that reads events has the session open until then.
        if self.is_ours() {
            self.context.end_events();
        }
    }
}

fn head(attributes: &DeviceAttributes, kind: DeviceKind) -> c::ibv_device {
    let mut device: c::ibv_device = zeroed();
    // As `uverbs` devices of the kernel are called.
    let (node, transport, name, file) = match kind {
        DeviceKind::Iwarp => {
            (c::IBV_NODE_RNIC, c::IBV_TRANSPORT_IWARP, &attributes.name, "uverbs0")
        }
        DeviceKind::Roce => {
            (c::IBV_NODE_CA, c::IBV_TRANSPORT_IB, &attributes.wired_name, "uverbs1")
        }
    };
    (device.node_type, device.transport_type) = (node, transport);
    copy_name(&mut device.name, name);
    copy_name(&mut device.dev_name, file);
    let tree = if attributes.tree.is_empty() { "/sys" } else { &attributes.tree };
    copy_name(&mut device.dev_path, &format!("{tree}/class/infiniband_verbs/{file}"));
    copy_name(&mut device.ibdev_path, &format!("{tree}/class/infiniband/{name}"));
    device
}

/// Which of the two devices of the drop-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    /// Its queue pairs connect.
    Iwarp,
    /// Its queue pairs are wired by hand, as those of a RoCE adapter.
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

impl DeviceKind {
    /// Where it stands in [`KINDS`].
    fn index(self) -> usize {
        match self {
            DeviceKind::Iwarp => 0,
            DeviceKind::Roce => 1,
        }
    }
}

/// Both.
pub(crate) const KINDS: [DeviceKind; 2] = [DeviceKind::Iwarp, DeviceKind::Roce];

/// Copies a name into a field of C, cut off so that a zero byte ends it.
pub(crate) fn copy_name(field: &mut [c_char], name: &str) {
    let bytes = name.bytes().take(field.len().saturating_sub(1));
    for (to, from) in field.iter_mut().zip(bytes) {
        *to = from as c_char;
    }
}
