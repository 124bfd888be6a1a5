//! Functions of the C library that return paths. They show a path of the daemon's tree as the
//! program sees it.

use std::mem::MaybeUninit;

use libc::{AT_FDCWD, c_char, c_int, size_t, ssize_t};

use crate::errno::kept;
use crate::kernel_path;
use crate::next::next;
use crate::path::{ROOM, mapped};

/// Defines functions that return a path as a string.
macro_rules! shown {
    ($(fn $name:ident ($($argument:ident: $type:ty),*);)*) => {$(
        /// Same as the C library's function of this name.
        ///
        /// # Safety
        ///
        /// Same as for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> *mut c_char {
            type Call = unsafe extern "C" fn($($type),*) -> *mut c_char;
            let Some(next) = next!($name: Call) else { return std::ptr::null_mut() };
            // SAFETY: the caller fulfils the requirements of the C library's function, which
            // returns a string in memory of the caller.
            unsafe {
                let found = next($($argument),*);
                kernel_path::show_string(found);
                found
            }
        }
    )*};
}

shown! {
    fn getcwd(to: *mut c_char, size: size_t);
    fn __getcwd_chk(to: *mut c_char, size: size_t, room: size_t);
    fn getwd(to: *mut c_char);
    fn __getwd_chk(to: *mut c_char, room: size_t);
    fn get_current_dir_name();
}

/// Defines functions that take a path and return one as a string.
macro_rules! resolved {
    ($(fn $name:ident [] ($($after:ident: $then:ty),*);)*) => {$(
        /// Same as the C library's function of this name.
        ///
        /// # Safety
        ///
        /// Same as for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char $(, $after: $then)*) -> *mut c_char {
            type Call = unsafe extern "C" fn(*const c_char $(, $then)*) -> *mut c_char;
            let Some(next) = next!($name: Call) else { return std::ptr::null_mut() };
            mapped(AT_FDCWD, path, |path| {
                // SAFETY: the caller fulfils the requirements of the C library's function, which
                // returns a string in memory of the caller.
                unsafe {
                    let found = next(path $(, $after)*);
                    kernel_path::show_string(found);
                    found
                }
            })
        }
    )*};
}

resolved! {
    fn realpath [] (to: *mut c_char);
    fn __realpath_chk [] (to: *mut c_char, room: size_t);
    fn canonicalize_file_name [] ();
}

/// Defines functions that read a symbolic link.
macro_rules! links {
    ($(fn $name:ident [$($folder:ident: c_int)?] (to: *mut c_char, size: size_t
        $(, $room:ident: size_t)?);)*) => {$(
        /// Same as the C library's function of this name.
        ///
        /// # Safety
        ///
        /// Same as for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            $($folder: c_int,)? path: *const c_char, to: *mut c_char, size: size_t
            $(, $room: size_t)?
        ) -> ssize_t {
            type Call = unsafe extern "C" fn(
                $(replace!($folder c_int),)? *const c_char, *mut c_char, size_t
                $(, replace!($room size_t))?
            ) -> ssize_t;
            let Some(next) = next!($name: Call) else { return -1 };
            mapped([AT_FDCWD $(, $folder)?].last().copied().unwrap_or(AT_FDCWD), path, |path| {
                // SAFETY: the caller fulfils the requirements of the C library's function.
                let length = unsafe { next($($folder,)? path, to, size $(, $room)?) };
                let Ok(read) = usize::try_from(length) else { return length };
                let again = |to: *mut c_char| {
                    // SAFETY: as before, with a buffer of `ROOM` bytes.
                    unsafe { next($($folder,)? path, to, ROOM $(, replace!($room ROOM))?) }
                };
                // SAFETY: the call has written these bytes.
                unsafe { shown_link(to, read, size, again) }
            })
        }
    )*};
}

macro_rules! replace {
    ($_:ident $($by:tt)*) => { $($by)* };
}

links! {
    fn readlink [] (to: *mut c_char, size: size_t);
    fn readlinkat [folder: c_int] (to: *mut c_char, size: size_t);
    fn __readlink_chk [] (to: *mut c_char, size: size_t, room: size_t);
    fn __readlinkat_chk [folder: c_int] (to: *mut c_char, size: size_t, room: size_t);
}

/// Shows the target of a link, which may be truncated. Links such as `/proc/self/cwd` have targets
/// in the tree. Returns its new length.
///
/// # Safety
///
/// `length` bytes from `to` on must be readable and writable.
unsafe fn shown_link(
    to: *mut c_char,
    length: usize,
    size: usize,
    again: impl FnOnce(*mut c_char) -> ssize_t,
) -> ssize_t {
    // SAFETY: the caller guarantees that these bytes are valid.
    let text = unsafe { std::slice::from_raw_parts(to.cast::<u8>(), length) };
    if length == size && kernel_path::may_be(text) {
        // SAFETY: as above.
        return unsafe { shown_whole(to, length, again) };
    }
    // SAFETY: as above.
    unsafe { kernel_path::show(to, length) as ssize_t }
}

/// Replaces a truncated target by the start of the shown path, at most `length` bytes.
///
/// # Safety
///
/// As for [`shown_link`].
#[inline(never)]
unsafe fn shown_whole(
    to: *mut c_char,
    length: usize,
    again: impl FnOnce(*mut c_char) -> ssize_t,
) -> ssize_t {
    let mut whole = [const { MaybeUninit::<c_char>::uninit() }; ROOM];
    let from = whole.as_mut_ptr().cast::<c_char>();
    let Ok(read) = usize::try_from(kept(|| again(from))) else { return length as ssize_t };
    // SAFETY: the call has written `read` bytes of the buffer. At most `length` bytes are copied to
    // the caller's buffer, which has as many.
    unsafe {
        let shown = kernel_path::show(from, read).min(length);
        std::ptr::copy_nonoverlapping(from, to, shown);
        shown as ssize_t
    }
}
