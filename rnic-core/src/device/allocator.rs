//! Steering tags: issuing them.
//!
//! [`StagAllocator`] lives with the resource manager and issues values that a peer cannot guess
//! (RFC 5042 section 8.1.1).

use std::collections::{HashMap, VecDeque};

use crate::types::Stag;

/// Issues STags: a keyed permutation of a 24-bit slot number, then an 8-bit key.
///
/// Slots are reused first-in first-out and only after [`REUSE_AFTER`] others, with the key advanced; a
/// slot whose 256 keys are used up is retired. 0 and `0xFFFF_FFFF` are never issued.
pub struct StagAllocator {
    permutation: Permutation,
    fresh: u32,
    free: VecDeque<FreeSlot>,
    issued: HashMap<u32, FreeSlot>,
}

/// Slots that must be free before the one freed first is used again.
pub const REUSE_AFTER: usize = 4096;
const SLOTS: u32 = 1 << 24;

#[derive(Clone, Copy)]
struct FreeSlot {
    slot: u32,
    key: u8,
    keys_left: u16,
}

/// Every slot is in use or retired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no STag is left")]
pub struct StagsExhausted;

impl StagAllocator {
    /// An allocator whose sequence depends on 32 random octets only.
    pub fn new(seed: [u8; 32]) -> Self {
        StagAllocator {
            permutation: Permutation::new(seed),
            fresh: 0,
            free: VecDeque::new(),
            issued: HashMap::new(),
        }
    }

    /// Issues an STag that is not in use and was not for a long time.
    pub fn allocate(&mut self) -> Result<Stag, StagsExhausted> {
        loop {
            let mut entry = if self.free.len() > REUSE_AFTER || self.fresh == SLOTS {
                self.free.pop_front().ok_or(StagsExhausted)?
            } else {
                let slot = self.fresh;
                self.fresh += 1;
                FreeSlot { slot, key: self.permutation.first_key(slot), keys_left: 256 }
            };
            let stag = self.permutation.apply(entry.slot) << 8 | u32::from(entry.key);
            entry.key = entry.key.wrapping_add(1);
            entry.keys_left -= 1;
            if stag == 0 || stag == u32::MAX {
                self.give_back(entry);
                continue;
            }
            self.issued.insert(stag, entry);
            return Ok(Stag(stag));
        }
    }

    /// Issues an STag of which every key is usable, for a window whose keys others choose.
    pub fn allocate_for_window(&mut self) -> Result<Stag, StagsExhausted> {
        loop {
            let stag = self.allocate()?;
            // Keys of these two would reach the values that are never issued.
            if stag.0 >> 8 != 0 && stag.0 >> 8 != SLOTS - 1 {
                return Ok(stag);
            }
            self.release(stag);
        }
    }

    /// Takes back a window's STag, whose last key was `last`: the next one to be issued follows that.
    pub fn release_window(&mut self, issued: Stag, last: Stag) {
        if let Some(entry) = self.issued.get_mut(&issued.0) {
            entry.key = (last.0 as u8).wrapping_add(1);
        }
        self.release(issued);
    }

    /// Takes back an STag that was issued; anything else is ignored.
    pub fn release(&mut self, stag: Stag) {
        if let Some(entry) = self.issued.remove(&stag.0) {
            self.give_back(entry);
        }
    }

    fn give_back(&mut self, entry: FreeSlot) {
        if entry.keys_left > 0 {
            self.free.push_back(entry);
        }
    }
}

/// A keyed permutation of 24-bit numbers: a Feistel network of eight rounds over two halves of 12.
struct Permutation {
    round_keys: [u64; 8],
    key_key: u64,
}

impl Permutation {
    fn new(seed: [u8; 32]) -> Self {
        // Expand the seed: each round key depends on all 32 octets.
        let word =
            |i: usize| u64::from_le_bytes(seed[i * 8..i * 8 + 8].try_into().unwrap_or([0; 8]));
        let mut state = word(0);
        let mut next = |round: usize| {
            for i in 0..4 {
                state = mix(state ^ word(i).rotate_left(round as u32 * 7 + 1));
            }
            state
        };
        Permutation { round_keys: std::array::from_fn(&mut next), key_key: next(8) }
    }

    fn apply(&self, slot: u32) -> u32 {
        let (mut l, mut r) = (slot >> 12 & 0xFFF, slot & 0xFFF);
        for k in self.round_keys {
            (l, r) = (r, l ^ (mix(k ^ u64::from(r)) as u32 & 0xFFF));
        }
        l << 12 | r
    }

    fn first_key(&self, slot: u32) -> u8 {
        mix(self.key_key ^ u64::from(slot)) as u8
    }
}

