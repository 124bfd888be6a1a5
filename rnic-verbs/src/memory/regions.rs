//! The regions of this process, by key: where the bytes of an element lie.
//!
//! The daemon checks every element itself. This is for small messages only, which are copied into
//! the request when they are posted instead of being fetched later by a system call: a program may
//! not change them in between.

use std::collections::HashMap;

use parking_lot::RwLock;
use rnic_client::{PdId, Sge};

/// All of them that are reached by system calls.
#[derive(Default)]
pub(crate) struct Regions {
    by_key: RwLock<HashMap<u32, Region>>,
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) pd: PdId,
    /// First address that elements name it by.
    pub(crate) iova: u64,
    /// Where that is in this process.
    pub(crate) address: u64,
    /// Bytes of it.
    pub(crate) length: u64,
}

impl Regions {
    pub(crate) fn insert(&self, key: u32, region: Region) {
        self.by_key.write().insert(key, region);
    }

    pub(crate) fn remove(&self, key: u32) {
        self.by_key.write().remove(&key);
    }

    /// Whether the daemon may write somewhere in a range by way of one of them.
    pub(crate) fn reach_into(&self, start: u64, end: u64) -> bool {
        let reaches = |r: &Region| r.address < end && start < r.address.saturating_add(r.length);
        self.by_key.read().values().any(reaches)
    }

    /// Where an element lies, if it names a region of this domain and lies in it.
    pub(crate) fn locate(&self, pd: PdId, element: &Sge) -> Option<u64> {
        let region = *self.by_key.read().get(&element.lkey)?;
        let offset = element.addr.checked_sub(region.iova)?;
        let end = offset.checked_add(element.length.into())?;
        (region.pd == pd && end <= region.length).then(|| region.address + offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_found_inside_of_regions_of_their_domain_alone() {
        let regions = Regions::default();
        let region = Region { pd: PdId(3), iova: 0x100, address: 0x7000, length: 16 };
        regions.insert(9, region);
        let at = |addr, length, lkey| Sge { addr, length, lkey };
        assert_eq!(regions.locate(PdId(3), &at(0x100, 16, 9)), Some(0x7000));
        assert_eq!(regions.locate(PdId(3), &at(0x10f, 1, 9)), Some(0x700f));
        for (pd, element) in [
            (3, at(0x100, 17, 9)),
            (3, at(0xff, 1, 9)),
            (3, at(u64::MAX, 1, 9)),
            (3, at(0x100, 1, 8)),
            (4, at(0x100, 1, 9)),
        ] {
            assert_eq!(regions.locate(PdId(pd), &element), None, "{element:?} in {pd}");
        }
        for (start, end, reached) in [
            (0x6000, 0x7001, true),
            (0x700f, 0x8000, true),
            (0x6000, 0x7000, false),
            (0x7010, 0x8000, false),
        ] {
            assert_eq!(regions.reach_into(start, end), reached, "{start:#x} to {end:#x}");
        }
        regions.remove(9);
        assert_eq!(regions.locate(PdId(3), &at(0x100, 1, 9)), None);
    }
}
