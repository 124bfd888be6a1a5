//! The entry of one STag: its memory and its users.

use std::sync::Arc;

use super::fault::{LocalFault, RemoteFault};
use crate::device::memory::{Memory, Target};
use crate::device::window::{Binding, WindowCount};
use rnic_abi::types::{Access, MrId, PdId, QpId, Scope, SessionId, Stag};

/// A memory region, or a window bound to a region, as a worker sees it.
#[derive(Clone)]
pub struct StagEntry {
    /// STag in requests of peers (rkey). For a region it is also the lkey.
    pub stag: Stag,
    /// Region or window.
    pub kind: StagKind,
    /// Handle of the region; for a window, of the region it is bound to.
    pub mr: MrId,
    /// Owner. Local requests of other sessions may not use it.
    pub session: SessionId,
    /// Protection domain. Only QPs of this domain may use the STag.
    pub pd: PdId,
    /// QPs that may use it, for themselves and for their peers.
    pub scope: Scope,
    /// Access rights of local requests and of peers. A window has its own.
    pub access: Access,
    /// First address in SGEs and remote offsets.
    pub iova: u64,
    /// Length in bytes. `iova + length` is below 2^64.
    pub length: u64,
    /// Location of the bytes.
    pub memory: Memory,
}

/// Kind of object to which an STag refers.
#[derive(Clone, Debug)]
pub enum StagKind {
    /// A region, with the count of windows bound to it.
    Region(Arc<WindowCount>),
    /// A window, bound to the entry's region.
    Window(Arc<Binding>),
}

impl StagKind {
    /// Returns the kind of a region without windows.
    pub fn region() -> Self {
        StagKind::Region(Arc::default())
    }
}

/// The identity with which a QP accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Principal {
    /// Owner of the QP.
    pub session: SessionId,
    /// Protection domain of the QP.
    pub pd: PdId,
    /// Number of the QP, for regions whose scope is one QP.
    pub qp: QpId,
}

impl StagEntry {
    /// Returns true if the scope includes this QP.
    pub(super) fn serves(&self, qp: QpId) -> bool {
        match self.scope {
            Scope::Pd => true,
            Scope::Qp(only) => only == qp,
        }
    }

    /// Returns the memory of a local SGE if `principal` may use it. If `write` is true, the region
    /// must allow local writes.
    #[inline]
    pub(in crate::device) fn local(
        &self,
        principal: Principal,
        addr: u64,
        len: u32,
        write: bool,
    ) -> Result<Target<'_>, LocalFault> {
        let is_region = matches!(self.kind, StagKind::Region(_));
        if !is_region
            || self.session != principal.session
            || self.pd != principal.pd
            || !self.serves(principal.qp)
        {
            return Err(LocalFault::InvalidKey);
        }
        if write && !self.access.contains(Access::LOCAL_WRITE) {
            return Err(LocalFault::NoRight);
        }
        self.range(addr, u64::from(len)).ok_or(LocalFault::Bounds)
    }

    /// Returns the memory of a range in a peer's request. The entry must have `right`.
    #[inline]
    pub(in crate::device) fn remote(
        &self,
        principal: Principal,
        to: u64,
        len: u64,
        right: Access,
    ) -> Result<Target<'_>, RemoteFault> {
        //= DDP-8.2-1, DDP-8.2-2, DDP-8.3.1-1, DDP-8.3.1-2, RDMAP-7.2-8, RDMAP-8.1.1-1
        //= RDMAP-8.1.1-2
        if self.pd != principal.pd || !self.serves(principal.qp) {
            return Err(RemoteFault::NotAssociated);
        }
        //= DDP-7.1-12
        if !self.access.contains(right) {
            return Err(RemoteFault::NoRight);
        }
        //= DDP-7.1-15, RDMAP-7.2-11
        to.checked_add(len).ok_or(RemoteFault::Wrap)?;
        //= DDP-7.1-13, DDP-7.1-14, DDP-8.1-1, DDP-8.3.1-3, RDMAP-7.2-9, RDMAP-7.2-10, RDMAP-8.1.1-3
        self.range(to, len).ok_or(RemoteFault::Bounds)
    }

    /// Returns the offset of `addr` in the memory, or `None` if the `len` bytes at `addr` are not
    /// within it.
    #[expect(clippy::cast_possible_truncation, reason = "at most the length of the memory")]
    pub(super) fn offset_of(&self, addr: u64, len: u64) -> Option<usize> {
        let from = addr.checked_sub(self.iova)?;
        (from.checked_add(len)? <= self.length).then_some(from as usize)
    }

    /// Returns the `len` bytes at `addr`, or `None` if they are not within the memory.
    #[expect(clippy::cast_possible_truncation, reason = "at most the length of the memory")]
    pub(super) fn range(&self, addr: u64, len: u64) -> Option<Target<'_>> {
        let from = self.offset_of(addr, len)?;
        Some(self.memory.target(from as u64, len as usize, self.session))
    }
}
