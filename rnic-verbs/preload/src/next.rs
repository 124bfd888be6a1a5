//! Finds the C library's function that a call was meant for.

use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

use libc::c_void;

/// The next function of a name after this library's own (`dlsym(3)`, `RTLD_NEXT`).
pub(crate) struct Next {
    /// Name, with a terminating zero byte.
    name: &'static str,
    found: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn of(name: &'static str) -> Self {
        Next { name, found: AtomicPtr::new(null_mut()) }
    }

    /// Returns the function. Returns `None` and sets `ENOSYS` if no other library has it.
    pub(crate) fn find(&self) -> Option<*const c_void> {
        let found = self.found.load(Relaxed);
        if !found.is_null() {
            return Some(found);
        }
        // SAFETY: the pointer to this thread's `errno` is valid, here and below.
        let errno = unsafe { *libc::__errno_location() };
        // SAFETY: the name must end in a zero byte. `interpose!` appends one.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr().cast()) };
        // Concurrent calls find the same function.
        self.found.store(found, Relaxed);
        let left = if found.is_null() { libc::ENOSYS } else { errno };
        // SAFETY: as above, the pointer is valid.
        unsafe { *libc::__errno_location() = left };
        (!found.is_null()).then_some(found.cast_const())
    }
}
