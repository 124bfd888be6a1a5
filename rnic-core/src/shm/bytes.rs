//! Shared memory in place, for callers who can promise what this crate cannot know.

use std::marker::PhantomData;

use super::mapping::Mapping;

/// A range of a mapping that is accessed where it lies.
///
/// Other processes may write there, which no type can rule out; so there are only a pointer and
/// `unsafe` slices. Whoever can do with a copy needs neither ([`Mapping::read`],
/// [`Mapping::write`]).
#[derive(Clone, Copy)]
pub struct RawBytes<'a> {
    start: *mut u8,
    len: usize,
    mapping: PhantomData<&'a Mapping>,
}

// SAFETY: it is a range of a `Mapping`, which threads may share, and gives access to nothing
// without an `unsafe` call whose obligations do not depend on the thread.
unsafe impl Send for RawBytes<'_> {}
// SAFETY: as above.
unsafe impl Sync for RawBytes<'_> {}

impl<'a> RawBytes<'a> {
    /// `len` bytes at `offset`, if they lie within.
    pub fn new(mapping: &'a Mapping, offset: usize, len: usize) -> Option<Self> {
        let start = mapping.range(offset, len)?;
        Some(RawBytes { start, len, mapping: PhantomData })
    }

    /// Where it starts. Valid for `len` bytes, for reading and writing, as long as the memory
    /// exists.
    pub fn as_ptr(self) -> *mut u8 {
        self.start
    }

    /// Bytes of the range.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The bytes as a slice.
    ///
    /// # Safety
    ///
    /// As long as the slice lives nobody writes to these bytes: no thread of this process through
    /// the region or by other means, no peer (give it no right to write here, or know from its
    /// messages that it is done), and not the daemon on behalf of a posted receive or RDMA Read
    /// (their completions have been polled).
    pub unsafe fn as_slice(self) -> &'a [u8] {
        // SAFETY: the range lies within the mapping (`new`), which outlives `'a`; every value of a
        // byte is valid; that nobody writes is the caller's obligation.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// The bytes as a slice to write to.
    ///
    /// # Safety
    ///
    /// As [`as_slice`](Self::as_slice); and nobody in this process reads them meanwhile, by another
    /// slice or through the region. What a peer or the daemon reads meanwhile (for a posted send or
    /// RDMA Write, or an RDMA Read of the peer) is any mixture of old and new bytes.
    pub unsafe fn as_mut_slice(self) -> &'a mut [u8] {
        // SAFETY: as above; that nobody else reads or writes is the caller's obligation.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl std::fmt::Debug for RawBytes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RawBytes").field("start", &self.start).field("len", &self.len).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slices_are_the_memory_itself_and_lie_within() {
        let (mapping, _fd) = Mapping::create_shared_buffer(8192).expect("a little memory");
        mapping.write(4090, b"in place").expect("in range");
        let raw = RawBytes::new(&mapping, 4090, 8).expect("in range");
        assert_eq!((raw.as_ptr() as u64, raw.len()), (mapping.address() + 4090, 8));
        {
            // SAFETY: nobody else knows this memory, and there is no other slice of it at a time.
            let slice = unsafe { raw.as_slice() };
            assert_eq!(slice, b"in place");
        }
        {
            // SAFETY: as above.
            let slice = unsafe { raw.as_mut_slice() };
            slice[3..].copy_from_slice(b"there");
        }
        let mut seen = [0; 8];
        mapping.read(4090, &mut seen).expect("in range");
        assert_eq!(&seen, b"in there");
        assert!(RawBytes::new(&mapping, 8192, 0).is_some_and(RawBytes::is_empty));
        for (offset, len) in [(8192, 1), (1, 8192), (usize::MAX, 2), (2, usize::MAX)] {
            assert!(RawBytes::new(&mapping, offset, len).is_none());
        }
    }
}
