//! The function that would have been called.

use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

use libc::c_void;

/// The next function of a name after this library's own (`dlsym(3)`, `RTLD_NEXT`).
pub(crate) struct Next {
    /// With its zero byte.
    name: &'static str,
    found: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn of(name: &'static str) -> Self {
        Next { name, found: AtomicPtr::new(null_mut()) }
    }

    /// The function; none, and `ENOSYS`, if no other library has it.
    pub(crate) fn find(&self) -> Option<*const c_void> {
        let found = self.found.load(Relaxed);
        if !found.is_null() {
            return Some(found);
        }
        // SAFETY: it has a value in every thread, as in what follows.
        let errno = unsafe { *libc::__errno_location() };
        // SAFETY: the name ends in a zero byte.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr().cast()) };
        // Whoever comes at the same time finds the same.
        self.found.store(found, Relaxed);
        let left = if found.is_null() { libc::ENOSYS } else { errno };
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = left };
        (!found.is_null()).then_some(found.cast_const())
    }
}
