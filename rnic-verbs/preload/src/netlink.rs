//! Answers the netlink requests of `rdma` (iproute2) for devices, ports and counters
//! (`rdma/rdma_netlink.h`) from the files that this library shows. `objects` answers those for
//! objects (`rdma resource`) and those that change links.
//!
//! This module replaces functions of libmnl, not system calls, so it affects only programs that
//! open a socket of `NETLINK_RDMA` with libmnl. Other requests fail with `EOPNOTSUPP`. Unlike the
//! other functions of this library, these allocate memory, as libmnl's do.

use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::fs;
use std::ptr::null_mut;

use libc::{c_int, c_uint, c_void, size_t, socklen_t, ssize_t};

use crate::next::next;
use crate::objects;

/// Messages that a socket has not received yet.
pub(crate) type Replies = VecDeque<Vec<u8>>;

/// A socket of this library. The mark has the size of `struct mnl_socket`, and is negative where
/// that structure has its descriptor. As in libmnl, one thread at a time uses a socket.
#[repr(C)]
struct Socket {
    mark: [c_int; 4],
    replies: Replies,
}

/// An invalid descriptor, and arbitrary numbers.
const MARK: [c_int; 4] = [-1, 0x726e_6963, 0x6d6e_6c00, 0x736f_636b];

/// Returns a socket of this library; `None` for one of libmnl.
///
/// # Safety
///
/// `socket` must be null, or a socket of this library or of libmnl that no other thread uses.
unsafe fn own<'a>(socket: *mut c_void) -> Option<&'a mut Socket> {
    // SAFETY: both kinds of sockets begin with 16 bytes, aligned as `int`.
    let mark = unsafe { socket.cast::<[c_int; 4]>().as_ref() };
    // SAFETY: only `mnl_socket_open` below allocates a socket with this mark.
    (mark == Some(&MARK)).then(|| unsafe { &mut *socket.cast::<Socket>() })
}

/// Calls `own` with the messages of a socket of this library, and libmnl's function with others.
macro_rules! replace {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $returns:ty, else $failed:expr, = $own:expr;)*) => {$(
        /// Same as libmnl's function of this name.
        ///
        /// # Safety
        ///
        /// Same as for libmnl's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(socket: *mut c_void $(, $arg: $type)*) -> $returns {
            // SAFETY: the caller fulfils the requirements of libmnl's function.
            if let Some(Socket { replies, .. }) = unsafe { own(socket) } {
                let answer: fn(&mut Replies, $($type),*) -> $returns = $own;
                return answer(replies, $($arg),*);
            }
            type Call = unsafe extern "C" fn(*mut c_void $(, $type)*) -> $returns;
            let Some(next) = next!($name: Call, of c"libmnl.so.0") else { return $failed };
            // SAFETY: the caller fulfils the requirements of libmnl's function.
            unsafe { next(socket $(, $arg)*) }
        }
    )*};
}

replace! {
    fn mnl_socket_bind(groups: c_uint, pid: libc::pid_t) -> c_int, else -1, = |_, _, _| 0;
    fn mnl_socket_setsockopt(kind: c_int, value: *mut c_void, length: socklen_t) -> c_int,
        else -1, = |_, _, _, _| 0;
    fn mnl_socket_get_portid() -> c_uint, else 0, = |_| 1;
    fn mnl_socket_sendto(message: *const c_void, length: size_t) -> ssize_t,
        else -1, = |replies, message, length| {
        if message.is_null() {
            return 0;
        }
        // SAFETY: the program passes a message of this length.
        let request = unsafe { std::slice::from_raw_parts(message.cast::<u8>(), length) };
        *replies = answer(request).unwrap_or_default();
        length.cast_signed()
    };
    fn mnl_socket_recvfrom(to: *mut c_void, size: size_t) -> ssize_t,
        else -1, = |replies, to, size| {
        let Some(message) = replies.pop_front().filter(|message| message.len() <= size) else {
            // SAFETY: the pointer to this thread's `errno` is valid.
            unsafe { *libc::__errno_location() = libc::EAGAIN };
            return -1;
        };
        // SAFETY: the program passes a buffer of this size, which the message does not exceed.
        unsafe { to.cast::<u8>().copy_from_nonoverlapping(message.as_ptr(), message.len()) };
        message.len().cast_signed()
    };
}

