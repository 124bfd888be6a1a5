//! `librnic_preload.so`: programs that look for RDMA devices in `/sys` and `/dev` find those of the
//! daemon, whose tree `RNIC_TREE` names.
//!
//! The dynamic loader puts these functions in front of the C library's (`LD_PRELOAD`, ld.so(8)).
//! Each passes its arguments on, except for a path below those of the tree (`path`). A pointer that
//! cannot be read is passed on as well and fails as without this library. The functions allocate
//! nothing, take no lock and leave `errno` as the C library sets it, so they may be called wherever
//! the C library's may, signal handlers included.

#![allow(unsafe_code)] // Functions of the C library.

mod bytes;
mod next;
mod path;

use libc::{DIR, FILE, c_char, c_int, c_long, c_uint, c_void, mode_t, size_t, ssize_t};
use next::Next;
use path::mapped;

/// Functions of the C library: what stands before the path that they are called with, and behind
/// it, and what they return if the library has none of that name.
macro_rules! interpose {
    ($(fn $name:ident [$($before:ident: $first:ty),*] ($($after:ident: $then:ty),*)
        -> $returns:ty, else $failed:expr;)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        ///
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            $($before: $first,)* path: *const c_char $(, $after: $then)*
        ) -> $returns {
            type Call = unsafe extern "C" fn($($first,)* *const c_char $(, $then)*) -> $returns;
            static NEXT: Next = Next::of(concat!(stringify!($name), "\0"));
            let Some(next) = NEXT.find() else { return $failed };
            // SAFETY: it is the function of this name. Those that take arguments by need (`open`
            // its mode) find them where a call with all of them puts them, on the machines that
            // this is built for.
            let next = unsafe { std::mem::transmute::<*const c_void, Call>(next) };
            mapped(path, |path| {
                // SAFETY: the caller promises what the C library asks for.
                unsafe { next($($before,)* path $(, $after)*) }
            })
        }
    )*};
}

/// What `scandir(3)` is called with.
type Filter = *const c_void;

interpose! {
    fn open [] (flags: c_int, mode: mode_t) -> c_int, else -1;
    fn open64 [] (flags: c_int, mode: mode_t) -> c_int, else -1;
    fn openat [folder: c_int] (flags: c_int, mode: mode_t) -> c_int, else -1;
    fn openat64 [folder: c_int] (flags: c_int, mode: mode_t) -> c_int, else -1;
    // With `_FORTIFY_SOURCE` programs call these.
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
    // Programs that were built with a C library before 2.33 call these.
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
    fn opendir [] () -> *mut DIR, else std::ptr::null_mut();
    fn scandir [] (names: *mut c_void, filter: Filter, compare: Filter) -> c_int, else -1;
    fn scandir64 [] (names: *mut c_void, filter: Filter, compare: Filter) -> c_int, else -1;
    fn readlink [] (to: *mut c_char, size: size_t) -> ssize_t, else -1;
    fn readlinkat [folder: c_int] (to: *mut c_char, size: size_t) -> ssize_t, else -1;
    fn __readlink_chk [] (to: *mut c_char, size: size_t, room: size_t) -> ssize_t, else -1;
    fn realpath [] (to: *mut c_char) -> *mut c_char, else std::ptr::null_mut();
    fn __realpath_chk [] (to: *mut c_char, room: size_t) -> *mut c_char,
        else std::ptr::null_mut();
    fn canonicalize_file_name [] () -> *mut c_char, else std::ptr::null_mut();
    fn pathconf [] (what: c_int) -> c_long, else -1;
}
