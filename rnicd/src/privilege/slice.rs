//! Time slices of a thread.
//!
//! A woken thread waits until the slice of the thread that runs on its CPU is over (some
//! milliseconds), unless its own slices are shorter (Linux 6.12 and newer). A thread with shorter
//! slices gets the same share of the CPU, but sooner. This is right for a worker that shares its
//! CPU with busy threads. It is wrong beside programs that yield: a yield gives up the rest of a
//! slice, so that the worker would get many turns after one yield of the program.

use std::io;
use std::mem::size_of;
use std::time::Duration;

/// The shortest slice that the kernel accepts.
const SHORT: Duration = Duration::from_micros(100);

/// Sets short or default time slices for the calling thread. Does not change its priority.
///
/// # Errors
///
/// Errors of the system calls. Kernels before 6.12 accept the request and ignore it.
pub fn set_short_slices(short: bool) -> io::Result<()> {
    let mut attributes = attributes()?;
    attributes.size = SIZE;
    // For a thread of the normal policy this is the slice in nanoseconds, 0 for the default.
    attributes.sched_runtime = if short { SHORT.as_nanos() as u64 } else { 0 };
    // SAFETY: the kernel reads `SIZE` bytes of `attributes`, a live local that the kernel itself
    // has initialised.
    let set = unsafe {
        libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0 as libc::c_uint)
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the scheduling attributes of the calling thread.
fn attributes() -> io::Result<libc::sched_attr> {
    // SAFETY: an all-zero `sched_attr` is a valid value of that C struct of integers.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `SIZE` bytes to `attributes`, a live local of that size. 0
    // is the calling thread.
    let got = unsafe {
        libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, SIZE, 0 as libc::c_uint)
    };
    match got {
        0 => Ok(attributes),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Size of the structure in bytes, for its `size` field.
const SIZE: u32 = size_of::<libc::sched_attr>() as u32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_slice_changes() {
        // The setting ends with its thread.
        let asked = std::thread::spawn(|| {
            let mut seen = vec![attributes()];
            for short in [true, false] {
                set_short_slices(short).unwrap_or_else(|e| panic!("{e}"));
                seen.push(attributes());
            }
            seen.into_iter().collect::<io::Result<Vec<_>>>()
        });
        let seen = asked.join().unwrap_or_else(|_| panic!("the thread panicked"));
        let seen = seen.unwrap_or_else(|e| panic!("{e}"));
        let slices: Vec<u64> = seen.iter().map(|a| a.sched_runtime).collect();
        // Kernels before 6.12 report no slices.
        if slices[0] != 0 {
            assert_eq!(slices[1..], [SHORT.as_nanos() as u64, slices[0]]);
            assert_ne!(slices[0], slices[1]);
        }
        let rest = |a: &libc::sched_attr| (a.sched_policy, a.sched_nice, a.sched_flags);
        assert!(seen.iter().all(|a| rest(a) == rest(&seen[0])));
    }
}
