//! `librnic_preload.so`: shows the daemon's devices to programs that look for RDMA devices in
//! `/sys` and `/dev`, and loads rnicd's libraries for programs that load rdma-core's by a file
//! name. `RNIC_TREE` contains the path of the daemon's tree; without it, the tree is that of the
//! system's daemon.
//!
//! The dynamic loader puts these functions before those of the C library (`LD_PRELOAD`, ld.so(8)).
//! Each function calls the next one of its name with the same arguments, but replaces a path that
//! belongs to the tree (`path`, `place`), and shows a path of the tree as the kernel's
//! (`kernel_path`). A pointer that cannot be read is passed on unchanged, so that the call fails as
//! it would without this library. Once the library is initialised (`next`), the functions do not
//! allocate, take no lock and leave `errno` as the C library sets it. They may then be called
//! wherever the C library's functions may, including signal handlers.

#![allow(unsafe_code)] // Functions of the C library.

mod bytes;
mod errno;
mod globs;
mod kernel_path;
mod library;
mod netlink;
mod next;
mod objects;
mod path;
mod place;
mod results;
mod tree;
mod walks;

use libc::{AT_FDCWD, DIR, FILE, c_char, c_int, c_long, c_uint, c_void, mode_t, size_t, ssize_t};
use next::next;
use path::mapped;

/// Defines functions of the C library. Each definition lists the arguments before the path and
/// after it, and the result if no other library has a function of that name.
macro_rules! interpose {
    ($(fn $name:ident [$($before:ident: $first:ty),*] ($($after:ident: $then:ty),*)
        -> $returns:ty, else $failed:expr;)*) => {$(
        /// Same as the C library's function of this name.
        ///
        /// # Safety
        ///
        /// Same as for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            $($before: $first,)* path: *const c_char $(, $after: $then)*
        ) -> $returns {
            type Call = unsafe extern "C" fn($($first,)* *const c_char $(, $then)*) -> $returns;
            let Some(next) = next!($name: Call) else { return $failed };
            mapped(start!($($before)*), path, |path| {
                // SAFETY: the caller fulfils the requirements of the C library's function.
                unsafe { next($($before,)* path $(, $after)*) }
            })
        }
    )*};
}

/// Returns the folder in which a relative path starts: the argument with its descriptor, or the
/// working directory.
macro_rules! start {
    () => {
        AT_FDCWD
    };
    (version) => {
        AT_FDCWD
    };
    (watches) => {
        AT_FDCWD
    };
    (actions $($fd:ident)?) => {
        AT_FDCWD
    };
    (version $folder:ident) => {
        $folder
    };
    ($folder:ident) => {
        $folder
    };
}

/// Function pointer arguments of `scandir(3)`.
type Filter = *const c_void;

interpose! {
    fn open [] (flags: c_int, mode: mode_t) -> c_int, else -1;
    fn open64 [] (flags: c_int, mode: mode_t) -> c_int, else -1;
    fn openat [folder: c_int] (flags: c_int, mode: mode_t) -> c_int, else -1;
    fn openat64 [folder: c_int] (flags: c_int, mode: mode_t) -> c_int, else -1;
    // Called by programs built with `_FORTIFY_SOURCE`.
    fn __open_2 [] (flags: c_int) -> c_int, else -1;
    fn __open64_2 [] (flags: c_int) -> c_int, else -1;
    fn __openat_2 [folder: c_int] (flags: c_int) -> c_int, else -1;
    fn __openat64_2 [folder: c_int] (flags: c_int) -> c_int, else -1;
    fn fopen [] (mode: *const c_char) -> *mut FILE, else std::ptr::null_mut();
    fn fopen64 [] (mode: *const c_char) -> *mut FILE, else std::ptr::null_mut();
    fn stat [] (to: *mut c_void) -> c_int, else -1;
    fn stat64 [] (to: *mut c_void) -> c_int, else -1;
    fn lstat [] (to: *mut c_void) -> c_int, else -1;
    fn lstat64 [] (to: *mut c_void) -> c_int, else -1;
    fn fstatat [folder: c_int] (to: *mut c_void, flags: c_int) -> c_int, else -1;
    fn fstatat64 [folder: c_int] (to: *mut c_void, flags: c_int) -> c_int, else -1;
    fn statx [folder: c_int] (flags: c_int, mask: c_uint, to: *mut c_void) -> c_int, else -1;
    // Called by programs built with a C library before 2.33.
    fn __xstat [version: c_int] (to: *mut c_void) -> c_int, else -1;
    fn __xstat64 [version: c_int] (to: *mut c_void) -> c_int, else -1;
    fn __lxstat [version: c_int] (to: *mut c_void) -> c_int, else -1;
    fn __lxstat64 [version: c_int] (to: *mut c_void) -> c_int, else -1;
    fn __fxstatat [version: c_int, folder: c_int] (to: *mut c_void, flags: c_int)
        -> c_int, else -1;
    fn __fxstatat64 [version: c_int, folder: c_int] (to: *mut c_void, flags: c_int)
        -> c_int, else -1;
    fn access [] (mode: c_int) -> c_int, else -1;
    fn faccessat [folder: c_int] (mode: c_int, flags: c_int) -> c_int, else -1;
    fn euidaccess [] (mode: c_int) -> c_int, else -1;
    fn eaccess [] (mode: c_int) -> c_int, else -1;
    fn freopen [] (mode: *const c_char, file: *mut FILE) -> *mut FILE,
        else std::ptr::null_mut();
    fn freopen64 [] (mode: *const c_char, file: *mut FILE) -> *mut FILE,
        else std::ptr::null_mut();
    fn opendir [] () -> *mut DIR, else std::ptr::null_mut();
    fn scandir [] (names: *mut c_void, filter: Filter, compare: Filter) -> c_int, else -1;
    fn scandir64 [] (names: *mut c_void, filter: Filter, compare: Filter) -> c_int, else -1;
    fn scandirat [folder: c_int] (names: *mut c_void, filter: Filter, compare: Filter)
        -> c_int, else -1;
    fn scandirat64 [folder: c_int] (names: *mut c_void, filter: Filter, compare: Filter)
        -> c_int, else -1;
    fn chdir [] () -> c_int, else -1;
    fn statfs [] (to: *mut c_void) -> c_int, else -1;
    fn statfs64 [] (to: *mut c_void) -> c_int, else -1;
    fn statvfs [] (to: *mut c_void) -> c_int, else -1;
    fn statvfs64 [] (to: *mut c_void) -> c_int, else -1;
    // Called by `ls -l`.
    fn getxattr [] (name: *const c_char, to: *mut c_void, size: size_t) -> ssize_t, else -1;
    fn lgetxattr [] (name: *const c_char, to: *mut c_void, size: size_t) -> ssize_t, else -1;
    fn listxattr [] (to: *mut c_char, size: size_t) -> ssize_t, else -1;
    fn llistxattr [] (to: *mut c_char, size: size_t) -> ssize_t, else -1;
    fn inotify_add_watch [watches: c_int] (mask: c_uint) -> c_int, else -1;
    fn posix_spawn_file_actions_addopen [actions: *mut c_void, fd: c_int]
        (flags: c_int, mode: mode_t) -> c_int, else libc::ENOSYS;
    fn posix_spawn_file_actions_addchdir_np [actions: *mut c_void] () -> c_int,
        else libc::ENOSYS;
    fn pathconf [] (what: c_int) -> c_long, else -1;
}
