//! Event channels and ids.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::Gid;

use crate::c::*;
use crate::errno::{Errno, minus_one, pointer};
use crate::ffi::handles::{Body, Foreign, Kind, live, publish, withdraw, zeroed};
use crate::rdmacm::{EventChannel, IdBody};
use crate::system;
use crate::verbs::context::PORT;
use crate::verbs::device::{Device, DeviceKind};

use crate::ffi::socket_address as addresses;
use crate::rdmacm::events;
use crate::verbs::context::entry as context;
use crate::verbs::memory;

/// The body of an `rdma_cm_id`.
pub(crate) struct CmIdBody {
    pub(crate) id: Arc<IdBody>,
    /// The channel created for a synchronous id; null for other ids.
    own_channel: Mutex<Foreign<rdma_event_channel>>,
    /// Attributes of queue pairs for peers that connect (`rdma_create_ep(3)`).
    pub(crate) endpoint: Mutex<Option<Endpoint>>,
    /// The path record that the C structure points to, once the route of a UD id is resolved.
    path: Mutex<Option<Box<ibv_sa_path_rec>>>,
}

/// A PD and the attributes of queue pairs in it.
pub(crate) struct Endpoint {
    pub(crate) pd: Foreign<ibv_pd>,
    pub(crate) wanted: ibv_qp_init_attr,
}

// SAFETY: its pointers are stored for the program, and followed only by C functions.
unsafe impl Send for Endpoint {}

impl Body for CmIdBody {
    type Head = rdma_cm_id;
    const KIND: Kind = Kind::Id;
}

/// Returns the body of an id.
pub(crate) unsafe fn cm_id<'a>(id: *mut rdma_cm_id) -> Result<&'a CmIdBody, Errno> {
    // SAFETY: the caller does not destroy `id` while the result is in use.
    unsafe { live::<CmIdBody>(id) }
}

impl CmIdBody {
    /// Returns true if calls on the id wait for their result.
    pub(crate) fn is_synchronous(&self) -> bool {
        !self.own_channel.lock().is_null()
    }
}

/// Returns the context shared by all ids of a device. Context and device stay open until the
/// process ends, because programs keep objects of them.
pub(crate) fn context_of(
    device: &Arc<Device>,
    kind: DeviceKind,
) -> Result<*mut ibv_context, Errno> {
    let mut kept = device.defaults(kind).context.lock();
    if kept.is_null() {
        *kept = Foreign(context::open(device, kind)?);
    }
    Ok(kept.0)
}

/// Returns the PD of QPs that a program creates without one. It also lasts until the process ends.
pub(crate) fn default_pd(device: &Arc<Device>, kind: DeviceKind) -> Result<*mut ibv_pd, Errno> {
    let context = context_of(device, kind)?;
    let mut kept = device.defaults(kind).pd.lock();
    if kept.is_null() {
        // SAFETY: the context was found above.
        *kept = Foreign(unsafe { memory::allocate_pd(context)? });
    }
    Ok(kept.0)
}

/// Creates an event channel.
fn make_channel(device: Arc<Device>) -> Result<*mut rdma_event_channel, Errno> {
    let channel = EventChannel::create(device)?;
    let head = rdma_event_channel { fd: channel.fd() };
    Ok(publish(head, channel).as_ptr())
}

/// Returns the channel of a C pointer.
pub(crate) unsafe fn channel<'a>(
    channel: *mut rdma_event_channel,
) -> Result<&'a Arc<EventChannel>, Errno> {
    // SAFETY: the caller does not destroy `channel` while the result is in use.
    unsafe { live::<Arc<EventChannel>>(channel) }
}

/// rdma_create_event_channel(3).
pub(crate) unsafe extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    let _guard = system::uncancelled();
    pointer(open_device().and_then(make_channel))
}

/// Opens the device. Returns `ENODEV` on every failure.
fn open_device() -> Result<Arc<Device>, Errno> {
    Device::open().map_err(|errno| errno.with_number(libc::ENODEV))
}

/// rdma_destroy_event_channel(3).
pub(crate) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    let _guard = system::uncancelled();
    if !channel.is_null() {
        // SAFETY: no other thread uses `channel`, now or later (rdma_destroy_event_channel(3)).
        let withdrawn = unsafe { withdraw::<Arc<EventChannel>>(channel) };
        withdrawn.map_or_else(|errno| errno.log(), drop);
    }
}

/// Returns the channel for an id: `named`, or a new channel owned by the id.
unsafe fn channel_for(
    device: &Arc<Device>,
    named: *mut rdma_event_channel,
) -> Result<(*mut rdma_event_channel, Foreign<rdma_event_channel>), Errno> {
    if !named.is_null() {
        return Ok((named, Foreign::NULL));
    }
    let own = make_channel(device.clone())?;
    Ok((own, Foreign(own)))
}

