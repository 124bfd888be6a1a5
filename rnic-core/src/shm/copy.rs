//! The one place that moves octets in and out of shared memory.
//!
//! Another process may write the same octets at the same time. There is no bulk atomic copy in the
//! language, so we use `ptr::copy*` on raw pointers, as virtual machine monitors do for guest
//! memory, and keep the three conditions under which that is sound in practice: nothing but octets
//! is copied (any value of them is valid), no reference to the foreign side ever exists, and a
//! compiler fence after each copy keeps the compiler from going back to the foreign side for a
//! value it has already copied. What was copied is a mixture of what both sides wrote, at worst.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::atomic::{compiler_fence, fence};

use super::Mapping;

/// Why a copy has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyFault {
    /// The range is not within the mapping.
    #[error("the range is outside of the mapping")]
    OutOfRange,
    /// An atomic word is not at a multiple of its size.
    #[error("the word is not aligned")]
    Misaligned,
    /// A page of one of the mappings was gone; what was read is void.
    #[error("a page of the mapping was gone")]
    Poisoned,
}

impl Mapping {
    /// Copies out of the mapping.
    #[inline]
    pub fn read(&self, offset: usize, dst: &mut [u8]) -> Result<(), CopyFault> {
        let from = self.range(offset, dst.len()).ok_or(CopyFault::OutOfRange)?;
        // SAFETY: `from` is valid for `dst.len()` octets (checked by `range`); `dst` is private
        // memory, so the two cannot overlap. Concurrent foreign writers: see the module.
        unsafe { std::ptr::copy_nonoverlapping(from, dst.as_mut_ptr(), dst.len()) };
        self.sound()
    }

    /// Copies into the mapping.
    #[inline]
    pub fn write(&self, offset: usize, src: &[u8]) -> Result<(), CopyFault> {
        let to = self.range(offset, src.len()).ok_or(CopyFault::OutOfRange)?;
        // SAFETY: `to` is valid for `src.len()` octets (checked by `range`); `src` is private
        // memory, so the two cannot overlap. Concurrent foreign accesses: see the module.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), to, src.len()) };
        self.sound()
    }

    /// Sets octets of the mapping.
    #[inline]
    pub fn fill(&self, offset: usize, len: usize, octet: u8) -> Result<(), CopyFault> {
        let to = self.range(offset, len).ok_or(CopyFault::OutOfRange)?;
        // SAFETY: `to` is valid for `len` octets (checked by `range`).
        unsafe { std::ptr::write_bytes(to, octet, len) };
        self.sound()
    }

    /// Like [`write`](Self::write), but the last octets become visible last: a program that polls on
    /// the end of its buffer finds the rest in place. The last octets are the longest naturally
    /// aligned word (8, 4, 2 or 1) at the end of the range, stored in one piece.
    #[inline]
    pub fn write_tail_last(&self, offset: usize, src: &[u8]) -> Result<(), CopyFault> {
        let to = self.range(offset, src.len()).ok_or(CopyFault::OutOfRange)?;
        let (head, tail) = src.split_at(src.len() - tail_len(to, src.len()));
        let mut word = [0; 8];
        word[..tail.len()].copy_from_slice(tail);
        // SAFETY: `to` is valid for `src.len()` octets, of which `head` is the first part; `src` is
        // private memory, so they cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(head.as_ptr(), to, head.len()) };
        // SAFETY: `head.len()` is at most `src.len()`, and the tail that `tail_len` chose is
        // naturally aligned and ends where the checked range ends.
        unsafe { store_tail(to.add(head.len()), word, tail.len()) };
        self.sound()
    }

    /// Copies `len` octets from here to `dst`, with one pass over them. Within one mapping the
    /// ranges may overlap (`memmove`). With `tail_last` as in
    /// [`write_tail_last`](Self::write_tail_last).
    #[inline]
    pub fn copy_to(
        &self,
        offset: usize,
        dst: &Mapping,
        dst_offset: usize,
        len: usize,
        tail_last: bool,
    ) -> Result<(), CopyFault> {
        let from = self.range(offset, len).ok_or(CopyFault::OutOfRange)?;
        let to = dst.range(dst_offset, len).ok_or(CopyFault::OutOfRange)?;
        let tail = if tail_last { tail_len(to, len) } else { 0 };
        let head = len - tail;
        let mut word = [0; 8];
        // SAFETY: `from` is valid for `len` octets and `tail` of them are at `head`; `word` has
        // room for 8 and `tail` is at most that. Read first, because where the ranges overlap the
        // next copy may run over it.
        unsafe { std::ptr::copy_nonoverlapping(from.add(head), word.as_mut_ptr(), tail) };
        // SAFETY: both are valid for `len` octets, at least `head`; overlap is allowed.
        unsafe { std::ptr::copy(from, to, head) };
        // SAFETY: as in `write_tail_last`.
        unsafe { store_tail(to.add(head), word, tail) };
        self.sound()?;
        dst.sound()
    }

