//! Devices and contexts.

use std::ffi::{c_char, c_int};
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::Arc;

use crate::c::*;
use crate::errno::{Errno, minus_one, negative, pointer, status};
use crate::ffi::absent;
use crate::ffi::handles::{
    Body, Kind, OfContext, all_of, is_live, live, publish, withdraw, zeroed,
};
use crate::system;
use crate::verbs::ah::AhBody;
use crate::verbs::context::{ContextBody, PORT};
use crate::verbs::cq::CqBody;
use crate::verbs::device::{Device, DeviceKind, KINDS};
use crate::verbs::device_filter;
use crate::verbs::mr::MrBody;
use crate::verbs::mw::MwBody;
use crate::verbs::pd::PdBody;
use crate::verbs::qp::QpBody;
use crate::verbs::srq::SrqBody;

use crate::ffi::pointers::argument_mut;
use crate::verbs::cq::{entry as cq, extended as cq_ex};
use crate::verbs::memory;
use crate::verbs::qp::{entry as qp, extended as qp_ex};
use crate::verbs::srq::entry as srq;

/// A device list. It keeps its devices open.
struct DeviceList {
    _device: Arc<Device>,
}

impl Body for DeviceList {
    /// Null-terminated.
    type Head = [*mut ibv_device; KINDS.len() + 1];
    const KIND: Kind = Kind::DeviceList;
}

impl Body for ContextBody {
    type Head = verbs_context;
    const KIND: Kind = Kind::Context;
}

/// Returns the context for a C pointer, which points to the last field of the structure.
pub(crate) unsafe fn context<'a>(context: *mut ibv_context) -> Result<&'a ContextBody, Errno> {
    // SAFETY: each context of this library is inside a `verbs_context`. The caller does not close
    // it while the result is in use.
    unsafe { live(if context.is_null() { null_mut() } else { start(context) }) }
}

/// Checks that an object belongs to the same context as the object that uses it.
///
/// # Errors
///
/// `EINVAL` otherwise. The kernel likewise accepts only objects of the same file descriptor.
pub(crate) fn check_same(
    what: Kind,
    of: *mut ibv_context,
    expected: *mut ibv_context,
) -> Result<(), Errno> {
    if of == expected {
        Ok(())
    } else {
        Err(Errno::invalid(format_args!("the {what} belongs to another device context")))
    }
}

fn start(context: *mut ibv_context) -> *mut verbs_context {
    context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast()
}

/// Opens a context of a device.
pub(crate) fn open(device: &Arc<Device>, kind: DeviceKind) -> Result<*mut ibv_context, Errno> {
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
    set_unsupported(&mut head);
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

/// Sets the unsupported operations, except those that take an object which cannot exist. With null
/// pointers, the inline functions of the C headers would return `EOPNOTSUPP` without a reason.
fn set_unsupported(head: &mut verbs_context) {
    head.alloc_null_mr = Some(absent::ibv_alloc_null_mr);
    head.create_counters = Some(absent::ibv_create_counters);
    head.alloc_dm = Some(absent::ibv_alloc_dm);
    head.create_flow_action_esp = Some(absent::ibv_create_flow_action_esp);
    head.modify_qp_rate_limit = Some(absent::ibv_modify_qp_rate_limit);
    head.alloc_parent_domain = Some(absent::ibv_alloc_parent_domain);
    head.alloc_td = Some(absent::ibv_alloc_td);
    head.modify_cq = Some(absent::ibv_modify_cq);
    head.post_srq_ops = Some(absent::ibv_post_srq_ops);
    head.create_rwq_ind_table = Some(absent::ibv_create_rwq_ind_table);
    head.create_wq = Some(absent::ibv_create_wq);
    head.ibv_create_flow = Some(absent::ibv_create_flow);
    head.open_qp = Some(absent::ibv_open_qp);
    head.open_xrcd = Some(absent::ibv_open_xrcd);
}

/// ibv_get_device_list(3).
pub(crate) unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let _guard = system::uncancelled();
    let found = Device::open();
    let kinds = found.as_ref().map_or(Vec::new(), |device| device_filter::kinds(device));
    if !count.is_null() {
        // SAFETY: `count` is not null, so it points to an `int` (ibv_get_device_list(3)).
        unsafe { *count = kinds.len() as c_int };
    }
    // `ENOSYS` means no RDMA on this machine: programs with other transports go on without it.
    pointer(found.map_err(|errno| errno.with_number(libc::ENOSYS)).map(|device| {
        let mut devices = [null_mut(); KINDS.len() + 1];
        devices.iter_mut().zip(kinds).for_each(|(place, kind)| *place = device.head(kind).0);
        publish(devices, DeviceList { _device: device }).as_ptr().cast()
    }))
}

/// ibv_free_device_list(3).
pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let _guard = system::uncancelled();
    if !list.is_null() {
        // SAFETY: no other thread uses `list`, now or later (ibv_free_device_list(3)).
        let withdrawn = unsafe { withdraw::<DeviceList>(list.cast()) };
        withdrawn.map_or_else(|errno| errno.log(), drop);
    }
}

