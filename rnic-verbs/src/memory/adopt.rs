//! Adoption: pages of the program become shared memory where they lie.
//!
//! The daemon copies to and from shared memory as fast as it can copy at all; the program's own
//! pages it reaches by system calls. So private anonymous pages of a region are copied into a
//! memfd, which the daemon maps, and that is moved over the range in one step. To the program
//! nothing has changed. When the last region of the range is taken back, the pages become private
//! again: an allocator counts on `MADV_DONTNEED` giving it zeros, which shared pages do not.
//!
//! What is written between the copy and the move is lost. So this is done only where there is no
//! other thread, with all signals blocked: nobody else can run meanwhile, and nobody can be made;
//! or, if the environment asks for it, with the pages [withheld](super::withhold) from the others.
//! What this library writes counts as well. Its own thread and the allocator write where they have
//! objects, and a block of the heap has them for neighbours: it is adopted only if it has all of
//! its pages to itself. Between copy and move this thread allocates nothing, and it must not run on
//! a stack that lies in the range. And the daemon writes, where it is told to: a range that another
//! region reaches into is left as it is.
//!
//! After `fork` the child must not write into its parent's registered memory, as it does not with
//! private pages. A handler in the child maps the same pages privately; what the parent writes to a
//! page later, the child may see as long as it has not written to that page itself.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::raw::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rnic_client::{Context, ProgramBuffer};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};

use super::maps::{self, Mapping};
use super::regions::Regions;
use super::withhold::Withheld;
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
    /// Others may come to reach into it.
    regions: Arc<Regions>,
}

/// Regions smaller than this are reached by system calls, which cost less than a mapping and a
/// descriptor for each do, but for a [`FEW`].
const LARGE: usize = 64 << 10;

/// Smaller regions of a device that are adopted at a time, if they are whole pages: what a program
/// polls, or measures with, is seldom more. The ends of a small message are then as far from one
/// another as they are in shared memory, and not two system calls of a microsecond further.
const FEW: usize = 32;

/// What is adopted, for forks.
static FORKED: Mutex<Forked> = Mutex::new(Forked { files: Vec::new(), pieces: Vec::new() });

struct Forked {
    files: Vec<File>,
    /// Where they are mapped as a fork begins: the child has no safe way to find out.
    pieces: Vec<(RawFd, Mapping)>,
}

/// The file of a range.
#[derive(Clone, Copy, PartialEq, Eq)]
struct File {
    memfd: RawFd,
    /// As it was mapped first. The program may have moved it, or parts of it, since.
    mapping: Mapping,
}

/// The adopted ranges of a device.
#[derive(Default)]
pub(crate) struct Ranges {
    ranges: Mutex<Vec<Weak<Adopted>>>,
}

