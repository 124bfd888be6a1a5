//! The devices that a program sees, in order: the devices in `RNIC_DEVICES`, a comma-separated list
//! of names, or if the list is empty, the RoCE devices.

use std::ffi::{OsStr, c_char, c_int};
use std::mem::offset_of;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use rnic_client::{DeviceKind, Function};

use crate::c::{IBV_SYSFS_NAME_MAX, ibv_device};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Kind, is_live, publish, withdraw};
use crate::ffi::pointers::Out;
use crate::memory::maps;
use crate::verbs::adapter::Adapter;
use crate::verbs::device::Device;
use crate::verbs::session;
use crate::{log, system};

/// Returns the devices that the program sees.
pub(crate) fn visible(device: &Device) -> Result<Vec<Arc<Adapter>>, Errno> {
    let mut adapters = device.adapters()?;
    let names = system::variable(c"RNIC_DEVICES");
    Ok(match names.filter(|names| !names.to_string_lossy().trim().is_empty()) {
        None => {
            adapters.retain(|adapter| adapter.kind() == DeviceKind::Roce);
            adapters
        }
        Some(wanted) => named(&wanted, &adapters),
    })
}

fn named(wanted: &OsStr, adapters: &[Arc<Adapter>]) -> Vec<Arc<Adapter>> {
    let mut all: Vec<Arc<Adapter>> = Vec::new();
    for name in wanted.to_string_lossy().split(',').map(str::trim) {
        match adapters.iter().find(|adapter| adapter.name() == name) {
            Some(found) if !all.iter().any(|adapter| Arc::ptr_eq(adapter, found)) => {
                all.push(found.clone());
            }
            Some(_) => {}
            None => log::debug(|| {
                let names: Vec<&str> = adapters.iter().map(|adapter| adapter.name()).collect();
                format!("RNIC_DEVICES: no device {name:?}; the devices are {}", names.join(", "))
            }),
        }
    }
    all
}

/// A device list. It keeps its devices open.
struct DeviceList {
    _device: Arc<Device>,
    _adapters: Vec<Arc<Adapter>>,
}

impl Body for DeviceList {
    /// Null-terminated.
    type Head = [*mut ibv_device; MOST + 1];
    const KIND: Kind = Kind::DeviceList;
}

/// Opens the session. Returns the devices that the program sees.
fn list() -> Result<(Vec<Arc<Adapter>>, Arc<Device>), Errno> {
    let device = session::open()?;
    // The event of the last change may not have arrived yet.
    device.tables_changed();
    Ok((visible(&device)?, device))
}

fn get(count: Out<c_int>) -> Result<*mut *mut ibv_device, Errno> {
    count.write(0);
    // `ENOSYS` means that this machine has no RDMA. Programs with other transports then use those.
    let (adapters, device) = list().map_err(|errno| errno.with_number(libc::ENOSYS))?;
    device.admit(Function::GetDeviceList.call())?;
    let shown = adapters.len().min(MOST);
    count.write(shown as c_int);
    let mut devices = [null_mut(); MOST + 1];
    let places = devices.iter_mut().take(shown);
    places.zip(&adapters).for_each(|(place, adapter)| *place = adapter.head().0);
    let list = DeviceList { _device: device, _adapters: adapters };
    Ok(publish(devices, list).as_ptr().cast())
}

fn free(list: *mut *mut ibv_device) -> Result<(), Errno> {
    if list.is_null() {
        return Ok(());
    }
    // SAFETY: no thread uses `list`, now or later (ibv_free_device_list(3)).
    unsafe { withdraw::<DeviceList>(list.cast()) }.map(drop)
}

/// Returns the name in the structure. Some programs make a structure of their own.
fn name(device: *mut ibv_device) -> *const c_char {
    let name = device.cast_const().cast::<c_char>().wrapping_add(offset_of!(ibv_device, name));
    let is_readable = || maps::is_readable(name.addr() as u64, IBV_SYSFS_NAME_MAX as u64);
    if is_live(Kind::Device, device.addr()) || is_readable().unwrap_or(false) {
        return name;
    }
    no_device(device).of("ibv_get_device_name").report();
    null()
}

/// Returns the GUID, in network byte order.
fn guid(device: *mut ibv_device) -> u64 {
    session::with_head(device).map_or(0, |(_, adapter)| adapter.guid())
}

/// Maximum number of devices in a list. A daemon has at most 16 RoCE devices and one iWARP device.
pub(crate) const MOST: usize = 32;

pub(crate) fn no_device(device: *mut ibv_device) -> Errno {
    errno!(libc::ENODEV, "{device:p} is not from ibv_get_device_list")
}

entry! {
    uncancelled ibv_get_device_list(count: Out<c_int>) -> pointer<*mut ibv_device> = get;
    uncancelled ibv_free_device_list(list: *mut *mut ibv_device) -> nothing = free;
    uncancelled ibv_get_device_name(device: *mut ibv_device) -> value<*const c_char> = name;
    plain ibv_get_device_guid(device: *mut ibv_device) -> value<u64> = guid;
}

#[cfg(test)]
mod tests {
    use rnic_client::DeviceRow;

    use super::*;
    use crate::verbs::adapter::tests::attributes;

    #[test]
    fn devices_are_listed_in_the_order_of_names() {
        let adapter = |name: &str, kind, uverbs| {
            let row = DeviceRow {
                name: name.to_owned(),
                kind,
                guid: 1,
                vendor_id: 0,
                vendor_part_id: 0,
                interface: String::new(),
                uverbs,
                gids: Vec::new(),
                port_down: false,
                p_key: 0xffff,
                active_width: 2,
                active_speed: 32,
            };
            Adapter::new(row, &attributes())
        };
        let all = [
            adapter("rxe_0", DeviceKind::Roce, 0),
            adapter("rxe_1", DeviceKind::Roce, 1),
            adapter("rnicd0", DeviceKind::Iwarp, 2),
        ];
        let of = |wanted: &str| {
            let named = named(OsStr::new(wanted), &all);
            named.iter().map(|adapter| adapter.name().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(of("rxe_1"), ["rxe_1"]);
        assert_eq!(of("rxe_1, rnicd0,rxe_0,rxe_1"), ["rxe_1", "rnicd0", "rxe_0"]);
        assert_eq!(of("mlx5_0,rnicd0"), ["rnicd0"]);
        assert!(of("mlx5_0").is_empty());
    }
}
