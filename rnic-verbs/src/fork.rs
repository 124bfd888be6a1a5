//! fork(2) support, and the path of sysfs.
//!
//! Real devices pin pages, which copy-on-write after a fork would separate from the program. This
//! device pins nothing, so no preparation is necessary.

use libc::{c_char, c_int, c_uint, c_void, size_t};

use crate::c::IBV_FORK_UNNEEDED;
use crate::ffi::entry::entry;

entry! {
    plain ibv_fork_init() -> value<c_int> = || 0;
    plain ibv_is_fork_initialized() -> value<c_uint> = || IBV_FORK_UNNEEDED;
    /// Makes a range visible to child processes again. Undocumented, but drivers called it.
    plain ibv_dofork_range(base: *mut c_void, size: size_t) -> value<c_int> = |_, _| 0;
    /// Hides a range from child processes. Undocumented, but drivers called it.
    plain ibv_dontfork_range(base: *mut c_void, size: size_t) -> value<c_int> = |_, _| 0;
    /// Returns the mount point of sysfs. Undocumented; MPI libraries look for `class/infiniband`
    /// there.
    plain ibv_get_sysfs_path() -> value<*const c_char> = || c"/sys".as_ptr();
}
