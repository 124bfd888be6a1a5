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
    /// `len` bytes from `address` on, possibly none. `None` if they begin at address 0 or end
    /// beyond the last address.
    ///
    /// # Safety
    ///
    /// From its registration until that has been taken back (also if taking it back fails: until
    /// the session ends), others write the range at any time where the registration gives that
    /// right. Until then nothing in it may be what the language forbids others to change: no
    /// reference, no value of this program whose bytes mean something to its compiler.
    pub unsafe fn new(address: u64, len: u64) -> Option<ProgramRange> {
        address.checked_add(len)?;
        (address > 0).then_some(ProgramRange { address, len })
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
