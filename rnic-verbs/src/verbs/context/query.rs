//! The C functions that query a context.

use std::ffi::{c_int, c_uint};
use std::mem::offset_of;

use rnic_client::{Function, LibraryCall};

use super::{ContextBody, any_context, context};
use crate::c::*;
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::pointers::{In, InOut, Out, get, set};
use crate::verbs::device::PORT;

fn device(of: *mut ibv_context, attr: Out<ibv_device_attr>) -> Result<(), Errno> {
    let context = context(of)?;
    let attr = attr.required("device_attr")?;
    context.device().admit(Function::QueryDevice.call())?;
    attr.write(context.attributes());
    Ok(())
}

fn device_ex(
    of: *mut ibv_context,
    input: In<ibv_query_device_ex_input>,
    attr: Out<ibv_device_attr_ex>,
    length: usize,
) -> Result<(), Errno> {
    let context = context(of)?;
    let comp_mask = input.optional().map_or(0, |input| input.comp_mask);
    if comp_mask != 0 {
        return Err(invalid!("comp_mask {comp_mask:#x} of the input is not 0"));
    }
    let attr = attr.required("attr")?;
    context.device().admit(Function::QueryDevice.call())?;
    // SAFETY: `attr` has room for `length` bytes (ibv_query_device_ex(3)).
    unsafe { attr.write_prefix(&context.attributes_ex(), 0, length) };
    Ok(())
}

/// Queries the port for programs built before 2018, whose structure ends before `port_cap_flags2`.
fn port_without_flags2(
    of: *mut ibv_context,
    port: u8,
    attr: Out<ibv_port_attr>,
) -> Result<(), Errno> {
    port_prefix(of, port, attr, offset_of!(ibv_port_attr, port_cap_flags2))
}

fn port_prefix(
    of: *mut ibv_context,
    port: u8,
    attr: Out<ibv_port_attr>,
    length: usize,
) -> Result<(), Errno> {
    let context = context(of)?;
    let found = context.port(port)?;
    context.device().admit(LibraryCall::QueryPort)?;
    // SAFETY: `attr` has room for `length` bytes (ibv_query_port(3)).
    unsafe { attr.required("port_attr")?.write_prefix(&found, 0, length) };
    Ok(())
}

fn rt_values(of: *mut ibv_context, values: InOut<ibv_values_ex>) -> Result<(), Errno> {
    let values = values.required("values")?;
    any_context(of)?.device().admit(Function::QueryRtValues.call())?;
    let mask = get!(values.comp_mask) & IBV_VALUES_MASK_RAW_CLOCK;
    if mask != 0 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        set!(values.raw_clock.tv_sec = now.tv_sec);
        set!(values.raw_clock.tv_nsec = now.tv_nsec);
    }
    set!(values.comp_mask = mask);
    Ok(())
}

fn gid(of: *mut ibv_context, port: u8, index: c_int, to: Out<ibv_gid>) -> Result<(), Errno> {
    // A negative index is out of range for every table.
    let index = u32::try_from(index).unwrap_or(u32::MAX);
    let to = to.required("gid")?;
    let context = context(of)?;
    let found = context.gid(port, index)?;
    context.device().admit(Function::QueryGid.call())?;
    to.write(found);
    Ok(())
}

fn gid_type(of: *mut ibv_context, port: u8, index: u32, kind: Out<u32>) -> Result<(), Errno> {
    let kind = kind.required("type")?;
    let entry = queried_entry(of, port, index)?;
    // As in the kernel's files: 1 is RoCE v2, 0 is RoCE v1 and everything else.
    kind.write(u32::from(entry.gid_type == IBV_GID_TYPE_ROCE_V2));
    Ok(())
}

fn gid_ex(
    of: *mut ibv_context,
    port: u32,
    index: u32,
    entry: Out<ibv_gid_entry>,
    flags: u32,
    length: usize,
) -> Result<(), Errno> {
    no_flags(flags)?;
    let entry = entry.required("entry")?;
    let found = queried_entry(of, u8::try_from(port).unwrap_or(0), index)?;
    // SAFETY: `entry` has room for `length` bytes (ibv_query_gid_ex(3)).
    unsafe { entry.write_prefix(&found, 0, length) };
    Ok(())
}

fn gid_table(
    of: *mut ibv_context,
    entries: Out<ibv_gid_entry>,
    room: usize,
    flags: u32,
    length: usize,
) -> Result<usize, Errno> {
    no_flags(flags)?;
    let context = context(of)?;
    // The result omits empty entries of the table.
    let rows = (0..context.gid_count()).filter_map(|n| entry_of(&context, PORT, n).ok());
    let rows: Vec<_> = rows.collect();
    let count = rows.len();
    if count > room {
        return Err(invalid!("{count} GIDs, but room for {room} entries"));
    }
    context.device().admit(Function::QueryGidTable.call())?;
    for (index, row) in rows.iter().enumerate() {
        // SAFETY: `entries` has room for `room` structures of `length` bytes
        // (ibv_query_gid_table(3)), which are at least `count`.
        unsafe { entries.required("entries")?.write_prefix(row, index, length) };
    }
    Ok(count)
}

