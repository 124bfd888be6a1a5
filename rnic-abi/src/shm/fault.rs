//! Signal handler for missing pages of shared memory. It poisons the mapping and keeps the process
//! alive.
//!
//! A client can make a page of its memory unusable at any instant (by truncating the file), even
//! during a copy by the daemon; so can a memory failure. The kernel then sends `SIGBUS` or
//! `SIGSEGV` to the thread that accessed the page. The handler looks the address up in a fixed
//! table of mapped ranges. If it finds a range, it marks the range poisoned, maps an anonymous zero
//! page over the missing one and returns. The copy then runs to its end, and its caller checks the
//! mark and discards the result. If there is no such range, the signal takes its default action:
//! the fault is a bug in the daemon.
//!
//! The table is a process-wide static. It consists of atomics and has no lock, and for a range that
//! it finds the handler makes one system call, `mmap`.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};

/// Maximum number of registered ranges: more than `vm.max_map_count` (65,530) allows.
const SLOTS: usize = 1 << 16;

static TABLE: Table = Table::new();

/// Installs the handler for `SIGBUS` and `SIGSEGV` for the whole process. Further calls are
/// harmless.
///
/// The daemon calls this before it adopts the first shared buffer.
pub fn install() -> io::Result<()> {
    TABLE.page.store(rustix::param::page_size(), Ordering::Release);
    for signal in [libc::SIGBUS, libc::SIGSEGV] {
        // SAFETY: an all-zero `sigaction` is a valid value of that C struct.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_fault as *const () as usize;
        // On the alternate stack, so that a stack overflow still gets its default action.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `action` is valid for the call. Its handler has the three-argument signature that
        // SA_SIGINFO requires and does only what a signal handler may do. The old action is not
        // requested.
        if unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// A mapped range in the table, from the creation of the mapping until just before it is unmapped.
#[derive(Debug)]
pub(super) struct Registration {
    slot: usize,
}

impl Registration {
    /// Registers `len` bytes at `start`. Returns `None` if no slot is free.
    pub(super) fn new(start: usize, len: usize) -> Option<Self> {
        TABLE.insert(start, len).map(|slot| Registration { slot })
    }

    /// Returns true if a page of the range has been missing.
    #[inline]
    pub(super) fn is_poisoned(&self) -> bool {
        TABLE.slots[self.slot].poisoned.load(Ordering::Acquire)
    }

    /// Marks the range poisoned after the kernel found a page missing in a system call (`EFAULT`).
    pub(super) fn poison(&self) {
        TABLE.slots[self.slot].poisoned.store(true, Ordering::Release);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        TABLE.remove(self.slot);
    }
}

/// Initially all zeros: any other value would add 1.5 MiB to the file of every program.
struct Table {
    slots: [Slot; SLOTS],
    /// Number of slots that the handler searches: no slot from this number on has ever been used.
    used: AtomicUsize,
    /// Start of the search for a free slot.
    hint: AtomicUsize,
    /// Page size in bytes, written by `install` before the handler can run.
    page: AtomicUsize,
}

/// `version` counts in steps of four: `4k` free, `4k + 1` being filled, `4k + 2` live, `4k + 3`
/// being emptied. Start and end are valid only if the same live version is read before and after
/// them.
struct Slot {
    version: AtomicU32,
    poisoned: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
}

impl Table {
    const fn new() -> Self {
        Table {
            slots: [const {
                Slot {
                    version: AtomicU32::new(0),
                    poisoned: AtomicBool::new(false),
                    start: AtomicUsize::new(0),
                    end: AtomicUsize::new(0),
                }
            }; SLOTS],
            used: AtomicUsize::new(0),
            hint: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
        }
    }

    fn insert(&self, start: usize, len: usize) -> Option<usize> {
        let from = self.hint.load(Ordering::Relaxed).min(SLOTS);
        let (index, version) = (from..SLOTS).chain(0..from).find_map(|index| {
            let version = self.slots[index].version.load(Ordering::Relaxed);
            let claimed = version & 3 == 0
                && self.slots[index]
                    .version
                    .compare_exchange(
                        version,
                        version.wrapping_add(1),
                        Ordering::Acquire,
                        Ordering::Relaxed,
                    )
                    .is_ok();
            claimed.then_some((index, version))
        })?;
        let slot = &self.slots[index];
        // Pairs with the acquire fence in `find`: a thread that sees one of the stores below also
        // sees that the slot's version has changed.
        fence(Ordering::Release);
        slot.poisoned.store(false, Ordering::Relaxed);
        slot.start.store(start, Ordering::Relaxed);
        slot.end.store(start.saturating_add(len), Ordering::Relaxed);
        slot.version.store(version.wrapping_add(2), Ordering::Release);
        self.used.fetch_max(index + 1, Ordering::Release);
        self.hint.store(index + 1, Ordering::Relaxed);
        Some(index)
    }

    /// Frees a live slot. Called once, by its owner.
    fn remove(&self, index: usize) {
        let slot = &self.slots[index];
        let version = slot.version.load(Ordering::Relaxed);
        slot.version.store(version.wrapping_add(1), Ordering::Relaxed);
        // Pairs with the acquire fence in `find`, as in `insert`.
        fence(Ordering::Release);
        slot.start.store(0, Ordering::Relaxed);
        slot.end.store(0, Ordering::Relaxed);
        slot.version.store(version.wrapping_add(2), Ordering::Release);
        self.hint.fetch_min(index, Ordering::Relaxed);
    }

    /// Returns the live slot that covers `address`.
    ///
    /// A thread faults on a mapping that it holds, so the slot of that mapping was filled earlier,
    /// is not emptied during the search, and is found. A slot that changes during the search
    /// belongs to another mapping and is skipped.
    fn find(&self, address: usize) -> Option<&Slot> {
        let used = self.used.load(Ordering::Acquire).min(SLOTS);
        self.slots[..used].iter().find(|slot| {
            let before = slot.version.load(Ordering::Acquire);
            let start = slot.start.load(Ordering::Relaxed);
            let end = slot.end.load(Ordering::Relaxed);
            fence(Ordering::Acquire);
            before & 3 == 2
                && slot.version.load(Ordering::Relaxed) == before
                && (start..end).contains(&address)
        })
    }

    /// Makes a fault at `address` harmless. Returns false if no registered range covers it.
    fn absorb(&self, address: usize) -> bool {
        let Some(slot) = self.find(address) else { return false };
        // Mark first: another thread that reads the zero page must find the mark.
        slot.poisoned.store(true, Ordering::SeqCst);
        let page = self.page.load(Ordering::Acquire);
        // SAFETY: the page lies in a live mapping (mappings start and end at page boundaries), so
        // MAP_FIXED replaces a page of that mapping and nothing else. The page holds only foreign
        // memory, to which no Rust reference other than to atomics exists, and stays readable and
        // writable. The mapping cannot be unmapped now, because the faulting thread holds it.
        let got = unsafe {
            libc::mmap(
                (address & !(page - 1)) as *mut libc::c_void,
                page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        got != libc::MAP_FAILED
    }
}

/// The signal handler: no allocation, no lock, no panic. Uses only atomics, `mmap`, `signal` and
/// `raise`.
extern "C" fn on_fault(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: `__errno_location` returns this thread's errno, always valid.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes a valid `siginfo_t` to an SA_SIGINFO handler. For these two signals
    // `si_addr` is a field of it (meaningless unless `si_code` > 0).
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code <= 0 || !TABLE.absorb(address) {
        // Not a fault in shared memory: restore the default action. A real fault recurs as soon as
        // the handler returns. A signal sent by a process does not, so it is raised again. SAFETY:
        // SIG_DFL is a valid action, and both calls are async-signal-safe.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            if code <= 0 {
                libc::raise(signal);
            }
        }
    }
    // SAFETY: errno is valid, as above. The interrupted code must find its old value.
    unsafe { *libc::__errno_location() = errno };
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use rustix::fs::MemfdFlags;

    use super::super::{CopyFault, Mapping};
    use super::*;

    const LEN: usize = 16 * 4096;

    /// Maps a memfd without seals: the test can still truncate it.
    fn unsealed() -> (Mapping, OwnedFd) {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("memfd");
        rustix::fs::ftruncate(&fd, LEN as u64).expect("grow");
        (Mapping::map(fd.as_fd(), LEN).expect("memory for the mapping"), fd)
    }

    #[test]
    fn a_copy_from_a_truncated_buffer_is_poisoned() {
        install().expect("handler");
        // The intact mapping is registered first.
        let (other, _other_fd) = unsealed();
        let (buffer, fd) = unsealed();
        buffer.fill(0, LEN, 7).expect("still there");
        rustix::fs::ftruncate(&fd, 4096).expect("shrink");
        let mut bytes = vec![1; LEN];
        assert_eq!(buffer.read(0, &mut bytes), Err(CopyFault::Poisoned));
        assert_eq!(bytes[..4096], [7; 4096]);
        assert_eq!(bytes[4096..], [0; LEN - 4096], "zero pages replace missing ones");
        assert!(buffer.is_poisoned());
        assert!(!other.is_poisoned());
        assert_eq!(other.read(0, &mut bytes), Ok(()));
    }

    #[test]
    fn a_copy_into_a_truncated_buffer_is_poisoned() {
        install().expect("handler");
        let (source, _source_fd) = unsealed();
        for offset in [0, 4095, LEN - 1] {
            let (buffer, fd) = unsealed();
            rustix::fs::ftruncate(&fd, 0).expect("shrink");
            assert_eq!(buffer.write(offset, &[1]), Err(CopyFault::Poisoned));
            let (buffer, fd) = unsealed();
            rustix::fs::ftruncate(&fd, 0).expect("shrink");
            assert_eq!(buffer.fill(offset, 1, 1), Err(CopyFault::Poisoned));
            let (buffer, fd) = unsealed();
            rustix::fs::ftruncate(&fd, 0).expect("shrink");
            assert_eq!(source.copy_to(0, &buffer, 0, LEN, true), Err(CopyFault::Poisoned));
            assert!(!source.is_poisoned());
        }
    }

    #[test]
    fn a_reused_slot_is_not_poisoned() {
        install().expect("handler");
        for _ in 0..50 {
            let (buffer, fd) = unsealed();
            assert!(!buffer.is_poisoned());
            rustix::fs::ftruncate(&fd, 0).expect("shrink");
            assert_eq!(buffer.read(0, &mut [0]), Err(CopyFault::Poisoned));
        }
    }

    #[test]
    fn concurrent_mappings_and_faults() {
        install().expect("handler");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for n in 0..500 {
                        let (buffer, fd) = unsealed();
                        if n % 2 == 0 {
                            rustix::fs::ftruncate(&fd, 0).expect("shrink");
                            assert_eq!(buffer.write(4096, &[1]), Err(CopyFault::Poisoned));
                        } else {
                            assert_eq!(buffer.write(4096, &[1]), Ok(()));
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn table_fills_up_and_empties() {
        let table: &Table = Box::leak(heap_table());
        for n in 0..SLOTS {
            assert_eq!(table.insert((n + 1) * 4096, 4096), Some(n));
        }
        assert_eq!(table.insert(4096, 4096), None);
        let hit = |address| table.find(address).map(|slot| slot.start.load(Ordering::Relaxed));
        assert_eq!(hit(4095), None);
        assert_eq!(hit(4096), Some(4096));
        assert_eq!(hit(8191), Some(4096));
        assert_eq!(hit(SLOTS * 4096 + 4095), Some(SLOTS * 4096));
        assert_eq!(hit((SLOTS + 1) * 4096), None);
        table.remove(1000);
        assert_eq!(hit(1001 * 4096), None);
        assert_eq!(table.insert(1 << 40, 1), Some(1000));
        assert_eq!(hit(1 << 40), Some(1 << 40));
        assert_eq!(hit((1 << 40) + 1), None);
    }

    /// Allocates a table in place: its 1.5 MiB may be too large for a test's stack.
    fn heap_table() -> Box<Table> {
        let mut table = Box::<Table>::new_uninit();
        // SAFETY: zeros are valid for all its atomics.
        unsafe {
            table.as_mut_ptr().write_bytes(0, 1);
            table.assume_init()
        }
    }

    /// Runs one of the `child_` tests below in its own process. Returns the signal that ended it.
    fn signal_that_ends(child: &str) -> Option<i32> {
        let program = std::env::current_exe().expect("our own path");
        let status = Command::new(program)
            .args(["--exact", &format!("shm::fault::tests::{child}"), "--nocapture"])
            .env(CHILD, "1")
            .output()
            .expect("our own program")
            .status;
        status.signal()
    }

    #[test]
    fn other_faults_take_the_default_action() {
        assert_eq!(signal_that_ends("child_faults_elsewhere"), Some(libc::SIGBUS));
        assert_eq!(
            signal_that_ends("child_touches_an_unmapped_shared_buffer"),
            Some(libc::SIGSEGV)
        );
    }

    #[test]
    fn a_sent_signal_takes_the_default_action() {
        assert_eq!(signal_that_ends("child_sends_itself_a_signal"), Some(libc::SIGSEGV));
    }

    #[test]
    fn child_faults_elsewhere() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        install().expect("handler");
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("memfd");
        rustix::fs::ftruncate(&fd, 4096).expect("grow");
        let flags = rustix::mm::MapFlags::SHARED;
        let protection = rustix::mm::ProtFlags::READ;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, protection, flags, &fd, 0) };
        rustix::fs::ftruncate(&fd, 0).expect("shrink");
        // SAFETY: mapped above and aligned. The missing page ends this process, as intended.
        unsafe { at.expect("memory for the mapping").cast::<u8>().read_volatile() };
    }

    #[test]
    fn child_touches_an_unmapped_shared_buffer() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        install().expect("handler");
        let (buffer, _fd) = unsealed();
        let at = buffer.address() as *const u8;
        drop(buffer);
        // SAFETY: deliberately none: the address is no longer mapped, which ends this process.
        unsafe { at.read_volatile() };
    }

    #[test]
    fn child_sends_itself_a_signal() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        install().expect("handler");
        // SAFETY: raising a signal in this process has no preconditions.
        unsafe { libc::raise(libc::SIGSEGV) };
    }

    const CHILD: &str = "RNIC_FAULT_TEST_CHILD";
}
