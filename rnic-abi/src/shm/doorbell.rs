//! Doorbells, with which a client notifies a worker of new entries in its rings.
//!
//! There is one page per client and worker. It has one bit per doorbell index in the leaf lines, a
//! summary word with one bit per leaf line, and a word that is set while the worker does not scan
//! the page. While both sides are busy they exchange only these bits. The eventfd is written once
//! per sleep. Clients do not share pages, so a client that writes garbage here costs only its own
//! session some lookups. A scan visits at most `LINES_PER_SCAN` leaf lines (512 indices each) and
//! finds fewer than twice `ENOUGH` indices.

use std::sync::Arc;

use super::Mapping;
use super::queue::QueueError;
use super::sync::{Ordering, fence};
use super::view::View;
use crate::abi::queue::{PAGE, doorbell, doorbell_offset};

/// The client's side of one doorbell page. Any thread may ring.
#[derive(Clone, Debug)]
pub struct DoorbellRinger {
    page: View,
}

impl DoorbellRinger {
    /// Opens the page of `worker` in the session's first arena.
    pub fn new(arena: Arc<Mapping>, worker: u32) -> Result<Self, QueueError> {
        Ok(DoorbellRinger { page: page(arena, worker)? })
    }

    /// Marks `index` (below `doorbell::INDICES`) as rung. Must be called after the store that the
    /// worker has to see, such as that of the producer index. If it returns true, the caller must
    /// write to the worker's eventfd.
    ///
    /// Pairs with [`DoorbellScanner::prepare_sleep`]. Here: set leaf and summary bits, fence, load
    /// `engine_sleeps`. There: set `engine_sleeps`, fence, load the summary. If this fence is
    /// first, the worker finds the summary bit and stays awake. Otherwise this call sees that the
    /// worker sleeps. Also pairs with [`DoorbellScanner::scan`], which clears the summary before
    /// the leaf, and the leaf before it reads any producer index: a bit that is set too late for
    /// one of these reads is found by the next scan. If several threads ring, only one of them
    /// clears `engine_sleeps` and writes to the eventfd.
    #[inline]
    #[must_use = "a worker that sleeps needs its eventfd written"]
    pub fn ring(&self, index: u32) -> bool {
        let index = (index % doorbell::INDICES) as usize;
        let leaf = self.page.u64(doorbell::LEAVES + index / 64 * 8);
        // Release: the thread that takes the bit sees the earlier stores. The summary comes after
        // the leaf, so that the thread that takes the summary bit finds the leaf bit.
        leaf.fetch_or(1 << (index % 64), Ordering::Release);
        self.page.u64(doorbell::SUMMARY).fetch_or(1 << (index / 512), Ordering::Release);
        fence(Ordering::SeqCst);
        let sleeps = self.page.u32(doorbell::ENGINE_SLEEPS);
        sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::Relaxed) != 0
    }
}

/// The worker's side of one doorbell page.
#[derive(Debug)]
pub struct DoorbellScanner {
    page: View,
    /// Summary bits taken from the page whose lines have not been visited completely.
    lines: u64,
    /// Next word to visit in the first of these lines.
    word: usize,
}

impl DoorbellScanner {
    /// Opens the page of `worker` in the session's first arena.
    pub fn new(arena: Arc<Mapping>, worker: u32) -> Result<Self, QueueError> {
        Ok(DoorbellScanner { page: page(arena, worker)?, lines: 0, word: 0 })
    }

    /// Returns a scanner of the same words as `ringer`.
    #[cfg(all(test, loom))]
    pub(super) fn sharing(ringer: &DoorbellRinger) -> Self {
        DoorbellScanner { page: ringer.page.clone(), lines: 0, word: 0 }
    }

    /// Calls `rung` for each index that was rung since the last scan. Returns false if there was
    /// none. After about `ENOUGH` calls it leaves the rest to the next scan. The client may ring
    /// without reason and with any index, so the caller must look the index up and then check its
    /// ring.
    #[inline]
    pub fn scan(&mut self, rung: impl FnMut(u32)) -> bool {
        if self.lines == 0 {
            let summary = self.page.u64(doorbell::SUMMARY);
            if summary.load(Ordering::Relaxed) == 0 {
                return false;
            }
            // Acquire: the leaf bits set before the summary bits are visible.
            self.lines = summary.swap(0, Ordering::Acquire) & ALL_LINES;
        }
        self.visit(rung)
    }

    /// Takes the leaf bits of at most `LINES_PER_SCAN` lines.
    fn visit(&mut self, mut rung: impl FnMut(u32)) -> bool {
        let mut found = 0;
        for _ in 0..LINES_PER_SCAN {
            if self.lines == 0 {
                break;
            }
            let line = self.lines.trailing_zeros();
            let leaves = self.page.words(doorbell::LEAVES + line as usize * 64, 8);
            for (n, leaf) in (0..).zip(leaves).skip(self.word) {
                if leaf.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                // Acquire: the client's stores before the ring are visible to `rung`.
                let mut bits = leaf.swap(0, Ordering::Acquire);
                while bits != 0 {
                    found += 1;
                    rung(line * 512 + n * 64 + bits.trailing_zeros());
                    bits &= bits - 1;
                }
                if found >= ENOUGH && n < 7 {
                    self.word = n as usize + 1;
                    return true;
                }
            }
            self.word = 0;
            self.lines &= self.lines - 1;
            if found >= ENOUGH {
                break;
            }
        }
        found > 0
    }

