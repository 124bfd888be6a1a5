//! What one STag names, and who may use it.

use std::sync::Arc;

use super::fault::{LocalFault, RemoteFault};
use crate::device::memory::{Memory, Target};
use crate::device::window::{Binding, WindowCount};
use crate::types::{Access, MrId, PdId, QpId, Scope, SessionId, Stag};

/// A memory region, or a window bound to one, as a worker knows it.
#[derive(Clone)]
pub struct StagEntry {
    /// STag by which peers name it (rkey); that of a region is its lkey, too.
    pub stag: Stag,
    /// Whether the STag is a region's or a window's.
    pub kind: StagKind,
    /// The region's handle.
    pub mr: MrId,
    /// Owner; only the owner may use it locally.
    pub session: SessionId,
    /// Protection domain; only QPs of this domain may use the STag.
    pub pd: PdId,
    /// Who may use it from the wire.
    pub scope: Scope,
    /// Rights of local requests and of peers; a window has its own.
    pub access: Access,
    /// First address, for local elements and remote offsets alike.
    pub iova: u64,
    /// Bytes; `iova + length` is below 2^64.
    pub length: u64,
    /// Memory it names, `length` bytes.
    pub memory: Memory,
}

/// What an STag stands for.
#[derive(Clone, Debug)]
pub enum StagKind {
    /// A region, with the count of windows bound to it.
    Region(Arc<WindowCount>),
    /// A window, bound to the entry's region.
    Window(Arc<Binding>),
}

impl StagKind {
    /// A region without windows.
    pub fn region() -> Self {
        StagKind::Region(Arc::default())
    }
}

/// The identity under which a QP uses memory.
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
    /// Whether its scope takes in this QP.
    pub(super) fn serves(&self, qp: QpId) -> bool {
        match self.scope {
            Scope::Pd => true,
            Scope::Qp(only) => only == qp,
        }
    }

    /// The memory of a local element, for who may use it. `write` asks for the right to write it.
    #[inline]
    pub(in crate::device) fn local(
        &self,
        who: Principal,
        addr: u64,
        len: u32,
        write: bool,
    ) -> Result<Target<'_>, LocalFault> {
        let is_region = matches!(self.kind, StagKind::Region(_));
        if !is_region || self.session != who.session || self.pd != who.pd || !self.serves(who.qp) {
            return Err(LocalFault::InvalidKey);
        }
        if write && !self.access.contains(Access::LOCAL_WRITE) {
            return Err(LocalFault::NoRight);
        }
        self.range(addr, u64::from(len)).ok_or(LocalFault::Bounds)
    }

    /// The memory of a range that a peer names, asking for `right`.
    #[inline]
    pub(in crate::device) fn remote(
        &self,
        who: Principal,
        to: u64,
        len: u64,
        right: Access,
    ) -> Result<Target<'_>, RemoteFault> {
        //= DDP-8.2-1, DDP-8.2-2, DDP-8.3.1-1, DDP-8.3.1-2, RDMAP-7.2-8, RDMAP-8.1.1-1
        //= RDMAP-8.1.1-2
        if self.pd != who.pd || !self.serves(who.qp) {
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

    /// Bytes from its start to `addr`, if it has `len` bytes from there on.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "at most the length, which is that of a piece of memory"
    )]
    pub(super) fn offset_of(&self, addr: u64, len: u64) -> Option<usize> {
        let from = addr.checked_sub(self.iova)?;
        (from.checked_add(len)? <= self.length).then_some(from as usize)
    }

    /// The `len` bytes from `addr` on, if it has them.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "at most the length, which is that of a piece of memory"
    )]
    pub(super) fn range(&self, addr: u64, len: u64) -> Option<Target<'_>> {
        let from = self.offset_of(addr, len)?;
        Some(self.memory.target(from as u64, len as usize, self.session))
    }
}
