//! Mappings of shared memory: arenas (created by the daemon) and shared buffers (created by the
//! client).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, SeekFrom};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::fault::Registration;

/// A range of memory shared with another process. Unmapped when the last owner drops it.
///
/// Both sides can read and write it at any time, so no method returns a reference to its bytes.
/// They are copied in and out (see the methods in this and the `copy` module) or accessed as
/// atomic words.
pub struct Mapping {
    // Dropped before `pages`: while an address is mapped, it must not match the slot of a mapping
    // that no longer exists.
    registration: Registration,
    pages: Pages,
}

/// The address range of a mapping.
struct Pages {
    base: NonNull<u8>,
    len: usize,
    origin: Origin,
}

/// Origin of the address range, which determines how it is released.
#[derive(Clone, Copy)]
enum Origin {
    /// Created by `mmap`.
    Mapped,
    /// The memory of a vector with this capacity.
    Heap { capacity: usize },
}

// SAFETY: the pointer is to memory that belongs to the mapping, not to a thread. Every access to it
// uses atomics or copies that tolerate concurrent writers.
unsafe impl Send for Pages {}
// SAFETY: as for `Send`: the type exists for shared access.
unsafe impl Sync for Pages {}

impl Mapping {
    /// Creates an arena of zeroed memory. All of it is allocated now and not at the first access,
    /// so lack of memory is reported here. Its size cannot change later. Called by the daemon.
    pub fn create_arena(name: &str, len: usize) -> io::Result<(Arc<Self>, OwnedFd)> {
        let fd = memfd(name)?;
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, nonzero(len)?)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Arc::new(Self::map(fd.as_fd(), len)?), fd))
    }

    /// Maps an arena that the daemon created. A child created by `fork` does not inherit it: two
    /// processes on one end of a ring would corrupt each other's entries. Called by the client.
    pub fn map_arena(fd: BorrowedFd<'_>, len: usize) -> io::Result<Arc<Self>> {
        if rustix::fs::fstat(fd)?.st_size.cast_unsigned() != nonzero(len)? {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the arena does not have the announced size",
            ));
        }
        let mapping = Self::map(fd, len)?;
        mapping.advise(Advice::LinuxDontFork)?;
        Ok(Arc::new(mapping))
    }

    /// Creates a shared buffer with its pages populated and charged to this process, for the daemon
    /// to adopt and seal. Called by the client.
    pub fn create_shared_buffer(len: usize) -> io::Result<(Arc<Self>, OwnedFd)> {
        Self::create_shared_buffer_by_steps(len, |_| Ok(()))
    }

    /// Like [`create_shared_buffer`](Self::create_shared_buffer), in steps of [`POPULATE_STEP`]
    /// bytes. Calls `go_on` before each step with the number of bytes that are not populated yet.
    /// An error of `go_on` ends the attempt and frees all memory. In `go_on`, the caller of a large
    /// allocation must check the free memory: a kernel that runs out of memory does not refuse a
    /// page but kills a process.
    pub fn create_shared_buffer_by_steps<E: From<io::Error>>(
        len: usize,
        mut go_on: impl FnMut(usize) -> Result<(), E>,
    ) -> Result<(Arc<Self>, OwnedFd), E> {
        go_on(len)?;
        let fd = memfd("rnic-shared-buffer")?;
        rustix::fs::ftruncate(&fd, nonzero(len)?).map_err(io::Error::from)?;
        let mapping = Self::map(fd.as_fd(), len)?;
        for done in (0..len).step_by(POPULATE_STEP) {
            if done > 0 {
                go_on(len - done)?;
            }
            mapping.populate(done, POPULATE_STEP.min(len - done))?;
        }
        Ok((Arc::new(mapping), fd))
    }

    /// Wraps private memory of this process, which others access through its
    /// [`AddressSpace`](super::AddressSpace). Called by the client to attach the memory. The bytes
    /// are not moved.
    pub fn from_vec(bytes: Vec<u8>) -> io::Result<Arc<Self>> {
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        let len = bytes.len();
        let origin = Origin::Heap { capacity: bytes.capacity() };
        // A vector's pointer is never null.
        let base = NonNull::new(bytes.as_mut_ptr()).ok_or(io::ErrorKind::Other)?;
        // Returns the vector to the allocator if one of the following calls fails.
        let pages = Pages { base, len, origin };
        nonzero(len)?;
        let registration = register(base, len)?;
        Ok(Arc::new(Mapping { registration, pages }))
    }

    /// Adopts a shared buffer that a client created, after ensuring that the client can no longer
    /// change its size or its pages.
    ///
    /// The order matters. Reading the seals is the only check that no descriptor can delay, and
    /// only a memfd passes it. The mapping comes before `F_SEAL_FUTURE_WRITE`, which would refuse
    /// it. Size and holes are checked after the seals, because before them the client could still
    /// change both: `SHRINK`, `GROW` and `FUTURE_WRITE` together refuse truncation, hole punching
    /// and writing through the descriptor, so that a present page stays present and no page is
    /// ever charged to the daemon. The mapping is not accessed before all checks have passed.
    pub fn adopt_shared_buffer(fd: BorrowedFd<'_>, len: u64) -> Result<Arc<Self>, AdoptError> {
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| AdoptError::NotMemfd)?;
        if seals.contains(SealFlags::SEAL) {
            return Err(AdoptError::AlreadySealed);
        }
        // A memfd of huge pages has another magic. Its page pool may run out later.
        let kind = rustix::fs::fstatfs(fd).map_err(AdoptError::os)?.f_type;
        if kind != TMPFS_MAGIC {
            return Err(AdoptError::HugePages);
        }
        let size = usize::try_from(len).ok().filter(|&n| n != 0 && n <= isize::MAX as usize);
        let size = size.ok_or(AdoptError::BadLength { len })?;
        let mapping = Self::map(fd, size).map_err(AdoptError::Map)?;
        rustix::fs::fcntl_add_seals(
            fd,
            SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL,
        )
        .map_err(|e| AdoptError::Seal(e.into()))?;
        let actual = rustix::fs::fstat(fd).map_err(AdoptError::os)?.st_size.cast_unsigned();
        if actual != len {
            return Err(AdoptError::WrongSize { announced: len, actual });
        }
        let hole = rustix::fs::seek(fd, SeekFrom::Hole(0)).map_err(AdoptError::os)?;
        if hole != len {
            return Err(AdoptError::Hole { offset: hole });
        }
        Ok(Arc::new(mapping))
    }

    /// Returns the size of the mapping in bytes, at least 1.
    #[inline]
    pub fn len(&self) -> usize {
        self.pages.len
    }

    /// Returns false: a mapping has at least one byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.pages.len == 0
    }

    /// Returns true if a page has been missing. Bytes read since then may be zeros instead of the
    /// client's data, so the caller must end the session.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.registration.is_poisoned()
    }

    /// Returns the start address in this process. Used by clients that register by address.
    #[inline]
    pub fn address(&self) -> u64 {
        self.pages.base.as_ptr() as u64
    }

    /// Marks the mapping poisoned after the kernel found a page missing in a system call.
    pub(super) fn poison(&self) {
        self.registration.poison();
    }

    /// Returns the address of `len` bytes at `offset`, or `None` if they are not within the
    /// mapping.
    #[inline]
    pub(super) fn range(&self, offset: usize, len: usize) -> Option<*mut u8> {
        if offset > self.pages.len || len > self.pages.len - offset {
            return None;
        }
        // SAFETY: `offset` is at most the length of the mapping, checked above, so the result
        // points into it or one past its end.
        Some(unsafe { self.pages.base.as_ptr().add(offset) })
    }

    /// Maps `len` bytes of `fd` shared, for reading and writing.
    pub(super) fn map(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        nonzero(len)?;
        // SAFETY: the kernel chooses a free address range, so no existing memory is affected.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::Other)?;
        let pages = Pages { base, len, origin: Origin::Mapped };
        let registration = register(base, len)?;
        Ok(Mapping { registration, pages })
    }

    /// Allocates every page of a range. `done` must be a multiple of the page size, and the range
    /// within the mapping.
    fn populate(&self, done: usize, len: usize) -> io::Result<()> {
        let from = self.range(done, len).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range belongs to this mapping, and populating it does not change its
        // contents.
        unsafe { rustix::mm::madvise(from.cast(), len, Advice::LinuxPopulateWrite) }?;
        Ok(())
    }

    /// Returns the address of the first byte in this process.
    pub(super) fn base(&self) -> *mut u8 {
        self.pages.base.as_ptr()
    }

    pub(super) fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is this mapping, and the advice used here does not change its contents.
        unsafe { rustix::mm::madvise(self.pages.base.as_ptr().cast(), self.pages.len, advice) }?;
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        match self.origin {
            Origin::Mapped => {
                // SAFETY: `base` and `len` are those of the `mmap` call, unmapped only here.
                // Pointers derived from them live only in values that hold an `Arc` of the mapping,
                // and no such value exists any more.
                let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
            }
            Origin::Heap { capacity } => {
                // SAFETY: these are the parts of the vector that `from_vec` took apart. No derived
                // pointer is in use, as above.
                drop(unsafe { Vec::from_raw_parts(self.base.as_ptr(), self.len, capacity) });
            }
        }
    }
}

