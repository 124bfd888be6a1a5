//! The devices that ids can use (`rdma_get_devices(3)`).

use std::ffi::c_int;
use std::net::IpAddr;
use std::ptr::null_mut;
use std::sync::Arc;

use rnic_client::{DeviceKind, Function};

use super::rc_attr::gid_of;
use crate::c::ibv_context;
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Kind, publish, withdraw};
use crate::ffi::pointers::Out;
use crate::verbs::adapter::Adapter;
use crate::verbs::device::Device;
use crate::verbs::device_list::{self, MOST};
use crate::verbs::open::default_context;
use crate::verbs::session;

/// Returns the device of this kind for an id with a local address: a device of the interface that
/// has the address, or else a device of all interfaces. Without an address, or if no device of the
/// daemon has it, returns the first device. If no device of this kind is visible to the program,
/// all of them qualify.
///
/// # Errors
///
/// `ENODEV` if there is no such device, or if only devices invisible to the program have the
/// address.
pub(super) fn device_with(
    device: &Device,
    kind: DeviceKind,
    source: Option<IpAddr>,
) -> Result<Arc<Adapter>, Errno> {
    let of_kind = |mut all: Vec<Arc<Adapter>>| {
        all.retain(|adapter| adapter.kind() == kind);
        all
    };
    let mut visible = of_kind(device_list::visible(device)?);
    if visible.is_empty() {
        visible = of_kind(device.adapters()?);
    }
    let first = visible.first().cloned();
    let first = first.ok_or_else(|| errno!(libc::ENODEV, "the daemon has no {kind} device"))?;
    let Some(source) = source.filter(|_| kind == DeviceKind::Roce) else { return Ok(first) };
    let tables = device.tables()?;
    let gid = gid_of(source, &tables.gids);
    if !tables.gids.iter().any(|row| row.gid == gid) {
        return Ok(first);
    }
    visible.retain(|adapter| adapter.gids(&tables).iter().any(|row| row.gid == gid));
    let of_one = visible.iter().find(|adapter| adapter.has_one_interface());
    of_one.or(visible.first()).cloned().ok_or_else(|| {
        errno!(libc::ENODEV, "no device has the GID {source}, or RNIC_DEVICES does not contain it")
    })
}

/// The list that `rdma_get_devices` returns, null-terminated.
type Contexts = [*mut ibv_context; MOST + 1];

/// Body of such a list. The head holds all the data.
struct ContextList;

impl Body for ContextList {
    type Head = Contexts;
    const KIND: Kind = Kind::ContextList;
}

fn get(count: Out<c_int>) -> Result<*mut *mut ibv_context, Errno> {
    let mut list: Contexts = [null_mut(); MOST + 1];
    let found = fill(&mut list);
    count.write(found.as_ref().map_or(0, |found| *found as c_int));
    found.map(|_| publish(list, ContextList).as_ptr().cast())
}

/// Fills in the contexts of the devices that the program may see, in the order of
/// `ibv_get_device_list`. Returns their number.
fn fill(list: &mut Contexts) -> Result<usize, Errno> {
    let device = session::open()?;
    device.admit(Function::GetDevices.call())?;
    // As for `ibv_get_device_list`.
    device.tables_changed();
    let mut adapters = device_list::visible(&device)?;
    adapters.truncate(MOST);
    for (place, adapter) in list.iter_mut().zip(&adapters) {
        *place = default_context(&device, adapter)?;
    }
    match adapters.len() {
        0 => Err(errno!(libc::ENODEV, "no device matches RNIC_DEVICES")),
        n => Ok(n),
    }
}

fn free(list: *mut *mut ibv_context) -> Result<(), Errno> {
    if list.is_null() {
        return Ok(());
    }
    // SAFETY: no thread uses `list`, now or later (rdma_free_devices(3)).
    unsafe { withdraw::<ContextList>(list.cast()) }.map(drop)
}

entry! {
    uncancelled rdma_get_devices(count: Out<c_int>) -> pointer<*mut ibv_context> = get;
    plain rdma_free_devices(list: *mut *mut ibv_context) -> nothing = free;
}
