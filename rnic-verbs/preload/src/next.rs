//! Finds the functions of other libraries that this library's functions replace.

use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

use libc::c_void;

use crate::errno::kept;

/// The next function of a name after this library's own (`dlsym(3)`, `RTLD_NEXT`).
pub(crate) struct Next {
    /// Name, with a terminating zero byte.
    name: &'static str,
    /// Library in which to look if the program has loaded it for itself (`RTLD_LOCAL`).
    library: Option<&'static CStr>,
    found: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn of(name: &'static str, library: Option<&'static CStr>) -> Self {
        Next { name, library, found: AtomicPtr::new(null_mut()) }
    }

    /// Finds the function, and removes the error that a failure leaves for `dlerror(3)`.
    pub(crate) fn find_at_load(&self) {
        kept(|| {
            if self.find_next().is_null() {
                // SAFETY: no obligations. The result is not used.
                unsafe { libc::dlerror() };
            }
        });
    }

    fn find_next(&self) -> *mut c_void {
        // SAFETY: the name must end in a zero byte. `next!` appends one.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr().cast()) };
        // Concurrent calls find the same function.
        self.found.store(found, Relaxed);
        found
    }

    fn find_in_library(&self) -> *mut c_void {
        let Some(library) = self.library else { return null_mut() };
        // SAFETY: the name ends in a zero byte. No library is loaded, so no constructor runs.
        let library =
            unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if library.is_null() {
            return null_mut();
        }
        // SAFETY: the handle is valid, and the name ends in a zero byte.
        let found = unsafe { libc::dlsym(library, self.name.as_ptr().cast()) };
        self.found.store(found, Relaxed);
        found
    }

    /// Returns the function. Returns `None` and sets `ENOSYS` if no other library has it.
    pub(crate) fn find(&self) -> Option<*const c_void> {
        let mut found = self.found.load(Relaxed);
        if found.is_null() {
            found = kept(|| self.find_next());
        }
        if found.is_null() {
            found = kept(|| self.find_in_library());
        }
        if found.is_null() {
            // SAFETY: the pointer to this thread's `errno` is valid.
            unsafe { *libc::__errno_location() = libc::ENOSYS };
        }
        (!found.is_null()).then_some(found.cast_const())
    }
}

/// Returns the next function of a name, as a function of this type. `of` names its library if a
/// program may load it with `dlopen(3)`. The function is found when this library is loaded, because
/// a later `dlsym(3)` would clear the program's `dlerror(3)` and take the loader's lock. Only calls
/// from constructors of libraries that are initialised earlier cause a later `dlsym(3)`.
macro_rules! next {
    ($name:ident: $call:ty) => { $crate::next::next!(@ $name: $call, None) };
    ($name:ident: $call:ty, of $library:literal) => {
        $crate::next::next!(@ $name: $call, Some($library))
    };
    (@ $name:ident: $call:ty, $library:expr) => {{
        static NEXT: $crate::next::Next =
            $crate::next::Next::of(concat!(stringify!($name), "\0"), $library);
        #[used]
        #[unsafe(link_section = ".init_array")]
        static AT_LOAD: extern "C" fn() = {
            extern "C" fn find() {
                NEXT.find_at_load();
            }
            find
        };
        NEXT.find().map(|found| {
            // SAFETY: the pointer must be to a function of this type, and it was found by this
            // name. Functions with optional arguments (the mode of `open`) find them where a call
            // with all arguments puts them, on the machines that this library is built for.
            unsafe { std::mem::transmute::<*const libc::c_void, $call>(found) }
        })
    }};
}

pub(crate) use next;
