//! Calls of the C library: cancellation points (pthreads(7)), the environment, and `errno`.

use std::ffi::{CStr, OsStr, OsString, c_int};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;

unsafe extern "C" {
    // pthread_setcancelstate(3) and secure_getenv(3), which the `libc` crate lacks.
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
    fn secure_getenv(name: *const libc::c_char) -> *const libc::c_char;
}

/// Returns the value of an environment variable. Returns `None` if it is unset or empty, or if the
/// program has gained privileges (`AT_SECURE`), because its caller controls the environment.
pub(crate) fn variable(name: &CStr) -> Option<OsString> {
    // SAFETY: the name ends in a zero byte. A program that changes its environment while other
    // threads read it breaks every other reader as well.
    let value = unsafe { secure_getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: values of the environment end in a zero byte.
    let value = unsafe { CStr::from_ptr(value) };
    (!value.is_empty()).then(|| OsStr::from_bytes(value.to_bytes()).to_owned())
}

/// `PTHREAD_CANCEL_DISABLE`.
const CANCEL_DISABLE: libc::c_int = 1;

/// Disables cancellation of this thread until dropped.
pub(crate) struct Uncancelled {
    before: libc::c_int,
}

/// Disables cancellation of this thread. Held by calls that may open, read or close a file through
/// the C library. These functions are cancellation points (pthreads(7)), and the code between them
/// cannot be unwound: a cancelled thread would end the program. The thread is cancelled at the next
/// cancellation point of the program.
pub(crate) fn uncancelled() -> Uncancelled {
    let mut before = 0;
    // SAFETY: it changes the state of this thread, and writes the old state to a live local.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut before) };
    Uncancelled { before }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: as above, with a state that this thread had.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

/// Decrements an eventfd. Blocks while it is 0, unless the descriptor is non-blocking.
pub(crate) fn read_count(fd: RawFd) -> io::Result<()> {
    let mut count = [0u8; 8];
    // SAFETY: the buffer is valid for its length. A thread cancelled here leaves nothing to clean
    // up: there is no lock and nothing to drop.
    let n = unsafe { libc::read(fd, count.as_mut_ptr().cast(), count.len()) };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Receives one packet from a socket, truncated to the length of `packet`, with `flags` of recv(2).
/// Blocks unless the socket is non-blocking or `flags` contain `MSG_DONTWAIT`.
pub(crate) fn receive_packet(fd: RawFd, packet: &mut [u8], flags: c_int) -> io::Result<usize> {
    // SAFETY: as above.
    let n = unsafe { libc::recv(fd, packet.as_mut_ptr().cast(), packet.len(), flags) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Sets `errno` of this thread.
pub(crate) fn set_errno(errno: i32) {
    // SAFETY: the location belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
}
