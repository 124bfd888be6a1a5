//! A checked range of a mapping whose words are atomics: what queues and doorbells are made of.
//!
//! Under `cfg(loom)` the words live on the heap as `loom`'s atomics instead, so that everything
//! above this file runs unchanged in a model.

use std::sync::Arc;

use super::Mapping;
use super::sync::{AtomicU32, AtomicU64, Ordering};
use crate::abi::queue::CACHE_LINE;

#[cfg(loom)]
pub(super) use modelled::View;
#[cfg(not(loom))]
pub(super) use real::View;

impl View {
    /// Loads `N` words, each once.
    #[inline]
    pub(super) fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        let mut words = [0; N];
        for (word, from) in words.iter_mut().zip(self.words(offset, N)) {
            *word = from.load(Ordering::Relaxed);
        }
        words
    }

    /// Stores words; whoever publishes them adds the order.
    #[inline]
    pub(super) fn store_words(&self, offset: usize, words: &[u64]) {
        for (to, word) in self.words(offset, words.len()).iter().zip(words) {
            to.store(*word, Ordering::Relaxed);
        }
    }

    /// Has the first two lines of `count` words from `offset` brought here to be written, while
    /// this goes on. Nothing depends on it.
    #[inline]
    pub(super) fn fetch_to_write(&self, offset: usize, count: usize) {
        self.first_lines(offset, count).for_each(fetch_line);
    }

    /// The same to be read.
    #[inline]
    pub(super) fn fetch_to_read(&self, offset: usize, count: usize) {
        self.first_lines(offset, count).for_each(fetch_line_to_read);
    }

    /// The first word of each of the first two lines of `count` words.
    #[inline]
    fn first_lines(&self, offset: usize, count: usize) -> impl Iterator<Item = &AtomicU64> {
        self.words(offset, count).iter().step_by(CACHE_LINE / 8).take(2)
    }

    /// The word at `offset`.
    #[inline]
    pub(super) fn u64(&self, offset: usize) -> &AtomicU64 {
        &self.words(offset, 1)[0]
    }
}

/// Not by `_mm_prefetch`, which only reads where a compiler does not know what the processor can
/// do: a line that another CPU has read is here already, and is not to be read but taken from it.
#[cfg(all(target_arch = "x86_64", not(loom)))]
#[inline]
fn fetch_line(word: &AtomicU64) {
    // SAFETY: a hint, which changes no memory, no register and no flag, and never faults;
    // processors that do not know it take it for no operation, as the architecture reserves it.
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
    // SAFETY: a hint, which changes no memory and never faults.
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

    // SAFETY: `base` points into `mapping`, which is Send and Sync and kept alive by the `Arc`; it
    // is used for atomic accesses only.
    unsafe impl Send for View {}
    // SAFETY: as above.
    unsafe impl Sync for View {}

    impl View {
        /// `len` bytes at `offset`, if they lie within the mapping and `offset` is a multiple of
        /// 8.
        pub(in super::super) fn new(
            mapping: Arc<Mapping>,
            offset: usize,
            len: usize,
        ) -> Option<Self> {
            let base = mapping.range(offset, len)?;
            offset.is_multiple_of(8).then_some(View { base, len, mapping })
        }

        /// The mapping that it is a part of.
        #[inline]
        pub(in super::super) fn mapping(&self) -> &Arc<Mapping> {
            &self.mapping
        }

        /// The 32-bit word at `offset`.
        #[inline]
        pub(in super::super) fn u32(&self, offset: usize) -> &AtomicU32 {
            assert!(offset.is_multiple_of(4) && self.len >= 4 && offset <= self.len - 4);
            // SAFETY: within the view (asserted) and so within the mapping, which outlives the
            // borrow of `self`; `base` is aligned to 8 (page + multiple of 8), `offset` to 4; any
            // value is valid; the only other accesses in this process are atomic or raw copies.
            unsafe { AtomicU32::from_ptr(self.base.add(offset).cast()) }
        }

        /// `count` words from `offset`.
        #[inline]
        pub(in super::super) fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
            assert!(
                offset.is_multiple_of(8) && offset <= self.len && count <= (self.len - offset) / 8
            );
            // SAFETY: as for `u32`, with 8 for the alignment; `AtomicU64` has the size and
            // alignment of `u64` and is made for shared mutation, so a shared slice of it claims
            // nothing about who writes the memory.
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

    /// See the module. Clones share their words; a word is used as 32 or as 64 bits, never as both.
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
