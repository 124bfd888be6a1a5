//! Reads bytes at a pointer of the program, which may be invalid.

use libc::{c_char, c_long};

use crate::errno::kept;

/// The bytes from a pointer onwards, up to the first page that cannot be read.
#[derive(Clone)]
pub(crate) struct Bytes {
    next: *const u8,
    page_size: usize,
    /// Page that was last found readable; null at first.
    readable: *const u8,
}

impl Bytes {
    pub(crate) fn of(pointer: *const c_char) -> Self {
        // SAFETY: the call has no preconditions. It only returns a number.
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

    /// Returns the position of the next byte.
    pub(crate) fn position(&self) -> *const c_char {
        self.next.cast()
    }

    /// Returns the next byte; `None` if the program may not read it.
    pub(crate) fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.next = self.next.wrapping_add(1);
        Some(byte)
    }

    /// Like [`next`](Self::next), but stays at the byte.
    pub(crate) fn peek(&mut self) -> Option<u8> {
        if !self.is_readable() {
            return None;
        }
        // SAFETY: the byte must be readable, which `is_readable` has just checked. A program that
        // unmaps a path while another of its threads opens the file may crash here.
        Some(unsafe { self.next.read_volatile() })
    }
}

/// Returns true if the program may read a page. Does not change `errno`.
///
/// `process_vm_readv(2)` would copy the bytes themselves, but sandboxes (seccomp) that allow a
/// program to open files often kill it for that call. `madvise(2)` is allowed, because every
/// allocator calls it. It fails on kernels and in sandboxes without this advice, and for device
/// memory. In that case `rt_sigprocmask(2)` decides: it reads a signal set from the page before it
/// rejects the invalid operation. It is only the second choice because Valgrind reports bytes that
/// were never written.
fn may_read(page: *const u8, page_size: usize) -> bool {
    kept(|| {
        let advice = c_long::from(libc::MADV_POPULATE_READ);
        // SAFETY: the call must not change memory. The advice only makes the page present, as a
        // read would. It fails if there is no page or if it is not readable.
        let done = unsafe { libc::syscall(libc::SYS_madvise, page, page_size, advice) };
        done == 0 || {
            const SET: usize = 8;
            // SAFETY: the call must not change the signal mask. The kernel rejects the operation
            // -1, and an address that it cannot read.
            unsafe {
                libc::syscall(libc::SYS_rt_sigprocmask, -1, page, std::ptr::null::<u8>(), SET);
                *libc::__errno_location() != libc::EFAULT
            }
        }
    })
}
