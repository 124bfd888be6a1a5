//! A client's address space, accessed through the `/proc/self/mem` descriptor that the client
//! opened and passed to the daemon.
//!
//! The descriptor refers to the address space, not to a process ID: after `exec` or exit, reads and
//! writes transfer nothing, even if a new process has the same ID. Possession of the descriptor is
//! the permission, so this module needs no privilege. Callers must observe two limitations:
//!
//! * A copy may block forever if the client's pages are served by userfaultfd or FUSE. Call this
//!   module only on threads that this client may block.
//! * Writes ignore the client's page protection. At registration the client's library checks that
//!   memory may be written.
//!
//! Nothing is mapped, so a missing page causes an error of the system call, not a signal.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::Mapping;
use super::copy::tail_len;

/// First address beyond the address space of any program, on all supported processors. The kernel
/// rejects unmapped addresses below it.
pub const USER_END: u64 = 1 << 56;

/// Maximum number of bytes per system call.
pub const STEP: usize = 64 * 1024;

/// An address space that its owner has passed to this process.
#[derive(Debug)]
pub struct AddressSpace {
    file: OwnedFd,
    /// Set when a copy finds that the address space has ended. Never cleared.
    gone: AtomicBool,
    /// Held during [`update_u64`](Self::update_u64). The address and value of a word whose write
    /// is delayed.
    changing: Mutex<Option<(u64, u64)>>,
}

/// Reason why a copy failed. Bytes written before the failure stay written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachedFault {
    /// The address space has ended, because of `exec` or with its process.
    #[error("the address space is gone")]
    Gone,
    /// Nothing is mapped at an address of the range.
    #[error("an address is not mapped")]
    Unmapped,
    /// A page of the mapping at the other end of the copy was missing. The mapping is now poisoned.
    #[error("a page of the mapping is missing")]
    Poisoned,
}

/// Reason why a descriptor was not accepted as an address space.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Not a file of `/proc`: a pipe, a device, a directory, another file.
    #[error("the descriptor does not refer to a file of /proc")]
    NotProcfs,
    /// A file of `/proc` other than the memory of the process.
    #[error("the descriptor is {path}, not /proc/{pid}/mem")]
    NotItsMemory {
        /// Path of the descriptor's file: the target of its link in `/proc/self/fd`.
        path: String,
        /// The expected process.
        pid: i32,
    },
    /// The descriptor is read-only, write-only, or neither.
    #[error("the descriptor is not open for reading and writing")]
    NotReadWrite,
    /// A system call that examines the descriptor failed.
    #[error("examining the descriptor failed: {0}")]
    Examine(#[source] io::Error),
}

impl AddressSpace {
    /// Takes over the `/proc/PID/mem` descriptor of process `pid`, which must be open for reading
    /// and writing. On error it returns the descriptor, so that the caller can close it on a thread
    /// that may block.
    ///
    /// This function accesses the file system of the descriptor and may block there. Call it only
    /// on threads that may also block on copies for this client.
    pub fn adopt(file: OwnedFd, pid: i32) -> Result<Arc<Self>, (AttachError, OwnedFd)> {
        match examine(&file, pid) {
            Ok(()) => Ok(Arc::new(AddressSpace {
                file,
                gone: AtomicBool::new(false),
                changing: Mutex::new(None),
            })),
            Err(error) => Err((error, file)),
        }
    }

    /// Returns true if a copy found that the address space has ended.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Copies bytes out of the address space.
    pub fn read(&self, address: u64, dst: &mut [u8]) -> Result<(), AttachedFault> {
        // SAFETY: the bytes are exclusively borrowed for the call.
        unsafe { self.read_raw(address, dst.as_mut_ptr(), dst.len()) }
    }

    /// Copies bytes into the address space. With `tail_last`, the longest naturally aligned word at
    /// the end of the range is written last, by a separate call. A program that polls the end of
    /// its buffer then finds the other bytes in place.
    pub fn write(&self, address: u64, src: &[u8], tail_last: bool) -> Result<(), AttachedFault> {
        // SAFETY: the bytes are borrowed for the call.
        unsafe { self.write_raw(address, src.as_ptr(), src.len(), tail_last) }
    }