/// ibv_get_device_name(3).
pub(crate) unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    if !is_live(Kind::Device, device.addr()) {
        no_device(device).report();
        return std::ptr::null();
    }
    // SAFETY: `is_live` has found `device`, and the caller does not free the list that keeps it
    // open during the call (ibv_get_device_name(3)).
    unsafe { (&raw const (*device).name).cast() }
}

/// ibv_get_device_guid(3), in network byte order.
pub(crate) unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    Device::with_head(device).map_or(0, |(device, kind)| device.guid(kind))
}

/// ibv_open_device(3).
pub(crate) unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let _guard = system::uncancelled();
    let found = Device::with_head(device).ok_or_else(|| no_device(device));
    pointer(found.and_then(|(device, kind)| open(&device, kind)))
}

fn no_device(device: *mut ibv_device) -> Errno {
    Errno::new(libc::ENODEV, format_args!("{device:p} is not from ibv_get_device_list"))
}

/// ibv_close_device(3). The context that ids share stays open.
pub(crate) unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: `context` finds the context, and no other thread uses it, now or later
    // (ibv_close_device(3)).
    status(unsafe { self::context(context).and_then(|found| close(context, found)) })
}

unsafe fn close(context: *mut ibv_context, found: &ContextBody) -> Result<(), Errno> {
    let device = found.device();
    if device.defaults(found.kind()).context.lock().0 == context {
        // Current and later ids of the process use it.
        return Ok(());
    }
    // SAFETY: the caller has found `context`, and no other thread uses it or its objects any more.
    unsafe {
        // A forked child must not destroy objects of its parent.
        if device.is_ours() {
            destroy_objects(context);
        }
        withdraw::<ContextBody>(start(context)).map(drop)
    }
}

/// Destroys the objects of a context, as the kernel does when the descriptor of the context is
/// closed. Destroys each object before the objects that it uses, and does not wait for
/// unacknowledged events. Completion channels remain: each has its own descriptor.
unsafe fn destroy_objects(of: *mut ibv_context) {
    // SAFETY: no other thread uses the objects of a context that is being closed
    // (ibv_close_device(3)).
    unsafe {
        destroy_each::<Arc<QpBody>>(of, |qp| qp.detach());
        destroy_each::<Arc<SrqBody>>(of, |srq| srq.detach());
        destroy_each::<MwBody>(of, |_| {});
        destroy_each::<MrBody>(of, |mr| mr.deregister().unwrap_or_else(|errno| errno.log()));
        destroy_each::<Arc<CqBody>>(of, |cq| {
            cq.detach();
            cq.leave_channel();
        });
        destroy_each::<AhBody>(of, |_| {});
        destroy_each::<Arc<PdBody>>(of, |_| {});
    }
}

macro_rules! of_context {
    ($($body:ty),* $(,)?) => {
        $(
            // SAFETY: the structure of the C API begins with its context.
            unsafe impl OfContext for $body {}
        )*
    };
}

of_context!(Arc<PdBody>, MrBody, MwBody, Arc<CqBody>, Arc<SrqBody>, Arc<QpBody>, AhBody,);

unsafe fn destroy_each<B: OfContext>(of: *mut ibv_context, detach: impl Fn(&B)) {
    for head in all_of::<B>(of) {
        // SAFETY: no other thread uses objects of a context that is being closed. With other verbs
        // libraries, such a use would read the freed context.
        unsafe {
            live::<B>(head).map_or_else(|errno| errno.log(), &detach);
            withdraw::<B>(head).map_or_else(|errno| errno.log(), drop);
        }
    }
}

/// ibv_query_device(3).
pub(crate) unsafe extern "C" fn ibv_query_device(
    of: *mut ibv_context,
    attributes: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: the caller does not close `of` during the call, and `attributes` is null or has room
    // for an `ibv_device_attr` (ibv_query_device(3)).
    status(unsafe {
        context(of).and_then(|context| {
            *argument_mut(attributes, "device_attr")? = context.attributes();
            Ok(())
        })
    })
}

unsafe extern "C" fn query_device_ex(
    of: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attributes: *mut ibv_device_attr_ex,
    length: usize,
) -> c_int {
    // SAFETY: the caller does not close `of` during the call, and `input` is null or valid.
    // `attributes` has room for `length` bytes, the size of an older or newer structure.
    status(unsafe {
        context(of).and_then(|context| {
            let comp_mask = input.as_ref().map_or(0, |input| input.comp_mask);
            if comp_mask != 0 {
                let reason = format_args!("comp_mask {comp_mask:#x} of the input is not 0");
                return Err(Errno::invalid(reason));
            }
            write_prefix(&context.attributes_ex(), attributes.cast(), length);
            Ok(())
        })
    })
}

/// Copies as much of a structure as fits, and fills the rest of `length` with zeros.
unsafe fn write_prefix<T>(value: &T, to: *mut u8, length: usize) {
    let common = length.min(size_of::<T>());
    // SAFETY: `to` has room for `length` bytes, as the caller guarantees, and `common` is at most
    // the size of `value`.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast(), to, common);
        to.add(common).write_bytes(0, length - common);
    }
}