/// Same as libmnl's function of this name.
///
/// # Safety
///
/// No obligations.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mnl_socket_open(bus: c_int) -> *mut c_void {
    if bus == libc::NETLINK_RDMA && fs::read_dir(CLASS).is_ok() {
        return Box::into_raw(Box::new(Socket { mark: MARK, replies: Replies::new() })).cast();
    }
    type Call = unsafe extern "C" fn(c_int) -> *mut c_void;
    let Some(next) = next!(mnl_socket_open: Call, of c"libmnl.so.0") else { return null_mut() };
    // SAFETY: libmnl's function has no obligations.
    unsafe { next(bus) }
}

/// Same as libmnl's function of this name.
///
/// # Safety
///
/// Same as for libmnl's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mnl_socket_close(socket: *mut c_void) -> c_int {
    // SAFETY: the caller fulfils the requirements of libmnl's function.
    if let Some(own) = unsafe { own(socket) } {
        // SAFETY: `mnl_socket_open` has allocated it as a box, and the program does not use it
        // again.
        drop(unsafe { Box::from_raw(own) });
        return 0;
    }
    type Call = unsafe extern "C" fn(*mut c_void) -> c_int;
    let Some(next) = next!(mnl_socket_close: Call, of c"libmnl.so.0") else { return -1 };
    // SAFETY: the caller fulfils the requirements of libmnl's function.
    unsafe { next(socket) }
}

/// A request: its bytes with fields of its header (`struct nlmsghdr`).
pub(crate) struct Request<'a> {
    bytes: &'a [u8],
    flags: u16,
    sequence: u32,
}

/// Returns the replies to a request; `None` for bytes without a header.
fn answer(bytes: &[u8]) -> Option<Replies> {
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let flags = u16::from_ne_bytes(bytes.get(6..8)?.try_into().ok()?);
    let sequence = u32::from_ne_bytes(bytes.get(8..12)?.try_into().ok()?);
    let request = Request { bytes, flags, sequence };
    if kind == SYS_GET {
        let mut reply = request.reply(kind);
        reply.put(SYS_ATTR_NETNS_SHARED, &[1]);
        reply.put(SYS_ATTR_COPY_ON_FORK, &[1]);
        return Some([reply.finish(), request.end(0)].into());
    }
    if let Some(replies) = objects::answer(&request, kind) {
        return Some(replies);
    }
    let counted = request.attribute(ATTR_STAT_RES);
    let of_qps = counted.is_some_and(|counted| *counted == ATTR_RES_QP.to_ne_bytes());
    if kind == STAT_GET && of_qps && request.dumps() {
        // As with rxe, QPs have no counters of their own.
        return Some([request.end(0)].into());
    }
    let describe: fn(&Device, &mut Message) = match kind {
        GET => Device::put_device,
        PORT_GET => Device::put_port,
        STAT_GET if of_qps => Device::put_mode,
        STAT_GET if counted.is_none() => Device::put_statistic,
        _ => return Some([request.end(libc::EOPNOTSUPP)].into()),
    };
    let wanted = request.attribute(ATTR_DEV_INDEX);
    let is_wanted =
        |device: &Device| wanted.is_none_or(|index| device.index.to_ne_bytes() == *index);
    let mut replies = Replies::new();
    for device in devices().into_iter().filter(is_wanted) {
        let mut reply = request.reply(kind);
        reply.put(ATTR_DEV_INDEX, &device.index.to_ne_bytes());
        reply.put_text(ATTR_DEV_NAME, &device.name);
        reply.put(ATTR_PORT_INDEX, &PORT.to_ne_bytes());
        describe(&device, &mut reply);
        replies.push_back(reply.finish());
    }
    let missing = replies.is_empty() && !request.dumps();
    replies.push_back(request.end(if missing { libc::ENODEV } else { 0 }));
    Some(replies)
}

impl Request<'_> {
    pub(crate) fn dumps(&self) -> bool {
        self.flags & NLM_F_DUMP == NLM_F_DUMP
    }

    /// Returns the value of an attribute.
    pub(crate) fn attribute(&self, wanted: u16) -> Option<&[u8]> {
        attribute(self.bytes.get(HEADER..)?, wanted)
    }

    /// Returns the text of an attribute. The error is `EINVAL`.
    pub(crate) fn text(&self, wanted: u16) -> Result<&CStr, c_int> {
        let bytes = self.attribute(wanted).ok_or(libc::EINVAL)?;
        CStr::from_bytes_until_nul(bytes).map_err(|_| libc::EINVAL)
    }

    /// Returns the device with the index in the request. The error is `EINVAL`.
    pub(crate) fn device<'d>(&self, all: &'d [Device]) -> Result<&'d Device, c_int> {
        let wanted = self.attribute(ATTR_DEV_INDEX).ok_or(libc::EINVAL)?;
        let device = all.iter().find(|device| device.index.to_ne_bytes() == *wanted);
        device.ok_or(libc::EINVAL)
    }

    pub(crate) fn reply(&self, kind: u16) -> Message {
        let flags = if self.dumps() { NLM_F_MULTI } else { 0 };
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(self.sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        Message(bytes)
    }

    /// Returns the last message: an error number or 0.
    pub(crate) fn end(&self, error: c_int) -> Vec<u8> {
        let is_error = error != 0 || !self.dumps();
        let mut message = self.reply(if is_error { NLMSG_ERROR } else { NLMSG_DONE });
        message.0.extend((-error).to_ne_bytes());
        if is_error {
            message.0.extend(self.bytes.iter().take(HEADER));
        }
        message.finish()
    }
}