    /// Changes a word and returns its old value. Calls of this function exclude each other, but
    /// stores of the owner may occur between the read and the write.
    pub fn update_u64(
        &self,
        address: u64,
        change: impl Fn(u64) -> u64,
    ) -> Result<u64, AttachedFault> {
        // A thread that waits for this lock waits for pages of the same owner.
        //= 7306-5-1, 7306-5.3-1, 7306-5.4-2
        let mut delayed = self.changing.lock();
        self.write_delayed(&mut delayed);
        let old = self.read_u64(address)?;
        let new = change(old);
        if new != old {
            self.write(address, &new.to_ne_bytes(), false)?;
        }
        Ok(old)
    }

    /// Changes a word like [`update_u64`](Self::update_u64), but writes it later: by
    /// [`finish_update`](Self::finish_update) or before the next change of any word. Stores of the
    /// owner until then are lost.
    pub fn begin_update(
        &self,
        address: u64,
        change: impl Fn(u64) -> u64,
    ) -> Result<u64, AttachedFault> {
        let mut delayed = self.changing.lock();
        self.write_delayed(&mut delayed);
        let old = self.read_u64(address)?;
        *delayed = Some((address, change(old))).filter(|(_, new)| *new != old);
        Ok(old)
    }

    /// Writes the word whose write is delayed, if any.
    pub fn finish_update(&self) {
        self.write_delayed(&mut self.changing.lock());
    }

    /// Writes a word whose write was delayed. A word that has been unmapped is lost, like other
    /// memory of the owner.
    fn write_delayed(&self, delayed: &mut Option<(u64, u64)>) {
        if let Some((address, new)) = delayed.take() {
            let _ = self.write(address, &new.to_ne_bytes(), false);
        }
    }

    fn read_u64(&self, address: u64) -> Result<u64, AttachedFault> {
        let mut word = [0; 8];
        self.read(address, &mut word)?;
        //= 7306-5.1.1-8
        Ok(u64::from_ne_bytes(word))
    }

    /// Copies bytes from the address space into shared memory, in one pass. For `tail_last`, see
    /// [`Mapping::write_tail_last`].
    pub fn read_into(
        &self,
        address: u64,
        dst: &Mapping,
        offset: usize,
        len: usize,
        tail_last: bool,
    ) -> Result<(), AttachedFault> {
        let tail = if tail_last { len.min(8) } else { 0 };
        let head = len - tail;
        let to = dst.range(offset, len).ok_or(AttachedFault::Unmapped)?;
        // SAFETY: `to` is valid for `len` bytes (checked by `range`) while `dst` is borrowed, and
        // no reference covers them. Only the kernel writes them, as any other process may at any
        // time.
        let result = unsafe { self.read_raw(address, to, head) };
        poison(result, dst)?;
        if tail > 0 {
            let mut last = [0; 8];
            self.read(address + head as u64, &mut last[..tail])?;
            dst.write_tail_last(offset + head, &last[..tail])
                .map_err(|_| AttachedFault::Poisoned)?;
        }
        Ok(())
    }

    /// Copies shared memory into the address space, in one pass. For `tail_last`, see
    /// [`write`](Self::write).
    pub fn write_from(
        &self,
        address: u64,
        src: &Mapping,
        offset: usize,
        len: usize,
        tail_last: bool,
    ) -> Result<(), AttachedFault> {
        let from = src.range(offset, len).ok_or(AttachedFault::Unmapped)?;
        // SAFETY: `from` is valid for `len` bytes (checked by `range`) while `src` is borrowed.
        // Only the kernel reads them, with any value that they have at that instant.
        let result = unsafe { self.write_raw(address, from, len, tail_last) };
        poison(result, src)
    }

    /// Copies from one address space to another, or within one, through a private buffer of
    /// [`STEP`] bytes. Ranges may overlap if they are not longer than the buffer.
    // If this function were inlined, the buffer would be part of the caller's frame, and a copy of
    // a few bytes would touch each of its pages.
    #[inline(never)]
    pub fn copy_to(
        &self,
        address: u64,
        to: &AddressSpace,
        to_address: u64,
        len: usize,
        tail_last: bool,
    ) -> Result<(), (CopyEnd, AttachedFault)> {
        let mut buffer = [0; STEP];
        let mut done = 0;
        while done < len {
            let n = (len - done).min(STEP);
            let from = done as u64;
            let last = tail_last && done + n == len;
            self.read(address + from, &mut buffer[..n]).map_err(|e| (CopyEnd::Source, e))?;
            to.write(to_address + from, &buffer[..n], last).map_err(|e| (CopyEnd::Sink, e))?;
            done += n;
        }
        Ok(())
    }