/// ibv_query_port(3), called by programs built before 2018, when the structure ended with `flags`.
pub(crate) unsafe extern "C" fn ibv_query_port(
    of: *mut ibv_context,
    port: u8,
    attributes: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: `query_port` has the contract of this function, and the structure of these programs
    // ends before `port_cap_flags2`.
    unsafe { query_port(of, port, attributes, offset_of!(ibv_port_attr, port_cap_flags2)) }
}

unsafe extern "C" fn query_port(
    of: *mut ibv_context,
    port: u8,
    attributes: *mut ibv_port_attr,
    length: usize,
) -> c_int {
    // SAFETY: the caller does not close `of` during the call, and `attributes` has room for
    // `length` bytes, the size of its structure.
    unsafe {
        let attr = context(of).and_then(|context| context.port(port));
        status(attr.map(|attr| write_prefix(&attr, attributes.cast(), length)))
    }
}

unsafe extern "C" fn query_rt_values(_of: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    // SAFETY: `values` is null or points to an `ibv_values_ex` (ibv_query_rt_values_ex(3)).
    let values = match unsafe { argument_mut(values, "values") } {
        Ok(values) => values,
        Err(errno) => return errno.report(),
    };
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
    let _guard = system::uncancelled();
    // SAFETY: the caller does not close `of` during the call, and `gid` has room for a GID
    // (ibv_query_gid(3)).
    unsafe {
        // A negative index is out of range for every table.
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        let found = context(of).and_then(|context| context.gid(port, index));
        minus_one(found.map(|found| gid.write(found)))
    }
}

/// `ibv_query_gid_type`, a private function that tools call.
pub(crate) unsafe extern "C" fn ibv_query_gid_type(
    of: *mut ibv_context,
    port: u8,
    index: u32,
    kind: *mut u32,
) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: the caller does not close `of` during the call, and `kind` has room for a `u32`.
    unsafe {
        let found = context(of).and_then(|context| entry_of(context, port, index));
        // As in the kernel's files: 1 is RoCE v2, 0 is RoCE v1 and everything else.
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
    let _guard = system::uncancelled();
    // SAFETY: the caller does not close `of` during the call, and `entry` has room for `length`
    // bytes, the size of its structure (ibv_query_gid_ex(3)).
    unsafe {
        let port = u8::try_from(port).unwrap_or(0);
        let found = no_flags(flags).and_then(|()| context(of));
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
    let _guard = system::uncancelled();
    // SAFETY: the caller does not close `of` during the call, and `entries` has room for `room`
    // structures of `length` bytes (ibv_query_gid_table(3)), of which at most `room` are written.
    unsafe {
        let found = no_flags(flags).and_then(|()| context(of));
        negative(found.and_then(|context| {
            // The result omits empty entries of the table.
            let rows = (0..context.gid_count()).filter_map(|n| entry_of(context, PORT, n).ok());
            let rows: Vec<_> = rows.collect();
            let count = rows.len();
            if count > room {
                let reason = format_args!("{count} GIDs, but room for {room} entries");
                return Err(Errno::invalid(reason));
            }
            for (index, entry) in rows.iter().enumerate() {
                write_prefix(entry, entries.cast::<u8>().add(index * length), length);
            }
            Ok(count)
        }))
    }
}

fn no_flags(flags: u32) -> Result<(), Errno> {
    match flags {
        0 => Ok(()),
        _ => Err(Errno::unsupported(format_args!("GID query flags {flags:#x} are not 0"))),
    }
}

fn entry_of(context: &ContextBody, port: u8, index: u32) -> Result<ibv_gid_entry, Errno> {
    let gid = context.gid(port, index)?;
    let row = context.gid_row(port, index);
    if row.as_ref().is_some_and(|row| row.gid.is_zero()) {
        return Err(Errno::new(
            libc::ENODATA,
            format_args!("GID index {index}: the entry is empty"),
        ));
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
    // SAFETY: the caller does not close `of` during the call, and `pkey` has room for a `u16`
    // (ibv_query_pkey(3)).
    unsafe {
        let found = context(of).and_then(|context| context.pkey(port, index));
        minus_one(found.map(|found| pkey.write(found)))
    }
}

/// ibv_get_pkey_index(3).
pub(crate) unsafe extern "C" fn ibv_get_pkey_index(
    of: *mut ibv_context,
    port: u8,
    pkey: u16,
) -> c_int {
    // SAFETY: the caller does not close `of` during the call (ibv_get_pkey_index(3)).
    let found = unsafe { context(of) }.and_then(|context| context.pkey(port, 0));
    minus_one(found.and_then(|found| {
        if found == pkey {
            return Ok(());
        }
        let pkey = u16::from_be(pkey);
        Err(Errno::invalid(format_args!("P_Key {pkey:#06x} is not in the table of the port")))
    }))
}
