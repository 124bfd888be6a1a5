//! `glob(3)`. Calls inside the C library cannot be interposed, so it gets this library's functions
//! through `GLOB_ALTDIRFUNC`.

use libc::{DIR, c_char, c_int, c_void, size_t};

use crate::next::next;
use crate::{lstat, opendir, stat, tree};

/// `glob_t`.
#[repr(C)]
pub struct Glob {
    count: size_t,
    paths: *mut *mut c_char,
    offset: size_t,
    flags: c_int,
    calls: Calls,
}

/// Functions that `glob(3)` calls with `GLOB_ALTDIRFUNC`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Calls {
    closedir: unsafe extern "C" fn(*mut DIR) -> c_int,
    readdir: unsafe extern "C" fn(*mut DIR) -> *mut libc::dirent,
    opendir: unsafe extern "C" fn(*const c_char) -> *mut DIR,
    lstat: unsafe extern "C" fn(*const c_char, *mut c_void) -> c_int,
    stat: unsafe extern "C" fn(*const c_char, *mut c_void) -> c_int,
}

/// Functions that find files of the tree.
const TREE: Calls =
    Calls { closedir: libc::closedir, readdir: libc::readdir, opendir, lstat, stat };

/// `GLOB_ALTDIRFUNC`.
const OTHER_CALLS: c_int = 1 << 9;

/// Defines functions that expand a pattern.
macro_rules! globs {
    ($(fn $name:ident [] ();)*) => {$(
        /// Same as the C library's function of this name.
        ///
        /// # Safety
        ///
        /// Same as for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            pattern: *const c_char, flags: c_int, failed: *const c_void, found: *mut Glob
        ) -> c_int {
            type Call = unsafe extern "C" fn(*const c_char, c_int, *const c_void, *mut Glob)
                -> c_int;
            let Some(next) = next!($name: Call) else { return -1 };
            if flags & OTHER_CALLS != 0 || found.is_null() || tree::root().is_none() {
                // SAFETY: the caller fulfils the requirements of the C library's function.
                return unsafe { next(pattern, flags, failed, found) };
            }
            // SAFETY: as above, and `calls` must be readable and writable: it is part of the
            // caller's structure. It may be uninitialized, so the functions in it are only copied.
            unsafe {
                let calls = (&raw mut (*found).calls).cast::<std::mem::MaybeUninit<Calls>>();
                let before = calls.read();
                calls.write(std::mem::MaybeUninit::new(TREE));
                let done = next(pattern, flags | OTHER_CALLS, failed, found);
                calls.write(before);
                (*found).flags &= !OTHER_CALLS;
                done
            }
        }
    )*};
}

globs! {
    fn glob [] ();
    fn glob64 [] ();
}