    /// # Safety
    /// `to` must be valid for writing `len` bytes, to which only the caller may hold a reference.
    unsafe fn read_raw(&self, address: u64, to: *mut u8, len: usize) -> Result<(), AttachedFault> {
        self.steps(address, len, |at, done, n| {
            // SAFETY: `done + n` is at most `len`, and the caller guarantees that `to` is valid for
            // `len` bytes. The kernel checks the foreign address.
            unsafe { libc::pread(self.file.as_raw_fd(), to.add(done).cast(), n, at) }
        })
    }

    /// # Safety
    /// `from` must be valid for reading `len` bytes.
    unsafe fn write_raw(
        &self,
        address: u64,
        from: *const u8,
        len: usize,
        tail_last: bool,
    ) -> Result<(), AttachedFault> {
        let head = if tail_last { len - tail_len(address, len) } else { len };
        for (start, end) in [(0, head), (head, len)] {
            self.steps(address + start as u64, end - start, |at, done, n| {
                // SAFETY: `start + done + n` is at most `len`, and the caller guarantees that
                // `from` is valid for reading `len` bytes. The kernel checks the foreign address.
                unsafe { libc::pwrite(self.file.as_raw_fd(), from.add(start + done).cast(), n, at) }
            })?;
        }
        Ok(())
    }

    /// Calls `step(address, done, bytes)` for at most [`STEP`] bytes each, until `len` are done.
    fn steps(
        &self,
        address: u64,
        len: usize,
        step: impl Fn(libc::off_t, usize, usize) -> isize,
    ) -> Result<(), AttachedFault> {
        if self.is_gone() {
            return Err(AttachedFault::Gone);
        }
        let mut done = 0;
        while done < len {
            let at = address.checked_add(done as u64).and_then(|at| at.try_into().ok());
            let at = at.ok_or(AttachedFault::Unmapped)?;
            match usize::try_from(step(at, done, (len - done).min(STEP))) {
                // No byte of a non-empty range was transferred: the address space has ended.
                Ok(0) => {
                    self.gone.store(true, Ordering::Relaxed);
                    return Err(AttachedFault::Gone);
                }
                // After a short count the next page is missing: the next call reports it.
                Ok(n) => done += n,
                Err(_) => match Errno::from_io_error(&io::Error::last_os_error()) {
                    Some(Errno::INTR) => {}
                    Some(Errno::FAULT) => return Err(AttachedFault::Poisoned),
                    _ => return Err(AttachedFault::Unmapped),
                },
            }
        }
        Ok(())
    }
}

/// The failed end of a copy between two address spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyEnd {
    /// The memory that was read.
    Source,
    /// The memory that was written.
    Sink,
}

/// Checks that `file` is the memory of process `pid`. Reads the open flags first, because that
/// call does not access the file system.
fn examine(file: &OwnedFd, pid: i32) -> Result<(), AttachError> {
    let os = |e: Errno| AttachError::Examine(e.into());
    let flags = rustix::fs::fcntl_getfl(file).map_err(os)?;
    let both = flags.contains(OFlags::RDWR) && !flags.contains(OFlags::PATH);
    let kind = rustix::fs::fstatfs(file.as_fd()).map_err(os)?.f_type;
    if kind != rustix::fs::PROC_SUPER_MAGIC {
        return Err(AttachError::NotProcfs);
    }
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let path = rustix::fs::readlink(link, Vec::new()).map_err(os)?;
    let path = path.to_string_lossy().into_owned();
    // If `/proc` is mounted elsewhere, only the end of the path can be checked: the process IDs in
    // the path belong to another namespace. Then possession must suffice.
    let inside = path.strip_prefix("/proc/");
    let its_own = match inside.map(|p| p.split('/').collect::<Vec<_>>()) {
        Some(parts) => match parts[..] {
            [of, "mem"] | [of, "task", _, "mem"] => of == pid.to_string(),
            _ => false,
        },
        None => path.ends_with("/mem"),
    };
    match (its_own, both) {
        (false, _) => Err(AttachError::NotItsMemory { path, pid }),
        (true, false) => Err(AttachError::NotReadWrite),
        (true, true) => Ok(()),
    }
}

