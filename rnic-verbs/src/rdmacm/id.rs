//! Ids (`rdma_create_id(3)`): creation, destruction and their C structure.

use std::ffi::c_void;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::{DeviceKind, Function, PortSpace};

use super::ack::acknowledge_own;
use super::channel::{self, channel, open_device};
use super::ib;
use super::rc_attr::{HOP_LIMIT, PACKET_LIFE_TIME, gid_of};
use super::service::Service;
use super::state::{EventChannel, IbForm, IdBody};
use crate::c::*;
use crate::errno::{self, Errno};
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Foreign, Kind, Live, live, publish, withdraw, zeroed};
use crate::ffi::pointers::{Out, get, set};
use crate::ffi::socket_address::{from_c, ib_from_c, in_c};
use crate::verbs::context::{context, mtu_code};
use crate::verbs::device::{Device, PORT};
use crate::verbs::device_list;
use crate::verbs::open::{default_context, default_pd};

/// The body of an `rdma_cm_id`.
pub(super) struct CmIdBody {
    pub(super) id: Arc<IdBody>,
    /// The channel created for a synchronous id; null for other ids.
    own_channel: Mutex<Foreign<rdma_event_channel>>,
    /// Attributes of queue pairs for peers that connect (`rdma_create_ep(3)`).
    pub(super) endpoint: Mutex<Option<Endpoint>>,
    /// The path record that the C structure points to, once the route of an id of the RoCE device
    /// is resolved.
    path: Mutex<Option<Box<ibv_sa_path_rec>>>,
}

/// A PD and the attributes of queue pairs in it.
pub(super) struct Endpoint {
    pub(super) pd: Foreign<ibv_pd>,
    pub(super) wanted: ibv_qp_init_attr,
}

// SAFETY: its pointers are stored for the program, and only C functions dereference them.
unsafe impl Send for Endpoint {}

impl Body for CmIdBody {
    type Head = rdma_cm_id;
    const KIND: Kind = Kind::Id;
}

/// Returns the id of a C pointer.
pub(super) fn cm_id(id: *mut rdma_cm_id) -> Result<Live<CmIdBody>, Errno> {
    live(id)
}

/// Returns the id of a C pointer, if it is bound to a device.
pub(super) fn of_device(id: *mut rdma_cm_id) -> Result<Live<CmIdBody>, Errno> {
    let id = cm_id(id)?;
    if get!(id.verbs).is_null() {
        return Err(invalid!("the id is not bound to a device yet"));
    }
    Ok(id)
}

impl CmIdBody {
    /// Evaluates the fault rules of a call that concerns the id, which they select by its peer.
    pub(super) fn admit(&self, function: Function) -> Result<(), Errno> {
        self.id.admit_call(function)
    }

    /// Returns true if calls on the id wait for their result.
    pub(super) fn is_synchronous(&self) -> bool {
        !self.own_channel.lock().is_null()
    }
}

/// Returns the channel for an id: `named`, or a new channel owned by the id.
fn channel_for(
    device: &Arc<Device>,
    named: *mut rdma_event_channel,
) -> Result<(*mut rdma_event_channel, Foreign<rdma_event_channel>), Errno> {
    if !named.is_null() {
        return Ok((named, Foreign::NULL));
    }
    let own = channel::make(device.clone())?;
    Ok((own, Foreign(own)))
}

