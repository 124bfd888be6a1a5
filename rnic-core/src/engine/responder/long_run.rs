//! Detects runs of long placements that exceed the caches.
//!
//! A copy through the caches is fastest if its sink is cached, and slowest if not. That depends on
//! the number of bytes written since the sink was last used, which a single message does not show.
//! A stream of long messages, however, usually fills a buffer from beginning to end repeatedly.

use crate::device::memory::Target;
use rnic_abi::types::Stag;

/// Consecutive long pieces placed in a region.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::engine) struct LongRun {
    stag: Stag,
    /// End of the last piece.
    end: u64,
    /// Bytes placed since the run last went back to a lower offset, and the bytes of the run before
    /// that.
    bytes: u64,
    before: u64,
}

impl LongRun {
    /// Returns the memory for a piece placed at `to`, marked if the copy should bypass the caches.
    #[inline]
    pub(in crate::engine) fn sink<'t>(
        &mut self,
        stag: Stag,
        to: u64,
        target: Target<'t>,
    ) -> Target<'t> {
        target.past_caches(self.takes_past_caches(stag, to, target.len()))
    }

    /// Adds a piece placed at `to`. Returns true if the copy should bypass the caches.
    #[inline]
    fn takes_past_caches(&mut self, stag: Stag, to: u64, len: usize) -> bool {
        let len = len as u64;
        if len < LONG {
            return false;
        }
        if stag != self.stag {
            *self = LongRun { stag, ..LongRun::default() };
        } else if to < self.end {
            self.before = self.bytes;
            self.bytes = 0;
        }
        self.end = to.saturating_add(len);
        self.bytes = self.bytes.saturating_add(len);
        self.bytes.max(self.before) > CACHED
    }
}

/// Minimum length in bytes of a piece that counts. For shorter pieces the copy is not the main
/// cost.
const LONG: u64 = 32 * 1024;
/// Bytes of a run that may still be cached. With 8 MiB at each end, copies through the caches were
/// 1.1 times as fast as copies that bypass them, with 16 MiB 0.75 times, with 32 MiB 0.55 times
/// (AMD EPYC, 32 MiB of L3).
const CACHED: u64 = 12 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Returns for each round through a buffer how many of its pieces bypassed the caches.
    fn past_caches(run: &mut LongRun, rounds: usize, buffer: usize, piece: usize) -> Vec<usize> {
        let pieces = || (0..buffer / piece).map(|n| (n * piece) as u64);
        let mut round = || pieces().filter(|to| run.takes_past_caches(Stag(1), *to, piece)).count();
        (0..rounds).map(|_| round()).collect()
    }

    #[test]
    fn large_buffer_bypasses_the_caches() {
        let run = &mut LongRun::default();
        assert_eq!(past_caches(run, 3, 8 * MIB, MIB), [0, 0, 0]);
        assert_eq!(past_caches(run, 3, MIB, MIB), [0, 0, 0]);
        assert_eq!(past_caches(run, 3, 64 * MIB, MIB), [52, 64, 64]);
        // The first round still counts as part of the long run.
        assert_eq!(past_caches(run, 3, 8 * MIB, MIB), [8, 0, 0]);
    }

    #[test]
    fn short_or_scattered_pieces_are_no_run() {
        let run = &mut LongRun::default();
        assert_eq!(past_caches(run, 2, 64 * MIB, 4096), [0, 0]);
        for n in 0..100 {
            assert!(!run.takes_past_caches(Stag(2 + n % 2), u64::from(n) << 20, MIB));
        }
        for n in (0..100).rev() {
            assert!(!run.takes_past_caches(Stag(1), n << 20, MIB), "backwards");
        }
        // A peer may use any offset and length.
        for _ in 0..100 {
            run.takes_past_caches(Stag(1), u64::MAX, usize::MAX);
        }
    }
}
