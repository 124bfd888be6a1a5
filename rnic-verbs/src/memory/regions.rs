//! The memory regions of this process by key, to find the address of an SGE.
//!
//! Only small messages need this: posting copies their bytes into the request, which saves the
//! daemon a system call. The daemon itself checks every SGE.

use std::collections::HashMap;

use parking_lot::RwLock;
use rnic_client::{PdId, Sge};

/// All regions.
#[derive(Default)]
pub(crate) struct Regions {
    by_key: RwLock<HashMap<u32, Region>>,
}

/// A region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) pd: PdId,
    /// First address of the region in SGEs.
    pub(crate) iova: u64,
    /// Address of the same byte in this process.
    pub(crate) address: u64,
    /// Length in bytes.
    pub(crate) length: u64,
}

impl Regions {
    pub(crate) fn insert(&self, key: u32, region: Region) {
        self.by_key.write().insert(key, region);
    }

    pub(crate) fn remove(&self, key: u32) {
        self.by_key.write().remove(&key);
    }

    /// Returns the address of an SGE in this process, if it lies within a region of this PD.
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
    fn locate_checks_bounds_and_pd() {
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
        regions.remove(9);
        assert_eq!(regions.locate(PdId(3), &at(0x100, 1, 9)), None);
    }
}
