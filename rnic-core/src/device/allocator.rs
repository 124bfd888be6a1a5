//! Allocation of steering tags.
//!
//! The resource manager owns the [`StagAllocator`]. Neither a peer nor a client can predict its
//! STags (RFC 5040 section 8.1.1), however many STags they have seen.

use std::collections::{HashSet, VecDeque};

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};

use rnic_abi::types::Stag;

/// Issues STags. An STag consists of a 24-bit index that no other object has, and an 8-bit key.
/// Both are drawn at random each time.
///
/// An index is drawn from the indices that are neither in use nor resting. A released index rests
/// until [`REST`] others have been released. No state such as a key counter is kept per index, so
/// an index can be used any number of times.
///
/// The owner may change the key where verbs allow it (windows). The first and the last index are
/// not used, so that no STag, with any key, is 0 or `0xFFFF_FFFF`.
///
/// At most half of all indices are in use, so at most two draws on average find a free index. Even
/// a client that has seen all other STags can rule out only slightly more than half of the indices.
pub struct StagAllocator {
    space: Space,
    random: ChaCha20Rng,
    used: HashSet<u32>,
    resting: HashSet<u32>,
    /// Resting indices in the order of their release.
    returned: VecDeque<u32>,
}

/// Maximum number of objects with an STag.
pub const MOST: u32 = Space::WHOLE.most();
/// Number of releases after which a released index can be used again.
pub const REST: usize = Space::WHOLE.rest();

/// Error if [`MOST`] objects have an STag already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{MOST} STags are in use, the maximum")]
pub struct StagsExhausted;

impl StagAllocator {
    /// Creates an allocator. Its STags depend only on the seed and on the calls made.
    pub fn new(seed: [u8; 32]) -> Self {
        StagAllocator::within(Space::WHOLE, seed)
    }

    fn within(space: Space, seed: [u8; 32]) -> Self {
        StagAllocator {
            space,
            random: ChaCha20Rng::from_seed(seed),
            used: HashSet::new(),
            resting: HashSet::new(),
            returned: VecDeque::new(),
        }
    }

    /// Issues an STag that cannot be derived from any STag issued before.
    pub fn allocate(&mut self) -> Result<Stag, StagsExhausted> {
        if self.used.len() == self.space.most() as usize {
            return Err(StagsExhausted);
        }
        // At most half of the indices are in use and one in 256 rests, so each draw succeeds with a
        // probability of nearly one half or more.
        loop {
            //= RDMAP-8.1.1-8
            let stag = self.space.stag(self.random.next_u32());
            let index = index(stag);
            if self.space.has(index) && !self.resting.contains(&index) && self.used.insert(index) {
                return Ok(stag);
            }
        }
    }

    /// Releases an STag, with any key. Ignores an STag that is not in use.
    pub fn release(&mut self, stag: Stag) {
        let index = index(stag);
        if !self.used.remove(&index) {
            return;
        }
        self.resting.insert(index);
        self.returned.push_back(index);
        if self.returned.len() > self.space.rest()
            && let Some(rested) = self.returned.pop_front()
        {
            self.resting.remove(&rested);
        }
    }
}

/// Returns the part of an STag that does not depend on its key.
pub(super) fn index(stag: Stag) -> u32 {
    stag.0 >> KEY_BITS
}

const KEY_BITS: u32 = 8;

/// The set of indices, given by their number of bits. Tests use small sets to exhaust them.
#[derive(Clone, Copy)]
struct Space {
    bits: u32,
}

impl Space {
    const WHOLE: Space = Space { bits: u32::BITS - KEY_BITS };

    const fn indices(self) -> u32 {
        1 << self.bits
    }

    const fn most(self) -> u32 {
        self.indices() / 2
    }

    const fn rest(self) -> usize {
        (self.indices() / 256) as usize
    }

    /// Builds an STag from the high bits of `random`, as many as an index and a key have.
    fn stag(self, random: u32) -> Stag {
        Stag(random >> (Space::WHOLE.bits - self.bits))
    }

    /// Returns true if an index may be used.
    fn has(self, index: u32) -> bool {
        index != 0 && index < self.indices() - 1
    }
}

#[cfg(test)]
mod tests;
