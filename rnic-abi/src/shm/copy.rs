//! All copies of bytes into and out of shared memory.
//!
//! Another process may write the same bytes at the same time. Rust has no bulk atomic copy, so this
//! module uses `ptr::copy*` on raw pointers, as virtual machine monitors do for guest memory. It
//! satisfies the three conditions under which that is sound in practice: only bytes are copied (any
//! value of them is valid), no reference to foreign memory ever exists, and a compiler fence after
//! each copy keeps the compiler from reading foreign memory again for a value that it has already
//! copied. At worst the copy is a mixture of the bytes that both sides wrote.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::atomic::{compiler_fence, fence};

use super::{Mapping, past_caches};

/// Reason why an access failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyFault {
    /// The range is not within the mapping.
    #[error("the range is outside of the mapping")]
    OutOfRange,
    /// An atomic word is not at a multiple of its size.
    #[error("the word is not aligned")]
    Misaligned,
    /// A page of one of the mappings was missing. The copied bytes are invalid.
    #[error("a page of the mapping is missing")]
    Poisoned,
}

impl Mapping {
    /// Copies bytes out of the mapping.
    #[inline]
    pub fn read(&self, offset: usize, dst: &mut [u8]) -> Result<(), CopyFault> {
        let from = self.range(offset, dst.len()).ok_or(CopyFault::OutOfRange)?;
        // SAFETY: `from` is valid for `dst.len()` bytes (checked by `range`). `dst` is private
        // memory, so the two cannot overlap. For concurrent foreign writers see the module.
        unsafe { std::ptr::copy_nonoverlapping(from, dst.as_mut_ptr(), dst.len()) };
        self.check_poison()
    }

    /// Copies bytes into the mapping.
    #[inline]
    pub fn write(&self, offset: usize, src: &[u8]) -> Result<(), CopyFault> {
        let to = self.range(offset, src.len()).ok_or(CopyFault::OutOfRange)?;
        // SAFETY: `to` is valid for `src.len()` bytes (checked by `range`). `src` is private
        // memory, so the two cannot overlap. For concurrent foreign accesses see the module.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), to, src.len()) };
        self.check_poison()
    }

    /// Sets `len` bytes of the mapping to `byte`.
    #[inline]
    pub fn fill(&self, offset: usize, len: usize, byte: u8) -> Result<(), CopyFault> {
        let to = self.range(offset, len).ok_or(CopyFault::OutOfRange)?;
        // SAFETY: `to` is valid for `len` bytes (checked by `range`).
        unsafe { std::ptr::write_bytes(to, byte, len) };
        self.check_poison()
    }

    /// Like [`write`](Self::write), but the last bytes become visible last: a program that polls
    /// the end of its buffer then finds the other bytes in place. The last bytes are the longest
    /// naturally aligned word (8, 4, 2 or 1 bytes) at the end of the range, stored atomically.
    #[inline]
    pub fn write_tail_last(&self, offset: usize, src: &[u8]) -> Result<(), CopyFault> {
        let to = self.range(offset, src.len()).ok_or(CopyFault::OutOfRange)?;
        // SAFETY: `src` and `to` are both valid for `src.len()` bytes.
        unsafe { move_tail_last(src.as_ptr(), to, src.len()) };
        self.check_poison()
    }

    /// Copies `len` bytes from this mapping to `dst` in one pass. Within one mapping the ranges may
    /// overlap (`memmove`). For `tail_last`, see [`write_tail_last`](Self::write_tail_last).
    #[inline]
    pub fn copy_to(
        &self,
        offset: usize,
        dst: &Mapping,
        dst_offset: usize,
        len: usize,
        tail_last: bool,
    ) -> Result<(), CopyFault> {
        self.copy_by(offset, dst, dst_offset, len, |from, to| {
            // SAFETY: both are valid for `len` bytes (see `copy_by`). Overlap is allowed.
            unsafe {
                if tail_last {
                    move_tail_last(from, to, len);
                } else {
                    std::ptr::copy(from, to, len);
                }
            }
        })
    }

