//! Adoption: pages of the program become shared memory where they lie.
//!
//! The daemon copies to and from shared memory as fast as it can copy at all; the program's own
//! pages it reaches by system calls. So private anonymous pages of a region are copied into a
//! memfd, which the daemon maps, and that is moved over the range in one step. To the program
//! nothing has changed. When the last region of the range is taken back, the pages become private
//! again: an allocator counts on `MADV_DONTNEED` giving it zeros, which shared pages do not.
//!
//! A thread that writes between the copy and the move would lose what it wrote. So this is done
//! only where there is no other thread, with all signals blocked: nobody else can run meanwhile,
//! and nobody can be made.
//!
//! After `fork` the child must not write into its parent's registered memory, as it does not with
//! private pages. A handler in the child maps the same pages privately; what the parent writes to a
//! page later, the child may see as long as it has not written to that page itself.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rnic_client::{Context, ProgramBuffer};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};

use super::maps::{self, Mapping};
use crate::errno::Errno;
use crate::{log, system};

/// A range of the program's memory that is shared with the daemon where it lies.
pub(crate) struct Adopted {
    /// First address, of a page.
    start: usize,
    /// Bytes, whole pages.
    len: usize,
    memfd: OwnedFd,
    /// What the kernel calls the memfd, by which its pages are told from others.
    inode: u64,
    buffer: ProgramBuffer,
}

/// Regions smaller than this are reached by system calls, which cost less than a mapping does.
const SMALLEST: usize = 64 << 10;

/// Ranges that are adopted, for the child of a fork.
static FORKED: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

/// A range, as the handler of a fork needs it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Entry {
    start: usize,
    len: usize,
    memfd: RawFd,
}

/// The adopted ranges of a device.
#[derive(Default)]
pub(crate) struct Ranges {
    ranges: Mutex<Vec<Weak<Adopted>>>,
}

impl Ranges {
    /// The adopted range that a region lies in, adopting it if that is worth it and safe; `None`
    /// if the region is to be reached where it lies.
    pub(crate) fn of(&self, context: &Context, address: u64, length: u64) -> Option<Arc<Adopted>> {
        let (address, length) = (usize::try_from(address).ok()?, usize::try_from(length).ok()?);
        let page = rustix::param::page_size();
        let start = address - address % page;
        let end = address.checked_add(length)?.checked_next_multiple_of(page)?;
        let mut ranges = self.ranges.lock();
        ranges.retain(|range| range.strong_count() > 0);
        for range in ranges.iter().filter_map(Weak::upgrade) {
            if range.start <= start && end <= range.start + range.len && range.is_in_place() {
                return Some(range);
            }
            if start < range.start + range.len && range.start < end {
                // Part of it is adopted already: the rest is reached where it lies.
                return None;
            }
        }
        if end - start < SMALLEST || !is_wanted() || !system::is_only_thread() {
            return None;
        }
        match system::without_signals(|| Adopted::adopt(context, start, end - start)) {
            Ok(adopted) => {
                let adopted = Arc::new(adopted?);
                ranges.push(Arc::downgrade(&adopted));
                Some(adopted)
            }
            Err(errno) => {
                log::debug(|| format!("{} bytes stay where they are: {errno:?}", end - start));
                None
            }
        }
    }
}

/// Whether the environment lets pages be adopted (`RNIC_ADOPT`).
fn is_wanted() -> bool {
    std::env::var_os("RNIC_ADOPT").is_none_or(|wanted| wanted != "never")
}

impl Adopted {
    /// What the daemon knows it by, and how far from its start an address is.
    pub(crate) fn place(&self, address: u64) -> (&ProgramBuffer, u64) {
        (&self.buffer, address - self.start as u64)
    }

