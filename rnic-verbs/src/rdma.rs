//! Objects and links for `librnic_preload.so`, which answers the netlink requests of `rdma`
//! (iproute2). Each function opens a session of its own, so the user sees and changes what
//! `rnicctl` shows and changes.

use std::ffi::{CString, c_int, c_void};
use std::net::SocketAddr;

use rnic_client::rdma::{Attribute, LQPN, Objects, Value, add_link};
use rnic_client::{Context, DeviceKind, Error, Refusal};

use crate::c::{IBV_NODE_CA, IBV_NODE_RNIC};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::pointers::{Argument, Text};

/// Receives an attribute of a message: its number, and its value or, for a null pointer, the start
/// of the attributes in it. Number 0 ends these. The first argument is that of the caller.
pub(crate) type Put = unsafe extern "C" fn(*mut c_void, u16, *const c_void, usize);

impl Argument for Put {
    type C = Self;

    unsafe fn from_c(c: Self) -> Self {
        c
    }
}

entry! {
    /// Passes the objects of a kind, such as "qp", that are shown with a device to `put`: the
    /// attributes of each in one attribute with this number. A null pointer as kind selects the
    /// numbers of objects of all kinds. The node type is 0 for a RoCE device after the first.
    uncancelled rdma_objects(
        kind: Text, node_type: c_int, number: u16, put: Put, argument: *mut c_void,
    ) -> status = objects;
    /// Adds a link.
    uncancelled rdma_link_add(name: Text, kind: Text, netdev: Text) -> status = link_add;
    /// Deletes a link.
    uncancelled rdma_link_delete(name: Text) -> status = link_delete;
}

/// Passes attributes to the caller of this library.
struct Sink {
    put: Put,
    argument: *mut c_void,
}

impl Sink {
    fn put(&self, number: u16, value: &[u8]) {
        // SAFETY: the value is valid during the call, and the argument is that of the caller.
        unsafe { (self.put)(self.argument, number, value.as_ptr().cast(), value.len()) }
    }

    /// Passes an attribute that contains attributes.
    fn nested(&self, number: u16, attributes: impl FnOnce()) {
        // SAFETY: as for `put`; there is no value.
        unsafe { (self.put)(self.argument, number, std::ptr::null(), 0) }
        attributes();
        // SAFETY: as for `put`; there is no value.
        unsafe { (self.put)(self.argument, 0, std::ptr::null(), 0) }
    }

    fn attribute(&self, Attribute { number, value, .. }: &Attribute) {
        match value {
            Value::U32(value) | Value::Word32(value, _) | Value::Process(value, _) => {
                self.put(*number, &value.to_ne_bytes());
            }
            Value::U64(value) => self.put(*number, &value.to_ne_bytes()),
            Value::Word8(value, _) => self.put(*number, &[*value]),
            Value::Switch(value) => self.put(*number, &[u8::from(*value)]),
            Value::Address(address) => self.put(*number, &storage(*address)),
            Value::Qps(ranges) => self.nested(*number, || {
                for range in ranges.iter().take(MOST_RANGES) {
                    self.nested(QP_ENTRY, || self.range(*range));
                }
            }),
        }
    }

    fn range(&self, (first, last): (u32, u32)) {
        if first == last {
            self.put(LQPN, &first.to_ne_bytes());
        } else {
            self.put(MIN_RANGE, &first.to_ne_bytes());
            self.put(MAX_RANGE, &last.to_ne_bytes());
        }
    }
}

fn objects(
    kind: Text,
    node_type: c_int,
    number: u16,
    put: Put,
    argument: *mut c_void,
) -> Result<(), Errno> {
    let device = match node_type {
        IBV_NODE_CA => Some(DeviceKind::Roce),
        IBV_NODE_RNIC => Some(DeviceKind::Iwarp),
        _ => None,
    };
    let sink = Sink { put, argument };
    let objects = Objects::read(&Context::open()?)?;
    let Some(kind) = kind.read().map_err(|_| invalid!("the kind is not UTF-8"))? else {
        for (kind, count) in objects.counts(device) {
            sink.nested(number, || {
                sink.put(SUMMARY_NAME, &[kind.as_bytes(), &[0]].concat());
                sink.put(SUMMARY_CURRENT, &(count as u64).to_ne_bytes());
            });
        }
        return Ok(());
    };
    for object in objects.list(kind, device) {
        sink.nested(number, || object.iter().for_each(|attribute| sink.attribute(attribute)));
    }
    Ok(())
}

/// Returns a `struct sockaddr_storage`.
fn storage(address: SocketAddr) -> [u8; 128] {
    let mut bytes = [0; 128];
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(address) => bytes[4..8].copy_from_slice(&address.ip().octets()),
        SocketAddr::V6(address) => {
            bytes[8..24].copy_from_slice(&address.ip().octets());
            bytes[24..28].copy_from_slice(&address.scope_id().to_ne_bytes());
        }
    }
    bytes
}

fn link_add(name: Text, kind: Text, netdev: Text) -> Result<(), Errno> {
    let name = text(&name, "name")?;
    let netdev = text(&netdev, "netdev")?;
    let kind = text(&kind, "type")?;
    if kind != "rxe" {
        return Err(invalid!("type {kind:?}: rnicd adds devices of type rxe"));
    }
    let context = Context::open()?;
    add_link(&context, name, netdev).map_err(|error| {
        if !matches!(error.refusal(), Some(Refusal::Invalid { .. })) {
            return of_change(error);
        }
        let devices = context.device_unruled().map(|device| device.devices).unwrap_or_default();
        let taken = devices.into_iter().find(|device| device.name == name);
        // As by the kernel: for an interface that has a device, and for the name of a device.
        let number = match taken {
            _ if !is_interface(netdev) => libc::ENODEV,
            Some(device) if device.interface == netdev => libc::EEXIST,
            Some(_) => libc::ENFILE,
            None => libc::EINVAL,
        };
        Errno::from(error).with_number(number)
    })
}

/// Returns true if the network namespace has this interface.
fn is_interface(name: &str) -> bool {
    // SAFETY: the name is a string.
    CString::new(name).is_ok_and(|name| unsafe { libc::if_nametoindex(name.as_ptr()) } != 0)
}

fn link_delete(name: Text) -> Result<(), Errno> {
    let name = text(&name, "name")?;
    Context::open()?.remove_device(name).map_err(of_change)
}

/// Returns the error of a change. Without a right, the kernel returns `EPERM`.
fn of_change(error: Error) -> Errno {
    let is_forbidden = matches!(error.refusal(), Some(Refusal::NotAllowed { .. }));
    let errno = Errno::from(error);
    if is_forbidden { errno.with_number(libc::EPERM) } else { errno }
}

fn text<'a>(text: &'a Text, what: &str) -> Result<&'a str, Errno> {
    text.read().ok().flatten().ok_or_else(|| invalid!("the {what} is missing or not UTF-8"))
}

/// `rdma` prints at most 255 characters of the QPs of an SRQ.
const MOST_RANGES: usize = 100;

/// `RDMA_NLDEV_ATTR_...` (`rdma/rdma_netlink.h`).
const SUMMARY_NAME: u16 = 17;
const SUMMARY_CURRENT: u16 = 18;
const QP_ENTRY: u16 = 20;
const MIN_RANGE: u16 = 91;
const MAX_RANGE: u16 = 92;