/// Poisons the mapping if the kernel found that a page of it is missing.
fn poison(result: Result<(), AttachedFault>, mapping: &Mapping) -> Result<(), AttachedFault> {
    if result == Err(AttachedFault::Poisoned) {
        mapping.poison();
    }
    result
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn open(path: &str, write: bool) -> OwnedFd {
        File::options().read(true).write(write).open(path).expect("an existing file").into()
    }

    fn own() -> Arc<AddressSpace> {
        let pid = std::process::id() as i32;
        AddressSpace::adopt(open("/proc/self/mem", true), pid).expect("our own memory")
    }

    /// Returns memory of this process that is accessible both as a mapping and through [`own`].
    fn memory(len: usize) -> Arc<Mapping> {
        Mapping::create_shared_buffer(len).expect("memory for the buffer").0
    }

    fn contents(mapping: &Mapping, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        mapping.read(offset, &mut bytes).expect("in range");
        bytes
    }

    fn refusal(file: OwnedFd) -> AttachError {
        let pid = std::process::id() as i32;
        AddressSpace::adopt(file, pid).expect_err("it is not our memory").0
    }

    /// Starts a process, so that the test can end its address space.
    fn cat() -> (Child, Arc<AddressSpace>) {
        let child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat");
        let memory = open(&format!("/proc/{}/mem", child.id()), true);
        let space = AddressSpace::adopt(memory, child.id() as i32).expect("a child's memory");
        (child, space)
    }

    #[test]
    fn bytes_go_both_ways() {
        let space = own();
        let memory = memory(3 * STEP);
        let address = memory.address();
        let bytes: Vec<u8> = (0..2 * STEP + 77).map(|i| (i % 251) as u8).collect();
        for tail_last in [false, true] {
            memory.fill(0, 3 * STEP, 0).expect("in range");
            space.write(address + 3, &bytes, tail_last).expect("mapped");
            assert_eq!(contents(&memory, 3, bytes.len()), bytes);
            let mut back = vec![0; bytes.len()];
            space.read(address + 3, &mut back).expect("mapped");
            assert_eq!(back, bytes);
        }
        assert!(!space.is_gone());
    }

    //= 7306-5-1
    //= 7306-5.3-1
    //= 7306-5.4-2
    #[test]
    fn concurrent_word_updates_add_up() {
        const TIMES: u64 = 5_000;
        let space = own();
        let memory = memory(4096);
        let word = memory.address() + 8;
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..TIMES {
                        space.update_u64(word, |old| old + 1).expect("mapped");
                    }
                });
            }
        });
        assert_eq!(memory.load_u64(8), Ok(3 * TIMES));
    }

    //= 7306-5.4-3
    #[test]
    fn intervening_owner_stores_are_lost() {
        let space = own();
        let memory = memory(4096);
        let store_and_add = |old| {
            memory.store_u64(8, 100).expect("aligned");
            old + 1
        };
        assert_eq!(space.update_u64(memory.address() + 8, store_and_add), Ok(0));
        assert_eq!(memory.load_u64(8), Ok(1));
    }

    #[test]
    fn copies_to_and_from_shared_memory() {
        let space = own();
        let one = memory(8192);
        let two = memory(8192);
        for tail_last in [false, true] {
            for len in [1, 7, 8, 9, 4096] {
                one.write(5, &vec![len as u8; len]).expect("in range");
                two.fill(0, 8192, 0).expect("in range");
                space.read_into(one.address() + 5, &two, 3, len, tail_last).expect("mapped");
                assert_eq!(contents(&two, 3, len + 1), [vec![len as u8; len], vec![0]].concat());
                two.fill(0, 8192, 0).expect("in range");
                space.write_from(two.address() + 3, &one, 5, len, tail_last).expect("mapped");
                assert_eq!(contents(&two, 3, len + 1), [vec![len as u8; len], vec![0]].concat());
            }
        }
        assert_eq!(space.read_into(0, &two, 8190, 3, false), Err(AttachedFault::Unmapped));
    }

    #[test]
    fn overlapping_ranges_are_moved() {
        let space = own();
        let memory = memory(STEP);
        let bytes: Vec<u8> = (0..10_000).map(|i| (i % 241) as u8).collect();
        memory.write(0, &bytes).expect("in range");
        let address = memory.address();
        space.copy_to(address, &space, address + 100, bytes.len(), true).expect("mapped");
        assert_eq!(contents(&memory, 100, bytes.len()), bytes);
    }

    #[test]
    fn an_unmapped_address_fails_only_its_copy() {
        let space = own();
        let kept = memory(4096);
        let mut bytes = [0; 8];
        for address in [0, USER_END - 8, USER_END, u64::MAX - 2] {
            assert_eq!(space.read(address, &mut bytes), Err(AttachedFault::Unmapped));
            assert_eq!(space.write(address, &bytes, true), Err(AttachedFault::Unmapped));
        }
        space.read(kept.address(), &mut bytes).expect("mapped");
    }

    #[test]
    fn a_missing_page_poisons_the_shared_buffer() {
        let space = own();
        let kept = memory(4096);
        let gone = || {
            let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&fd, 4096)?;
            let mapping = Mapping::map(fd.as_fd(), 4096)?;
            rustix::fs::ftruncate(&fd, 0)?;
            io::Result::Ok(mapping)
        };
        let m = gone().expect("memory for the mapping");
        let fault = Err(AttachedFault::Poisoned);
        assert_eq!(space.read_into(kept.address(), &m, 0, 100, false), fault);
        assert!(m.is_poisoned());
        let m = gone().expect("memory for the mapping");
        assert_eq!(space.write_from(kept.address(), &m, 0, 100, false), fault);
        assert!(m.is_poisoned() && !space.is_gone());
    }

    #[test]
    fn an_ended_address_space_stays_gone() {
        let (mut child, space) = cat();
        // The first mapping is that of the program file.
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).expect("its maps");
        let start = maps.split('-').next().and_then(|a| u64::from_str_radix(a, 16).ok());
        let start = start.expect("a mapping");
        let mut bytes = [0; 4];
        space.read(start, &mut bytes).expect("mapped");
        child.kill().expect("a running child");
        child.wait().expect("a killed child");
        assert_eq!(space.read(start, &mut bytes), Err(AttachedFault::Gone));
        assert!(space.is_gone());
        assert_eq!(space.write(start, &bytes, false), Err(AttachedFault::Gone));
    }

    #[test]
    fn after_fork_the_parents_memory_is_accessed() {
        let space = own();
        let memory = Mapping::from_vec(vec![1; 8192]).expect("a slot in the table");
        let address = memory.address();
        // SAFETY: the child stores one byte of private memory and exits. It uses no lock and no
        // other thread of this process.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                (address as *mut u8).write_volatile(2);
                libc::_exit(0);
            }
            child
        };
        assert!(child > 0, "fork");
        let mut status = 0;
        // SAFETY: `status` is a live local of the right type.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        let mut seen = [0];
        space.read(address, &mut seen).expect("mapped");
        assert_eq!(seen, [1], "the child wrote into its own copy");
        space.write(address, &[3], false).expect("mapped");
        assert_eq!(contents(&memory, 0, 2), [3, 1]);
    }

    #[test]
    fn other_descriptors_are_refused() {
        let zero = refusal(open("/dev/zero", true));
        assert!(matches!(zero, AttachError::NotProcfs), "{zero}");
        let (pipe, _other) = rustix::pipe::pipe().expect("a pipe");
        assert!(matches!(refusal(pipe), AttachError::NotProcfs));
        assert!(matches!(refusal(open("/tmp", false)), AttachError::NotProcfs));
        let maps = refusal(open("/proc/self/maps", false));
        assert!(matches!(&maps, AttachError::NotItsMemory { path, .. } if path.ends_with("/maps")));
        assert!(matches!(refusal(open("/proc/self/mem", false)), AttachError::NotReadWrite));
        let (mut child, _) = cat();
        let other = refusal(open(&format!("/proc/{}/mem", child.id()), true));
        assert!(matches!(other, AttachError::NotItsMemory { .. }), "{other}");
        child.kill().expect("a running child");
        child.wait().expect("a killed child");
    }

    #[test]
    fn thread_self_mem_is_accepted() {
        let file = open("/proc/thread-self/mem", true);
        AddressSpace::adopt(file, std::process::id() as i32).expect("our own memory");
    }
}
