//! Pages that no other thread reaches for a moment.
//!
//! They are moved away in one step, and whoever touches their place waits, in the kernel, for a
//! userfaultfd of ours (`userfaultfd(2)`) that never answers: once something is there and the
//! descriptor is closed, they look again and go on. A store is before the move or after it; none is
//! lost. System calls that reach there meanwhile are not made to wait: they fail with `EFAULT`,
//! because a plain user's userfaultfd holds up user mode only.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::raw::c_void;
use std::ptr::null_mut;

use rustix::mm::{MremapFlags, UserfaultfdFlags};

use crate::errno::Errno;

/// Pages that were moved away from where the program has them.
pub(super) struct Withheld {
    /// Where the program has them.
    place: *mut c_void,
    /// Where they are.
    pages: *mut c_void,
    len: usize,
    /// Whoever touches the place waits as long as it is open.
    _waited_for: OwnedFd,
}

impl Withheld {
    /// Moves away the pages of a range. An error (`EPERM` where it is forbidden) leaves them.
    ///
    /// # Safety
    ///
    /// The range is one mapping of private memory, whole pages, and this thread touches nothing in
    /// it, its stack and heap included, until [`Withheld::replace`] has returned.
    pub(super) unsafe fn take(start: usize, len: usize) -> Result<Withheld, Errno> {
        let flags = UserfaultfdFlags::CLOEXEC | USER_MODE_ONLY;
        // SAFETY: it is made to watch the range below, and nothing else.
        let descriptor = unsafe { rustix::mm::userfaultfd(flags) }?;
        let mut version = [UFFD_API, 0, 0];
        let mut watched = [start as u64, len as u64, UFFDIO_REGISTER_MODE_MISSING, 0];
        // SAFETY: both have the size and the shape that the calls write to.
        unsafe {
            ask(&descriptor, UFFDIO_API, version.as_mut_ptr())?;
            ask(&descriptor, UFFDIO_REGISTER, watched.as_mut_ptr())?;
        }
        let place = start as *mut c_void;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
        // SAFETY: the kernel chooses a free range for the pages: it looks at the last argument,
        // which says so. Others wait, as the module says; this thread does not look, as the caller
        // says.
        let pages = unsafe { libc::mremap(place, len, len, flags, null_mut::<c_void>()) };
        if pages == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(Withheld { place, pages, len, _waited_for: descriptor })
    }

    /// Their first byte, where they are.
    pub(super) fn pages(&self) -> *const u8 {
        self.pages.cast()
    }

    /// Puts another mapping of the same length, contents and rights where the pages were; or, with
    /// an error, puts the pages back, and leaves the other mapping where it is.
    ///
    /// # Safety
    ///
    /// `by` is the caller's, and nobody else looks at it.
    pub(super) unsafe fn replace(self, by: *mut c_void) -> Result<(), Errno> {
        let Withheld { place, pages, len, .. } = self;
        let to_place =
            // SAFETY: nothing is in the place; what moves there is the caller's, or ours.
            |from| unsafe { rustix::mm::mremap_fixed(from, len, len, MremapFlags::MAYMOVE, place) };
        if let Err(error) = to_place(by) {
            if to_place(pages).is_err() {
                // The program's memory is lost to it: it must not go on with zeros.
                std::process::abort();
            }
            return Err(error.into());
        }
        // SAFETY: they are ours, and copied.
        let _ = unsafe { rustix::mm::munmap(pages, len) };
        Ok(())
    }
}

/// # Safety
///
/// `argument` points to what this call reads and writes.
unsafe fn ask(descriptor: &OwnedFd, call: libc::Ioctl, argument: *mut u64) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    match unsafe { libc::ioctl(descriptor.as_raw_fd(), call, argument) } {
        -1 => Err(std::io::Error::last_os_error().into()),
        _ => Ok(()),
    }
}

/// `UFFD_USER_MODE_ONLY`: for plain users.
const USER_MODE_ONLY: UserfaultfdFlags = UserfaultfdFlags::from_bits_retain(1);
/// Version of the interface, the only one.
const UFFD_API: u64 = 0xAA;
/// Who touches a page that is not there waits.
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`: version, features, calls there are.
const UFFDIO_API: libc::Ioctl = 0xC018_AA3F;
/// `_IOWR(0xAA, 0x00, struct uffdio_register)`: start, length, mode, calls there are.
const UFFDIO_REGISTER: libc::Ioctl = 0xC020_AA00;
