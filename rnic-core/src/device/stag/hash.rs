//! Hash function of a worker's STag tables.
//!
//! A client can register until it gets suitable STags, and it chooses the key of a window. So it
//! could collect STags with equal hashes and make every lookup slow. To prevent this, the hash
//! depends on a secret of the table.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash, Hasher};

/// The secret of a table.
#[derive(Clone)]
pub(in crate::device) struct StagHash {
    /// Odd, so that the multiplication loses no bit.
    factor: u64,
}

impl StagHash {
    fn new(secret: u64) -> Self {
        StagHash { factor: secret | 1 }
    }
}

impl Default for StagHash {
    /// Takes the secret from the source that the standard library uses for its own hash tables.
    fn default() -> Self {
        StagHash::new(RandomState::new().hash_one(0u8))
    }
}

impl BuildHasher for StagHash {
    type Hasher = StagHasher;

    fn build_hasher(&self) -> StagHasher {
        StagHasher { state: 0, factor: self.factor }
    }
}

/// One multiplication by a secret. Two STags chosen without the secret have k equal bits in the
/// middle of the product with a probability of at most 2/2^k (Dietzfelbinger et al., 1997). The
/// table uses the low bits for its buckets, so `write_u32` rotates the middle bits there.
pub(in crate::device) struct StagHasher {
    state: u64,
    factor: u64,
}

impl Hasher for StagHasher {
    fn finish(&self) -> u64 {
        self.state
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u32(u32::from(*b));
        }
    }

    fn write_u32(&mut self, n: u32) {
        let product = (self.state ^ u64::from(n)).wrapping_mul(self.factor);
        self.state = product.rotate_right(32);
    }
}

/// Shrinks a table that is nearly empty but was large. Moving the remaining entries takes less time
/// than the growth did.
pub(super) fn shrink_sparse<K: Eq + Hash, V, S: BuildHasher>(table: &mut HashMap<K, V, S>) {
    if table.capacity() > SMALL && table.len() < table.capacity() / 8 {
        table.shrink_to(table.len() * 2);
    }
}

/// Capacity that a table may keep.
const SMALL: usize = 1024;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn hashes(secret: &StagHash, stags: impl Iterator<Item = u32>) -> Vec<u64> {
        stags.map(|n| secret.hash_one(n)).collect()
    }

    #[test]
    fn hashes_fill_both_ends_of_a_word() {
        let secret = StagHash::new(0xBB67_AE85_84CA_A73B);
        // STags that differ only in some bits, as an attacker may collect them. The last set is a
        // window with all its keys.
        for (count, shift) in [(4096, 20), (4096, 17), (4096, 8), (256, 0)] {
            let hashes = hashes(&secret, (0..count).map(|n| 0x1234_5678 ^ n << shift));
            assert_eq!(hashes.iter().collect::<HashSet<_>>().len(), count as usize);
            // The bits that select a bucket of the hash table, and the bits of its control bytes.
            // Even in the worst case only a few of 4096 collected STags collide.
            let (buckets, least) = if count == 256 { (0xFF, 120) } else { (0xFFF, 500) };
            let low: HashSet<u64> = hashes.iter().map(|h| h & buckets).collect();
            let high: HashSet<u64> = hashes.iter().map(|h| h >> 57).collect();
            assert!(low.len() > least, "{} buckets, shift {shift}", low.len());
            assert!(high.len() > 80, "{} control bytes, shift {shift}", high.len());
        }
    }

    #[test]
    fn collisions_differ_between_tables() {
        // Fractional parts of the square roots of 3 and 7.
        let one = StagHash::new(0xBB67_AE85_84CA_A73B);
        let other = StagHash::new(0xA54F_F53A_5F1D_36F1);
        let bucket = |secret: &StagHash, n| secret.hash_one(n) & 0xFFFF;
        let gathered: Vec<u32> = (1..1 << 24).filter(|n| bucket(&one, *n) == 7).take(100).collect();
        assert_eq!(gathered.len(), 100);
        let elsewhere: HashSet<u64> = gathered.iter().map(|n| bucket(&other, *n)).collect();
        assert!(elsewhere.len() > 90, "{} places", elsewhere.len());
        let [a, b] = [StagHash::default(), StagHash::default()];
        assert_ne!(a.hash_one(1u32), b.hash_one(1u32), "every table has a secret of its own");
    }

    #[test]
    fn every_hashed_byte_counts() {
        let secret = StagHash::default();
        let all: HashSet<u64> = (0..=255u8)
            .map(|n| {
                let mut hasher = secret.build_hasher();
                hasher.write(&[1, n, 2]);
                hasher.finish()
            })
            .collect();
        assert_eq!(all.len(), 256);
    }
}