/// Creates an id on a channel, or a synchronous id if `named` is null; `body` creates the
/// [`IdBody`].
pub(crate) unsafe fn make(
    device: &Arc<Device>,
    named: *mut rdma_event_channel,
    program: *mut c_void,
    port_space: rdma_port_space,
    body: impl FnOnce(Arc<EventChannel>) -> Arc<IdBody>,
) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: `channel_for` does not follow `named`.
    let (at, own) = unsafe { channel_for(device, named)? };
    // SAFETY: it is the program's channel, or a new one.
    let id = body(unsafe { channel(at)? }.clone());
    let mut head: rdma_cm_id = zeroed();
    head.channel = at;
    head.context = program;
    head.ps = port_space;
    head.qp_type = match id.kind() {
        DeviceKind::Iwarp => IBV_QPT_RC,
        DeviceKind::Roce => IBV_QPT_UD,
    };
    let cm_id = CmIdBody {
        id: id.clone(),
        own_channel: Mutex::new(own),
        endpoint: Mutex::default(),
        path: Mutex::default(),
    };
    let head = publish(head, cm_id).as_ptr();
    id.set_head(Foreign(head));
    Ok(head)
}

/// Writes the known addresses of an id to the C structure, and the device once they determine it.
/// As in the kernel, an id bound to a loopback address has no device yet; libfabric then listens on
/// the device's address.
pub(crate) unsafe fn show_addresses(to: *mut rdma_cm_id, id: &IdBody) -> Result<(), Errno> {
    let (source, peer) = id.addresses();
    // SAFETY: callers have found `to` with `cm_id`, have created it, or hold an unacknowledged
    // event of it, so it stays live during the call.
    unsafe {
        if let Some(source) = source {
            (*to).route.addr.src = addresses::in_c(source);
            let of_none = source.ip().is_unspecified() || source.ip().is_loopback();
            if peer.is_some() || !of_none {
                (*to).verbs = context_of(id.device(), id.kind())?;
                // For queue pairs that a program creates without the id.
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

/// Writes the path of an id to the C structure after route resolution. The RoCE device has one
/// path, with the fields that the kernel sets; the iWARP device has none.
pub(crate) unsafe fn show_path(to: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: `cm_id` finds `to`, which is not destroyed before its event is acknowledged. The
    // context of ids is never closed (`context_of`).
    unsafe {
        let found = cm_id(to)?;
        if !found.id.is_ud() {
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
    let _guard = system::uncancelled();
    // SAFETY: `create` has the contract of this function.
    let made = unsafe { create(channel, program, port_space) };
    // SAFETY: `to` has room for a pointer (rdma_create_id(3)).
    minus_one(made.map(|id| unsafe { to.write(id) }))
}

/// Like [`rdma_create_id`].
pub(crate) unsafe fn create(
    channel: *mut rdma_event_channel,
    program: *mut c_void,
    port_space: rdma_port_space,
) -> Result<*mut rdma_cm_id, Errno> {
    let kind = match port_space {
        RDMA_PS_TCP => DeviceKind::Iwarp,
        // Only the RoCE device has UD QPs.
        RDMA_PS_UDP => DeviceKind::Roce,
        // Multicast, and InfiniBand addresses.
        RDMA_PS_IPOIB | RDMA_PS_IB => {
            let reason = format_args!("port space {port_space:#x}: only TCP and UDP are supported");
            return Err(Errno::new(libc::EPROTONOSUPPORT, reason));
        }
        _ => return Err(Errno::invalid(format_args!("{port_space:#x} is not a port space"))),
    };
    let device = open_device()?;
    let of_device = device.clone();
    let body = |channel| IdBody::create(of_device, kind, channel);
    // SAFETY: `channel` is null, or the caller does not destroy it during the call
    // (rdma_create_id(3)).
    unsafe { make(&device, channel, program, port_space, body) }
}

/// rdma_destroy_id(3).
pub(crate) unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: `cm_id` finds `id`, and no other thread uses it, now or later (rdma_destroy_id(3)).
    minus_one(unsafe {
        cm_id(id).and_then(|found| {
            events::acknowledge_own(id);
            found.id.destroy();
            let cm_id = withdraw::<CmIdBody>(id)?;
            rdma_destroy_event_channel(cm_id.own_channel.into_inner().0);
            Ok(())
        })
    })
}

/// rdma_migrate_id(3).
pub(crate) unsafe extern "C" fn rdma_migrate_id(
    id: *mut rdma_cm_id,
    to: *mut rdma_event_channel,
) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: `migrate` has the contract of this function.
    minus_one(unsafe { migrate(id, to) })
}

/// Like [`rdma_migrate_id`].
pub(crate) unsafe fn migrate(
    id: *mut rdma_cm_id,
    to: *mut rdma_event_channel,
) -> Result<(), Errno> {
    // SAFETY: `cm_id` finds `id`, and the caller destroys neither `id` nor `to` during the call
    // (rdma_migrate_id(3)). No other thread uses the old channel of a synchronous id.
    unsafe {
        let found = cm_id(id)?;
        if to.is_null() && found.is_synchronous() {
            return Err(Errno::invalid(format_args!("the id is already synchronous")));
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

/// Default partition of every port. The value is the same in either byte order.
const DEFAULT_PKEY: u16 = 0xFFFF;
/// The kernel's default hop limit.
const HOP_LIMIT: u8 = 64;
/// `IB_SA_EQ`: the field of the selector has exactly this value.
const EXACTLY: u8 = 2;
/// `CMA_IBOE_PACKET_LIFETIME`: the kernel's value for RoCE, 4.096 us times two to this power.
const PACKET_LIFE_TIME: u8 = 16;
