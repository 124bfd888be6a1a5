//! The devices that a program sees, in order. The RoCE device comes first: programs that take the
//! first device usually exchange QP numbers themselves, which an iWARP device cannot support.
//! `RNIC_DEVICES`, a comma-separated list of device names, selects other devices or another order.

use std::ffi::OsStr;

use crate::verbs::device::{Device, DeviceKind, KINDS};
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