    /// Shares pages with the daemon, if they are private, anonymous and there. Nobody else runs.
    fn adopt(context: &Context, start: usize, len: usize) -> Result<Option<Adopted>, Errno> {
        if !maps::covered_by(start as u64, len as u64, Mapping::is_private_memory)? {
            return Ok(None);
        }
        if !is_mostly_resident(start, len) {
            // Untouched memory would have to be made now, all of it.
            return Ok(None);
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create("rnic-adopted", flags)?;
        rustix::fs::ftruncate(&memfd, len as u64)?;
        let inode = rustix::fs::fstat(&memfd)?.st_ino;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let shared = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses a free range.
        let copy = unsafe { rustix::mm::mmap(null_mut(), len, rights, shared, &memfd, 0) }?;
        // SAFETY: the pages are mapped and readable, as the maps have just said, and nobody writes
        // them meanwhile; the copy is ours.
        unsafe { std::ptr::copy_nonoverlapping(start as *const u8, copy.cast::<u8>(), len) };
        let buffer = match context.share_memfd(memfd.as_fd(), len as u64) {
            Ok(buffer) => buffer,
            Err(error) => {
                // SAFETY: it was mapped above.
                let _ = unsafe { rustix::mm::munmap(copy, len) };
                return Err(error.into());
            }
        };
        follow_forks();
        let mut forked = FORKED.lock();
        let to = start as *mut _;
        let fixed = MremapFlags::MAYMOVE;
        // SAFETY: the range is replaced by memory of the same contents and rights, in one step.
        if let Err(error) = unsafe { rustix::mm::mremap_fixed(copy, len, len, fixed, to) } {
            // SAFETY: it was mapped above.
            let _ = unsafe { rustix::mm::munmap(copy, len) };
            return Err(error.into());
        }
        forked.push(Entry { start, len, memfd: memfd.as_raw_fd() });
        drop(forked);
        Ok(Some(Adopted { start, len, memfd, inode, buffer }))
    }

    /// Whether the program has it mapped still, and nothing else in its place.
    fn is_in_place(&self) -> bool {
        let ours = |mapping: Mapping| mapping.inode == self.inode;
        maps::covered_by(self.start as u64, self.len as u64, ours).unwrap_or(false)
    }

    /// Gives the program private pages again, where it has not mapped something else. Nobody else
    /// runs.
    fn give_back(&self) -> Result<(), Errno> {
        let ours = |mapping: &Mapping| mapping.inode == self.inode;
        for piece in maps::within(self.start as u64, self.len as u64)?.into_iter().filter(ours) {
            let (start, len) = (piece.start as usize, (piece.end - piece.start) as usize);
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            let private = MapFlags::PRIVATE;
            // SAFETY: the kernel chooses a free range.
            let copy = unsafe { rustix::mm::mmap_anonymous(null_mut(), len, rights, private) }?;
            let to = start as *mut _;
            // SAFETY: the piece is ours, mapped as the maps have just said, and nobody writes it
            // meanwhile; it is replaced by memory of the same contents in one step.
            let moved = unsafe {
                std::ptr::copy_nonoverlapping(start as *const u8, copy.cast::<u8>(), len);
                rustix::mm::mremap_fixed(copy, len, len, MremapFlags::MAYMOVE, to)
            };
            if let Err(error) = moved {
                // SAFETY: it was mapped above.
                let _ = unsafe { rustix::mm::munmap(copy, len) };
                return Err(error.into());
            }
        }
        Ok(())
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        let entry = Entry { start: self.start, len: self.len, memfd: self.memfd.as_raw_fd() };
        let mut forked = FORKED.lock();
        if !forked.contains(&entry) {
            // The child of a fork, which has private pages already.
            return;
        }
        // With other threads there is no safe moment: the pages stay shared, with a file that
        // nobody else has open any more.
        if system::is_only_thread() {
            let _ = system::without_signals(|| self.give_back());
        }
        forked.retain(|other| *other != entry);
    }
}

/// Whether most of a range has memory.
fn is_mostly_resident(start: usize, len: usize) -> bool {
    let pages = len / rustix::param::page_size();
    let mut resident = vec![0u8; pages];
    // SAFETY: the vector has room for one byte for each page.
    let answer = unsafe { libc::mincore(start as *mut _, len, resident.as_mut_ptr()) };
    answer == 0 && resident.iter().filter(|&&page| page & 1 == 1).count() * 2 >= pages
}

/// Has children of this process get private pages, from now on.
fn follow_forks() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handlers are functions of this library, which is never unloaded once it has
        // a thread.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    });
}

unsafe extern "C" fn before_fork() {
    std::mem::forget(FORKED.lock());
}

unsafe extern "C" fn in_parent() {
    // SAFETY: `before_fork` has locked it in this thread.
    unsafe { FORKED.force_unlock() };
}

/// Only system calls: other threads of the parent may have held any lock.
unsafe extern "C" fn in_child() {
    // SAFETY: `before_fork` has locked it in this thread, so nobody else has it.
    unsafe {
        for entry in &*FORKED.data_ptr() {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
            // The range is the adopted one, mapped from this file until now, and stays readable
            // with the same contents.
            libc::mmap(entry.start as *mut _, entry.len, rights, flags, entry.memfd, 0);
        }
        (*FORKED.data_ptr()).clear();
        FORKED.force_unlock();
    }
}
