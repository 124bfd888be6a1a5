//! Whether this is still the process that made something, at the price of a load.
//!
//! Sockets that a child inherits are its parent's, the parent's queues it does not even have
//! (`MADV_DONTFORK`), and to ask the kernel at each use who
//! we are costs more than the use. So there is a page of which the kernel gives a child an empty
//! one (`MADV_WIPEONFORK`, Linux 4.14), whoever makes the child: also one by clone(2), which runs
//! no handlers of forks. In it stands a number that an [`Owner`] keeps too. A child finds 0, and
//! gives itself another number than any of its forebears had before it may own something.
//!
//! Where there is no such page an owner is known by its process id. A child that shares all of its
//! parent's memory (`CLONE_VM`, as that of vfork(2)) is taken for it by the page only; it has until
//! exec(2), and the parent's queues are where it finds them.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::abi::queue::PAGE;

/// A process that made something. Copies of it in a child are still of the parent.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// The word in the page and what stood there, if there is such a page.
    sign: Option<(&'static AtomicU64, u64)>,
    id: u32,
}

impl Owner {
    /// This process.
    pub fn current() -> Self {
        let sign = word().map(|word| (word, number(word)));
        Owner { sign, id: std::process::id() }
    }

    /// The process of this id, for which the kernel is asked each time.
    pub fn by_id(id: u32) -> Self {
        Owner { sign: None, id }
    }

    /// Whether it is the calling process.
    #[inline]
    pub fn is_current(&self) -> bool {
        match self.sign {
            Some(_) => self.may_be_current(),
            None => std::process::id() == self.id,
        }
    }

    /// Whether it is the calling process, as far as the page tells: always, where there is none.
    #[inline]
    pub fn may_be_current(&self) -> bool {
        // Relaxed: a process had its number before it could make an owner of it, and in a child
        // there is nothing but the zeros of the kernel until it gives itself one.
        self.sign.is_none_or(|(word, number)| word.load(Ordering::Relaxed) == number)
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.id
    }
}

/// The number of this process, which is given one if it is a child that has none.
fn number(word: &AtomicU64) -> u64 {
    /// How many have been given, by this process and its forebears: this is not wiped.
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

/// The word that a child finds to be 0. No lock is taken, which a child might find taken for ever.
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
    // SAFETY: it points to the start of a page from `wiped_page`, which is mapped for good once it
    // stands in `WORD`, in a child too; it is aligned as pages are, any value is valid, and nobody
    // accesses it but as this atomic word.
    Some(unsafe { &*at })
}

/// A page of zeros that will be one in a child too.
fn wiped_page() -> Option<NonNull<u8>> {
    let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: the kernel chooses a free address range, so no existing memory is affected.
    let page = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE, rights, flags) };
    let page = NonNull::new(page.ok()?.cast::<u8>())?;
    // SAFETY: the page is ours and empty, and no advice changes that.
    let advised =
        unsafe { rustix::mm::madvise(page.as_ptr().cast(), PAGE, Advice::LinuxWipeOnFork) };
    // An emulator may say yes to whatever it is asked, and do nothing.
    // SAFETY: as above; there is no such advice.
    let believable = unsafe { libc::madvise(page.as_ptr().cast(), PAGE, -1) } != 0;
    if advised.is_ok() && believable {
        return Some(page);
    }
    unmap(page);
    None
}

fn unmap(page: NonNull<u8>) {
    // SAFETY: it is a page from `wiped_page` that nobody else has heard of.
    let _ = unsafe { rustix::mm::munmap(page.as_ptr().cast(), PAGE) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `ask` says in a child that `start` makes, which ends without having done anything else.
    fn in_child(start: impl Fn() -> i64, ask: impl Fn() -> bool) -> bool {
        let child = start();
        if child == 0 {
            let status = if ask() { 10 } else { 11 };
            // SAFETY: ends the child at once: nothing of its parent's is run or written.
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
        // SAFETY: the child does what `in_child` says: no locks, no memory of the heap.
        i64::from(unsafe { libc::fork() })
    }

    /// No handlers of forks are run, nor does the C library learn of the child.
    fn by_clone() -> i64 {
        // SAFETY: as above; without a stack of its own and without shared memory clone(2) is fork.
        unsafe { libc::syscall(libc::SYS_clone, i64::from(libc::SIGCHLD), 0, 0, 0, 0) }
    }

    #[test]
    fn a_child_is_not_its_parent_however_it_was_made() {
        let by_id = Owner::by_id(std::process::id());
        let current = Owner::current();
        assert!(current.sign.is_some(), "this kernel can wipe a page");
        assert_eq!(current.id(), std::process::id());
        for owner in [current, by_id] {
            for start in [by_fork, by_clone] {
                assert!(owner.is_current());
                assert!(!in_child(start, || owner.is_current()));
                let is_told = owner.sign.is_some();
                assert_eq!(!in_child(start, || owner.may_be_current()), is_told);
                assert!(owner.is_current());
            }
        }
    }

    #[test]
    fn a_child_that_owns_something_is_none_of_its_forebears() {
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
            assert_eq!(owner.sign.map(|sign| sign.1), Owner::current().sign.map(|sign| sign.1));
        }
    }
}
