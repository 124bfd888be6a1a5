//! Steering tags: issuing them.
//!
//! [`StagAllocator`] lives with the resource manager and issues values that nobody can foretell
//! (RFC 5042 section 8.1.1), neither a peer nor a client that has seen any number of them.

use std::collections::{HashSet, VecDeque};

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};

use crate::types::Stag;

/// Issues STags: an index of 24 bits that no other object has, then a key of 8 bits, all of them
/// drawn anew each time.
///
/// An index is drawn among those that are neither in use nor resting: one that is taken back rests
/// until [`REST`] others have been. Nothing is remembered of an index that does so, least of all a
/// key to count up, so there is no end to how often it may be used.
///
/// The key is the owner's to change where verbs say so (windows). The first and the last index are
/// not used: every other STag, whatever its key, is neither 0 nor `0xFFFF_FFFF`.
///
/// At most half of all indices are in use, so two draws find a free one on average, however many
/// there are, and even who holds or has seen all others can rule out little more than every second
/// one.
pub struct StagAllocator {
    space: Space,
    random: ChaCha20Rng,
    used: HashSet<u32>,
    resting: HashSet<u32>,
    /// Those that rest, in the order in which they were taken back.
    returned: VecDeque<u32>,
}

/// Objects that may have an STag at once.
pub const MOST: u32 = Space::WHOLE.most();
/// Indices that are taken back before one of them can be used again.
pub const REST: usize = Space::WHOLE.rest();

/// [`MOST`] objects have STags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{MOST} STags are in use, which is half of all")]
pub struct StagsExhausted;

impl StagAllocator {
    /// An allocator whose sequence depends on 32 random bytes, and on what is asked of it.
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

    /// Issues an STag that nothing has that was said before tells anything about.
    pub fn allocate(&mut self) -> Result<Stag, StagsExhausted> {
        if self.used.len() == self.space.most() as usize {
            return Err(StagsExhausted);
        }
        // At most half of the indices are in use and one of 256 rests, so each draw succeeds with
        // nearly one half at least.
        loop {
            //= RDMAP-8.1.1-8
            let stag = self.space.stag(self.random.next_u32());
            let index = index(stag);
            if self.space.has(index) && !self.resting.contains(&index) && self.used.insert(index) {
                return Ok(stag);
            }
        }
    }

    /// Takes back an STag that was issued, whatever its key is by now. One that is not in use is
    /// ignored.
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

/// The part of an STag that stays when its key changes.
pub(super) fn index(stag: Stag) -> u32 {
    stag.0 >> KEY_BITS
}

const KEY_BITS: u32 = 8;

/// The indices there are: those of so many bits. Tests have small ones, to go through them often.
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

    /// As many random bits as an index and a key have.
    fn stag(self, random: u32) -> Stag {
        Stag(random >> (Space::WHOLE.bits - self.bits))
    }

    /// Whether an index is used at all.
    fn has(self, index: u32) -> bool {
        index != 0 && index < self.indices() - 1
    }
}

#[cfg(test)]
mod tests;