fn register(base: NonNull<u8>, len: usize) -> io::Result<Registration> {
    Registration::new(base.as_ptr() as usize, len)
        .ok_or_else(|| io::Error::other("the table of shared mappings is full"))
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping")
            .field("base", &self.pages.base)
            .field("len", &self.pages.len)
            .field("poisoned", &self.is_poisoned())
            .finish()
    }
}

/// Reason why a shared buffer was refused. A correct client causes only `Map`, when address space
/// or the table of mappings is exhausted. A refusal costs at most that client's session.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The descriptor is not a memfd: a file, a pipe, a directory, a socket.
    #[error("the descriptor is not a memfd")]
    NotMemfd,
    /// The memfd was created without `MFD_ALLOW_SEALING`, or has `F_SEAL_SEAL` already.
    #[error("the memfd refuses further seals")]
    AlreadySealed,
    /// The memfd has huge pages, which are not supported.
    #[error("memfds of huge pages are not supported")]
    HugePages,
    /// The length is 0 or larger than an address range can be.
    #[error("{len} bytes is not a valid length of a shared buffer")]
    BadLength {
        /// Requested length.
        len: u64,
    },
    /// Mapping for reading and writing failed.
    #[error("mapping the shared buffer failed: {0}")]
    Map(#[source] io::Error),
    /// Adding the seals failed.
    #[error("sealing the shared buffer failed: {0}")]
    Seal(#[source] io::Error),
    /// The memfd does not have the announced size.
    #[error("the memfd has {actual} bytes instead of the announced {announced}")]
    WrongSize {
        /// Bytes according to the client's request.
        announced: u64,
        /// Bytes according to `fstat(2)`.
        actual: u64,
    },
    /// A page was never populated; an access would charge it to the daemon.
    #[error("the memfd is not populated at offset {offset}")]
    Hole {
        /// Offset of the first hole.
        offset: u64,
    },
    /// A system call that examines the descriptor failed.
    #[error("examining the memfd failed: {0}")]
    Examine(#[source] io::Error),
}

impl AdoptError {
    fn os(error: rustix::io::Errno) -> Self {
        AdoptError::Examine(error.into())
    }
}

/// Creates a memfd that can be sealed and, where the kernel supports that, is never executable.
fn memfd(name: &str) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Linux before 6.3 rejects the flag.
        Err(rustix::io::Errno::INVAL) => Ok(rustix::fs::memfd_create(name, flags)?),
        other => Ok(other?),
    }
}