fn no_flags(flags: u32) -> Result<(), Errno> {
    match flags {
        0 => Ok(()),
        _ => Err(unsupported!("GID query flags {flags:#x} are not 0")),
    }
}

/// Returns an entry of the GID table, unless a fault rule of `ibv_query_gid` fails the call.
fn queried_entry(of: *mut ibv_context, port: u8, index: u32) -> Result<ibv_gid_entry, Errno> {
    let context = context(of)?;
    let entry = entry_of(&context, port, index)?;
    context.device().admit(Function::QueryGid.call())?;
    Ok(entry)
}

fn entry_of(context: &ContextBody, port: u8, index: u32) -> Result<ibv_gid_entry, Errno> {
    let gid = context.gid(port, index)?;
    let row = context.gid_row(port, index);
    if row.as_ref().is_some_and(|row| row.gid.is_zero()) {
        // Without a log line, because tools query every entry of the table.
        return Err(Errno::nothing_yet(libc::ENODATA));
    }
    Ok(ibv_gid_entry {
        gid,
        gid_index: index,
        port_num: PORT.into(),
        gid_type: match row {
            None => IBV_GID_TYPE_IB,
            Some(_) if context.gids().is_v1(index) => IBV_GID_TYPE_ROCE_V1,
            Some(_) => IBV_GID_TYPE_ROCE_V2,
        },
        ndev_ifindex: row.as_ref().map_or(0, |row| row.interface_index),
    })
}

fn pkey(of: *mut ibv_context, port: u8, index: c_int, to: Out<u16>) -> Result<(), Errno> {
    let to = to.required("pkey")?;
    let context = context(of)?;
    let found = context.pkey(port, index)?;
    context.device().admit(LibraryCall::QueryPkey)?;
    to.write(found);
    Ok(())
}

fn pkey_index(of: *mut ibv_context, port: u8, pkey: u16) -> Result<(), Errno> {
    let context = context(of)?;
    if context.pkey(port, 0)? == pkey {
        return context.device().admit(Function::GetPkeyIndex.call());
    }
    let pkey = u16::from_be(pkey);
    Err(invalid!("P_Key {pkey:#06x} is not in the table of the port"))
}

entry! {
    plain ibv_query_device(of: *mut ibv_context, attr: Out<ibv_device_attr>) -> status = device;
    plain query_device_ex(
        of: *mut ibv_context, input: In<ibv_query_device_ex_input>, attr: Out<ibv_device_attr_ex>,
        length: usize,
    ) -> status = device_ex;
    plain ibv_query_port(of: *mut ibv_context, port: u8, attr: Out<ibv_port_attr>) -> status
        = port_without_flags2;
    /// ibv_query_port(3), for programs built since 2018.
    plain query_port(
        of: *mut ibv_context, port: u8, attr: Out<ibv_port_attr>, length: usize,
    ) -> status = port_prefix;
    /// ibv_query_rt_values_ex(3).
    plain query_rt_values(of: *mut ibv_context, values: InOut<ibv_values_ex>) -> status = rt_values;
    uncancelled ibv_query_gid(
        of: *mut ibv_context, port: u8, index: c_int, to: Out<ibv_gid>,
    ) -> minus_one = gid;
    /// `ibv_query_gid_type`, a private function that tools call.
    uncancelled ibv_query_gid_type(
        of: *mut ibv_context, port: u8, index: c_uint, kind: Out<u32>,
    ) -> minus_one = gid_type;
    /// ibv_query_gid_ex(3).
    uncancelled _ibv_query_gid_ex(
        of: *mut ibv_context, port: u32, index: u32, entry: Out<ibv_gid_entry>, flags: u32,
        length: usize,
    ) -> status = gid_ex;
    /// ibv_query_gid_table(3).
    uncancelled _ibv_query_gid_table(
        of: *mut ibv_context, entries: Out<ibv_gid_entry>, room: usize, flags: u32, length: usize,
    ) -> negative<isize> = gid_table;
    plain ibv_query_pkey(
        of: *mut ibv_context, port: u8, index: c_int, to: Out<u16>,
    ) -> minus_one = pkey;
    plain ibv_get_pkey_index(of: *mut ibv_context, port: u8, pkey: u16) -> minus_one = pkey_index;
}
