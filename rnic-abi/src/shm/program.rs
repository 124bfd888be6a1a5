//! Memory that a program allocated itself and registers in place.

use super::mapping::Mapping;

/// A range of the calling process's memory that the daemon may read and write on request.
///
/// This process does not access the bytes through this value. It represents the promise made in
/// [`new`](Self::new), so that functions that take a range can be safe.
#[derive(Debug)]
pub struct ProgramRange {
    address: u64,
    len: u64,
}

impl ProgramRange {
    /// Creates the range of `len` bytes at `address`. Returns `None` if `address + len` overflows,
    /// or if both are 0.
    ///
    /// # Safety
    ///
    /// From its registration until its deregistration (until the end of the session if that fails),
    /// other processes may read and write the range at any time, as the registration permits.
    /// During that time the range must not contain anything that the language forbids others to
    /// change: no reference to it, and no value about whose bytes the compiler may make
    /// assumptions. A registration with the right to write must contain only pages that this
    /// process may write, because writes of the daemon ignore the protection of pages.
    pub unsafe fn new(address: u64, len: u64) -> Option<ProgramRange> {
        address.checked_add(len)?;
        (len > 0 || address > 0).then_some(ProgramRange { address, len })
    }

    /// Returns the range of a mapping. It is never freed, and no reference to its bytes exists.
    pub fn of(memory: &'static Mapping) -> ProgramRange {
        ProgramRange { address: memory.address(), len: memory.len() as u64 }
    }

    /// Returns the first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the range is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
