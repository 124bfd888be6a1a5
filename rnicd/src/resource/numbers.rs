//! Numbers: handles that are unique on the device, and doorbell indices that are unique in a
//! session. The manager calls it; it knows nothing about what they name.

use std::collections::{BTreeSet, HashMap};

use rnic_core::abi::queue::doorbell;
use rnic_core::types::SessionId;

/// Handles of one kind in use, and whose they are.
#[derive(Debug, Default)]
pub struct Handles {
    last: u32,
    owners: HashMap<u32, SessionId>,
}

impl Handles {
    /// A handle that nothing has, late after it was last given back.
    pub fn allocate(&mut self, owner: SessionId) -> u32 {
        // Ends: configured limits keep far fewer objects than there are numbers.
        loop {
            self.last = self.last % LAST + 1;
            if let std::collections::hash_map::Entry::Vacant(free) = self.owners.entry(self.last) {
                free.insert(owner);
                return self.last;
            }
        }
    }

    /// Gives a handle back.
    pub fn release(&mut self, handle: u32) {
        self.owners.remove(&handle);
    }

    /// Whose object this is.
    pub fn owner(&self, handle: u32) -> Option<SessionId> {
        self.owners.get(&handle).copied()
    }
}

/// Handles are 24-bit numbers, from 1: that is how wide verbs programs expect a `qp_num`.
const LAST: u32 = (1 << 24) - 1;

/// Doorbell indices of one session, the lowest free one first: a busy page has few leaf lines.
#[derive(Debug, Default)]
pub struct Doorbells {
    fresh: u32,
    free: BTreeSet<u32>,
}

impl Doorbells {
    /// An index nothing uses, if the page has one.
    pub fn allocate(&mut self) -> Option<u32> {
        if let Some(index) = self.free.pop_first() {
            return Some(index);
        }
        (self.fresh < doorbell::INDICES).then(|| {
            self.fresh += 1;
            self.fresh - 1
        })
    }

    /// Gives an index back.
    pub fn release(&mut self, index: u32) {
        self.free.insert(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_comes_back_only_after_all_others() {
        let mut handles = Handles { last: LAST - 1, ..Handles::default() };
        let a = SessionId(1);
        assert_eq!((handles.allocate(a), handles.allocate(a)), (LAST, 1));
        handles.release(LAST);
        handles.last = LAST - 1;
        handles.owners.insert(2, a);
        assert_eq!((handles.allocate(a), handles.allocate(a)), (LAST, 3));
        assert_eq!((handles.owner(3), handles.owner(4)), (Some(a), None));
    }

    #[test]
    fn doorbells_run_out_and_are_reused() {
        let mut doorbells = Doorbells::default();
        for n in 0..doorbell::INDICES {
            assert_eq!(doorbells.allocate(), Some(n));
        }
        assert_eq!(doorbells.allocate(), None);
        doorbells.release(77);
        assert_eq!(doorbells.allocate(), Some(77));
    }
}