/// Returns the value of one of these attributes.
fn attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(attributes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(attributes.get(2..4)?.try_into().ok()?);
        if kind & NLA_TYPE_MASK == wanted {
            return attributes.get(4..length);
        }
        attributes = attributes.get(length.max(4).next_multiple_of(4)..)?;
    }
}

/// A message, or the attributes in an attribute.
#[derive(Default)]
pub(crate) struct Message(Vec<u8>);

impl Message {
    pub(crate) fn put(&mut self, kind: u16, value: &[u8]) {
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    pub(crate) fn put_text(&mut self, kind: u16, text: &str) {
        self.put(kind, CString::new(text).unwrap_or_default().as_bytes_with_nul());
    }

    /// Returns the value of an attribute, if this is not a whole message.
    pub(crate) fn attribute(&self, wanted: u16) -> Option<&[u8]> {
        attribute(&self.0, wanted)
    }

    pub(crate) fn append(&mut self, attributes: &Message) {
        self.0.extend(&attributes.0);
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns true if a message with these attributes and `more` fits the buffer of `rdma`, or if
    /// there are no attributes yet.
    pub(crate) fn has_room(&self, more: &Message) -> bool {
        self.0.is_empty() || self.0.len() + more.0.len() <= ROOM
    }

    /// Sets the length.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}

/// A device with one port, as the device files show it.
pub(crate) struct Device {
    /// Number of its `uverbs` file.
    pub(crate) index: u32,
    pub(crate) name: String,
}

/// Returns the devices that the program sees, in ascending order of their numbers.
pub(crate) fn devices() -> Vec<Device> {
    let entries = fs::read_dir("/sys/class/infiniband_verbs").into_iter().flatten().flatten();
    let device = |entry: fs::DirEntry| {
        let index = entry.file_name().to_str()?.strip_prefix("uverbs")?.parse().ok()?;
        let name = fs::read_to_string(entry.path().join("ibdev")).ok()?;
        Some(Device { index, name: name.trim().to_owned() })
    };
    let mut devices: Vec<_> = entries.filter_map(device).collect();
    devices.sort_by_key(|device| device.index);
    devices
}

impl Device {
    fn attribute(&self, name: &str) -> String {
        let text = fs::read_to_string(format!("{CLASS}/{}/{name}", self.name)).unwrap_or_default();
        text.trim_end().to_owned()
    }

    /// Returns the number before the colon of an attribute ("4: ACTIVE").
    fn number(&self, name: &str) -> u8 {
        let text = self.attribute(name);
        text.split(':').next().and_then(|number| number.parse().ok()).unwrap_or_default()
    }

    pub(crate) fn node_type(&self) -> u8 {
        self.number("node_type")
    }

    fn guid(&self, name: &str) -> u64 {
        u64::from_str_radix(&self.attribute(name).replace(':', ""), 16).unwrap_or_default()
    }

    fn put_device(&self, to: &mut Message) {
        let node_type = self.node_type();
        to.put_text(ATTR_FW_VERSION, &self.attribute("fw_ver"));
        to.put(ATTR_NODE_GUID, &self.guid("node_guid").to_ne_bytes());
        to.put(ATTR_SYS_IMAGE_GUID, &self.guid("sys_image_guid").to_ne_bytes());
        to.put(ATTR_DEV_NODE_TYPE, &[node_type]);
        to.put_text(ATTR_DEV_PROTOCOL, if node_type == 1 { "roce" } else { "iw" });
    }

    fn put_port(&self, to: &mut Message) {
        to.put(ATTR_PORT_STATE, &[self.number("ports/1/state")]);
        to.put(ATTR_PORT_PHYS_STATE, &[self.number("ports/1/phys_state")]);
        let Some(interface) = self.interface() else { return };
        let index = fs::read_to_string(format!("/sys/class/net/{interface}/ifindex"));
        let index = index.ok().and_then(|text| text.trim().parse::<u32>().ok());
        to.put(ATTR_NDEV_INDEX, &index.unwrap_or_default().to_ne_bytes());
        to.put_text(ATTR_NDEV_NAME, &interface);
    }

    /// Returns the interface of the first GID that is not on the loopback interface. If all GIDs
    /// are on it, returns the loopback interface.
    fn interface(&self) -> Option<String> {
        let folder = format!("{CLASS}/{}/ports/1/gid_attrs/ndevs", self.name);
        let row = |entry: fs::DirEntry| {
            let row: u32 = entry.file_name().to_str()?.parse().ok()?;
            let name = fs::read_to_string(entry.path()).ok()?.trim().to_owned();
            (!name.is_empty()).then_some((name == "lo", row, name))
        };
        let rows = fs::read_dir(folder).ok()?.flatten().filter_map(row);
        rows.min().map(|(_, _, name)| name)
    }

    /// No counter is bound to QPs (`RDMA_COUNTER_MODE_NONE`).
    fn put_mode(&self, to: &mut Message) {
        to.put(ATTR_STAT_MODE, &0_u32.to_ne_bytes());
    }

    fn put_statistic(&self, to: &mut Message) {
        let mut counters = Message(Vec::new());
        for name in COUNTERS {
            let value = self.attribute(&format!("ports/1/hw_counters/{name}"));
            let Ok(value) = value.parse::<u64>() else { continue };
            let mut counter = Message(Vec::new());
            counter.put_text(ATTR_STAT_NAME, name);
            counter.put(ATTR_STAT_VALUE, &value.to_ne_bytes());
            counters.put(ATTR_STAT_ENTRY | NLA_F_NESTED, &counter.0);
        }
        to.put(ATTR_STAT_COUNTERS | NLA_F_NESTED, &counters.0);
    }
}

const CLASS: &str = "/sys/class/infiniband";

/// Files in `hw_counters` that `rdma statistic` shows, as in rnicd's own `rdma`.
const COUNTERS: [&str; 2] = ["rx_read_requests", "iwInRdmaReads"];

/// Length of `struct nlmsghdr`.
const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_MULTI: u16 = 2;
const NLM_F_DUMP: u16 = 0x300;
pub(crate) const NLA_F_NESTED: u16 = 1 << 15;
const NLA_TYPE_MASK: u16 = 0x3FFF;

/// Size of the attributes of a message with a list. The buffer of `rdma` has the size of a page, at
/// least 4096 bytes.
const ROOM: usize = 3500;

/// The port of each device.
pub(crate) const PORT: u32 = 1;

/// `RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, ...)`.
pub(crate) const NLDEV: u16 = 5 << 10;
const GET: u16 = NLDEV | 1;
const PORT_GET: u16 = NLDEV | 5;
const SYS_GET: u16 = NLDEV | 6;
const STAT_GET: u16 = NLDEV | 17;

/// `RDMA_NLDEV_SYS_ATTR_...`.
const SYS_ATTR_NETNS_SHARED: u16 = 66;
const SYS_ATTR_COPY_ON_FORK: u16 = 93;

/// `RDMA_NLDEV_ATTR_...`.
pub(crate) const ATTR_DEV_INDEX: u16 = 1;
pub(crate) const ATTR_DEV_NAME: u16 = 2;
pub(crate) const ATTR_PORT_INDEX: u16 = 3;
const ATTR_FW_VERSION: u16 = 5;
const ATTR_NODE_GUID: u16 = 6;
const ATTR_SYS_IMAGE_GUID: u16 = 7;
const ATTR_PORT_STATE: u16 = 12;
const ATTR_PORT_PHYS_STATE: u16 = 13;
const ATTR_DEV_NODE_TYPE: u16 = 14;
const ATTR_RES_QP: u32 = 19;
const ATTR_NDEV_INDEX: u16 = 50;
pub(crate) const ATTR_NDEV_NAME: u16 = 51;
const ATTR_DEV_PROTOCOL: u16 = 67;
const ATTR_STAT_MODE: u16 = 74;
const ATTR_STAT_RES: u16 = 75;
const ATTR_STAT_COUNTERS: u16 = 80;
const ATTR_STAT_ENTRY: u16 = 81;
const ATTR_STAT_NAME: u16 = 82;
const ATTR_STAT_VALUE: u16 = 83;
