//! What happens when a page of shared memory is gone: the shared buffer is poisoned, the process
//! lives.
//!
//! A client can make a page of its memory unusable (a truncated file, a failed memory bank) at any
//! instant, also in the middle of our copy. The kernel then sends `SIGBUS` or `SIGSEGV` to the
//! thread that touched it. The handler looks the address up in a fixed table of mapped ranges. On a
//! hit it marks the range poisoned, lays an anonymous zero page over the missing one and returns,
//! so the copy runs to its end; its caller tests the mark and discards the result. Without a hit
//! the signal takes its default action: such a fault is our bug.
//!
//! The table is a process-wide static. It is made of atomics, nothing in it is ever locked, and the
//! handler makes one system call, `mmap`.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};

/// Ranges that can be registered: more than `vm.max_map_count` (65,530) lets a process map.
const SLOTS: usize = 1 << 16;

static TABLE: Table = Table::new();

/// Installs the handler for `SIGBUS` and `SIGSEGV`, for the whole process; once is enough.
///
/// The daemon calls this before it adopts the first shared buffer.
pub fn install() -> io::Result<()> {
    TABLE.page.store(rustix::param::page_size(), Ordering::Release);
    for signal in [libc::SIGBUS, libc::SIGSEGV] {
        // SAFETY: an all-zero `sigaction` is a valid value of that C struct.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_fault as *const () as usize;
        // On the alternate stack, so that a stack overflow still reaches its default action.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `action` is valid for the call, its handler has the three-argument signature that
        // SA_SIGINFO asks for and does only what a signal handler may do; the old action is not
        // asked for.
        if unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// One mapped range in the table, from the mapping's birth to just before it is unmapped.
#[derive(Debug)]
pub(super) struct Registration {
    slot: usize,
}

impl Registration {
    /// Enters `len` bytes from `start`; `None` if every slot is taken.
    pub(super) fn new(start: usize, len: usize) -> Option<Self> {
        TABLE.insert(start, len).map(|slot| Registration { slot })
    }

    /// Whether a page of the range was missing once.
    #[inline]
    pub(super) fn is_poisoned(&self) -> bool {
        TABLE.slots[self.slot].poisoned.load(Ordering::Acquire)
    }

    /// Marks the range: the kernel found a page missing on our behalf (`EFAULT`).
    pub(super) fn poison(&self) {
        TABLE.slots[self.slot].poisoned.store(true, Ordering::Release);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        TABLE.remove(self.slot);
    }
}

struct Table {
    slots: [Slot; SLOTS],
    /// Slots below this number were used at some time: as far as the handler looks.
    used: AtomicUsize,
    /// Where the search for a free slot starts.
    hint: AtomicUsize,
    /// Bytes of a page, written by `install`.
    page: AtomicUsize,
}

/// `version` counts in steps of four: `4k` free, `4k + 1` being filled, `4k + 2` live, `4k + 3`
/// being emptied. Start and end are meaningful only between two equal live versions.
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
            page: AtomicUsize::new(4096),
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
        // Pairs with the acquire fence in `find`: whoever sees one of the stores below also sees
        // that the slot is no longer at the version it was.
        fence(Ordering::Release);
        slot.poisoned.store(false, Ordering::Relaxed);
        slot.start.store(start, Ordering::Relaxed);
        slot.end.store(start.saturating_add(len), Ordering::Relaxed);
        slot.version.store(version.wrapping_add(2), Ordering::Release);
        self.used.fetch_max(index + 1, Ordering::Release);
        self.hint.store(index + 1, Ordering::Relaxed);
        Some(index)
    }

    /// Only the owner of a live slot calls this, once.
    fn remove(&self, index: usize) {
        let slot = &self.slots[index];
        let version = slot.version.load(Ordering::Relaxed);
        slot.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        slot.start.store(0, Ordering::Relaxed);
        slot.end.store(0, Ordering::Relaxed);
        slot.version.store(version.wrapping_add(2), Ordering::Release);
        self.hint.fetch_min(index, Ordering::Relaxed);
    }

    /// The live slot that covers `address`.
    ///
    /// A thread faults on a mapping that it holds, so that mapping's slot was filled before and is
    /// not emptied meanwhile: it is found. A slot that changes while we look belongs to someone
    /// else and is passed over.
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

    /// Makes a fault at `address` harmless; `false` if the address is none of ours.
    fn absorb(&self, address: usize) -> bool {
        let Some(slot) = self.find(address) else { return false };
        // The mark comes first: another thread that reads the zero page finds it set.
        slot.poisoned.store(true, Ordering::SeqCst);
        let page = self.page.load(Ordering::Acquire);
        // SAFETY: the page lies in a live mapping (mappings start and end at page boundaries), so
        // MAP_FIXED replaces a page of that mapping and nothing else; it holds only foreign
        // memory, to which no Rust reference other than to atomics exists, and stays readable and
        // writable. The mapping cannot be unmapped meanwhile, because the faulting thread holds it.
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

/// The signal handler: no allocation, no lock, no panic; atomics, `mmap` and `sigaction` only.
extern "C" fn on_fault(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: `__errno_location` returns this thread's errno, always valid.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes a valid `siginfo_t` to an SA_SIGINFO handler; for the two signals
    // we are installed for, `si_addr` is a field of it (meaningless unless `si_code` > 0).
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code <= 0 || !TABLE.absorb(address) {
        // Not a fault in shared memory: the default action. A real fault comes again as soon as we
        // return; a signal that somebody sent does not, and is sent again.
        // SAFETY: SIG_DFL is a valid action; both calls are async-signal-safe.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            if code <= 0 {
                libc::raise(signal);
            }
        }
    }
    // SAFETY: as above; the interrupted code must find the errno it had.
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

    /// A mapping that `adopt_shared_buffer` would have sealed: its owner can still pull it away.
    fn unsealed() -> (Mapping, OwnedFd) {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("memfd");
        rustix::fs::ftruncate(&fd, LEN as u64).expect("grow");
        (Mapping::map(fd.as_fd(), LEN).expect("a little memory"), fd)
    }

    #[test]
    fn a_copy_from_a_truncated_shared_buffer_is_poisoned_and_the_process_lives() {
        install().expect("handler");
        // The one that is sound is known for longer.
        let (other, _other_fd) = unsealed();
        let (buffer, fd) = unsealed();
        buffer.fill(0, LEN, 7).expect("still there");
        rustix::fs::ftruncate(&fd, 4096).expect("shrink");
        let mut bytes = vec![1; LEN];
        assert_eq!(buffer.read(0, &mut bytes), Err(CopyFault::Poisoned));
        assert_eq!(bytes[..4096], [7; 4096]);
        assert_eq!(bytes[4096..], [0; LEN - 4096], "zero pages lie where pages are gone");
        assert!(buffer.is_poisoned());
        assert!(!other.is_poisoned());
        assert_eq!(other.read(0, &mut bytes), Ok(()));
    }

    #[test]
    fn a_copy_into_a_truncated_shared_buffer_is_poisoned() {
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
    fn the_slot_of_a_poisoned_mapping_is_clean_when_reused() {
        install().expect("handler");
        for _ in 0..50 {
            let (buffer, fd) = unsealed();
            assert!(!buffer.is_poisoned());
            rustix::fs::ftruncate(&fd, 0).expect("shrink");
            assert_eq!(buffer.read(0, &mut [0]), Err(CopyFault::Poisoned));
        }
    }

    #[test]
    fn threads_that_map_and_unmap_do_not_disturb_each_others_faults() {
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

    /// A table made in place: two megabytes are too much for a test's stack.
    fn heap_table() -> Box<Table> {
        let mut table = Box::<Table>::new_uninit();
        // SAFETY: `Table::new` is all zeros but for `page`, zeros are valid for all its atomics,
        // and `page` is used only by `absorb`, which these tests do not call on it.
        unsafe {
            table.as_mut_ptr().write_bytes(0, 1);
            table.assume_init()
        }
    }

    /// Runs one of the `child_` tests below in a process of its own; the signal that ended it.
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
    fn a_fault_outside_of_shared_memory_takes_its_default_action() {
        assert_eq!(signal_that_ends("child_faults_elsewhere"), Some(libc::SIGBUS));
        assert_eq!(
            signal_that_ends("child_touches_an_unmapped_shared_buffer"),
            Some(libc::SIGSEGV)
        );
    }

    #[test]
    fn a_signal_that_somebody_sends_takes_its_default_action() {
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
        let (flags, protection) = (rustix::mm::MapFlags::SHARED, rustix::mm::ProtFlags::READ);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, protection, flags, &fd, 0) };
        rustix::fs::ftruncate(&fd, 0).expect("shrink");
        // SAFETY: mapped above and aligned; that the page is gone ends this process, as intended.
        unsafe { at.expect("a little memory").cast::<u8>().read_volatile() };
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
        // SAFETY: sending oneself a signal has no conditions.
        unsafe { libc::raise(libc::SIGSEGV) };
    }

    const CHILD: &str = "RNIC_FAULT_TEST_CHILD";
}