fn nonzero(len: usize) -> io::Result<u64> {
    if len == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a mapping cannot be empty"));
    }
    Ok(len as u64)
}

/// Bytes by which a shared buffer grows between two calls of `go_on`: a multiple of every page
/// size, and about 20 ms of zeroing.
pub const POPULATE_STEP: usize = 64 << 20;

/// `TMPFS_MAGIC` of `linux/magic.h`: the file system of a memfd with ordinary pages.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use super::*;

    const LEN: usize = 3 * 4096;

    /// Returns a memfd of `len` bytes with all pages populated.
    fn populated(len: usize) -> OwnedFd {
        let mut file = File::from(memfd("test").expect("memfd"));
        file.write_all(&vec![1; len]).expect("memory for the file");
        file.into()
    }

    fn refusal(fd: impl AsFd, len: usize) -> AdoptError {
        Mapping::adopt_shared_buffer(fd.as_fd(), len as u64).expect_err("must be refused")
    }

    /// A child that inherited the arena could ring doorbells and post like its parent.
    #[test]
    fn an_arena_is_not_inherited_by_fork() {
        let (_daemon, fd) = Mapping::create_arena("test", LEN).expect("memory for the arena");
        let mapping = Mapping::map_arena(fd.as_fd(), LEN).expect("an arena");
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("the mappings");
        let begin = format!("{:08x}-", mapping.address());
        let ours = maps.lines().skip_while(|line| !line.starts_with(&begin));
        let flags = ours.take(30).find_map(|line| line.strip_prefix("VmFlags:"));
        let flags = flags.expect("the flags of the mapping");
        assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
    }

    #[test]
    fn a_clients_shared_buffer_is_adopted() {
        let (client, fd) = Mapping::create_shared_buffer(LEN).expect("memory for the buffer");
        let daemon =
            Mapping::adopt_shared_buffer(fd.as_fd(), LEN as u64).expect("an honest shared buffer");
        client.write(5000, b"both see it").expect("in range");
        let mut seen = [0; 11];
        daemon.read(5000, &mut seen).expect("in range");
        assert_eq!(&seen, b"both see it");
        assert_eq!(daemon.len(), LEN);
        assert_ne!(daemon.address(), client.address());
        assert!(!daemon.is_empty() && !daemon.is_poisoned());
        assert!(format!("{daemon:?}").contains("12288"));
    }

    #[test]
    fn an_error_stops_population() {
        let mut asked = Vec::new();
        let refused = Mapping::create_shared_buffer_by_steps(2 * POPULATE_STEP + 4096, |left| {
            asked.push(left);
            match left {
                4096 => Err(io::Error::from(io::ErrorKind::OutOfMemory)),
                _ => Ok(()),
            }
        });
        let kind = refused.err().map(|e| e.kind());
        assert_eq!(kind, Some(io::ErrorKind::OutOfMemory));
        assert_eq!(asked, [2 * POPULATE_STEP + 4096, POPULATE_STEP + 4096, 4096]);
        let made = Mapping::create_shared_buffer_by_steps(1, |left| match left {
            1 => Ok(()),
            _ => Err(io::Error::from(io::ErrorKind::OutOfMemory)),
        });
        assert!(made.is_ok());
        // No memory is allocated before the first call.
        let absurd = Mapping::create_shared_buffer_by_steps(usize::MAX, |_| {
            Err(io::Error::from(io::ErrorKind::OutOfMemory))
        });
        assert_eq!(absurd.err().map(|e| e.kind()), Some(io::ErrorKind::OutOfMemory));
    }

    #[test]
    fn a_vector_is_wrapped_in_place() {
        let mut bytes = Vec::with_capacity(100);
        bytes.extend_from_slice(b"bytes on the heap");
        let address = bytes.as_ptr() as u64;
        let memory = Mapping::from_vec(bytes).expect("a slot in the table");
        assert_eq!((memory.address(), memory.len()), (address, 17));
        let mut seen = [0; 4];
        memory.read(13, &mut seen).expect("in range");
        assert_eq!(&seen, b"heap");
        assert!(Mapping::from_vec(Vec::new()).is_err());
    }

    #[test]
    fn a_length_need_not_be_whole_pages() {
        let (_client, fd) = Mapping::create_shared_buffer(4097).expect("memory for the buffer");
        let daemon =
            Mapping::adopt_shared_buffer(fd.as_fd(), 4097).expect("an honest shared buffer");
        assert!(daemon.write(4096, &[1]).is_ok());
        assert!(daemon.write(4097, &[1]).is_err());
    }

    #[test]
    fn an_adopted_buffer_is_sealed() {
        let (_client, fd) = Mapping::create_shared_buffer(LEN).expect("memory for the buffer");
        Mapping::adopt_shared_buffer(fd.as_fd(), LEN as u64).expect("an honest shared buffer");
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let refused = Err(rustix::io::Errno::PERM);
        assert_eq!(rustix::fs::fallocate(&fd, punch, 0, 4096), refused);
        assert_eq!(rustix::fs::ftruncate(&fd, 0), refused);
        assert_eq!(rustix::fs::ftruncate(&fd, 2 * LEN as u64), refused);
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(rustix::io::Errno::PERM));
        assert_eq!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE), refused);
        assert!(Mapping::map(fd.as_fd(), LEN).is_err(), "no new writable mapping");
    }

    #[test]
    fn an_unpopulated_buffer_is_refused() {
        let fd = memfd("test").expect("memfd");
        rustix::fs::ftruncate(&fd, LEN as u64).expect("grow");
        assert!(matches!(refusal(&fd, LEN), AdoptError::Hole { offset: 0 }));
        let fd = populated(2 * 4096);
        rustix::fs::ftruncate(&fd, LEN as u64).expect("grow");
        assert!(matches!(refusal(&fd, LEN), AdoptError::Hole { offset: 8192 }));
    }

    #[test]
    fn a_buffer_of_another_size_is_refused() {
        for size in [LEN - 4096, LEN + 4096] {
            let error = refusal(populated(size), LEN);
            let AdoptError::WrongSize { announced, actual } = error else { panic!("{error:?}") };
            assert_eq!((announced, actual), (LEN as u64, size as u64));
        }
        assert!(matches!(refusal(populated(LEN), 0), AdoptError::BadLength { len: 0 }));
        let fd = populated(LEN);
        let error = Mapping::adopt_shared_buffer(fd.as_fd(), u64::MAX).expect_err("absurd");
        assert!(matches!(error, AdoptError::BadLength { len: u64::MAX }));
        let error = Mapping::adopt_shared_buffer(fd.as_fd(), 1 << 62).expect_err("absurd");
        assert!(matches!(error, AdoptError::Map(_)));
    }

    #[test]
    fn a_memfd_that_cannot_be_sealed_is_refused() {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("memfd");
        assert!(matches!(refusal(&fd, LEN), AdoptError::AlreadySealed));
        let fd = populated(LEN);
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SEAL).expect("seal");
        assert!(matches!(refusal(&fd, LEN), AdoptError::AlreadySealed));
    }

    #[test]
    fn a_write_sealed_buffer_cannot_be_mapped() {
        let fd = populated(LEN);
        rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).expect("seal");
        assert!(matches!(refusal(&fd, LEN), AdoptError::Map(_)));
    }

    #[test]
    fn other_kinds_of_descriptors_are_refused() {
        let (pipe, _end) = rustix::pipe::pipe().expect("pipe");
        assert!(matches!(refusal(pipe, LEN), AdoptError::NotMemfd));
        let directory = File::open("/").expect("directory");
        assert!(matches!(
            refusal(directory, LEN),
            AdoptError::NotMemfd | AdoptError::AlreadySealed
        ));
        let program = std::env::current_exe().expect("our own path");
        let file = File::open(program).expect("our own program");
        assert!(matches!(refusal(file, LEN), AdoptError::NotMemfd | AdoptError::AlreadySealed));
        let null = File::options().read(true).write(true).open("/dev/zero").expect("/dev/zero");
        assert!(matches!(refusal(null, LEN), AdoptError::NotMemfd));
    }

    #[test]
    fn shared_buffer_of_huge_pages_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        // The kernel may lack huge pages.
        if let Ok(fd) = rustix::fs::memfd_create("test", flags) {
            assert!(matches!(refusal(fd, 2 << 20), AdoptError::HugePages));
        }
    }

    #[test]
    fn arena_has_a_fixed_size_and_is_zero() {
        let (daemon, fd) = Mapping::create_arena("test", LEN).expect("memory for the arena");
        let client = Mapping::map_arena(fd.as_fd(), LEN).expect("the daemon's arena");
        let mut bytes = [1; LEN];
        client.read(0, &mut bytes).expect("in range");
        assert_eq!(bytes, [0; LEN]);
        client.write(100, &[7]).expect("in range");
        daemon.read(100, &mut bytes[..1]).expect("in range");
        assert_eq!(bytes[0], 7);
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        assert!(rustix::fs::ftruncate(&fd, 1 << 20).is_err());
        assert!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).is_err());
    }

    #[test]
    fn wrong_size_and_empty_memory_are_refused() {
        let (_daemon, fd) = Mapping::create_arena("test", LEN).expect("memory for the arena");
        assert!(Mapping::map_arena(fd.as_fd(), LEN + 4096).is_err());
        assert!(Mapping::map_arena(fd.as_fd(), 0).is_err());
        assert!(Mapping::create_arena("test", 0).is_err());
        assert!(Mapping::create_shared_buffer(0).is_err());
    }
}
