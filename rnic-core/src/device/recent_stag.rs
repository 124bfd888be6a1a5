//! Caches the STag of the previous request, because successive requests often use the same memory.

use super::memory::Target;
use super::stag::{LocalFault, Principal, RemoteFault, StagEntry, StagTable};
use rnic_abi::types::{Access, Stag};

/// The last entry found in a table. The table cannot change while this borrows it. Compared with
/// [`StagTable::local`] and [`StagTable::remote`] this saves only the lookup: every check is
/// repeated.
pub struct RecentStag<'t> {
    table: &'t StagTable,
    last: Option<&'t StagEntry>,
}

impl<'t> RecentStag<'t> {
    /// Creates an empty cache.
    pub fn new(table: &'t StagTable) -> Self {
        RecentStag { table, last: None }
    }

    /// Like [`StagTable::local`].
    #[inline]
    pub fn local(
        &mut self,
        principal: Principal,
        lkey: u32,
        addr: u64,
        len: u32,
        write: bool,
    ) -> Result<Target<'t>, LocalFault> {
        let entry = self.find(Stag(lkey)).ok_or(LocalFault::InvalidKey)?;
        entry.local(principal, addr, len, write)
    }

    /// Like [`StagTable::remote`].
    #[inline]
    pub fn remote(
        &mut self,
        principal: Principal,
        stag: Stag,
        to: u64,
        len: u64,
        right: Access,
    ) -> Result<Target<'t>, RemoteFault> {
        let entry = self.find(stag).ok_or(RemoteFault::InvalidStag)?;
        entry.remote(principal, to, len, right)
    }

    #[inline]
    fn find(&mut self, stag: Stag) -> Option<&'t StagEntry> {
        if self.last.is_none_or(|last| last.stag != stag) {
            self.last = self.table.get(stag);
        }
        self.last
    }
}
