//! Calls that leave `errno` unchanged.

/// Runs `call` and restores `errno`.
pub(crate) fn kept<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: the call has no preconditions. Every thread has an `errno`.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: the pointer to this thread's `errno` is valid, here and below.
    let before = unsafe { *errno };
    let result = call();
    // SAFETY: as above, the pointer is valid.
    unsafe { *errno = before };
    result
}