    /// Requests the eventfd, then checks the page once more. Called by the worker before it stops
    /// scanning this page. If it returns false, the client rang and the worker must continue
    /// scanning.
    ///
    /// For the fence argument see [`DoorbellRinger::ring`].
    #[must_use = "the worker may stop scanning only if this is true"]
    pub fn prepare_sleep(&mut self) -> bool {
        let sleeps = self.page.u32(doorbell::ENGINE_SLEEPS);
        sleeps.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.lines == 0 && self.page.u64(doorbell::SUMMARY).load(Ordering::Relaxed) == 0 {
            return true;
        }
        self.awake();
        false
    }

    /// Declares that the worker scans this page again and needs no eventfd.
    #[inline]
    pub fn awake(&mut self) {
        self.page.u32(doorbell::ENGINE_SLEEPS).store(0, Ordering::Relaxed);
    }
}

fn page(arena: Arc<Mapping>, worker: u32) -> Result<View, QueueError> {
    let offset = doorbell_offset(worker);
    View::new(arena, offset, PAGE).ok_or(QueueError::OutOfRange)
}

/// Limits of one scan: lines visited, and number of indices after which the scan stops.
const LINES_PER_SCAN: usize = 4;
const ENOUGH: u32 = 64;
/// Summary bits that have a leaf line. The others are ignored.
const ALL_LINES: u64 = (1 << doorbell::LEAF_LINES) - 1;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn pair() -> (DoorbellRinger, DoorbellScanner, Arc<Mapping>) {
        let (arena, _fd) = Mapping::create_arena("test", 3 * PAGE).expect("memory for the arena");
        let ringer = DoorbellRinger::new(arena.clone(), 1).expect("within the arena");
        let scanner = DoorbellScanner::new(arena.clone(), 1).expect("within the arena");
        (ringer, scanner, arena)
    }

    fn scan(scanner: &mut DoorbellScanner) -> Vec<u32> {
        let mut rung = Vec::new();
        assert_eq!(scanner.scan(|index| rung.push(index)), !rung.is_empty());
        rung
    }

    #[test]
    fn every_index_is_found_once() {
        let (ringer, mut scanner, _arena) = pair();
        for index in 0..doorbell::INDICES {
            assert!(!ringer.ring(index));
            assert!(!ringer.ring(index));
            assert_eq!(scan(&mut scanner), [index]);
            assert_eq!(scan(&mut scanner), []);
        }
    }

    #[test]
    fn a_scan_is_bounded_and_resumes() {
        let (ringer, mut scanner, arena) = pair();
        let indices: Vec<u32> = (0..62).map(|line| line * 512 + line).collect();
        for &index in &indices {
            assert!(!ringer.ring(index));
        }
        let mut rung = scan(&mut scanner);
        assert_eq!(rung.len(), LINES_PER_SCAN);
        assert!(!scanner.prepare_sleep(), "lines remain");
        assert!(!ringer.ring(0), "a line that was visited comes after those that were not");
        while rung.len() < indices.len() {
            rung.extend(scan(&mut scanner));
        }
        assert_eq!(rung, indices);
        assert_eq!(scan(&mut scanner), [0]);
        // A scan terminates, whatever the client writes.
        arena.fill(doorbell_offset(1), PAGE, 0xFF).expect("in range");
        for index in 0..62 * 8 {
            let word: Vec<u32> = (index * 64..index * 64 + 64).collect();
            assert_eq!(scan(&mut scanner), word, "each scan takes one word, in order");
            assert_eq!(scanner.prepare_sleep(), index == 62 * 8 - 1);
        }
    }

    #[test]
    fn spare_summary_bits_are_ignored() {
        let (_ringer, mut scanner, arena) = pair();
        arena.store_u64(doorbell_offset(1) + doorbell::SUMMARY, 3 << 62).expect("in range");
        assert!(!scanner.prepare_sleep());
        assert_eq!(scan(&mut scanner), []);
        assert!(scanner.prepare_sleep());
    }

    #[test]
    fn exactly_one_ring_wakes_a_worker() {
        let (ringer, mut scanner, _arena) = pair();
        assert!(!ringer.ring(9));
        assert!(!scanner.prepare_sleep(), "rung already");
        assert_eq!(scan(&mut scanner), [9]);
        assert!(scanner.prepare_sleep());
        assert!(ringer.ring(10));
        assert!(!ringer.ring(11), "the eventfd is written already");
        scanner.awake();
        assert_eq!(scan(&mut scanner), [10, 11]);
        assert!(scanner.prepare_sleep());
        scanner.awake();
        assert!(!ringer.ring(12));
    }

    #[test]
    fn an_index_out_of_range_stays_within_the_page() {
        let (ringer, mut scanner, _arena) = pair();
        assert!(!ringer.ring(u32::MAX));
        assert_eq!(scan(&mut scanner), [u32::MAX % doorbell::INDICES]);
    }

    #[test]
    fn a_page_outside_of_the_arena_is_refused() {
        let (_, _, arena) = pair();
        assert_eq!(DoorbellRinger::new(arena.clone(), 2).err(), Some(QueueError::OutOfRange));
        assert_eq!(DoorbellScanner::new(arena, u32::MAX).err(), Some(QueueError::OutOfRange));
    }
}