impl Ranges {
    /// The adopted range that a region lies in, adopting it if that is worth it and safe; `None`
    /// if the region is to be reached where it lies.
    pub(crate) fn of(
        &self,
        context: &Context,
        regions: &Arc<Regions>,
        address: u64,
        length: u64,
    ) -> Option<Arc<Adopted>> {
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
        let whole_pages = (address, address + length) == (start, end);
        let is_small = |len: usize| len < LARGE;
        if is_small(end - start) {
            let small = ranges.iter().filter_map(Weak::upgrade).filter(|r| is_small(r.len));
            if !whole_pages || small.count() >= FEW {
                return None;
            }
        }
        if regions.reach_into(start as u64, end as u64) {
            return None;
        }
        let company = match Wanted::by_environment() {
            Wanted::Never => return None,
            Wanted::Alone | Wanted::Always if system::is_only_thread() => Company::Nobody,
            Wanted::Alone => return None,
            Wanted::Always => Company::Threads,
        };
        let adopt = || Adopted::adopt(context, regions, (start, end - start), whole_pages, company);
        match system::without_signals(adopt) {
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

/// When pages may be adopted.
enum Wanted {
    Never,
    /// In a program that has no other thread.
    Alone,
    Always,
}

impl Wanted {
    /// What the environment says (`RNIC_ADOPT`).
    fn by_environment() -> Wanted {
        match std::env::var_os("RNIC_ADOPT") {
            Some(wanted) if wanted == "never" => Wanted::Never,
            Some(wanted) if wanted == "always" => Wanted::Always,
            _ => Wanted::Alone,
        }
    }
}

/// Who may run while pages are adopted.
#[derive(Clone, Copy)]
enum Company {
    Nobody,
    Threads,
}

impl Company {
    /// Copies pages and moves the copy into their place.
    ///
    /// # Safety
    ///
    /// The range is whole pages of private memory that may be read and written. This thread touches
    /// nothing in it meanwhile, nor do others unless they are this company. `copy` is the caller's,
    /// shared memory of the same length.
    unsafe fn replace(self, start: usize, len: usize, copy: *mut c_void) -> Result<(), Errno> {
        // SAFETY: nobody writes the pages between the copy and the move: there is nobody, or they
        // are where nobody looks. Their place gets the same contents and rights, in one step.
        unsafe {
            match self {
                Company::Nobody => {
                    std::ptr::copy_nonoverlapping(start as *const u8, copy.cast::<u8>(), len);
                    let to = start as *mut _;
                    rustix::mm::mremap_fixed(copy, len, len, MremapFlags::MAYMOVE, to)?;
                }
                Company::Threads => {
                    let withheld = Withheld::take(start, len)?;
                    std::ptr::copy_nonoverlapping(withheld.pages(), copy.cast::<u8>(), len);
                    withheld.replace(copy)?;
                }
            }
        }
        Ok(())
    }
}

impl Adopted {
    /// What the daemon knows it by, and how far from its start an address is.
    pub(crate) fn place(&self, address: u64) -> (&ProgramBuffer, u64) {
        (&self.buffer, address - self.start as u64)
    }

    /// Shares pages with the daemon, if they are private, anonymous and there. Where others may
    /// have something on them, beside threads everywhere, they have to be the program's as a whole:
    /// a lock that a thread waits for in the kernel is not to be withheld.
    fn adopt(
        context: &Context,
        regions: &Arc<Regions>,
        (start, len): (usize, usize),
        whole_pages: bool,
        company: Company,
    ) -> Result<Option<Adopted>, Errno> {
        let fits = |m: Mapping| {
            let alone = match company {
                Company::Nobody => !m.heap,
                Company::Threads => m.range() == (start, len),
            };
            m.is_private_memory() && (whole_pages || alone) && !m.has_this_stack()
        };
        if !maps::covered_by(start as u64, len as u64, fits)? {
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
        let mapping = Mapping::of_file(start as u64, len as u64, inode);
        forked.files.push(File { memfd: memfd.as_raw_fd(), mapping });
        // SAFETY: the pages are mapped and readable, as the maps have just said. This thread writes
        // nothing there from here to the move: it allocates nothing and has its stack elsewhere.
        let moved = unsafe { company.replace(start, len, copy) };
        if let Err(error) = moved {
            forked.files.pop();
            // SAFETY: it was mapped above.
            let _ = unsafe { rustix::mm::munmap(copy, len) };
            return Err(error);
        }
        drop(forked);
        keep_from_growing(start, len);
        Ok(Some(Adopted { start, len, memfd, inode, buffer, regions: regions.clone() }))
    }

    /// Whether the program has it mapped still, and nothing else in its place.
    fn is_in_place(&self) -> bool {
        let ours = |mapping: Mapping| mapping.is_shared(self.inode);
        maps::covered_by(self.start as u64, self.len as u64, ours).unwrap_or(false)
    }

    /// Gives the program private pages again, where it has not mapped something else. Nobody else
    /// runs, and no other region reaches into them.
    fn give_back(&self) -> Result<(), Errno> {
        for piece in self.pieces()? {
            if piece.has_this_stack() {
                // Of a coroutine: what is copied would not be what is returned to.
                return Err(Errno::INVALID);
            }
            let (start, len) = piece.range();
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

impl Adopted {
    /// Gives the program pages of its own beside others who write: a private view of the file,
    /// which has what they have written and takes what they write next. The file stays until the
    /// program unmaps it, and `MADV_DONTNEED` gives its contents instead of zeros.
    fn give_view(&self) -> Result<(), Errno> {
        for piece in self.pieces()? {
            piece.make_private(self.memfd.as_raw_fd())?;
            let (start, len) = piece.range();
            keep_from_growing(start, len);
        }
        Ok(())
    }

    /// Where the program has it mapped still, in its place.
    fn pieces(&self) -> Result<impl Iterator<Item = Mapping>, Errno> {
        let inode = self.inode;
        let within = maps::within(self.start as u64, self.len as u64)?;
        Ok(within.into_iter().filter(move |mapping| mapping.is_shared(inode)))
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        system::without_signals(|| {
            let ours = |file: &File| file.mapping.is_shared(self.inode);
            let mut forked = FORKED.lock();
            if !forked.files.iter().any(ours) {
                // The child of a fork, which has private pages already.
                return;
            }
            let (start, end) = (self.start as u64, (self.start + self.len) as u64);
            let alone = system::is_only_thread() && !self.regions.reach_into(start, end);
            let given = match alone {
                true => self.give_back().or_else(|_| self.give_view()),
                false => self.give_view(),
            };
            if let Err(errno) = given {
                log::debug(|| format!("{} bytes stay shared with children: {errno:?}", self.len));
            }
            forked.files.retain(|file| !ours(file));
        });
    }
}

impl Mapping {
    /// First address and length.
    fn range(&self) -> (usize, usize) {
        (self.start as usize, (self.end - self.start) as usize)
    }

    /// Whether the caller runs on it, or on a part of what was mapped with it.
    fn has_this_stack(&self) -> bool {
        let here = 0u8;
        let stack = std::ptr::from_ref(&here) as u64;
        (self.start..self.end).contains(&stack)
    }

    /// Maps the same part of its file privately in its place. Only a system call, for the child of
    /// a fork.
    fn make_private(&self, file: RawFd) -> Result<(), Errno> {
        let (start, len) = self.range();
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
        let rights = if self.readable { libc::PROT_READ } else { 0 }
            | if self.writable { libc::PROT_WRITE } else { 0 };
        let offset = self.offset.cast_signed();
        // SAFETY: this is mapped here from this file, as the maps have said, and stays so with the
        // same contents and rights. The kernel lets no thread look in between.
        let at = unsafe { libc::mmap(start as *mut _, len, rights, flags, file, offset) };
        if at == libc::MAP_FAILED { Err(std::io::Error::last_os_error().into()) } else { Ok(()) }
    }
}

/// Has `mremap(2)` refuse to make a range longer, as it does with what is not one mapping: behind
/// the end of the file there is no memory. An allocator copies then.
fn keep_from_growing(start: usize, len: usize) {
    let page = rustix::param::page_size();
    // SAFETY: it is mapped and has at least one page; advice changes no contents. This one is about
    // reading files ahead, and differs from that of the pages before, if there are any.
    unsafe { libc::madvise((start + len - page) as *mut _, page, libc::MADV_RANDOM) };
}

/// Whether most of a range has memory.
fn is_mostly_resident(start: usize, len: usize) -> bool {
    let pages = len / rustix::param::page_size();
    let mut resident = vec![0u8; pages];
    // SAFETY: the vector has room for one byte for each page.
    let answer = unsafe { libc::mincore(start as *mut _, len, resident.as_mut_ptr()) };
    answer == 0 && resident.iter().filter(|&&page| page & 1 == 1).count() * 2 >= pages
}

impl Forked {
    fn pieces_among(&self, maps: Vec<Mapping>) -> Vec<(RawFd, Mapping)> {
        let of = |mapping: &Mapping| {
            self.files.iter().find(|file| mapping.is_shared(file.mapping.inode))
        };
        maps.into_iter().filter_map(|mapping| Some((of(&mapping)?.memfd, mapping))).collect()
    }
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
    let mut forked = FORKED.lock();
    if !forked.files.is_empty() {
        forked.pieces = match maps::all() {
            Ok(maps) => forked.pieces_among(maps),
            // Better what was there than nothing: a child must not share.
            Err(_) => forked.files.iter().map(|file| (file.memfd, file.mapping)).collect(),
        };
    }
    std::mem::forget(forked);
}

unsafe extern "C" fn in_parent() {
    // SAFETY: `before_fork` has locked it in this thread.
    unsafe { FORKED.force_unlock() };
}

/// Only system calls: other threads of the parent may have held any lock.
unsafe extern "C" fn in_child() {
    // SAFETY: `before_fork` has locked it in this thread, so nobody else has it.
    unsafe {
        let forked = &mut *FORKED.data_ptr();
        for (memfd, mapping) in &forked.pieces {
            // There is nobody to tell.
            let _ = mapping.make_private(*memfd);
        }
        forked.files.clear();
        forked.pieces.clear();
        FORKED.force_unlock();
    }
}
