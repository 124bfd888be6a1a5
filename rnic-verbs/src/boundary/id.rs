//! Event channels and ids.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::Gid;

use crate::c::*;
use crate::cm::{EventChannel, IdBody};
use crate::context::PORT;
use crate::device::{Device, DeviceKind};
use crate::errno::{Errno, minus_one, pointer};
use crate::object::{Body, Foreign, Kind, live, publish, withdraw, zeroed};
use crate::system;

use super::{addresses, context, events, memory};

/// What stands behind an id of C.
pub(super) struct IdShown {
    pub(super) id: Arc<IdBody>,
    /// The channel of a synchronous id, which was made for it; null otherwise.
    own_channel: Mutex<Foreign<rdma_event_channel>>,
    /// How queue pairs are to be made for peers that connect (`rdma_create_ep(3)`).
    pub(super) endpoint: Mutex<Option<Endpoint>>,
    /// The path that the structure of C points to, once the route of a datagram id is resolved.
    path: Mutex<Option<Box<ibv_sa_path_rec>>>,
}

/// A domain and what queue pairs in it are to be.
pub(super) struct Endpoint {
    pub(super) pd: Foreign<ibv_pd>,
    pub(super) wanted: ibv_qp_init_attr,
}

// SAFETY: the pointers in it are the program's, kept for it and followed at the boundary alone.
unsafe impl Send for Endpoint {}

impl Body for IdShown {
    type Head = rdma_cm_id;
    const KIND: Kind = Kind::Id;
}

/// What stands behind an id.
pub(super) unsafe fn shown<'a>(id: *mut rdma_cm_id) -> Result<&'a IdShown, Errno> {
    // SAFETY: as the module says.
    unsafe { live::<IdShown>(id) }
}

impl IdShown {
    /// Whether its calls wait for what comes of them.
    pub(super) fn is_synchronous(&self) -> bool {
        !self.own_channel.lock().is_null()
    }
}

/// The context that ids of a device bring along. It and the device stay until the process ends:
/// programs keep what they made with it.
pub(super) fn context_of(
    device: &Arc<Device>,
    kind: DeviceKind,
) -> Result<*mut ibv_context, Errno> {
    let mut kept = device.brought(kind).context.lock();
    if kept.is_null() {
        *kept = Foreign(context::open(device, kind)?);
    }
    Ok(kept.0)
}

/// The domain of queue pairs for which a program names none; it stays as well.
pub(super) fn default_pd(device: &Arc<Device>, kind: DeviceKind) -> Result<*mut ibv_pd, Errno> {
    let context = context_of(device, kind)?;
    let mut kept = device.brought(kind).pd.lock();
    if kept.is_null() {
        // SAFETY: the context has just been found.
        *kept = Foreign(unsafe { memory::allocate_pd(context)? });
    }
    Ok(kept.0)
}

/// Makes an event channel.
fn make_channel(device: Arc<Device>) -> Result<*mut rdma_event_channel, Errno> {
    let channel = EventChannel::create(device)?;
    let head = rdma_event_channel { fd: channel.fd() };
    Ok(publish(head, channel).as_ptr())
}

/// The channel behind a pointer of C's.
pub(super) unsafe fn channel<'a>(
    channel: *mut rdma_event_channel,
) -> Result<&'a Arc<EventChannel>, Errno> {
    // SAFETY: as the module says.
    unsafe { live::<Arc<EventChannel>>(channel) }
}

/// rdma_create_event_channel(3).
pub(crate) unsafe extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    let _whole = system::uncancelled();
    pointer(open_device().and_then(make_channel))
}

/// The device; `ENODEV` if there is none, whatever the reason.
fn open_device() -> Result<Arc<Device>, Errno> {
    Device::open().map_err(|errno| errno.with_number(libc::ENODEV))
}

/// rdma_destroy_event_channel(3).
pub(crate) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    let _whole = system::uncancelled();
    if !channel.is_null() {
        // SAFETY: as the module says.
        let withdrawn = unsafe { withdraw::<Arc<EventChannel>>(channel) };
        withdrawn.map_or_else(|errno| errno.log(), drop);
    }
}

/// A channel for an id: the one that is named, or one of its own.
unsafe fn channel_for(
    device: &Arc<Device>,
    named: *mut rdma_event_channel,
) -> Result<(*mut rdma_event_channel, Foreign<rdma_event_channel>), Errno> {
    match named.is_null() {
        false => Ok((named, Foreign::NULL)),
        true => {
            let own = make_channel(device.clone())?;
            Ok((own, Foreign(own)))
        }
    }
}

/// Makes an id on a channel, or a synchronous one if that is null; `body` makes what stands behind
/// it.
pub(super) unsafe fn make(
    device: &Arc<Device>,
    named: *mut rdma_event_channel,
    program: *mut c_void,
    port_space: rdma_port_space,
    body: impl FnOnce(Arc<EventChannel>) -> Arc<IdBody>,
) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: as the module says.
    let (at, own) = unsafe { channel_for(device, named)? };
    // SAFETY: it is the program's, or has just been made.
    let id = body(unsafe { channel(at)? }.clone());
    let mut head: rdma_cm_id = zeroed();
    (head.channel, head.context, head.ps) = (at, program, port_space);
    head.qp_type = match id.kind() {
        DeviceKind::Iwarp => IBV_QPT_RC,
        DeviceKind::Roce => IBV_QPT_UD,
    };
    let shown = IdShown {
        id: id.clone(),
        own_channel: Mutex::new(own),
        endpoint: Mutex::default(),
        path: Mutex::default(),
    };
    let head = publish(head, shown).as_ptr();
    id.published(Foreign(head));
    Ok(head)
}

