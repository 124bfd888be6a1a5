//! Detects a fork at the cost of a load.
//!
//! Sockets that a child inherits belong to its parent, and the parent's queues are not even mapped
//! in it (`MADV_DONTFORK`). Asking the kernel for the process ID at each use costs more than the
//! use itself. Instead this module maps a page that the kernel zeroes in a child
//! (`MADV_WIPEONFORK`, Linux 4.14), however the child was created: even by clone(2), which runs no
//! fork handlers. The page contains a number, which each [`Owner`] stores too. A child finds 0 and
//! takes a number that none of its ancestors had, before it can own anything.
//!
//! If such a page is not available, an owner is identified by its process ID. A child that shares
//! all of its parent's memory (`CLONE_VM`, like that of vfork(2)) has the parent's page, so this
//! module mistakes it for its parent. It runs only until exec(2), and the parent's queues are
//! mapped in it.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::abi::queue::PAGE;

/// The process that created an object. In a child, a copy of an `Owner` still identifies the
/// parent.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// The word in the page and its value at creation; `None` without such a page.
    mark: Option<(&'static AtomicU64, u64)>,
    id: u32,
}

impl Owner {
    /// Returns the calling process.
    pub fn current() -> Self {
        let mark = word().map(|word| (word, number(word)));
        Owner { mark, id: std::process::id() }
    }

    /// Returns the process with this ID. Each check asks the kernel for the process ID.
    pub fn by_id(id: u32) -> Self {
        Owner { mark: None, id }
    }

    /// Returns true if this is the calling process.
    #[inline]
    pub fn is_current(&self) -> bool {
        match self.mark {
            Some(_) => self.may_be_current(),
            None => std::process::id() == self.id,
        }
    }

    /// Returns false only if the page shows that this is not the calling process. Always returns
    /// true without a page.
    #[inline]
    pub fn may_be_current(&self) -> bool {
        // Relaxed: a process takes its number before it can create an owner with it, and a child
        // finds only the kernel's zeros until it takes a number.
        self.mark.is_none_or(|(word, number)| word.load(Ordering::Relaxed) == number)
    }

    /// Returns the process ID.
    pub fn id(&self) -> u32 {
        self.id
    }
}

/// Returns the number of this process. A child without a number takes one.
fn number(word: &AtomicU64) -> u64 {
    /// Count of numbers taken by this process and its ancestors. The kernel does not zero this word
    /// in a child.
    static GIVEN: AtomicU64 = AtomicU64::new(0);
    match word.load(Ordering::Relaxed) {
        0 => {
            let new = GIVEN.fetch_add(1, Ordering::Relaxed) + 1;
            match word.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => new,
                Err(of_another_thread) => of_another_thread,
            }
        }
        number => number,
    }
}

/// Returns the word that the kernel zeroes in a child. Takes no lock, because a child might inherit
/// it locked.
fn word() -> Option<&'static AtomicU64> {
    static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
    let mut at = WORD.load(Ordering::Acquire);
    if at.is_null() {
        let made = wiped_page()?;
        let ours = made.as_ptr().cast();
        let null = std::ptr::null_mut();
        at = match WORD.compare_exchange(null, ours, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => ours,
            Err(of_another_thread) => {
                unmap(made);
                of_another_thread
            }
        };
    }
    // SAFETY: `at` points to the start of a page from `wiped_page`, which stays mapped forever once
    // it is in `WORD`, even in a child. It is aligned like a page, any value is valid, and all
    // accesses are to this atomic word.
    Some(unsafe { &*at })
}

/// Maps a page of zeros that the kernel zeroes again in a child.
fn wiped_page() -> Option<NonNull<u8>> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE;
    // SAFETY: the kernel chooses a free address range, so no existing memory is affected.
    let page = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE, rights, flags) };
    let page = NonNull::new(page.ok()?.cast::<u8>())?;
    // SAFETY: the page belongs to this function and is empty, and no advice changes that.
    let advised =
        unsafe { rustix::mm::madvise(page.as_ptr().cast(), PAGE, Advice::LinuxWipeOnFork) };
    // An emulator may accept any advice and do nothing.
    // SAFETY: as above. This advice does not exist.
    let rejects_unknown = unsafe { libc::madvise(page.as_ptr().cast(), PAGE, -1) } != 0;
    if advised.is_ok() && rejects_unknown {
        return Some(page);
    }
    unmap(page);
    None
}

fn unmap(page: NonNull<u8>) {
    // SAFETY: it is a page from `wiped_page` to which no other reference exists.
    let _ = unsafe { rustix::mm::munmap(page.as_ptr().cast(), PAGE) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the result of `ask` in a child created by `start`. The child does nothing else.
    fn in_child(start: impl Fn() -> i64, ask: impl Fn() -> bool) -> bool {
        let child = start();
        if child == 0 {
            let status = if ask() { 10 } else { 11 };
            // SAFETY: ends the child at once, without the parent's exit handlers and buffered
            // output.
            unsafe { libc::_exit(status) };
        }
        assert!(child > 0, "no child");
        let child = i32::try_from(child).expect("a process id");
        let mut status = 0;
        // SAFETY: `status` is a live local of the right type.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status), "{status:#x}");
        match libc::WEXITSTATUS(status) {
            10 => true,
            11 => false,
            other => panic!("exit code {other}"),
        }
    }

    fn by_fork() -> i64 {
        // SAFETY: the child only runs the code in `in_child`, which uses no lock and no heap.
        i64::from(unsafe { libc::fork() })
    }

    /// Runs no fork handlers, and the C library does not notice the child.
    fn by_clone() -> i64 {
        // SAFETY: as above. Without a stack and without shared memory clone(2) acts like fork.
        unsafe { libc::syscall(libc::SYS_clone, i64::from(libc::SIGCHLD), 0, 0, 0, 0) }
    }

    #[test]
    fn a_child_is_not_its_parent() {
        let by_id = Owner::by_id(std::process::id());
        let current = Owner::current();
        assert!(current.mark.is_some(), "this kernel can zero a page in a child");
        assert_eq!(current.id(), std::process::id());
        for owner in [current, by_id] {
            for start in [by_fork, by_clone] {
                assert!(owner.is_current());
                assert!(!in_child(start, || owner.is_current()));
                let has_page = owner.mark.is_some();
                assert_eq!(!in_child(start, || owner.may_be_current()), has_page);
                assert!(owner.is_current());
            }
        }
    }

    #[test]
    fn a_child_owner_differs_from_its_ancestors() {
        let parent = Owner::current();
        let differs = || {
            let child = Owner::current();
            let grandchild = || {
                let own = Owner::current();
                own.is_current() && !child.is_current() && !parent.is_current()
            };
            child.is_current()
                && !parent.is_current()
                && in_child(by_clone, grandchild)
                && child.is_current()
        };
        assert!(in_child(by_clone, differs));
        assert!(parent.is_current() && Owner::current().is_current());
    }

    #[test]
    fn threads_of_a_process_are_the_same_owner() {
        let owners = [(); 8].map(|()| std::thread::spawn(Owner::current));
        for owner in owners {
            let owner = owner.join().expect("no panic");
            assert!(owner.is_current());
            assert_eq!(owner.mark.map(|mark| mark.1), Owner::current().mark.map(|mark| mark.1));
        }
    }
}
