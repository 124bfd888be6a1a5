//! fork(2) support, and the path of sysfs.
//!
//! Real devices pin pages, which copy-on-write after a fork would separate from the program. This
//! device pins nothing, so no preparation is necessary.

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

/// Makes a range visible to child processes again. Undocumented, but drivers called it.
pub(crate) extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: size_t) -> c_int {
    0
}

/// Hides a range from child processes. Undocumented, but drivers called it.
pub(crate) extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: size_t) -> c_int {
    0
}

/// Returns the mount point of sysfs. Undocumented; MPI libraries look for `class/infiniband` there.
pub(crate) extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    const PATH: &CStr = c"/sys";
    PATH.as_ptr()
}
