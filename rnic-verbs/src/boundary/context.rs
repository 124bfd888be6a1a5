//! Devices and contexts.

use std::ffi::{c_char, c_int};
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::Arc;

use crate::c::*;
use crate::context::{ContextBody, PORT};
use crate::device::{Device, DeviceKind, KINDS};
use crate::errno::{Errno, minus_one, pointer, status};
use crate::object::{Body, body, publish, withdraw, zeroed};
use crate::{system, visible};

use super::{cq, cq_ex, memory, qp, qp_ex, srq};

/// A list of devices, null-terminated, which keeps those that are in it.
#[repr(C)]
struct List {
    devices: [*mut ibv_device; KINDS.len() + 1],
    device: Arc<Device>,
}

impl Body for ContextBody {
    type Head = verbs_context;
}

/// The context behind a pointer of C's, which points into the middle of the structure.
pub(super) unsafe fn context<'a>(context: *mut ibv_context) -> Option<&'a ContextBody> {
    if context.is_null() {
        return None;
    }
    // SAFETY: as the module says; every context that we hand out is inside of a `verbs_context`.
    unsafe { body(start(context)) }
}

fn start(context: *mut ibv_context) -> *mut verbs_context {
    context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast()
}

/// Opens a context of a device.
pub(super) fn open(device: &Arc<Device>, kind: DeviceKind) -> Result<*mut ibv_context, Errno> {
    let opened = ContextBody::open(device.clone(), kind)?;
    let mut head: verbs_context = zeroed();
    head.query_port = Some(query_port);
    head.advise_mr = Some(memory::advise_mr);
    head.query_rt_values = Some(query_rt_values);
    head.create_cq_ex = Some(cq_ex::create_cq_ex);
    head.query_device_ex = Some(query_device_ex);
    head.create_qp_ex = Some(qp::create_qp_ex);
    head.get_srq_num = Some(srq::get_srq_num);
    head.create_srq_ex = Some(srq::create_srq_ex);
    head.sz = size_of::<verbs_context>();
    let context = &mut head.context;
    context.device = device.head(kind).0;
    context.ops.alloc_mw = Some(memory::alloc_mw);
    context.ops.bind_mw = Some(qp_ex::bind_mw);
    context.ops.dealloc_mw = Some(memory::dealloc_mw);
    context.ops.poll_cq = Some(cq::poll_cq);
    context.ops.req_notify_cq = Some(cq::req_notify_cq);
    context.ops.post_srq_recv = Some(srq::post_srq_recv);
    context.ops.post_send = Some(qp::post_send);
    context.ops.post_recv = Some(qp::post_recv);
    context.cmd_fd = opened.async_fd();
    context.async_fd = opened.async_fd();
    context.num_comp_vectors = opened.vectors();
    context.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    context.abi_compat = VERBS_ABI_IS_EXTENDED;
    let head = publish(head, opened).as_ptr();
    // SAFETY: the structure has just been published.
    Ok(unsafe { &raw mut (*head).context })
}

/// ibv_get_device_list(3).
pub(crate) unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let _whole = system::uncancelled();
    let found = Device::open();
    let kinds = found.as_ref().map_or(Vec::new(), |device| visible::kinds(device));
    if !count.is_null() {
        // SAFETY: as the module says.
        unsafe { *count = kinds.len() as c_int };
    }
    let Ok(device) = found else {
        // What a machine without a device says; programs ask that have other ways.
        system::set_errno(libc::ENOSYS);
        return null_mut();
    };
    let mut devices = [null_mut(); KINDS.len() + 1];
    devices.iter_mut().zip(kinds).for_each(|(place, kind)| *place = device.head(kind).0);
    Box::into_raw(Box::new(List { devices, device })).cast()
}

/// ibv_free_device_list(3).
pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let _whole = system::uncancelled();
    if !list.is_null() {
        // SAFETY: as the module says: it came from `ibv_get_device_list`.
        drop(unsafe { Box::from_raw(list.cast::<List>()) });
    }
}

/// ibv_get_device_name(3).
pub(crate) unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    if device.is_null() {
        return std::ptr::null();
    }
    // SAFETY: as the module says.
    unsafe { (&raw const (*device).name).cast() }
}

/// ibv_get_device_guid(3): in network byte order.
pub(crate) unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    Device::with_head(device).map_or(0, |(device, kind)| device.guid(kind))
}

/// ibv_open_device(3).
pub(crate) unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let _whole = system::uncancelled();
    let found = Device::with_head(device).ok_or(Errno::NO_DEVICE);
    pointer(found.and_then(|(device, kind)| open(&device, kind)))
}

/// ibv_close_device(3).
pub(crate) unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    let _whole = system::uncancelled();
    if context.is_null() {
        return status(Err(Errno::INVALID));
    }
    // SAFETY: as the module says.
    drop(unsafe { withdraw::<ContextBody>(start(context)) });
    0
}

/// ibv_query_device(3).
pub(crate) unsafe extern "C" fn ibv_query_device(
    of: *mut ibv_context,
    attributes: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let Some(context) = context(of) else { return status(Err(Errno::INVALID)) };
        attributes.write(context.attributes());
    }
    0
}

unsafe extern "C" fn query_device_ex(
    of: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attributes: *mut ibv_device_attr_ex,
    length: usize,
) -> c_int {
    // SAFETY: as the module says: `length` bytes are the program's structure, which may be older
    // or newer than ours.
    unsafe {
        let Some(context) = context(of) else { return status(Err(Errno::INVALID)) };
        if input.as_ref().is_some_and(|input| input.comp_mask != 0) {
            return status(Err(Errno::INVALID));
        }
        write_prefix(&context.attributes_ex(), attributes.cast(), length);
    }
    0
}

