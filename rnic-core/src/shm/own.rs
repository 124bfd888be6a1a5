//! This process's own memory, as the kernel copies it: an address that is not mapped, or may not be
//! written, is an error and no signal. And threads that wait for a word in shared memory.

use arrayvec::ArrayVec;

use super::Mapping;
use super::attached::tail_len;
use super::queue::MAX_SGE;
use super::sync::AtomicU32;
use crate::types::AtomicOperation;

/// Ranges of this process's addresses, in order.
pub(super) type Pieces = ArrayVec<(u64, u32), MAX_SGE>;

/// Copies the bytes of all pieces to `at` of the mapping. False if an address is not mapped; some
/// of the bytes may have been copied then.
pub(super) fn read(mapping: &Mapping, at: usize, pieces: &Pieces) -> bool {
    copy(mapping, at, pieces, libc::process_vm_readv)
}

/// Copies as many bytes from `at` of the mapping as the pieces have. With `tail_last` the last
/// ones, as far as they are one naturally aligned word, are written after the rest, in a call of
/// their own: a program that polls on the end of its buffer finds the rest in place.
pub(super) fn write(mapping: &Mapping, at: usize, pieces: &Pieces, tail_last: bool) -> bool {
    let (mut first, mut tail) = (pieces.clone(), Pieces::new());
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

/// Changes the word at an address; what was there before. The caller keeps changes by others who
/// call this away; those of the program itself may come in between.
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
    // SAFETY: `ours` lies within a live mapping, which processes share and Rust never refers to.
    // The kernel checks the addresses of the pieces, as many as stated. They are the daemon's,
    // which the client trusts with them: they lie in regions that the program has registered, to be
    // written by others at any time, so that Rust refers to nothing there.
    let copied = unsafe { call(own, &raw const ours, 1, program.as_ptr(), program.len() as _, 0) };
    copied == len.cast_signed()
}

/// Whether the system lets this process copy its own memory (`process_vm_readv(2)`,
/// `process_vm_writev(2)`), which a container's filter may forbid.
pub fn check_copies() -> std::io::Result<()> {
    let (from, mut to) = (7u64, 0u64);
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

/// Wakes a thread that waits for the word, in any process: one, because a client could have any
/// number of them wait.
#[cfg(not(loom))]
pub(super) fn futex_wake(word: &AtomicU32) {
    // SAFETY: the kernel looks at the address of a live word and writes nothing.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
}

/// Waits as long as the word is `value`. May return for no reason.
#[cfg(not(loom))]
pub(super) fn futex_wait(word: &AtomicU32, value: u32) {
    let forever = std::ptr::null::<libc::timespec>();
    // SAFETY: the kernel reads a live word; there is no timeout.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, forever) };
}

/// In a model nobody sleeps: it is asked whether somebody would.
#[cfg(loom)]
pub(super) fn futex_wake(_word: &AtomicU32) {}

#[cfg(loom)]
pub(super) fn futex_wait(_word: &AtomicU32, _value: u32) {}

/// Runs something with all signals blocked in this thread: a thread that it starts has them blocked
/// for good, so that signals reach the program's own threads only.
pub fn without_signals<T>(run: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are this function's own; blocking and unblocking signals of this thread
    // touches no memory else.
    let before = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    let result = run();
    // SAFETY: as above; the set is the one that was in force.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_may_copy_its_own_memory() {
        check_copies().expect("allowed here");
    }

    #[test]
    fn threads_that_are_started_without_signals_have_none() {
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