/// Shows a program the addresses of its id as far as they are known, and the device once they are
/// of one. Bound to a loopback address an id is of no device yet, as with the kernel: libfabric
/// listens at the device's address then.
pub(super) unsafe fn show_addresses(to: *mut rdma_cm_id, id: &IdBody) -> Result<(), Errno> {
    let (source, peer) = id.addresses();
    // SAFETY: as the module says.
    unsafe {
        if let Some(source) = source {
            (*to).route.addr.src = addresses::in_c(source);
            let of_none = source.ip().is_unspecified() || source.ip().is_loopback();
            if peer.is_some() || !of_none {
                (*to).verbs = context_of(id.device(), id.kind())?;
                // For queue pairs that a program makes without the id.
                if (*to).pd.is_null() {
                    (*to).pd = default_pd(id.device(), id.kind())?;
                }
                (*to).port_num = PORT;
            }
        }
        if let Some(peer) = peer {
            (*to).route.addr.dst = addresses::in_c(peer);
        }
        if let (DeviceKind::Roce, Some(source), Some(peer)) = (id.kind(), source, peer) {
            let gid = |address: SocketAddr| ibv_gid { raw: Gid::from(address.ip()).0 };
            (*to).route.addr.addr =
                rdma_ib_addr { sgid: gid(source), dgid: gid(peer), pkey: DEFAULT_PKEY };
        }
    }
    Ok(())
}

/// Shows a program the path of its id, whose route is resolved: one for the RoCE device, which has
/// the fields that the kernel gives it, and none for the iWARP device.
pub(super) unsafe fn show_path(to: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: as the module says.
    unsafe {
        let found = shown(to)?;
        if !found.id.is_of_datagrams() {
            return Ok(());
        }
        let ends = (*to).route.addr.addr;
        let mtu = context::context((*to).verbs)?.port(PORT)?.active_mtu;
        let path = ibv_sa_path_rec {
            dgid: ends.dgid,
            sgid: ends.sgid,
            hop_limit: HOP_LIMIT,
            reversible: 1,
            numb_path: 1,
            pkey: ends.pkey,
            mtu_selector: EXACTLY,
            mtu: mtu as u8,
            rate_selector: EXACTLY,
            packet_life_time_selector: EXACTLY,
            packet_life_time: PACKET_LIFE_TIME,
            ..zeroed()
        };
        let mut kept = found.path.lock();
        (*to).route.path_rec = &raw mut **kept.insert(Box::new(path));
        (*to).route.num_paths = 1;
    }
    Ok(())
}

/// rdma_create_id(3).
pub(crate) unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_id,
    program: *mut c_void,
    port_space: rdma_port_space,
) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    let made = unsafe { create(channel, program, port_space) };
    // SAFETY: as the module says.
    minus_one(made.map(|id| unsafe { to.write(id) }))
}

/// As [`rdma_create_id`].
pub(super) unsafe fn create(
    channel: *mut rdma_event_channel,
    program: *mut c_void,
    port_space: rdma_port_space,
) -> Result<*mut rdma_cm_id, Errno> {
    let kind = match port_space {
        RDMA_PS_TCP => DeviceKind::Iwarp,
        // Only its queue pairs send datagrams.
        RDMA_PS_UDP => DeviceKind::Roce,
        // Multicast, and addresses of InfiniBand.
        RDMA_PS_IPOIB | RDMA_PS_IB => {
            let reason = format_args!("port space {port_space:#x}: only TCP and UDP are served");
            return Err(Errno::new(libc::EPROTONOSUPPORT, reason));
        }
        _ => return Err(Errno::invalid(format_args!("{port_space:#x} is no port space"))),
    };
    let device = open_device()?;
    let of_device = device.clone();
    let body = |channel| IdBody::create(of_device, kind, channel);
    // SAFETY: as the module says.
    unsafe { make(&device, channel, program, port_space, body) }
}

/// rdma_destroy_id(3).
pub(crate) unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    minus_one(unsafe {
        shown(id).and_then(|found| {
            events::acknowledge_own(id);
            found.id.destroy();
            let shown = withdraw::<IdShown>(id)?;
            rdma_destroy_event_channel(shown.own_channel.into_inner().0);
            Ok(())
        })
    })
}

/// rdma_migrate_id(3).
pub(crate) unsafe extern "C" fn rdma_migrate_id(
    id: *mut rdma_cm_id,
    to: *mut rdma_event_channel,
) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    minus_one(unsafe { migrate(id, to) })
}

/// As [`rdma_migrate_id`].
pub(super) unsafe fn migrate(
    id: *mut rdma_cm_id,
    to: *mut rdma_event_channel,
) -> Result<(), Errno> {
    // SAFETY: as the module says.
    unsafe {
        let found = shown(id)?;
        if to.is_null() && found.is_synchronous() {
            return Err(Errno::invalid(format_args!("the id has no event channel already")));
        }
        let (at, own) = channel_for(found.id.device(), to)?;
        events::acknowledge_own(id);
        found.id.migrate(channel(at)?);
        (*id).channel = at;
        let before = std::mem::replace(&mut *found.own_channel.lock(), own);
        rdma_destroy_event_channel(before.0);
    }
    Ok(())
}

/// The partition that every port is in. It looks alike in either byte order.
const DEFAULT_PKEY: u16 = 0xFFFF;
/// The limit of the kernel where no route has another one.
const HOP_LIMIT: u8 = 64;
/// `IB_SA_EQ`: the field that the selector is of has exactly this value.
const EXACTLY: u8 = 2;
/// `CMA_IBOE_PACKET_LIFETIME`: 4.096 us times two to this power, as the kernel assumes of RoCE.
const PACKET_LIFE_TIME: u8 = 16;
