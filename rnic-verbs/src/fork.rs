//! fork(2) and what used to be asked of the kernel's files.
//!
//! Real devices pin pages, which a fork would copy away from under them. Nothing is pinned here, so
//! there is nothing to be prepared.

use std::ffi::CStr;

use libc::{c_char, c_int, c_uint, c_void, size_t};

use crate::c::IBV_FORK_UNNEEDED;

/// ibv_fork_init(3).
pub(crate) extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// ibv_is_fork_initialized(3).
pub(crate) extern "C" fn ibv_is_fork_initialized() -> c_uint {
    IBV_FORK_UNNEEDED
}

/// Lets children see a range again; undocumented, but drivers called it.
pub(crate) extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: size_t) -> c_int {
    0
}

/// Keeps a range from children; undocumented, but drivers called it.
pub(crate) extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: size_t) -> c_int {
    0
}

/// Where sysfs is mounted. Undocumented; MPI libraries look for `class/infiniband` below it.
pub(crate) extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    const PATH: &CStr = c"/sys";
    PATH.as_ptr()
}