    /// Like [`copy_to`](Self::copy_to), but bypasses the caches unless the ranges overlap.
    pub fn copy_past_caches_to(
        &self,
        offset: usize,
        dst: &Mapping,
        dst_offset: usize,
        len: usize,
        tail_last: bool,
    ) -> Result<(), CopyFault> {
        self.copy_by(offset, dst, dst_offset, len, |from, to| {
            let overlaps = (from as usize).abs_diff(to as usize) < len;
            let head = match (overlaps, tail_last) {
                (true, _) => 0,
                (false, true) => len - tail_len(to as u64, len),
                (false, false) => len,
            };
            // SAFETY: both are valid for `len` bytes (see `copy_by`), and the part that bypasses
            // the caches does not overlap. If the two mappings share memory, the copy acts like a
            // concurrent foreign writer (see the module).
            unsafe {
                past_caches::copy(from, to, head);
                if tail_last {
                    move_tail_last(from.add(head), to.add(head), len - head);
                } else {
                    std::ptr::copy(from.add(head), to.add(head), len - head);
                }
            }
        })
    }

    /// Calls `copy` with the addresses of `len` bytes in this mapping and in `dst`. Both are valid
    /// for `len` bytes, in memory to which this process holds no reference.
    #[inline]
    fn copy_by(
        &self,
        offset: usize,
        dst: &Mapping,
        dst_offset: usize,
        len: usize,
        copy: impl FnOnce(*const u8, *mut u8),
    ) -> Result<(), CopyFault> {
        let from = self.range(offset, len).ok_or(CopyFault::OutOfRange)?;
        let to = dst.range(dst_offset, len).ok_or(CopyFault::OutOfRange)?;
        copy(from, to);
        self.check_poison()?;
        dst.check_poison()
    }

    /// Loads an aligned word with acquire ordering.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64, CopyFault> {
        let value = self.word(offset)?.load(Ordering::Acquire);
        self.check_poison().map(|()| value)
    }

    /// Stores an aligned word with release ordering.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<(), CopyFault> {
        self.word(offset)?.store(value, Ordering::Release);
        self.check_poison()
    }

    /// Changes an aligned word atomically and returns its old value.
    pub fn update_u64(&self, offset: usize, change: impl Fn(u64) -> u64) -> Result<u64, CopyFault> {
        let word = self.word(offset)?;
        let changed =
            //= 7306-5-1, 7306-5.1.1-8, 7306-5.3-1, 7306-5.4-2
            word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(change(old)));
        let (Ok(old) | Err(old)) = changed;
        self.check_poison().map(|()| old)
    }

    /// Replaces an aligned word if it equals `current`. The inner result contains the old value:
    /// `Ok` if the word was replaced, otherwise `Err`.
    #[inline]
    pub fn compare_exchange_u64(
        &self,
        offset: usize,
        current: u64,
        new: u64,
    ) -> Result<Result<u64, u64>, CopyFault> {
        let found =
            self.word(offset)?.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire);
        self.check_poison().map(|()| found)
    }

    /// Adds to an aligned word, wrapping, and returns its old value.
    #[inline]
    pub fn fetch_add_u64(&self, offset: usize, value: u64) -> Result<u64, CopyFault> {
        let found = self.word(offset)?.fetch_add(value, Ordering::AcqRel);
        self.check_poison().map(|()| found)
    }

    #[inline]
    fn word(&self, offset: usize) -> Result<&AtomicU64, CopyFault> {
        let at = self.range(offset, 8).ok_or(CopyFault::OutOfRange)?;
        if !(at as usize).is_multiple_of(8) {
            return Err(CopyFault::Misaligned);
        }
        // SAFETY: the word is valid for 8 bytes (`range`) and aligned (just checked) while `self`
        // is borrowed. Any value is valid. Other accesses from this process are atomic or raw.
        Ok(unsafe { AtomicU64::from_ptr(at.cast()) })
    }

    /// Called at the end of each access. Checks that the fault handler, which would have run on
    /// this thread, did not poison the mapping.
    #[inline]
    fn check_poison(&self) -> Result<(), CopyFault> {
        // Keeps the copy before the load of the mark, and keeps the compiler from reading the
        // foreign bytes again (see the module).
        compiler_fence(Ordering::SeqCst);
        if self.is_poisoned() { Err(CopyFault::Poisoned) } else { Ok(()) }
    }
}

/// Returns the length of the longest naturally aligned word at the end of `len` bytes from
/// `address`.
#[inline]
pub(super) fn tail_len(address: u64, len: usize) -> usize {
    let end = address.wrapping_add(len as u64);
    // The largest power of two that divides the end, at most 8, and not longer than the range.
    match len {
        0 => 0,
        1 => 1,
        2..=3 => 1 << (end | 2).trailing_zeros(),
        4..=7 => 1 << (end | 4).trailing_zeros(),
        _ => 1 << (end | 8).trailing_zeros(),
    }
}