/// A bijective mixer with full avalanche (the finaliser of SplitMix64).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Against values of another program for the same seed; those of the mixer are the ones that
    /// are published for SplitMix64 from 0.
    #[test]
    fn permutation_and_first_keys_are_the_ones_meant() {
        assert_eq!(mix(0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(mix(0x9E37_79B9_7F4A_7C15), 0x6E78_9E6A_A1B9_65F4);
        let p = Permutation::new(std::array::from_fn(|i| i as u8));
        for (slot, permuted, key) in [
            (0, 0x30_BF6E, 0xA8),
            (1, 0x92_193F, 0x86),
            (0x12_3456, 0x4D_B4DB, 0xE0),
            (0xFF_FFFF, 0x25_29FD, 0x7F),
        ] {
            assert_eq!((p.apply(slot), p.first_key(slot)), (permuted, key), "{slot:#x}");
        }
    }

    #[test]
    fn permutation_is_one_to_one() {
        let p = Permutation::new([7; 32]);
        let mut seen = vec![false; SLOTS as usize];
        for slot in 0..SLOTS {
            let x = p.apply(slot) as usize;
            assert!(!seen[x], "slot {slot} collides");
            seen[x] = true;
        }
    }

    #[test]
    fn ten_thousand_stags_are_distinct_and_spread() {
        let mut a = StagAllocator::new([1; 32]);
        let stags: Vec<u32> = (0..10_000).map(|_| a.allocate().unwrap().0).collect();
        assert_eq!(stags.iter().collect::<HashSet<_>>().len(), stags.len());
        for sixteenth in 0..16u32 {
            let n = stags.iter().filter(|s| **s >> 28 == sixteenth).count();
            assert!((400..900).contains(&n), "{n} STags begin with {sixteenth:x}");
        }
        let steps: HashSet<u32> = stags.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect();
        assert!(steps.len() > 9_900, "a step repeats");
    }

    #[test]
    fn a_freed_stag_comes_back_late_and_never_the_same() {
        let mut a = StagAllocator::new([2; 32]);
        let first = a.allocate().unwrap();
        a.release(first);
        let mut seen = HashSet::from([first.0]);
        for _ in 0..3 * REUSE_AFTER {
            let s = a.allocate().unwrap();
            assert!(seen.insert(s.0), "{s} was issued twice");
            a.release(s);
        }
        assert!(seen.iter().any(|s| s >> 8 == first.0 >> 8 && *s != first.0), "slot never reused");
    }

    #[test]
    fn a_slot_waits_for_exactly_so_many_others() {
        let reused = |free: usize| {
            let mut a = StagAllocator::new([2; 32]);
            let all: Vec<Stag> = (0..free).map(|_| a.allocate().unwrap()).collect();
            all.iter().for_each(|stag| a.release(*stag));
            a.allocate().unwrap().0 >> 8 == all[0].0 >> 8
        };
        let seen = [REUSE_AFTER, REUSE_AFTER + 1, REUSE_AFTER + 2].map(reused);
        assert_eq!(seen, [false, true, true]);
    }

    #[test]
    fn keys_that_others_choose_reach_no_reserved_value() {
        let mut a = StagAllocator::new([5; 32]);
        let slot_of = |wanted| (0..SLOTS).find(|s| a.permutation.apply(*s) == wanted).unwrap();
        let slots = [slot_of(0), slot_of(SLOTS - 1), slot_of(77)];
        a.fresh = SLOTS;
        for slot in slots {
            a.give_back(FreeSlot { slot, key: 5, keys_left: 256 });
        }
        let issued = a.allocate_for_window().unwrap();
        assert_eq!(issued, Stag(77 << 8 | 5));
        // Somebody has counted it up; the next one begins behind that.
        a.release_window(issued, Stag(77 << 8 | 9));
        assert_eq!(a.allocate_for_window(), Ok(Stag(77 << 8 | 10)));
        // The other two are good for regions.
        let rest = [a.allocate(), a.allocate()].map(|stag| stag.unwrap().0 >> 8);
        assert_eq!(rest, [0, SLOTS - 1]);
    }

    #[test]
    fn a_slot_is_retired_when_its_keys_are_used_up() {
        let mut a = StagAllocator::new([3; 32]);
        a.give_back(FreeSlot { slot: 5, key: 9, keys_left: 0 });
        assert!(a.free.is_empty());
    }

    #[test]
    fn reserved_values_are_never_issued() {
        let mut a = StagAllocator::new([4; 32]);
        let zero = (0..SLOTS).find(|s| a.permutation.apply(*s) == 0).unwrap();
        for _ in 0..=REUSE_AFTER {
            a.give_back(FreeSlot { slot: zero, key: 0, keys_left: 1 });
        }
        a.fresh = SLOTS;
        assert_eq!(a.allocate(), Err(StagsExhausted));
    }
}
