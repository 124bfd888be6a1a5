//! Bytes at a pointer of the program, which may be none.

use libc::{c_char, c_long};

/// The bytes from a pointer on, up to the first page that cannot be read.
#[derive(Clone)]
pub(crate) struct Bytes {
    next: *const u8,
    page_size: usize,
    /// The last page that was found readable; null before the first one.
    readable: *const u8,
}

impl Bytes {
    pub(crate) fn of(pointer: *const c_char) -> Self {
        // SAFETY: it only returns a number.
        let page_size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let page_size = usize::try_from(page_size).unwrap_or(4096);
        Bytes { next: pointer.cast(), page_size, readable: std::ptr::null() }
    }

    /// Returns true if the program may read the next byte.
    pub(crate) fn is_readable(&mut self) -> bool {
        let page = self.next.wrapping_sub(self.next.addr() % self.page_size);
        if page != self.readable && may_read(page, self.page_size) {
            self.readable = page;
        }
        page == self.readable && !page.is_null()
    }

    /// The next byte. `None` if the program may not read it.
    pub(crate) fn next(&mut self) -> Option<u8> {
        if !self.is_readable() {
            return None;
        }
        // SAFETY: the kernel has just made the page readable. A program that unmaps a path while
        // another thread of it opens the file may crash here.
        let byte = unsafe { self.next.read_volatile() };
        self.next = self.next.wrapping_add(1);
        Some(byte)
    }
}

/// Returns true if the program may read a page. `errno` stays as it is.
///
/// `process_vm_readv(2)` would copy the bytes themselves, but sandboxes (seccomp) that let a
/// program open files often kill it for that; `madvise(2)` is what every allocator calls. Kernels
/// and sandboxes that lack this advice refuse it, as does the kernel for memory of a device. Then
/// `rt_sigprocmask(2)` decides: it reads a signal set from the page before it rejects the invalid
/// operation. It comes second because Valgrind reports bytes that were never written.
fn may_read(page: *const u8, page_size: usize) -> bool {
    // SAFETY: every thread has one.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let advice = c_long::from(libc::MADV_POPULATE_READ);
    // SAFETY: the advice makes the page present, as reading it would, and changes nothing. It fails
    // where there is none, or none that may be read.
    let done = unsafe { libc::syscall(libc::SYS_madvise, page, page_size, advice) };
    let readable = done == 0 || {
        const SET: usize = 8;
        // SAFETY: the kernel refuses to do -1 with a set, and an address that it cannot read.
        unsafe {
            libc::syscall(libc::SYS_rt_sigprocmask, -1, page, std::ptr::null::<u8>(), SET);
            *errno != libc::EFAULT
        }
    };
    // SAFETY: as above.
    unsafe { *errno = before };
    readable
}
