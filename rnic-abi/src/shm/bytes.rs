//! In-place access to shared memory, for callers that ensure the conditions this crate cannot
//! check.

use std::marker::PhantomData;

use super::mapping::Mapping;

/// A range of a mapping that is accessed in place.
///
/// Other processes may write there, which no type can prevent. Access is therefore possible only
/// through a raw pointer and through `unsafe` slices. A caller that can work on a copy needs
/// neither (see [`Mapping::read`] and [`Mapping::write`]).
#[derive(Clone, Copy)]
pub struct RawBytes<'a> {
    start: *mut u8,
    len: usize,
    mapping: PhantomData<&'a Mapping>,
}

// SAFETY: the value is a range of a `Mapping`, which threads may share. It accesses memory only in
// `unsafe` calls, and their obligations do not depend on the thread.
unsafe impl Send for RawBytes<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawBytes<'_> {}

impl<'a> RawBytes<'a> {
    /// Returns the `len` bytes at `offset`, or `None` if they are not within the mapping.
    pub fn new(mapping: &'a Mapping, offset: usize, len: usize) -> Option<Self> {
        let start = mapping.range(offset, len)?;
        Some(RawBytes { start, len, mapping: PhantomData })
    }

    /// Returns the address of the first byte. It is valid for reading and writing `len` bytes while
    /// the mapping exists.
    pub fn as_ptr(self) -> *mut u8 {
        self.start
    }

    /// Returns the number of bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Returns true if the range is empty.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the bytes as a slice.
    ///
    /// # Safety
    ///
    /// While the slice lives, these bytes must not be written: not by a thread of this process
    /// through the region or by other means, not by a peer (it has no right to write here, or its
    /// messages show that it has finished), and not by the daemon for a posted receive or RDMA Read
    /// (their completions have been polled).
    pub unsafe fn as_slice(self) -> &'a [u8] {
        // SAFETY: the range lies within the mapping (`new`), which outlives `'a`. Every value of a
        // byte is valid. The caller guarantees that the bytes are not written.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// Returns the bytes as a mutable slice.
    ///
    /// # Safety
    ///
    /// As for [`as_slice`](Self::as_slice). In addition, this process must not read the bytes while
    /// the slice lives, neither through another slice nor through the region. A peer or the daemon
    /// may read them (for a posted send or RDMA Write, or an RDMA Read of the peer), and gets any
    /// mixture of old and new bytes.
    pub unsafe fn as_mut_slice(self) -> &'a mut [u8] {
        // SAFETY: as in `as_slice`. The caller guarantees that the bytes are neither read nor
        // written by other means.
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
    fn slices_are_in_place_and_within_the_mapping() {
        let (mapping, _fd) = Mapping::create_shared_buffer(8192).expect("memory for the buffer");
        mapping.write(4090, b"in place").expect("in range");
        let raw = RawBytes::new(&mapping, 4090, 8).expect("in range");
        assert_eq!((raw.as_ptr() as u64, raw.len()), (mapping.address() + 4090, 8));
        {
            // SAFETY: only this test has this memory, and no other slice of it exists.
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
