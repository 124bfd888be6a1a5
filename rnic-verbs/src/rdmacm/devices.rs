//! The devices that ids can use (`rdma_get_devices(3)`).

use std::ffi::c_int;
use std::ptr::null_mut;

use crate::c::ibv_context;
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Kind, publish, withdraw};
use crate::ffi::pointers::Out;
use crate::verbs::device::KINDS;
use crate::verbs::open::default_context;
use crate::verbs::{device_list, session};

/// The list that `rdma_get_devices` returns, null-terminated.
type Contexts = [*mut ibv_context; KINDS.len() + 1];

/// Body of such a list. The head holds all the data.
struct ContextList;

impl Body for ContextList {
    type Head = Contexts;
    const KIND: Kind = Kind::ContextList;
}

fn get(count: Out<c_int>) -> Result<*mut *mut ibv_context, Errno> {
    let mut list: Contexts = [null_mut(); KINDS.len() + 1];
    let found = fill(&mut list);
    count.write(found.as_ref().map_or(0, |found| *found as c_int));
    found.map(|_| publish(list, ContextList).as_ptr().cast())
}

/// Fills in the contexts of the devices that the program may see, in the order of
/// `ibv_get_device_list`. Returns their number.
fn fill(list: &mut Contexts) -> Result<usize, Errno> {
    let device = session::open()?;
    let kinds = device_list::kinds(&device);
    for (place, kind) in list.iter_mut().zip(&kinds) {
        *place = default_context(&device, *kind)?;
    }
    match kinds.len() {
        0 => Err(errno!(libc::ENODEV, "no device matches RNIC_DEVICES")),
        n => Ok(n),
    }
}

fn free(list: *mut *mut ibv_context) -> Result<(), Errno> {
    if list.is_null() {
        return Ok(());
    }
    // SAFETY: no thread uses `list`, now or later (rdma_free_devices(3)).
    unsafe { withdraw::<ContextList>(list.cast()) }.map(drop)
}

entry! {
    uncancelled rdma_get_devices(count: Out<c_int>) -> pointer<*mut ibv_context> = get;
    plain rdma_free_devices(list: *mut *mut ibv_context) -> nothing = free;
}
