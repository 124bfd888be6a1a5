//! Allocates numbers: handles and STags, which are unique on the device, and doorbell indices,
//! which are unique in a session.
//!
//! Each number is owned by a value that frees it when dropped, on any thread.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_abi::abi::control::Refusal;
use rnic_abi::abi::queue::doorbell;
use rnic_abi::types::{SessionId, Stag};
use rnic_core::device::StagAllocator;

use super::refuse;

/// Handles of one kind in use, with their owners.
#[derive(Clone, Debug, Default)]
pub struct Handles(Arc<Mutex<Numbers>>);

#[derive(Debug, Default)]
struct Numbers {
    /// Numbers up to this one are reserved.
    kept: u32,
    last: u32,
    owners: HashMap<u32, SessionId>,
}

/// A unique handle.
#[derive(Debug)]
#[must_use = "a dropped handle is freed at once"]
pub struct Handle {
    number: u32,
    of: Handles,
}

impl Handles {
    /// Returns the handles of QPs, which start at 2, because QPs 0 and 1 are for management.
    pub fn of_queue_pairs() -> Self {
        Handles(Arc::new(Mutex::new(Numbers { kept: 1, last: 1, ..Numbers::default() })))
    }

    /// Allocates a free handle. A handle is reused only after all others.
    pub fn allocate(&self, owner: SessionId) -> Handle {
        let numbers = &mut *self.0.lock();
        // Terminates: the configured limits allow far fewer objects than there are numbers.
        loop {
            numbers.last = (numbers.last % LAST).max(numbers.kept) + 1;
            if let Entry::Vacant(free) = numbers.owners.entry(numbers.last) {
                free.insert(owner);
                return Handle { number: numbers.last, of: self.clone() };
            }
        }
    }

    /// Returns the owner of an object.
    pub fn owner(&self, handle: u32) -> Option<SessionId> {
        self.0.lock().owners.get(&handle).copied()
    }
}

impl Handle {
    /// Returns the number that clients use.
    pub fn number(&self) -> u32 {
        self.number
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let owners = &mut self.of.0.lock().owners;
        owners.remove(&self.number);
        // A burst of objects must not leave a large table behind.
        if owners.capacity() > MOST_SPARE && owners.len() < owners.capacity() / 8 {
            owners.shrink_to(owners.len() * 2);
        }
    }
}

/// Handles are 24-bit numbers from 1, because verbs programs expect a `qp_num` of this width.
const LAST: u32 = (1 << 24) - 1;

/// STags of the device.
#[derive(Clone)]
pub struct Stags(Arc<Mutex<StagAllocator>>);

/// A unique STag, with any key.
#[must_use = "a dropped STag is freed at once"]
pub struct IssuedStag {
    stag: Stag,
    of: Stags,
}

impl Stags {
    /// Issues STags from `allocator`, which has issued none yet.
    pub fn new(allocator: StagAllocator) -> Self {
        Stags(Arc::new(Mutex::new(allocator)))
    }

    /// Issues an STag that no region or window uses.
    pub fn issue(&self) -> Result<IssuedStag, Refusal> {
        let issued = self.0.lock().allocate();
        let stag = issued.map_err(|error| refuse::system("cannot issue an STag", &error))?;
        Ok(IssuedStag { stag, of: self.clone() })
    }
}

impl IssuedStag {
    /// Returns the STag as issued.
    pub fn stag(&self) -> Stag {
        self.stag
    }
}

impl Drop for IssuedStag {
    fn drop(&mut self) {
        self.of.0.lock().release(self.stag);
    }
}

/// Doorbell indices of one session. The lowest free index is used first, so that few cache lines of
/// the page are in use.
#[derive(Clone, Debug, Default)]
pub struct Doorbells(Arc<Mutex<Indices>>);

#[derive(Debug, Default)]
struct Indices {
    fresh: u32,
    free: BTreeSet<u32>,
}

/// The doorbell index of a queue or a pair of queues.
#[derive(Debug)]
#[must_use = "a dropped index is freed at once"]
pub struct Doorbell {
    index: u32,
    of: Doorbells,
}

impl Doorbells {
    /// Allocates the lowest free index. Returns an error if the page has none.
    pub fn allocate(&self) -> Result<Doorbell, Refusal> {
        let index = self.0.lock().allocate().ok_or_else(|| Refusal::Limit {
            key: "doorbells of a session".to_owned(),
            limit: u64::from(doorbell::INDICES),
            used: u64::from(doorbell::INDICES),
            wanted: 1,
        })?;
        Ok(Doorbell { index, of: self.clone() })
    }
}

impl Indices {
    fn allocate(&mut self) -> Option<u32> {
        if let Some(index) = self.free.pop_first() {
            return Some(index);
        }
        (self.fresh < doorbell::INDICES).then(|| {
            self.fresh += 1;
            self.fresh - 1
        })
    }
}

impl Doorbell {
    /// Returns the index in the page.
    pub fn index(&self) -> u32 {
        self.index
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        self.of.0.lock().free.insert(self.index);
    }
}

/// Capacity up to which a table does not shrink.
const MOST_SPARE: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_is_reused_after_all_others() {
        let handles = Handles::default();
        handles.0.lock().last = LAST - 1;
        let a = SessionId(1);
        let last = handles.allocate(a);
        let first = handles.allocate(a);
        assert_eq!((last.number(), first.number()), (LAST, 1));
        drop(last);
        handles.0.lock().last = LAST - 1;
        handles.0.lock().owners.insert(2, a);
        let last = handles.allocate(a);
        let third = handles.allocate(a);
        assert_eq!((last.number(), third.number()), (LAST, 3));
        assert_eq!((handles.owner(3), handles.owner(4)), (Some(a), None));
    }

    #[test]
    fn qp_numbers_start_at_2() {
        let handles = Handles::of_queue_pairs();
        assert_eq!(handles.allocate(SessionId(1)).number(), 2);
        handles.0.lock().last = LAST;
        assert_eq!(handles.allocate(SessionId(1)).number(), 2);
    }

    #[test]
    fn doorbells_run_out_and_are_reused() {
        let doorbells = Doorbells::default();
        let mut all: Vec<Doorbell> = (0..doorbell::INDICES)
            .map(|_| doorbells.allocate().unwrap_or_else(|e| panic!("{e}")))
            .collect();
        assert!((0..).zip(&all).all(|(n, doorbell)| doorbell.index() == n));
        assert!(doorbells.allocate().is_err());
        drop(all.remove(77));
        assert_eq!(doorbells.allocate().map(|doorbell| doorbell.index()).ok(), Some(77));
    }
}
