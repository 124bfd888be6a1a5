//! Functions of the C library that traverse a directory tree. They must be able to unwind, because
//! the program's function that they call for each file may throw an exception.

use std::cell::Cell;
use std::ffi::CStr;

use libc::{AT_FDCWD, c_char, c_int, c_void};

use crate::kernel_path;
use crate::next::next;
use crate::path::{ROOM, mapped};

/// `struct FTW`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Ftw {
    base: c_int,
    level: c_int,
}

/// Function of the program for each file. A function for `ftw(3)` ignores the last argument.
type Visit = unsafe extern "C-unwind" fn(*const c_char, *const c_void, c_int, *mut Ftw) -> c_int;

thread_local! {
    /// The program's function, during a walk in the tree.
    static VISIT: Cell<Option<Visit>> = const { Cell::new(None) };
}

/// Defines functions that call the program's function for each file, through `$inner`.
macro_rules! walks {
    ($(fn $name:ident [] (fds: c_int $(, $flags:ident: $type:ty)?) by $inner:ident;)*) => {$(
        /// Same as the C library's function of this name.
        ///
        /// # Safety
        ///
        /// Same as for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            path: *const c_char, visit: *const c_void, fds: c_int $(, $flags: $type)?
        ) -> c_int {
            type Call = unsafe extern "C-unwind" fn(
                *const c_char, *const c_void, c_int $(, $type)?
            ) -> c_int;
            let Some(next) = next!($name: Call) else { return -1 };
            mapped(AT_FDCWD, path, |inner| {
                // SAFETY: the caller fulfils the requirements of the C library's function.
                let walk = |visit| unsafe { next(inner, visit, fds $(, $flags)?) };
                if inner == path || visit.is_null() {
                    return walk(visit);
                }
                // SAFETY: the pointer must be to a function of this type. It is not null, and the
                // manual page requires a function for this kind of walk. `$inner` calls it as such.
                let own = unsafe { std::mem::transmute::<*const c_void, Visit>(visit) };
                let outer = VISIT.replace(Some(own));
                let done = walk($inner as *const c_void);
                VISIT.set(outer);
                done
            })
        }
    )*};
}

walks! {
    fn ftw [] (fds: c_int) by visit_ftw;
    fn ftw64 [] (fds: c_int) by visit_ftw;
    fn nftw [] (fds: c_int, flags: c_int) by visit_nftw;
    fn nftw64 [] (fds: c_int, flags: c_int) by visit_nftw;
}

/// Maximum number of paths of a walk that are looked up in the tree.
const WALKS: usize = 16;

/// Defines functions that return a stream of the files below several paths.
macro_rules! streams {
    ($(fn $name:ident;)*) => {$(
        /// Same as the C library's function of this name. The entries of the stream have paths in
        /// the tree, because the C library edits them in place.
        ///
        /// # Safety
        ///
        /// Same as for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            paths: *const *const c_char, options: c_int, compare: *const c_void
        ) -> *mut c_void {
            type Call = unsafe extern "C-unwind" fn(
                *const *const c_char, c_int, *const c_void
            ) -> *mut c_void;
            let Some(next) = next!($name: Call) else { return std::ptr::null_mut() };
            // SAFETY: the caller passes a list of paths that ends in a null pointer.
            let count = (0..=WALKS).find(|at| unsafe { *paths.add(*at) }.is_null());
            let mut list = [std::ptr::null(); WALKS + 1];
            let Some(count) = count else {
                // SAFETY: the caller fulfils the requirements of the C library's function.
                return unsafe { next(paths, options, compare) };
            };
            // SAFETY: `count` pointers must be readable. The search above has read them.
            let paths = unsafe { std::slice::from_raw_parts(paths, count) };
            // SAFETY: as above.
            with_mapped(paths, 0, &mut list, &mut |list| unsafe { next(list, options, compare) })
        }
    )*};
}

streams! {
    fn fts_open;
    fn fts64_open;
}

/// Calls `call` with a copy of a list, whose paths from `at` on are mapped.
fn with_mapped(
    paths: &[*const c_char],
    at: usize,
    list: &mut [*const c_char; WALKS + 1],
    call: &mut dyn FnMut(*const *const c_char) -> *mut c_void,
) -> *mut c_void {
    let Some(path) = paths.get(at) else { return call(list.as_ptr()) };
    mapped(AT_FDCWD, *path, |path| {
        list[at] = path;
        with_mapped(paths, at + 1, list, call)
    })
}

/// Function for `nftw(3)`.
///
/// # Safety
///
/// Same as for functions that are passed to `nftw(3)`.
unsafe extern "C-unwind" fn visit_nftw(
    path: *const c_char,
    found: *const c_void,
    kind: c_int,
    at: *mut Ftw,
) -> c_int {
    // SAFETY: `at` must be readable. nftw(3) passes a pointer to a structure that is valid during
    // the call.
    let Ftw { base, level } = unsafe { *at };
    visit_shown(path, |visit, shown, shorter| {
        let mut at = Ftw { base: base - shorter as c_int, level };
        // SAFETY: `visit` must be a function for `nftw(3)`, which stores it in `VISIT` for this
        // walk. Its arguments must be valid during the call: `shown` ends in a zero byte, `at` is a
        // local, and the others come from the C library.
        unsafe { visit(shown, found, kind, &raw mut at) }
    })
}

/// Function for `ftw(3)`, which passes no position.
///
/// # Safety
///
/// Same as for functions that are passed to `ftw(3)`.
unsafe extern "C-unwind" fn visit_ftw(
    path: *const c_char,
    found: *const c_void,
    kind: c_int,
) -> c_int {
    visit_shown(path, |visit, shown, _| {
        // SAFETY: `visit` must be a function for `ftw(3)`, which stores it in `VISIT` for this
        // walk. It has three parameters and ignores the register of the fourth. Its arguments must
        // be valid during the call: `shown` ends in a zero byte, and the others come from the C
        // library.
        unsafe { visit(shown, found, kind, std::ptr::null_mut()) }
    })
}

/// Calls `call` with the program's function, the path as the program sees it, and the number of
/// bytes by which this path is shorter than `path`.
fn visit_shown(
    path: *const c_char,
    call: impl FnOnce(Visit, *const c_char, usize) -> c_int,
) -> c_int {
    let Some(visit) = VISIT.get() else { return -1 };
    // SAFETY: the path must be readable up to a zero byte, and must not change. The C library
    // passes its own buffer, which it edits only after the call.
    let text = unsafe { CStr::from_ptr(path) }.to_bytes_with_nul();
    let mut copy = [0u8; ROOM];
    let Some(to) = copy.get_mut(..text.len()) else { return call(visit, path, 0) };
    to.copy_from_slice(text);
    // SAFETY: the bytes must be writable, and used by this thread only. They are those of the local
    // copy, which is at least as long as the text.
    let shown = unsafe { kernel_path::show(copy.as_mut_ptr().cast(), text.len()) };
    call(visit, copy.as_ptr().cast(), text.len() - shown)
}
