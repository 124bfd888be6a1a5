//! `rdma resource`: the objects of the daemon.

use rnic_client::rdma::{Attribute, Objects, Value};
use rnic_client::{Context, DeviceKind};

use super::Failure;
use super::devices::Device;
use super::output::Object;

/// A device with the objects that are shown with it, if any: iWARP QPs with the iWARP device, and
/// everything else with the first RoCE device.
pub struct Shown<'a> {
    pub device: &'a Device,
    objects: Option<DeviceKind>,
}

/// Returns the devices that programs see with their objects.
pub fn shown<'a>(devices: &'a [Device]) -> Vec<Shown<'a>> {
    let first = devices.iter().position(Device::is_roce);
    let with_objects = |(n, device): (usize, &'a Device)| {
        let objects = if !device.is_roce() {
            Some(DeviceKind::Iwarp)
        } else {
            (Some(n) == first).then_some(DeviceKind::Roce)
        };
        Shown { device, objects }
    };
    devices.iter().enumerate().map(with_objects).collect()
}

/// Returns the number of objects of each kind, per device.
pub fn summary(context: &Context, shown: &[Shown<'_>]) -> Result<Vec<Object>, Failure> {
    let objects = Objects::read(context)?;
    let line = |shown: &Shown<'_>| {
        let counts = objects.counts(shown.objects);
        counts
            .into_iter()
            .fold(shown.device.head(), |line, (kind, count)| line.number(kind, count as u64))
    };
    Ok(shown.iter().map(line).collect())
}

/// Returns the objects of a kind that belong to one of the devices.
pub fn list(context: &Context, kind: &str, shown: &[Shown<'_>]) -> Result<Vec<Object>, Failure> {
    let objects = Objects::read(context)?;
    let of_device = |shown: &Shown<'_>| {
        let start =
            if matches!(kind, "qp" | "cm_id") { shown.device.link() } else { shown.device.dev() };
        let listed = objects.list(kind, shown.objects).into_iter();
        listed.map(|attributes| attributes.into_iter().fold(start.clone(), with)).collect()
    };
    Ok(shown.iter().flat_map::<Vec<_>, _>(of_device).collect())
}

/// Adds an attribute as iproute2 prints it.
fn with(object: Object, attribute: Attribute) -> Object {
    let name = attribute.name;
    match attribute.value {
        Value::U32(number) => object.number(name, number.into()),
        Value::U64(number) => object.number(name, number),
        Value::Word8(_, word) | Value::Word32(_, word) => object.text(name, word),
        Value::Switch(value) => {
            object.field(name, value, format!("{name} {} ", if value { "on" } else { "off" }))
        }
        // Without brackets around an IPv6 address.
        Value::Address(address) => {
            object.text(name, &format!("{}:{}", address.ip(), address.port()))
        }
        Value::Process(process, command) => {
            object.number(name, process.into()).text("comm", &command)
        }
        Value::Qps(ranges) if ranges.is_empty() => object,
        Value::Qps(ranges) => {
            let range = |&(first, last): &(u32, u32)| {
                if first == last { first.to_string() } else { format!("{first}-{last}") }
            };
            let words: Vec<String> = ranges.iter().map(range).collect();
            let text = format!("{name} {} ", words.join(","));
            object.field(name, words, text)
        }
    }
}