/// Creates an id on a channel, or a synchronous id if `named` is null; `body` creates the
/// [`IdBody`].
pub(super) fn make(
    device: &Arc<Device>,
    named: *mut rdma_event_channel,
    program: *mut c_void,
    port_space: rdma_port_space,
    body: impl FnOnce(Arc<EventChannel>) -> Arc<IdBody>,
) -> Result<*mut rdma_cm_id, Errno> {
    let (at, own) = channel_for(device, named)?;
    let id = body(Arc::clone(&*channel(at)?));
    let mut head: rdma_cm_id = zeroed();
    head.channel = at;
    head.context = program;
    head.ps = port_space;
    head.qp_type = id.service.qp_type();
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
pub(super) fn show_addresses(to: Live<CmIdBody>) -> Result<(), Errno> {
    let id = &to.id;
    let (source, peer) = id.addresses();
    let form = id.ib();
    let shown = |address, space: fn(IbForm) -> PortSpace| match form {
        Some(form) => ib::in_union(ib::in_c(address, space(form))),
        None => in_c(address),
    };
    if let Some(source) = source {
        set!(to.route.addr.src = shown(source, |form| form.own));
        let of_none = source.ip().is_unspecified() || source.ip().is_loopback();
        if peer.is_some() || !of_none {
            let adapter = id.adapter()?;
            set!(to.verbs = default_context(&id.device, &adapter)?);
            // For queue pairs that a program creates without the id.
            if get!(to.pd).is_null() {
                set!(to.pd = default_pd(&id.device, &adapter)?);
            }
            set!(to.port_num = PORT);
        }
    }
    if let Some(peer) = peer {
        set!(to.route.addr.dst = shown(peer, |form| form.peer));
    }
    if let (DeviceKind::Roce, Some(source), Some(peer)) = (id.device_kind(), source, peer) {
        let table = id.device.tables()?;
        let gid = |address: SocketAddr| ibv_gid { raw: gid_of(address.ip(), &table.gids).0 };
        let addr = rdma_ib_addr { sgid: gid(source), dgid: gid(peer), pkey: DEFAULT_PKEY };
        set!(to.route.addr.addr = addr);
    }
    Ok(())
}

/// Writes the path of an id to the C structure after route resolution. The RoCE device has one
/// path, with the fields that the kernel sets; the iWARP device has none.
pub(super) fn show_path(to: Live<CmIdBody>) -> Result<(), Errno> {
    let mtu = match to.id.service {
        Service::Iwarp => return Ok(()),
        Service::Rc(_) => mtu_code(to.id.path_mtu()?.into()),
        Service::Ud => context(get!(to.verbs))?.port(PORT)?.active_mtu,
    };
    let ends = get!(to.route.addr.addr);
    let path = ibv_sa_path_rec {
        dgid: ends.dgid,
        sgid: ends.sgid,
        hop_limit: HOP_LIMIT,
        traffic_class: to.id.traffic_class(),
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
    let mut kept = to.path.lock();
    // The program may keep a pointer to the record of an earlier event.
    let record = kept.get_or_insert_with(|| Box::new(path));
    **record = path;
    set!(to.route.path_rec = &raw mut **record);
    set!(to.route.num_paths = 1);
    Ok(())
}

fn create_id(
    channel: *mut rdma_event_channel,
    to: Out<*mut rdma_cm_id>,
    program: *mut c_void,
    port_space: rdma_port_space,
) -> Result<(), Errno> {
    let to = to.required("id")?;
    let device = open_device()?;
    device.admit(Function::CreateId.call())?;
    to.write(create(&device, channel, program, port_space)?);
    Ok(())
}

/// Creates an id on a channel, or a synchronous id for a null pointer.
pub(super) fn create(
    device: &Arc<Device>,
    channel: *mut rdma_event_channel,
    program: *mut c_void,
    port_space: rdma_port_space,
) -> Result<*mut rdma_cm_id, Errno> {
    let visible = device_list::visible(device)?;
    let kinds: Vec<DeviceKind> = visible.iter().map(|adapter| adapter.kind()).collect();
    let service = Service::of(port_space, &kinds)?;
    let of_device = device.clone();
    let body = |channel| IdBody::create(of_device, service, channel);
    make(device, channel, program, port_space, body)
}

pub(super) fn destroy(id: *mut rdma_cm_id) -> Result<(), Errno> {
    let found = cm_id(id)?;
    acknowledge_own(found);
    found.id.destroy();
    // SAFETY: no thread uses `id`, now or later (rdma_destroy_id(3)).
    let body = unsafe { withdraw::<CmIdBody>(id) }?;
    errno::nothing(channel::destroy(body.own_channel.into_inner().0));
    Ok(())
}

fn destroy_by_program(id: *mut rdma_cm_id) -> Result<(), Errno> {
    cm_id(id)?.admit(Function::DestroyId)?;
    destroy(id)
}

fn migrate(id: *mut rdma_cm_id, to: *mut rdma_event_channel) -> Result<(), Errno> {
    let id = cm_id(id)?;
    if to.is_null() && id.is_synchronous() {
        return Err(invalid!("the id is already synchronous"));
    }
    id.admit(Function::MigrateId)?;
    let (at, own) = channel_for(&id.id.device, to)?;
    acknowledge_own(id);
    id.id.migrate(&*channel(at)?);
    set!(id.channel = at);
    let before = std::mem::replace(&mut *id.own_channel.lock(), own);
    errno::nothing(channel::destroy(before.0));
    Ok(())
}

/// Returns the local port, in network byte order.
fn src_port(id: *mut rdma_cm_id) -> u16 {
    cm_id(id).map_or(0, |id| port(&get!(id.route.addr.src)))
}

/// Returns the port of the peer, in network byte order.
fn dst_port(id: *mut rdma_cm_id) -> u16 {
    cm_id(id).map_or(0, |id| port(&get!(id.route.addr.dst)))
}

fn port(of: &rdma_sockaddr) -> u16 {
    if let Some(address) = ib_from_c(of) {
        return (u64::from_be(address.sib_sid) as u16).to_be();
    }
    from_c(of).map_or(0, |address| address.port().to_be())
}

entry! {
    uncancelled rdma_create_id(
        channel: *mut rdma_event_channel, to: Out<*mut rdma_cm_id>, program: *mut c_void,
        port_space: rdma_port_space,
    ) -> minus_one = create_id;
    uncancelled rdma_destroy_id(id: *mut rdma_cm_id) -> minus_one = destroy_by_program;
    uncancelled rdma_migrate_id(id: *mut rdma_cm_id, to: *mut rdma_event_channel) -> minus_one
        = migrate;
    plain rdma_get_src_port(id: *mut rdma_cm_id) -> value<u16> = src_port;
    plain rdma_get_dst_port(id: *mut rdma_cm_id) -> value<u16> = dst_port;
}

/// `IB_SA_EQ`: the field of the selector has exactly this value.
const EXACTLY: u8 = 2;
