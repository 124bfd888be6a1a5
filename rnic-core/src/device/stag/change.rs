//! STag changes that every worker must apply.

use std::fmt;
use std::sync::Arc;

use super::entry::{StagEntry, StagKind};
use crate::device::copier::Copier;
use crate::device::window::Window;
use rnic_abi::types::Stag;

/// A change to every worker's STag table, caused by a send request.
#[derive(Clone, Default)]
pub struct StagChange {
    pub(super) revoke: Option<Stag>,
    /// The copier of the revoked STag's memory, if only a copier can access that memory.
    pub(super) copier: Option<Arc<Copier>>,
    pub(super) install: Option<StagEntry>,
    /// The window that is changed, and its new STag.
    pub(super) window: Option<(Arc<Window>, Stag)>,
}

impl StagChange {
    /// Puts the window, if any, into its new state. Must be called after every worker has applied
    /// the change, and before the requesting QP continues.
    pub fn settle(&self) {
        let Some((window, stag)) = &self.window else { return };
        let to = self.install.as_ref().and_then(|entry| match &entry.kind {
            StagKind::Window(binding) => Some(binding.clone()),
            StagKind::Region(_) => None,
        });
        window.settle(*stag, to);
    }

    /// Returns the copier of the revoked memory, if any. Its jobs must also have ended before
    /// [`settle`](Self::settle) is called.
    pub fn copier(&self) -> Option<&Arc<Copier>> {
        self.copier.as_ref()
    }

    /// Returns the revoked STag, if any.
    pub fn revoked(&self) -> Option<Stag> {
        self.revoke
    }
}

impl fmt::Debug for StagChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StagChange { revoke, install, window, .. } = self;
        let install = install.as_ref().map(|entry| entry.stag);
        let window = window.as_ref().map(|(window, _)| window.id());
        write!(f, "revoke {revoke:?}, install {install:?} of window {window:?}")
    }
}
