//! Changes of STags that every worker has to make.

use std::fmt;
use std::sync::Arc;

use super::entry::{StagEntry, StagKind};
use crate::device::copier::Copier;
use crate::device::window::Window;
use crate::types::Stag;

/// A change of the STag table of every worker, asked for by a send request.
#[derive(Clone, Default)]
pub struct StagChange {
    pub(super) revoke: Option<Stag>,
    /// The copier that alone reaches the memory of what is revoked.
    pub(super) copier: Option<Arc<Copier>>,
    pub(super) install: Option<StagEntry>,
    /// The window that changes, and the STag it then has.
    pub(super) window: Option<(Arc<Window>, Stag)>,
}

impl StagChange {
    /// Every worker has carried it out: the window, if it is one, is in its new state. To be called
    /// before the QP that asked goes on.
    pub fn settle(&self) {
        let Some((window, stag)) = &self.window else { return };
        let to = self.install.as_ref().and_then(|entry| match &entry.kind {
            StagKind::Window(binding) => Some(binding.clone()),
            StagKind::Region(_) => None,
        });
        window.settle(*stag, to);
    }

    /// The copier that may be at work on what stops to work here: its jobs must be over as well
    /// before this is settled.
    pub fn copier(&self) -> Option<&Arc<Copier>> {
        self.copier.as_ref()
    }

    /// The STag that stops to work, if one does.
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
