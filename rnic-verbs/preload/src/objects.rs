//! Answers the netlink requests of `rdma` for objects, and those that add and delete links.
//!
//! The device files contain neither, and this library has no client of the daemon. So these
//! requests call private functions of rnicd's libibverbs.so.1 (`rnic-verbs/src/rdma.rs`), which is
//! found only when a program sends such a request. Without it they fail with `EOPNOTSUPP`.

use std::ffi::{CStr, CString};
use std::ptr::{from_mut, null};

use libc::{c_char, c_int, c_void, size_t};

use crate::netlink::*;

/// A kind of objects.
struct Kind {
    command: u16,
    /// Name in libibverbs.so.1; `None` for the numbers of objects of all kinds.
    name: Option<&'static CStr>,
    /// Attribute with the list of objects.
    table: u16,
    /// Attribute with an object.
    entry: u16,
    /// Attribute that selects an object.
    id: u16,
    /// The objects belong to a port.
    has_port: bool,
}

const fn kind(
    command: u16,
    name: &'static CStr,
    [table, entry, id]: [u16; 3],
    has_port: bool,
) -> Kind {
    Kind { command: NLDEV | command, name: Some(name), table, entry, id, has_port }
}

/// `RDMA_NLDEV_CMD_RES_..._GET` with `RDMA_NLDEV_ATTR_RES_...`.
const KINDS: [Kind; 8] = [
    Kind { command: NLDEV | 9, name: None, table: 15, entry: 16, id: 0, has_port: false },
    kind(10, c"qp", [19, 20, 21], true),
    kind(11, c"cm_id", [30, 31, 63], true),
    kind(12, c"cq", [35, 36, 61], false),
    kind(13, c"mr", [40, 41, 62], false),
    kind(14, c"pd", [46, 47, 60], false),
    kind(22, c"ctx", [86, 87, 64], false),
    kind(23, c"srq", [88, 89, 90], false),
];

/// `RDMA_NLDEV_CMD_NEWLINK`.
const ADD_LINK: u16 = NLDEV | 3;
/// `RDMA_NLDEV_CMD_DELLINK`.
const DELETE_LINK: u16 = NLDEV | 4;
/// `RDMA_NLDEV_ATTR_LINK_TYPE`.
const ATTR_LINK_TYPE: u16 = 65;

/// Returns the replies to a request; `None` if it is for neither objects nor links.
pub(crate) fn answer(request: &Request<'_>, command: u16) -> Option<Replies> {
    let result = match command {
        ADD_LINK => add_link(request),
        DELETE_LINK => delete_link(request),
        _ => list(request, KINDS.iter().find(|kind| kind.command == command)?),
    };
    Some(result.unwrap_or_else(|error| [request.end(error)].into()))
}

/// Returns the objects of a kind. Errors are those of the kernel.
fn list(request: &Request<'_>, kind: &Kind) -> Result<Replies, c_int> {
    let all = devices();
    let device = request.device(&all)?;
    let port = request.attribute(ATTR_PORT_INDEX);
    let is_single = kind.name.is_some() && !request.dumps();
    if port.is_some_and(|port| *port != PORT.to_ne_bytes())
        || is_single && port.is_some() != kind.has_port
    {
        return Err(libc::EINVAL);
    }
    let head = || {
        let mut reply = request.reply(kind.command);
        reply.put(ATTR_DEV_INDEX, &device.index.to_ne_bytes());
        reply.put_text(ATTR_DEV_NAME, &device.name);
        reply
    };
    let objects = objects(kind, shown_with(device, &all))?;
    if is_single {
        let id = request.attribute(kind.id).ok_or(libc::EINVAL)?;
        let is_wanted = |object: &&Message| object.attribute(kind.id) == Some(id);
        let object = objects.iter().find(is_wanted).ok_or(libc::ENOENT)?;
        let mut reply = head();
        reply.append(object);
        return Ok([reply.finish(), request.end(0)].into());
    }
    let mut replies = Replies::new();
    let mut objects = objects.iter().peekable();
    while objects.peek().is_some() {
        let mut table = Message::default();
        while let Some(object) = objects.next_if(|object| table.has_room(object)) {
            table.put(kind.entry | NLA_F_NESTED, object.bytes());
        }
        let mut reply = head();
        reply.put(kind.table | NLA_F_NESTED, table.bytes());
        replies.push_back(reply.finish());
    }
    replies.push_back(request.end(0));
    Ok(replies)
}

/// Returns the node type of a device with which objects are shown, or 0: iWARP QPs are shown with
/// the iWARP device, and everything else with the first RoCE device.
fn shown_with(device: &Device, all: &[Device]) -> c_int {
    let node_type = device.node_type();
    let first = all.iter().find(|other| other.node_type() == node_type);
    let is_first = first.is_some_and(|first| first.index == device.index);
    if is_first { node_type.into() } else { 0 }
}