/// Writes as much of a structure as the program has room for, and zeros behind it.
unsafe fn write_prefix<T>(value: &T, to: *mut u8, length: usize) {
    let common = length.min(size_of::<T>());
    // SAFETY: as the module says of `to`; the value is as long as its type.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast(), to, common);
        to.add(common).write_bytes(0, length - common);
    }
}

/// ibv_query_port(3), as programs call it that were built before 2018: the structure ended with
/// `flags` then.
pub(crate) unsafe extern "C" fn ibv_query_port(
    of: *mut ibv_context,
    port: u8,
    attributes: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: as the module says.
    unsafe { query_port(of, port, attributes, offset_of!(ibv_port_attr, port_cap_flags2)) }
}

unsafe extern "C" fn query_port(
    of: *mut ibv_context,
    port: u8,
    attributes: *mut ibv_port_attr,
    length: usize,
) -> c_int {
    // SAFETY: as the module says: `length` bytes are the program's structure.
    unsafe {
        let says = context(of).ok_or(Errno::INVALID).and_then(|context| context.port(port));
        status(says.map(|says| write_prefix(&says, attributes.cast(), length)))
    }
}

unsafe extern "C" fn query_rt_values(_of: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    // SAFETY: as the module says.
    let Some(values) = (unsafe { values.as_mut() }) else { return status(Err(Errno::INVALID)) };
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    if values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK != 0 {
        values.raw_clock.tv_sec = now.tv_sec;
        values.raw_clock.tv_nsec = now.tv_nsec;
    }
    values.comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
    0
}

/// ibv_query_gid(3).
pub(crate) unsafe extern "C" fn ibv_query_gid(
    of: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let found = context(of).zip(u32::try_from(index).ok()).ok_or(Errno::INVALID);
        let found = found.and_then(|(context, index)| context.gid(port, index));
        minus_one(found.map(|found| gid.write(found)))
    }
}

/// `ibv_query_gid_type`, which is private and which tools call.
pub(crate) unsafe extern "C" fn ibv_query_gid_type(
    of: *mut ibv_context,
    port: u8,
    index: u32,
    kind: *mut u32,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let found = context(of).ok_or(Errno::INVALID);
        let found = found.and_then(|context| entry_of(context, port, index));
        // As files of the kernel name them: there is one kind of RoCE's first version and of all
        // others, and one of its second.
        minus_one(found.map(|entry| kind.write(u32::from(entry.gid_type == IBV_GID_TYPE_ROCE_V2))))
    }
}

/// ibv_query_gid_ex(3).
pub(crate) unsafe extern "C" fn _ibv_query_gid_ex(
    of: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    length: usize,
) -> c_int {
    // SAFETY: as the module says: `length` bytes are the program's structure.
    unsafe {
        let port = u8::try_from(port).unwrap_or(0);
        let found = match flags {
            0 => context(of).ok_or(Errno::INVALID),
            _ => Err(Errno::UNSUPPORTED),
        };
        let found = found.and_then(|context| entry_of(context, port, index));
        status(found.map(|found| write_prefix(&found, entry.cast(), length)))
    }
}

/// ibv_query_gid_table(3).
pub(crate) unsafe extern "C" fn _ibv_query_gid_table(
    of: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    room: usize,
    flags: u32,
    length: usize,
) -> isize {
    // SAFETY: as the module says: there is room for so many structures of `length` bytes.
    unsafe {
        let found = match flags {
            0 => context(of).ok_or(Errno::INVALID),
            _ => Err(Errno::UNSUPPORTED),
        };
        let context = match found {
            Ok(context) => context,
            Err(errno) => return -(errno.0 as isize),
        };
        let rows = u32::try_from(context.gids().len().max(1)).unwrap_or(u32::MAX);
        let all = (0..rows).filter_map(|index| entry_of(context, PORT, index).ok());
        let mut count = 0;
        for entry in all {
            if count == room {
                return -(Errno::INVALID.0 as isize);
            }
            write_prefix(&entry, entries.cast::<u8>().add(count * length), length);
            count += 1;
        }
        count as isize
    }
}

fn entry_of(context: &ContextBody, port: u8, index: u32) -> Result<ibv_gid_entry, Errno> {
    let gid = context.gid(port, index)?;
    let row = context.gid_row(port, index);
    if row.as_ref().is_some_and(|row| row.gid.is_zero()) {
        return Err(Errno(libc::ENODATA));
    }
    Ok(ibv_gid_entry {
        gid,
        gid_index: index,
        port_num: PORT.into(),
        gid_type: if row.is_some() { IBV_GID_TYPE_ROCE_V2 } else { IBV_GID_TYPE_IB },
        ndev_ifindex: row.map_or(0, |row| row.interface_index),
    })
}

/// ibv_query_pkey(3).
pub(crate) unsafe extern "C" fn ibv_query_pkey(
    of: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let found = context(of).ok_or(Errno::INVALID).and_then(|context| context.pkey(port, index));
        minus_one(found.map(|found| pkey.write(found)))
    }
}

/// ibv_get_pkey_index(3).
pub(crate) unsafe extern "C" fn ibv_get_pkey_index(
    of: *mut ibv_context,
    port: u8,
    pkey: u16,
) -> c_int {
    // SAFETY: as the module says.
    let found = unsafe { context(of) }.ok_or(Errno::INVALID);
    let found = found.and_then(|context| context.pkey(port, 0));
    minus_one(found.and_then(|found| if found == pkey { Ok(()) } else { Err(Errno::INVALID) }))
}
