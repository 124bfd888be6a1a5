//! A checked range of a mapping, accessed as atomic words. Queues and doorbells use it.
//!
//! Under `cfg(loom)` the words are `loom`'s atomics on the heap, so that all code above this file
//! runs unchanged in a model.

use std::sync::Arc;

use super::Mapping;
use super::sync::{AtomicU32, AtomicU64, Ordering};
use crate::abi::queue::CACHE_LINE;

#[cfg(loom)]
pub(super) use modelled::View;
#[cfg(not(loom))]
pub(super) use real::View;

impl View {
    /// Loads `N` words, each once, with relaxed ordering.
    #[inline]
    pub(super) fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        let mut words = [0; N];
        for (word, from) in words.iter_mut().zip(self.words(offset, N)) {
            *word = from.load(Ordering::Relaxed);
        }
        words
    }

    /// Stores words with relaxed ordering. The caller orders these stores when it publishes them.
    #[inline]
    pub(super) fn store_words(&self, offset: usize, words: &[u64]) {
        for (to, word) in self.words(offset, words.len()).iter().zip(words) {
            to.store(*word, Ordering::Relaxed);
        }
    }

    /// Prefetches for writing the first two cache lines of the `count` words at `offset`. This is a
    /// hint: correctness does not depend on it.
    #[inline]
    pub(super) fn fetch_to_write(&self, offset: usize, count: usize) {
        self.first_lines(offset, count).for_each(fetch_line);
    }

    /// Like [`fetch_to_write`](Self::fetch_to_write), but prefetches the lines for reading.
    #[inline]
    pub(super) fn fetch_to_read(&self, offset: usize, count: usize) {
        self.first_lines(offset, count).for_each(fetch_line_to_read);
    }

    /// Returns the first word of each of the first two cache lines of `count` words.
    #[inline]
    fn first_lines(&self, offset: usize, count: usize) -> impl Iterator<Item = &AtomicU64> {
        self.words(offset, count).iter().step_by(CACHE_LINE / 8).take(2)
    }

    /// Returns the word at `offset`.
    #[inline]
    pub(super) fn u64(&self, offset: usize) -> &AtomicU64 {
        &self.words(offset, 1)[0]
    }
}

/// Prefetches a line for writing. `_mm_prefetch` would only prefetch for reading, unless the
/// compiler may assume a processor with this feature. A line that another CPU has only read is in
/// this CPU's cache already, but this CPU needs it exclusively.
#[cfg(all(target_arch = "x86_64", not(loom)))]
#[inline]
fn fetch_line(word: &AtomicU64) {
    // SAFETY: `prefetchw` is a hint, which changes no memory, no register and no flag, and never
    // faults. The encoding is architecturally reserved, so processors without support treat it as a
    // no-op.
    unsafe {
        std::arch::asm!(
            "prefetchw [{}]",
            in(reg) word.as_ptr(),
            options(readonly, nostack, preserves_flags),
        );
    }
}

#[cfg(all(target_arch = "x86_64", not(loom)))]
#[inline]
fn fetch_line_to_read(word: &AtomicU64) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch is a hint, which changes no memory and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(word.as_ptr().cast()) }
}

#[cfg(any(not(target_arch = "x86_64"), loom))]
#[inline]
fn fetch_line(_word: &AtomicU64) {}

#[cfg(any(not(target_arch = "x86_64"), loom))]
#[inline]
fn fetch_line_to_read(_word: &AtomicU64) {}

#[cfg(not(loom))]
mod real {
    use super::*;

    #[derive(Clone, Debug)]
    pub(in super::super) struct View {
        base: *mut u8,
        len: usize,
        mapping: Arc<Mapping>,
    }

    // SAFETY: `base` points into `mapping`, which is Send and Sync and kept alive by the `Arc`. It
    // is used for atomic accesses only.
    unsafe impl Send for View {}
    // SAFETY: as for `Send`.
    unsafe impl Sync for View {}

    impl View {
        /// Returns the `len` bytes at `offset`, or `None` if they are not within the mapping or
        /// `offset` is not a multiple of 8.
        pub(in super::super) fn new(
            mapping: Arc<Mapping>,
            offset: usize,
            len: usize,
        ) -> Option<Self> {
            let base = mapping.range(offset, len)?;
            offset.is_multiple_of(8).then_some(View { base, len, mapping })
        }

        /// Returns the mapping that contains the view.
        #[inline]
        pub(in super::super) fn mapping(&self) -> &Arc<Mapping> {
            &self.mapping
        }

        /// Returns the 32-bit word at `offset`.
        #[inline]
        pub(in super::super) fn u32(&self, offset: usize) -> &AtomicU32 {
            assert!(offset.is_multiple_of(4) && self.len >= 4 && offset <= self.len - 4);
            // SAFETY: the word is within the view (asserted) and so within the mapping, which
            // outlives the borrow of `self`. `base` is aligned to 8 (page start plus a multiple of
            // 8) and `offset` to 4. Any value is valid. All other accesses in this process are
            // atomic or raw copies.
            unsafe { AtomicU32::from_ptr(self.base.add(offset).cast()) }
        }

        /// Returns `count` words from `offset`.
        #[inline]
        pub(in super::super) fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
            assert!(
                offset.is_multiple_of(8) && offset <= self.len && count <= (self.len - offset) / 8
            );
            // SAFETY: as for `u32`, with alignment 8. `AtomicU64` has the size and alignment of
            // `u64` and permits shared mutation, so a shared slice of it does not assume that the
            // memory is unchanged.
            unsafe { std::slice::from_raw_parts(self.base.add(offset).cast(), count) }
        }

        /// Sets every word to zero.
        pub(in super::super) fn zero(&self) {
            for word in self.words(0, self.len / 8) {
                word.store(0, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(loom)]
mod modelled {
    use super::*;

    /// Model of a `View`. Clones share their words. A word is used either as 32 or as 64 bits.
    /// Only the first words exist: models use small rings and low doorbell indices.
    #[derive(Clone, Debug)]
    pub(in super::super) struct View {
        halves: Arc<[AtomicU32]>,
        words: Arc<[AtomicU64]>,
        mapping: Arc<Mapping>,
    }

    impl View {
        pub(in super::super) fn new(
            mapping: Arc<Mapping>,
            offset: usize,
            len: usize,
        ) -> Option<Self> {
            mapping.range(offset, len)?;
            let count = 0..(len / 8).min(MODELLED_WORDS);
            offset.is_multiple_of(8).then(|| View {
                halves: count.clone().map(|_| AtomicU32::new(0)).collect(),
                words: count.map(|_| AtomicU64::new(0)).collect(),
                mapping,
            })
        }

        pub(in super::super) fn mapping(&self) -> &Arc<Mapping> {
            &self.mapping
        }

        pub(in super::super) fn u32(&self, offset: usize) -> &AtomicU32 {
            &self.halves[offset / 8]
        }

        pub(in super::super) fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
            &self.words[offset / 8..][..count]
        }

        /// New words are zero.
        pub(in super::super) fn zero(&self) {}
    }

    const MODELLED_WORDS: usize = 64;
}