/// Objects that libibverbs.so.1 passes.
#[derive(Default)]
struct Objects {
    all: Vec<Message>,
    /// Attributes that are not complete, each in its predecessor, with their numbers.
    open: Vec<(u16, Message)>,
    has_port: bool,
}

impl Objects {
    fn begin(&mut self, number: u16) {
        let mut attributes = Message::default();
        if self.has_port && self.open.is_empty() {
            attributes.put(ATTR_PORT_INDEX, &PORT.to_ne_bytes());
        }
        self.open.push((number, attributes));
    }

    fn end(&mut self) {
        let Some((number, attributes)) = self.open.pop() else { return };
        match self.open.last_mut() {
            Some((_, outer)) => outer.put(number | NLA_F_NESTED, attributes.bytes()),
            None => self.all.push(attributes),
        }
    }
}

/// # Safety
///
/// `objects` must be an `Objects` that nothing else uses, and `value` null or `length` bytes.
unsafe extern "C" fn put(objects: *mut c_void, number: u16, value: *const c_void, length: size_t) {
    // SAFETY: the caller guarantees it.
    let objects = unsafe { &mut *objects.cast::<Objects>() };
    match (number, value.is_null()) {
        (0, true) => objects.end(),
        (_, true) => objects.begin(number),
        _ => {
            // SAFETY: the caller guarantees it.
            let value = unsafe { std::slice::from_raw_parts(value.cast(), length) };
            if let Some((_, attributes)) = objects.open.last_mut() {
                attributes.put(number, value);
            }
        }
    }
}

type Put = unsafe extern "C" fn(*mut c_void, u16, *const c_void, size_t);

fn objects(kind: &Kind, node_type: c_int) -> Result<Vec<Message>, c_int> {
    type Call = unsafe extern "C" fn(*const c_char, c_int, u16, Put, *mut c_void) -> c_int;
    let found = function(c"rnicd_rdma_objects")?;
    // SAFETY: the function of this name has this type.
    let call = unsafe { std::mem::transmute::<*mut c_void, Call>(found) };
    let name = kind.name.map_or(null(), CStr::as_ptr);
    let mut objects = Objects { has_port: kind.has_port, ..Objects::default() };
    let to = from_mut(&mut objects).cast();
    // SAFETY: the name is null or a string, and the function passes `to` only to `put`, and only
    // before it returns.
    done(unsafe { call(name, node_type, kind.entry, put, to) })?;
    Ok(objects.all)
}

fn add_link(request: &Request<'_>) -> Result<Replies, c_int> {
    type Call = unsafe extern "C" fn(*const c_char, *const c_char, *const c_char) -> c_int;
    let name = request.text(ATTR_DEV_NAME)?;
    let kind = request.text(ATTR_LINK_TYPE)?;
    let netdev = request.text(ATTR_NDEV_NAME)?;
    let found = function(c"rnicd_rdma_link_add")?;
    // SAFETY: the function of this name has this type.
    let call = unsafe { std::mem::transmute::<*mut c_void, Call>(found) };
    // SAFETY: the arguments are strings.
    done(unsafe { call(name.as_ptr(), kind.as_ptr(), netdev.as_ptr()) })?;
    Ok([request.end(0)].into())
}

fn delete_link(request: &Request<'_>) -> Result<Replies, c_int> {
    type Call = unsafe extern "C" fn(*const c_char) -> c_int;
    let all = devices();
    let device = request.device(&all)?;
    let name = CString::new(device.name.as_str()).map_err(|_| libc::EINVAL)?;
    let found = function(c"rnicd_rdma_link_delete")?;
    // SAFETY: the function of this name has this type.
    let call = unsafe { std::mem::transmute::<*mut c_void, Call>(found) };
    // SAFETY: the argument is a string.
    done(unsafe { call(name.as_ptr()) })?;
    Ok([request.end(0)].into())
}

fn done(error: c_int) -> Result<(), c_int> {
    if error == 0 { Ok(()) } else { Err(error) }
}

/// Returns a function of rnicd's libibverbs.so.1. The library is loaded if the program has not
/// loaded it, and stays loaded.
///
/// # Errors
///
/// `EOPNOTSUPP` if there is no libibverbs.so.1, or if it is that of rdma-core.
fn function(name: &CStr) -> Result<*mut c_void, c_int> {
    // SAFETY: the name is a string. The constructors of either library call nothing in this one
    // that would need the program's state.
    let library = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_LAZY) };
    if !library.is_null() {
        // SAFETY: the handle is valid, and the name is a string.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        if !found.is_null() {
            return Ok(found);
        }
    }
    // The program did not ask for the library.
    // SAFETY: no obligations.
    unsafe { libc::dlerror() };
    Err(libc::EOPNOTSUPP)
}
