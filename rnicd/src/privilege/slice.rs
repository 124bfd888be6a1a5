//! How long a thread wants to run at a time.
//!
//! A thread that is woken has to wait until the slice of the one that runs on its CPU is over, some
//! milliseconds, unless its own slices are shorter (Linux 6.12 and newer). Shorter slices give no
//! more of the CPU than others have, and it sooner: right for a worker on whose CPU somebody computes.
//! Beside programs that yield they are wrong: who yields passes over the rest of his slice, so that
//! after one yield of a program it would be the worker's turn many times.

use std::io;
use std::mem::size_of;
use std::time::Duration;

/// The shortest that the kernel takes.
const SHORT: Duration = Duration::from_micros(100);

/// Asks for short slices for the calling thread, or for those that everybody has; its priority stays.
///
/// # Errors
///
/// Those of the system. Kernels before 6.12 take the request and have one length of slices for all.
pub fn set_short_slices(short: bool) -> io::Result<()> {
    // SAFETY: an all-zero `sched_attr` is a valid value of that C struct of integers.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // A small constant.
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: the kernel writes at most `size` bytes to `attributes`, a live local of that size. 0
    // names the calling thread.
    let got = unsafe {
        libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0 as libc::c_uint)
    };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    attributes.size = size;
    // Of a thread of the ordinary policy this is its slice, in nanoseconds; 0 for the usual one.
    attributes.sched_runtime = if short { SHORT.as_nanos() as u64 } else { 0 };
    // SAFETY: the kernel reads `size` bytes of `attributes`, initialised as it did itself.
    let set = unsafe {
        libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0 as libc::c_uint)
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