/// Copies like `memmove`, but stores the word that `tail_len` selects last, and atomically.
///
/// # Safety
/// `from` must be valid for reading and `to` for writing `len` bytes, both in private or in shared
/// memory to which no other part of this process holds an exclusive reference.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "widened from that many bytes")]
unsafe fn move_tail_last(from: *const u8, to: *mut u8, len: usize) {
    let tail = tail_len(to as u64, len);
    let head = len - tail;
    // SAFETY: head and tail make up the range, for which the caller guarantees validity. The tail
    // of `to` is aligned to its length (see `tail_len`). `from` is read unaligned. Only atomics and
    // raw copies access shared memory, and any value of a byte is valid.
    unsafe {
        let source = from.add(head);
        let target = to.add(head);
        // The tail is read first: if the ranges overlap, copying the head may overwrite it.
        let word = match tail {
            8 => source.cast::<u64>().read_unaligned(),
            4 => u64::from(source.cast::<u32>().read_unaligned()),
            2 => u64::from(source.cast::<u16>().read_unaligned()),
            1 => u64::from(source.read()),
            _ => return,
        };
        if head != 0 {
            std::ptr::copy(from, to, head);
        }
        fence(Ordering::Release);
        match tail {
            8 => AtomicU64::from_ptr(target.cast()).store(word, Ordering::Relaxed),
            4 => AtomicU32::from_ptr(target.cast()).store(word as u32, Ordering::Relaxed),
            2 => AtomicU16::from_ptr(target.cast()).store(word as u16, Ordering::Relaxed),
            _ => AtomicU8::from_ptr(target).store(word as u8, Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use super::*;

    const LEN: usize = 8192;

    fn mapping() -> Arc<Mapping> {
        let (mapping, _fd) = Mapping::create_shared_buffer(LEN).expect("memory for the buffer");
        let pattern: Vec<u8> = (0..LEN).map(|n| (n % 251) as u8).collect();
        mapping.write(0, &pattern).expect("in range");
        mapping
    }

    fn contents(mapping: &Mapping) -> Vec<u8> {
        let mut bytes = vec![0; mapping.len()];
        mapping.read(0, &mut bytes).expect("in range");
        bytes
    }

    #[test]
    fn ranges_are_checked_at_every_edge() {
        let m = mapping();
        let far = Err(CopyFault::OutOfRange);
        for (offset, len, ok) in [
            (0, LEN, true),
            (LEN, 0, true),
            (LEN - 1, 1, true),
            (LEN - 1, 2, false),
            (LEN + 1, 0, false),
            (usize::MAX, 1, false),
            (usize::MAX, 0, false),
        ] {
            let expected = if ok { Ok(()) } else { far };
            let mut bytes = vec![0; len];
            assert_eq!(m.read(offset, &mut bytes), expected);
            assert_eq!(m.write(offset, &bytes), expected);
            assert_eq!(m.write_tail_last(offset, &bytes), expected);
            assert_eq!(m.fill(offset, len, 0), expected);
            assert_eq!(m.copy_to(offset, &m, 0, len, true), expected);
            assert_eq!(m.copy_to(0, &m, offset, len, false), expected);
        }
        assert_eq!(m.fill(1, usize::MAX, 0), far);
        assert_eq!(m.copy_to(1, &m, 0, usize::MAX, false), far);
    }

    #[test]
    fn fill_touches_its_range_only() {
        let m = mapping();
        let mut expected = contents(&m);
        m.fill(10, 100, 0xEE).expect("in range");
        expected[10..110].fill(0xEE);
        assert_eq!(contents(&m), expected);
    }

    #[test]
    fn tail_last_copies_the_same_bytes() {
        for offset in 64..80 {
            for len in 0..40 {
                let m = mapping();
                let n = mapping();
                let source: Vec<u8> = (0..len).map(|k| 200 - k as u8).collect();
                let mut expected = contents(&m);
                expected[offset..offset + len].copy_from_slice(&source);
                m.write_tail_last(offset, &source).expect("in range");
                assert_eq!(contents(&m), expected, "write of {len} at {offset}");
                n.write(1000, &source).expect("in range");
                expected[1000..1000 + len].copy_from_slice(&source);
                n.copy_to(1000, &n, offset, len, true).expect("in range");
                assert_eq!(contents(&n), expected, "copy of {len} to {offset}");
            }
        }
    }

    #[test]
    fn the_tail_is_the_longest_aligned_word() {
        let at = |offset: u64, len| tail_len(0x1000 + offset, len);
        assert_eq!([at(0, 0), at(0, 1), at(1, 1), at(7, 1)], [0, 1, 1, 1]);
        assert_eq!([at(0, 2), at(1, 2), at(0, 3), at(1, 3)], [2, 1, 1, 2]);
        assert_eq!([at(0, 4), at(4, 4), at(2, 4), at(3, 4)], [4, 4, 2, 1]);
        assert_eq!([at(0, 8), at(4, 8), at(8, 8), at(1, 7)], [8, 4, 8, 4]);
        assert_eq!([at(0, 64), at(4, 60), at(0, 63), at(0, 62)], [8, 8, 1, 2]);
    }

    #[test]
    fn overlapping_copies_within_a_mapping_move() {
        for tail_last in [false, true] {
            for (from, to) in [(100, 108), (100, 103), (108, 100), (103, 100), (100, 100)] {
                let m = mapping();
                let mut expected = contents(&m);
                expected.copy_within(from..from + 1000, to);
                m.copy_to(from, &m, to, 1000, tail_last).expect("in range");
                assert_eq!(contents(&m), expected, "{from} to {to}, tail last: {tail_last}");
            }
        }
    }

    #[test]
    fn atomic_words_need_range_and_alignment() {
        let m = mapping();
        m.store_u64(8, 5).expect("aligned");
        assert_eq!(m.load_u64(8), Ok(5));
        assert_eq!(m.fetch_add_u64(8, u64::MAX), Ok(5));
        assert_eq!(m.compare_exchange_u64(8, 5, 9), Ok(Err(4)));
        assert_eq!(m.compare_exchange_u64(8, 4, 9), Ok(Ok(4)));
        assert_eq!(m.load_u64(8), Ok(9));
        assert_eq!(m.load_u64(4), Err(CopyFault::Misaligned));
        assert_eq!(m.load_u64(LEN), Err(CopyFault::OutOfRange));
        assert_eq!(m.store_u64(LEN - 8, 1), Ok(()));
    }

    //= 7306-5-1
    //= 7306-5-2
    //= 7306-5.3-1
    //= 7306-5.4-2
    /// Uses two mappings of the memory, and atomic accesses other than a peer's operations.
    #[test]
    fn word_updates_are_atomic() {
        const TIMES: u64 = 20_000;
        let (one, fd) = Mapping::create_shared_buffer(LEN).expect("memory for the buffer");
        let other = Mapping::adopt_shared_buffer(fd.as_fd(), LEN as u64).expect("the same memory");
        std::thread::scope(|scope| {
            for mapping in [&one, &other, &one] {
                scope.spawn(|| {
                    for _ in 0..TIMES {
                        mapping.update_u64(8, |old| old + 1).expect("aligned");
                    }
                });
            }
            for _ in 0..TIMES {
                other.fetch_add_u64(8, 1).expect("aligned");
            }
        });
        assert_eq!(one.load_u64(8), Ok(4 * TIMES));
        // If another store intervenes, its value is the old one.
        let store_and_add = |old| {
            if old == 4 * TIMES {
                other.store_u64(8, 7).expect("aligned");
            }
            old + 1
        };
        assert_eq!(one.update_u64(8, store_and_add), Ok(7));
        assert_eq!(one.load_u64(8), Ok(8));
    }

    #[test]
    fn a_poisoned_mapping_fails_every_access() {
        let m = mapping();
        let other = mapping();
        m.poison();
        let poisoned = Err(CopyFault::Poisoned);
        assert_eq!(m.read(0, &mut [0]), poisoned);
        assert_eq!(m.write(0, &[0]), poisoned);
        assert_eq!(m.write_tail_last(0, &[0]), poisoned);
        assert_eq!(m.fill(0, 1, 0), poisoned);
        assert_eq!(m.copy_to(0, &other, 0, 1, false), poisoned);
        assert_eq!(other.copy_to(0, &m, 0, 1, false), poisoned);
        assert_eq!(m.load_u64(0), Err(CopyFault::Poisoned));
        assert_eq!(m.store_u64(0, 0), poisoned);
        assert_eq!(m.fetch_add_u64(0, 0), Err(CopyFault::Poisoned));
        assert_eq!(m.compare_exchange_u64(0, 0, 0), Err(CopyFault::Poisoned));
        assert!(!other.is_poisoned());
    }
}
