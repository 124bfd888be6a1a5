//! The STag of the last request, remembered: requests in a row are mostly about the same memory.

use super::memory::Target;
use super::stag::{LocalFault, Principal, RemoteFault, StagEntry, StagTable};
use crate::types::{Access, Stag};

/// An entry of a table that was looked up last. While it is remembered the table cannot change, and
/// of what [`StagTable::local`] and [`StagTable::remote`] do it saves the look-up only: every check
/// is made anew.
pub struct RecentStag<'t> {
    table: &'t StagTable,
    last: Option<&'t StagEntry>,
}

impl<'t> RecentStag<'t> {
    /// Nothing is remembered yet.
    pub fn new(table: &'t StagTable) -> Self {
        RecentStag { table, last: None }
    }

    /// As [`StagTable::local`].
    #[inline]
    pub fn local(
        &mut self,
        who: Principal,
        lkey: u32,
        addr: u64,
        len: u32,
        write: bool,
    ) -> Result<Target<'t>, LocalFault> {
        let entry = self.find(Stag(lkey)).ok_or(LocalFault::InvalidKey)?;
        entry.local(who, addr, len, write)
    }

    /// As [`StagTable::remote`].
    #[inline]
    pub fn remote(
        &mut self,
        who: Principal,
        stag: Stag,
        to: u64,
        len: u64,
        right: Access,
    ) -> Result<Target<'t>, RemoteFault> {
        let entry = self.find(stag).ok_or(RemoteFault::InvalidStag)?;
        entry.remote(who, to, len, right)
    }

    #[inline]
    fn find(&mut self, stag: Stag) -> Option<&'t StagEntry> {
        if self.last.is_none_or(|last| last.stag != stag) {
            self.last = self.table.get(stag);
        }
        self.last
    }
}
