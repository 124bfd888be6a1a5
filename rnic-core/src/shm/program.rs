//! Memory that a program has by its own means and registers as it lies.

/// A range of the calling process's memory that the daemon may be told to read and write.
///
/// Nothing in this process touches the bytes through it. What it stands for is a promise, so that
/// what takes one can be safe to call.
#[derive(Debug)]
pub struct ProgramRange {
    address: u64,
    len: u64,
}

impl ProgramRange {
    /// `len` bytes from `address` on. `None` if they end beyond the last address, or if there are
    /// none and no address either.
    ///
    /// # Safety
    ///
    /// From its registration until that has been taken back (also if taking it back fails: until
    /// the session ends), others write the range at any time where the registration gives that
    /// right. Until then nothing in it may be what the language forbids others to change: no
    /// reference, no value of this program whose bytes mean something to its compiler.
    pub unsafe fn new(address: u64, len: u64) -> Option<ProgramRange> {
        address.checked_add(len)?;
        (len > 0 || address > 0).then_some(ProgramRange { address, len })
    }

    /// Its first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes of the range.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
