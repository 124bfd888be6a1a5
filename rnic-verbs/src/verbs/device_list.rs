//! The devices that a program sees, in order. The RoCE device comes first: programs that take the
//! first device usually exchange QP numbers themselves, which an iWARP device cannot support.
//! `RNIC_DEVICES`, a comma-separated list of device names, selects other devices or another order.

use std::ffi::{OsStr, c_char, c_int};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use crate::c::ibv_device;
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Kind, is_live, publish, withdraw};
use crate::ffi::pointers::Out;
use crate::verbs::device::{Device, DeviceKind, KINDS};
use crate::verbs::session;
use crate::{log, system};

/// Order without `RNIC_DEVICES`.
const ORDER: [DeviceKind; 2] = [DeviceKind::Roce, DeviceKind::Iwarp];

/// Returns the devices that the program sees.
pub(crate) fn kinds(device: &Device) -> Vec<DeviceKind> {
    let attributes = &device.attributes;
    let names = [attributes.name.as_str(), &attributes.wired_name];
    match system::variable(c"RNIC_DEVICES") {
        None => ORDER.to_vec(),
        Some(wanted) => named(&wanted, names),
    }
}

fn named(wanted: &OsStr, names: [&str; 2]) -> Vec<DeviceKind> {
    let mut kinds = Vec::new();
    for name in wanted.to_string_lossy().split(',').map(str::trim) {
        match names.iter().position(|known| *known == name) {
            Some(at) if !kinds.contains(&KINDS[at]) => kinds.push(KINDS[at]),
            Some(_) => {}
            None => log::debug(|| {
                let [first, second] = names;
                format!("RNIC_DEVICES: no device {name:?}; the devices are {first} and {second}")
            }),
        }
    }
    kinds
}

/// A device list. It keeps its devices open.
struct DeviceList {
    _device: Arc<Device>,
}

impl Body for DeviceList {
    /// Null-terminated.
    type Head = [*mut ibv_device; KINDS.len() + 1];
    const KIND: Kind = Kind::DeviceList;
}

fn get(count: Out<c_int>) -> Result<*mut *mut ibv_device, Errno> {
    let found = session::open();
    let kinds = found.as_ref().map_or(Vec::new(), |device| kinds(device));
    count.write(kinds.len() as c_int);
    // `ENOSYS` means no RDMA on this machine: programs with other transports go on without it.
    let device = found.map_err(|errno| errno.with_number(libc::ENOSYS))?;
    let mut devices = [null_mut(); KINDS.len() + 1];
    devices.iter_mut().zip(kinds).for_each(|(place, kind)| *place = device.head(kind).0);
    Ok(publish(devices, DeviceList { _device: device }).as_ptr().cast())
}

fn free(list: *mut *mut ibv_device) -> Result<(), Errno> {
    if list.is_null() {
        return Ok(());
    }
    // SAFETY: no thread uses `list`, now or later (ibv_free_device_list(3)).
    unsafe { withdraw::<DeviceList>(list.cast()) }.map(drop)
}

fn name(device: *mut ibv_device) -> *const c_char {
    if !is_live(Kind::Device, device.addr()) {
        no_device(device).report();
        return null();
    }
    // SAFETY: `is_live` has found `device`, and during the call the program does not free the list
    // that keeps it open (ibv_get_device_name(3)).
    unsafe { (&raw const (*device).name).cast() }
}

/// Returns the GUID, in network byte order.
fn guid(device: *mut ibv_device) -> u64 {
    session::with_head(device).map_or(0, |(device, kind)| device.guid(kind))
}

pub(crate) fn no_device(device: *mut ibv_device) -> Errno {
    errno!(libc::ENODEV, "{device:p} is not from ibv_get_device_list")
}

entry! {
    uncancelled ibv_get_device_list(count: Out<c_int>) -> pointer<*mut ibv_device> = get;
    uncancelled ibv_free_device_list(list: *mut *mut ibv_device) -> nothing = free;
    plain ibv_get_device_name(device: *mut ibv_device) -> value<*const c_char> = name;
    plain ibv_get_device_guid(device: *mut ibv_device) -> value<u64> = guid;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_listed_as_they_are_named() {
        let of = |wanted: &str| named(OsStr::new(wanted), ["rnicd0", "rnicd1"]);
        let [iwarp, roce] = KINDS;
        assert_eq!(of("rnicd1"), [roce]);
        assert_eq!(of("rnicd1, rnicd0,rnicd1"), [roce, iwarp]);
        assert_eq!(of("mlx5_0,rnicd0"), [iwarp]);
        assert_eq!(of("mlx5_0"), []);
    }
}
