//! Whether so much is written one after the other that no cache holds its beginning at the end.
//!
//! A copy by way of the caches is the fastest there is if its sink is in them, and the slowest if
//! not. Which it is depends on how much else was written since, of which a message knows nothing. A
//! stream of long messages, though, goes through a buffer from its beginning to its end, and again.

use crate::device::memory::Target;
use crate::types::Stag;

/// Long pieces that were placed in one region, each behind the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::engine) struct LongRun {
    stag: Stag,
    /// Where the last one ended.
    end: u64,
    /// Bytes since a piece was placed before the one ahead of it, and in the run before that.
    bytes: u64,
    before: u64,
}

impl LongRun {
    /// The memory of a piece that is placed at `to`, with a word on whether it goes past the
    /// caches.
    #[inline]
    pub(in crate::engine) fn sink<'t>(
        &mut self,
        stag: Stag,
        to: u64,
        target: Target<'t>,
    ) -> Target<'t> {
        target.past_caches(self.takes_past_caches(stag, to, target.len()))
    }

    /// Takes in a piece that is placed at `to`; whether the caches are of no use to it.
    #[inline]
    fn takes_past_caches(&mut self, stag: Stag, to: u64, len: usize) -> bool {
        let len = len as u64;
        if len < LONG {
            return false;
        }
        if stag != self.stag {
            *self = LongRun { stag, ..LongRun::default() };
        } else if to < self.end {
            (self.before, self.bytes) = (self.bytes, 0);
        }
        self.end = to.saturating_add(len);
        self.bytes = self.bytes.saturating_add(len);
        self.bytes.max(self.before) > CACHED
    }
}

/// Bytes of a piece that counts: the copy is what it costs.
const LONG: u64 = 32 * 1024;
/// Bytes of a run that may yet be found in the caches. With 8 MiB at each end copies by way of the
/// caches were 1.1 times as fast as those past them, with 16 MiB 0.75 times, with 32 MiB 0.55 (AMD
/// EPYC, 32 MiB of L3).
const CACHED: u64 = 12 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// How many of the pieces of these rounds through a buffer went past the caches.
    fn past_caches(run: &mut LongRun, rounds: usize, buffer: usize, piece: usize) -> Vec<usize> {
        let pieces = || (0..buffer / piece).map(|n| (n * piece) as u64);
        let mut round = || pieces().filter(|to| run.takes_past_caches(Stag(1), *to, piece)).count();
        (0..rounds).map(|_| round()).collect()
    }

    #[test]
    fn a_buffer_larger_than_the_caches_goes_past_them_and_one_that_is_not_does_not() {
        let run = &mut LongRun::default();
        assert_eq!(past_caches(run, 3, 8 * MIB, MIB), [0, 0, 0]);
        assert_eq!(past_caches(run, 3, MIB, MIB), [0, 0, 0]);
        assert_eq!(past_caches(run, 3, 64 * MIB, MIB), [52, 64, 64]);
        // Its beginning is not there yet, but soon.
        assert_eq!(past_caches(run, 3, 8 * MIB, MIB), [8, 0, 0]);
    }

    #[test]
    fn what_is_short_and_what_goes_elsewhere_is_no_run() {
        let run = &mut LongRun::default();
        assert_eq!(past_caches(run, 2, 64 * MIB, 4096), [0, 0]);
        for n in 0..100 {
            assert!(!run.takes_past_caches(Stag(2 + n % 2), u64::from(n) << 20, MIB));
        }
        for n in (0..100).rev() {
            assert!(!run.takes_past_caches(Stag(1), n << 20, MIB), "backwards");
        }
        // What a peer names may be anything.
        for _ in 0..100 {
            run.takes_past_caches(Stag(1), u64::MAX, usize::MAX);
        }
    }
}