    /// Loads an aligned word, with acquire.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64, CopyFault> {
        let value = self.word(offset)?.load(Ordering::Acquire);
        self.sound().map(|()| value)
    }

    /// Stores an aligned word, with release.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<(), CopyFault> {
        self.word(offset)?.store(value, Ordering::Release);
        self.sound()
    }

    /// Replaces an aligned word if it is `current`; the word that was found, either way.
    #[inline]
    pub fn compare_exchange_u64(
        &self,
        offset: usize,
        current: u64,
        new: u64,
    ) -> Result<Result<u64, u64>, CopyFault> {
        let found =
            self.word(offset)?.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire);
        self.sound().map(|()| found)
    }

    /// Adds to an aligned word, wrapping; the word that was there.
    #[inline]
    pub fn fetch_add_u64(&self, offset: usize, value: u64) -> Result<u64, CopyFault> {
        let found = self.word(offset)?.fetch_add(value, Ordering::AcqRel);
        self.sound().map(|()| found)
    }

    #[inline]
    fn word(&self, offset: usize) -> Result<&AtomicU64, CopyFault> {
        let at = self.range(offset, 8).ok_or(CopyFault::OutOfRange)?;
        if !(at as usize).is_multiple_of(8) {
            return Err(CopyFault::Misaligned);
        }
        // SAFETY: valid for 8 octets (`range`) and aligned (just checked) for as long as `self`
        // is borrowed; any value is valid; other accesses from this process are atomic or raw.
        Ok(unsafe { AtomicU64::from_ptr(at.cast()) })
    }

    /// Ends every access: the verdict of the fault handler, which ran on this thread if at all.
    #[inline]
    fn sound(&self) -> Result<(), CopyFault> {
        // Neither the copy nor what follows it moves across: the mark is read after the copy, and
        // the compiler has to take the copied octets as they are (see the module).
        compiler_fence(Ordering::SeqCst);
        if self.is_poisoned() { Err(CopyFault::Poisoned) } else { Ok(()) }
    }
}

/// Octets of the naturally aligned word at the end of `len` octets from `to`.
#[inline]
fn tail_len(to: *mut u8, len: usize) -> usize {
    let end = (to as usize).wrapping_add(len);
    // The largest power of two that divides the end, at most 8, and not longer than the range.
    match len {
        0 => 0,
        1 => 1,
        2..=3 => 1 << (end | 2).trailing_zeros(),
        4..=7 => 1 << (end | 4).trailing_zeros(),
        _ => 1 << (end | 8).trailing_zeros(),
    }
}

/// Stores the first `len` octets of `word` in one piece, after everything stored before.
///
/// # Safety
/// `to` is valid for `len` octets and aligned to `len`, which is 0, 1, 2, 4 or 8.
#[inline]
unsafe fn store_tail(to: *mut u8, word: [u8; 8], len: usize) {
    fence(Ordering::Release);
    let value = u64::from_ne_bytes(word);
    // SAFETY: validity and alignment are this function's own condition, and the memory is shared:
    // only atomics and raw copies touch it. On a little-endian machine (the only ones this module
    // builds for) the first octets of a word are its low ones.
    unsafe {
        match len {
            8 => AtomicU64::from_ptr(to.cast()).store(value, Ordering::Relaxed),
            4 => AtomicU32::from_ptr(to.cast()).store(value as u32, Ordering::Relaxed),
            2 => AtomicU16::from_ptr(to.cast()).store(value as u16, Ordering::Relaxed),
            1 => AtomicU8::from_ptr(to).store(value as u8, Ordering::Relaxed),
            _ => {}
        }
    }
}
