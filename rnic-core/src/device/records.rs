//! Numbered records of many owners, and a ring that evicts fairly.
//!
//! [`Records`] finds a record by its number and returns the newest records of one owner, or of all,
//! in pages. A query visits only the records that it returns, regardless of the total number.
//! [`FairRing`] selects the record to evict when a record is added. Neither uses a clock or the
//! contents of a record. [`DiagnosisLog`](super::DiagnosisLog) and the daemon's event list use
//! them.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::hash::Hash;

/// Records by number, each with its owner.
#[derive(Debug)]
pub struct Records<K, T> {
    all: BTreeMap<u64, (K, T)>,
    owners: HashMap<K, BTreeSet<u64>>,
}

impl<K, T> Default for Records<K, T> {
    fn default() -> Self {
        Records { all: BTreeMap::new(), owners: HashMap::new() }
    }
}

impl<K: Copy + Eq + Hash, T> Records<K, T> {
    /// Adds a record under an unused number.
    pub fn insert(&mut self, number: u64, owner: K, record: T) {
        self.owners.entry(owner).or_default().insert(number);
        let old = self.all.insert(number, (owner, record));
        debug_assert!(old.is_none(), "record {number} was made twice");
    }

    /// Removes the record with this number, if it exists.
    pub fn remove(&mut self, number: u64) {
        let Some((owner, _)) = self.all.remove(&number) else { return };
        if let Some(numbers) = self.owners.get_mut(&owner) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.owners.remove(&owner);
            }
        }
    }

    /// Returns the record with this number.
    pub fn get(&self, number: u64) -> Option<&T> {
        self.all.get(&number).map(|(_, record)| record)
    }

    /// Returns the records with numbers below `before`, newest first, of one owner or of all.
    pub fn newest(&self, owner: Option<K>, before: u64) -> impl Iterator<Item = &T> {
        let of_all = match owner {
            None => Some(self.all.range(..before).rev().map(|(_, (_, record))| record)),
            Some(_) => None,
        };
        let numbers = owner.and_then(|owner| self.owners.get(&owner));
        let of_one = numbers.map(|numbers| numbers.range(..before).rev());
        let of_one = of_one.into_iter().flatten().filter_map(|number| self.get(*number));
        of_all.into_iter().flatten().chain(of_one)
    }

    /// Returns the number of records of one owner or of all.
    pub fn len(&self, owner: Option<K>) -> usize {
        match owner {
            None => self.all.len(),
            Some(owner) => self.owners.get(&owner).map_or(0, BTreeSet::len),
        }
    }
}

/// A ring shared by several owners. When it is full, the owner with the most items loses its oldest
/// item, so an owner that floods the ring evicts its own items.
#[derive(Debug)]
pub struct FairRing<K, T> {
    most: usize,
    len: usize,
    queues: HashMap<K, VecDeque<T>>,
    /// Owners, sorted by their number of items.
    sizes: BTreeSet<(usize, K)>,
}

impl<K: Copy + Eq + Hash + Ord, T> FairRing<K, T> {
    /// Creates a ring of at most `most` items, at least 1.
    pub fn new(most: usize) -> Self {
        let queues = HashMap::new();
        let sizes = BTreeSet::new();
        FairRing { most: most.max(1), len: 0, queues, sizes }
    }

    /// Adds the newest item. Returns the evicted item, if the ring was full.
    pub fn push(&mut self, owner: K, item: T) -> Option<T> {
        let displaced = if self.len >= self.most { self.pop() } else { None };
        let queue = self.queues.entry(owner).or_default();
        self.sizes.remove(&(queue.len(), owner));
        queue.push_back(item);
        self.sizes.insert((queue.len(), owner));
        self.len += 1;
        displaced
    }

    /// Removes and returns the oldest item of the owner with the most items.
    fn pop(&mut self) -> Option<T> {
        let (_, largest) = self.sizes.pop_last()?;
        let queue = self.queues.get_mut(&largest)?;
        let oldest = queue.pop_front();
        match queue.len() {
            0 => drop(self.queues.remove(&largest)),
            len => drop(self.sizes.insert((len, largest))),
        }
        self.len -= 1;
        oldest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An owner that once had many items loses none while others have more.
    #[test]
    fn the_owner_with_the_most_is_evicted() {
        let mut ring = FairRing::new(5);
        let mut there: Vec<(usize, &str)> = Vec::new();
        let owners = ["a", "a", "a", "a", "a", "b", "b", "b", "c"];
        for (number, owner) in owners.into_iter().enumerate() {
            if let Some(gone) = ring.push(owner, number) {
                there.retain(|(number, _)| *number != gone);
            }
            there.push((number, owner));
        }
        assert_eq!(there, [(3, "a"), (4, "a"), (6, "b"), (7, "b"), (8, "c")]);
    }

    #[test]
    fn a_ring_of_one_item_keeps_the_newest() {
        let mut ring = FairRing::new(0);
        assert_eq!(
            (ring.push("a", 1), ring.push("b", 2), ring.push("b", 3)),
            (None, Some(1), Some(2))
        );
    }

    #[test]
    fn pages_of_one_owner_newest_first() {
        let mut records = Records::default();
        for number in 1..=9 {
            records.insert(number, number % 2, number * 10);
        }
        let page =
            |owner, before| records.newest(owner, before).take(3).copied().collect::<Vec<_>>();
        assert_eq!(page(None, u64::MAX), [90, 80, 70]);
        assert_eq!(page(None, 3), [20, 10]);
        assert_eq!(page(Some(1), u64::MAX), [90, 70, 50]);
        assert_eq!(page(Some(1), 5), [30, 10]);
        assert!(page(Some(2), u64::MAX).is_empty());
        assert_eq!((records.len(None), records.len(Some(0)), records.len(Some(2))), (9, 4, 0));
    }

    #[test]
    fn a_removed_record_is_in_no_index() {
        let mut records = Records::default();
        records.insert(1, "a", ());
        records.remove(1);
        records.remove(1);
        assert!(records.get(1).is_none() && records.owners.is_empty());
    }
}
