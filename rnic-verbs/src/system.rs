//! Calls of the C library: those in which a thread of a program can be cancelled, the environment,
//! and `errno`.

use std::ffi::{CStr, OsStr, OsString};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;

unsafe extern "C" {
    // pthread_setcancelstate(3) and secure_getenv(3), which the `libc` crate lacks.
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
    fn secure_getenv(name: *const libc::c_char) -> *const libc::c_char;
}

/// Returns the value of an environment variable, or `None` if it is unset or empty, or if the
/// program is set-user-ID (`AT_SECURE`) and the environment another user's.
pub(crate) fn variable(name: &CStr) -> Option<OsString> {
    // SAFETY: the name ends in a zero byte. Programs that change their environment while other
    // threads read it break every other reader as well.
    let value = unsafe { secure_getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: a value of the environment ends in a zero byte.
    let value = unsafe { CStr::from_ptr(value) };
    (!value.is_empty()).then(|| OsStr::from_bytes(value.to_bytes()).to_owned())
}

/// `PTHREAD_CANCEL_DISABLE`.
const CANCEL_DISABLE: libc::c_int = 1;

/// Keeps this thread from being cancelled as long as it lives.
pub(crate) struct Uncancelled {
    before: libc::c_int,
}

/// To be held by calls that may open, read or close a file by way of the C library, which is where
/// threads are cancelled (pthreads(7)): this library is not made to be left half-way, and a thread
/// that tries ends the program. It is cancelled in the next such place of the program's own.
pub(crate) fn uncancelled() -> Uncancelled {
    let mut before = 0;
    // SAFETY: it changes a state of this thread, and writes the old one to our number.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut before) };
    Uncancelled { before }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: as above; the state is one that this thread had.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

/// Takes one from an eventfd, sleeping as its own mode says.
pub(crate) fn read_count(fd: RawFd) -> io::Result<()> {
    let mut count = [0u8; 8];
    // SAFETY: the buffer is valid for as many bytes. A thread that is cancelled here leaves
    // nothing behind: there is no lock and nothing to be dropped.
    let n = unsafe { libc::read(fd, count.as_mut_ptr().cast(), count.len()) };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes one packet from a socket, sleeping as its own mode says; cut off at the end of `packet`.
pub(crate) fn receive_packet(fd: RawFd, packet: &mut [u8]) -> io::Result<usize> {
    // SAFETY: as above.
    let n = unsafe { libc::recv(fd, packet.as_mut_ptr().cast(), packet.len(), 0) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Sets `errno` of this thread.
pub(crate) fn set_errno(errno: i32) {
    // SAFETY: the C library's own place for this thread.
    unsafe { *libc::__errno_location() = errno };
}
