//! Access to this process's own memory through the kernel, which returns an error for an unmapped
//! or protected page, where a load or store would raise a signal. Also futexes in shared memory.

use arrayvec::ArrayVec;

use super::Mapping;
use super::copy::tail_len;
use super::queue::MAX_SGE;
use super::sync::AtomicU32;
use crate::types::AtomicOperation;

/// Address ranges of this process, in order: start and length in bytes.
pub(super) type Pieces = ArrayVec<(u64, u32), MAX_SGE>;

/// Copies all pieces to the mapping, starting at offset `at`. Returns false if an address is not
/// mapped; some bytes may have been copied then.
pub(super) fn read(mapping: &Mapping, at: usize, pieces: &Pieces) -> bool {
    copy(mapping, at, pieces, libc::process_vm_readv)
}

/// Copies bytes from the mapping, starting at offset `at`, to all pieces. With `tail_last`, the
/// longest aligned word at the end is written by a second call, after the other bytes, because a
/// program may poll the end of its buffer. Returns false in the same cases as [`read`].
pub(super) fn write(mapping: &Mapping, at: usize, pieces: &Pieces, tail_last: bool) -> bool {
    let mut first = pieces.clone();
    let mut tail = Pieces::new();
    if tail_last && let Some((address, len)) = first.last_mut() {
        // At most 8.
        let word = u32::try_from(tail_len(*address, *len as usize)).unwrap_or(0);
        *len -= word;
        tail.push((address.wrapping_add((*len).into()), word));
    }
    let written = total(&first);
    copy(mapping, at, &first, libc::process_vm_writev)
        && copy(mapping, at + written, &tail, libc::process_vm_writev)
}

/// Applies an atomic operation to the word at an address. Returns its original value, or `None` if
/// the address is not mapped. The caller must serialize calls. Stores of the program may occur
/// between the read and the write.
pub(super) fn update(
    mapping: &Mapping,
    at: usize,
    address: u64,
    operation: AtomicOperation,
) -> Option<u64> {
    let word = Pieces::from_iter([(address, 8)]);
    let mut bytes = [0; 8];
    if !read(mapping, at, &word) {
        return None;
    }
    mapping.read(at, &mut bytes).ok()?;
    //= 7306-5.1.1-8
    let old = u64::from_ne_bytes(bytes);
    let new = operation.applied_to(old);
    if new != old {
        mapping.write(at, &new.to_ne_bytes()).ok()?;
        if !write(mapping, at, &word, false) {
            return None;
        }
    }
    Some(old)
}

fn total(pieces: &Pieces) -> usize {
    pieces.iter().map(|(_, len)| *len as usize).sum()
}

/// `process_vm_readv` or `process_vm_writev`.
type Call = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> isize;

fn copy(mapping: &Mapping, at: usize, pieces: &Pieces, call: Call) -> bool {
    let len = total(pieces);
    if len == 0 {
        return true;
    }
    let Some(start) = mapping.range(at, len) else { return false };
    let ours = libc::iovec { iov_base: start.cast(), iov_len: len };
    let mut program: ArrayVec<libc::iovec, MAX_SGE> = ArrayVec::new();
    for (address, len) in pieces {
        let Ok(address) = usize::try_from(*address) else { return false };
        let iov_base = std::ptr::with_exposed_provenance_mut(address);
        program.push(libc::iovec { iov_base, iov_len: *len as usize });
    }
    let own = std::process::id().cast_signed();
    // SAFETY: `ours` lies within a live shared mapping, to which Rust holds no reference. The
    // kernel checks the addresses of the pieces, whose number is the length of the list. The
    // daemon, which the program trusts, uses only addresses in regions that the program has
    // registered for access by others, so no Rust reference to these bytes may exist.
    let copied = unsafe { call(own, &raw const ours, 1, program.as_ptr(), program.len() as _, 0) };
    copied == len.cast_signed()
}

/// Checks that `process_vm_readv(2)` and `process_vm_writev(2)` work on this process. The seccomp
/// filter of a container may forbid them.
///
/// # Errors
///
/// The error of the system call that failed.
pub fn check_copies() -> std::io::Result<()> {
    let from = 7u64;
    let mut to = 0u64;
    let source = libc::iovec { iov_base: (&raw const from).cast_mut().cast(), iov_len: 8 };
    let sink = libc::iovec { iov_base: (&raw mut to).cast(), iov_len: 8 };
    let own = std::process::id().cast_signed();
    // SAFETY: both ranges are live locals of eight bytes, of which the first is only read.
    let read = unsafe { libc::process_vm_readv(own, &raw const sink, 1, &raw const source, 1, 0) };
    // SAFETY: as above.
    let write =
        || unsafe { libc::process_vm_writev(own, &raw const source, 1, &raw const sink, 1, 0) };
    if read == 8 && write() == 8 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Wakes one thread, of any process, that waits on the word. Does not wake all of them, because a
/// client could make any number wait.
#[cfg(not(loom))]
pub(super) fn futex_wake(word: &AtomicU32) {
    // SAFETY: the kernel uses the address of a live word and writes nothing.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
}

/// Waits while the word is `value`. May return spuriously.
#[cfg(not(loom))]
pub(super) fn futex_wait(word: &AtomicU32, value: u32) {
    let forever = std::ptr::null::<libc::timespec>();
    // SAFETY: the kernel reads a live word; there is no timeout.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, forever) };
}

/// Does nothing: in a loom model no thread sleeps.
#[cfg(loom)]
pub(super) fn futex_wake(_word: &AtomicU32) {}

#[cfg(loom)]
pub(super) fn futex_wait(_word: &AtomicU32, _value: u32) {}

/// Calls `run` with all signals blocked in this thread. Threads started by `run` inherit the mask,
/// so signals go to the program's own threads only.
pub fn without_signals<T>(run: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are this function's own; blocking and unblocking signals of this thread
    // touches no other memory.
    let before = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    let result = run();
    // SAFETY: as above; the set is the previous one.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_may_copy_its_own_memory() {
        check_copies().expect("allowed by the seccomp filter");
    }

    #[test]
    fn threads_started_without_signals_block_them() {
        let blocked = |file: &str| {
            let status = std::fs::read_to_string(file).expect("procfs");
            let mask =
                status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask");
            u64::from_str_radix(mask.trim(), 16).expect("hexadecimal digits")
        };
        let before = blocked("/proc/thread-self/status");
        let thread =
            without_signals(|| std::thread::spawn(move || blocked("/proc/thread-self/status")));
        let inside = thread.join().expect("no panic");
        for signal in [libc::SIGTERM, libc::SIGUSR1, libc::SIGALRM, libc::SIGCHLD, libc::SIGINT] {
            assert_ne!(inside & 1 << (signal - 1), 0, "signal {signal}");
        }
        assert_eq!(blocked("/proc/thread-self/status"), before);
    }
}
