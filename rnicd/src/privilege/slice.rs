//! How long a thread wants to run at a time.
//!
//! A thread that is woken has to wait until the slice of the one that runs on its CPU is over, some
//! milliseconds, unless its own slices are shorter (Linux 6.12 and newer). Shorter slices give no
//! more of the CPU than others have, and it sooner: right for a worker on whose CPU somebody
//! computes. Beside programs that yield they are wrong: who yields passes over the rest of his
//! slice, so that after one yield of a program it would be the worker's turn many times.

use std::io;
use std::mem::size_of;
use std::time::Duration;

/// The shortest that the kernel takes.
const SHORT: Duration = Duration::from_micros(100);

/// Asks for short slices for the calling thread, or for those that everybody has; its priority
/// stays.
///
/// # Errors
///
/// Those of the system. Kernels before 6.12 take the request and have one length of slices for all.
pub fn set_short_slices(short: bool) -> io::Result<()> {
    let mut attributes = attributes()?;
    attributes.size = SIZE;
    // Of a thread of the ordinary policy this is its slice, in nanoseconds; 0 for the usual one.
    attributes.sched_runtime = if short { SHORT.as_nanos() as u64 } else { 0 };
    // SAFETY: the kernel reads `SIZE` bytes of `attributes`, initialised as it did itself.
    let set = unsafe {
        libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0 as libc::c_uint)
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// How the calling thread is scheduled.
fn attributes() -> io::Result<libc::sched_attr> {
    // SAFETY: an all-zero `sched_attr` is a valid value of that C struct of integers.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `SIZE` bytes to `attributes`, a live local of that size. 0
    // names the calling thread.
    let got = unsafe {
        libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, SIZE, 0 as libc::c_uint)
    };
    match got {
        0 => Ok(attributes),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Bytes of the structure, for its `size` field.
const SIZE: u32 = size_of::<libc::sched_attr>() as u32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_short_when_asked_and_nothing_else_changes() {
        // What a thread asks for goes with it.
        let asked = std::thread::spawn(|| {
            let mut seen = vec![attributes()];
            for short in [true, false] {
                set_short_slices(short).unwrap_or_else(|e| panic!("{e}"));
                seen.push(attributes());
            }
            seen.into_iter().collect::<io::Result<Vec<_>>>()
        });
        let seen = asked.join().unwrap_or_else(|_| panic!("a thread of ours"));
        let seen = seen.unwrap_or_else(|e| panic!("{e}"));
        let slices: Vec<u64> = seen.iter().map(|a| a.sched_runtime).collect();
        // Kernels before 6.12 tell of no slices.
        if slices[0] != 0 {
            assert_eq!(slices[1..], [SHORT.as_nanos() as u64, slices[0]]);
            assert_ne!(slices[0], slices[1]);
        }
        let rest = |a: &libc::sched_attr| (a.sched_policy, a.sched_nice, a.sched_flags);
        assert!(seen.iter().all(|a| rest(a) == rest(&seen[0])));
    }
}
