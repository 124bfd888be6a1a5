//! Allocator of extents in one arena.
//!
//! First fit. Adjacent free extents are merged. Memory is not zeroed here: formatting a queue does
//! that.

use std::collections::BTreeMap;

use rnic_abi::abi::queue::CACHE_LINE;

/// The free extents of an arena.
#[derive(Clone, Debug)]
pub struct Extents {
    /// Length in bytes of each free extent, by offset. Both are multiples of a cache line.
    free: BTreeMap<usize, usize>,
}

impl Extents {
    /// Creates an allocator of `start..end`. Partial cache lines at either end are not used.
    pub fn new(start: usize, end: usize) -> Self {
        let start = start.next_multiple_of(CACHE_LINE);
        let end = end - end % CACHE_LINE;
        let mut free = BTreeMap::new();
        if start < end {
            free.insert(start, end - start);
        }
        Extents { free }
    }

    /// Allocates `len` bytes that share no cache line with other extents. Returns their offset, or
    /// `None` if no free extent is long enough.
    pub fn allocate(&mut self, len: usize) -> Option<usize> {
        let len = rounded(len)?;
        let (&offset, &have) = self.free.iter().find(|(_, have)| **have >= len)?;
        self.free.remove(&offset);
        if have > len {
            self.free.insert(offset + len, have - len);
        }
        Some(offset)
    }

    /// Frees an extent that [`Extents::allocate`] returned for `len`.
    pub fn release(&mut self, offset: usize, len: usize) {
        // The extent was allocated, so rounding cannot fail and the sums stay inside the arena.
        let mut offset = offset;
        let mut len = rounded(len).unwrap_or(0);
        if let Some(after) = self.free.remove(&(offset + len)) {
            len += after;
        }
        if let Some((&before, &before_len)) = self.free.range(..offset).next_back()
            && before + before_len == offset
        {
            offset = before;
            len += before_len;
        }
        self.free.insert(offset, len);
    }
}

fn rounded(len: usize) -> Option<usize> {
    len.max(1).checked_next_multiple_of(CACHE_LINE)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LINES: usize = 64;

    #[derive(Clone, Debug)]
    enum Op {
        Allocate(usize),
        Release(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0..12 * CACHE_LINE).prop_map(Op::Allocate),
            any::<usize>().prop_map(Op::Release),
        ]
    }

    proptest! {
        /// Compares with a plain array of cache lines: extents lie inside, never overlap, are found
        /// whenever a long enough run of free lines exists, and merge when freed.
        #[test]
        fn behaves_like_a_map_of_lines(ops in proptest::collection::vec(op(), 0..200)) {
            let start = 3 * CACHE_LINE;
            let mut extents = Extents::new(start - 5, start + LINES * CACHE_LINE + 9);
            let mut lines = [false; LINES];
            let mut live: Vec<(usize, usize)> = Vec::new();
            for op in ops {
                match op {
                    Op::Allocate(len) => {
                        let need = len.max(1).div_ceil(CACHE_LINE);
                        let run = lines.windows(need).any(|w| w.iter().all(|used| !used));
                        let got = extents.allocate(len);
                        prop_assert_eq!(got.is_some(), run);
                        if let Some(offset) = got {
                            prop_assert!(offset % CACHE_LINE == 0 && offset >= start);
                            let first = (offset - start) / CACHE_LINE;
                            for line in &mut lines[first..first + need] {
                                prop_assert!(!*line);
                                *line = true;
                            }
                            live.push((offset, len));
                        }
                    }
                    Op::Release(n) if !live.is_empty() => {
                        let (offset, len) = live.swap_remove(n % live.len());
                        let first = (offset - start) / CACHE_LINE;
                        lines[first..first + len.max(1).div_ceil(CACHE_LINE)].fill(false);
                        extents.release(offset, len);
                    }
                    Op::Release(_) => {}
                }
            }
            for (offset, len) in live {
                extents.release(offset, len);
            }
            prop_assert_eq!(extents.allocate(LINES * CACHE_LINE), Some(start));
        }
    }

    #[test]
    fn an_impossible_length_is_refused() {
        let mut extents = Extents::new(0, 4096);
        assert_eq!(extents.allocate(usize::MAX), None);
        assert_eq!(extents.allocate(4097), None);
        assert_eq!(Extents::new(10, 20).allocate(1), None);
    }
}
