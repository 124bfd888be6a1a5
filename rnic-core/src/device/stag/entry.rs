//! What one STag names, and who may use it.

use std::sync::Arc;

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
