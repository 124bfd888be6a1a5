//! The windows of a worker's table, and their bindings.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::entry::StagEntry;
use super::hash::{StagHash, shrink_sparse};
use crate::device::allocator::index;
use crate::device::window::{Binding, Window};
use rnic_abi::types::{QpId, Scope, SessionId, Stag};

/// Windows, bound or not. A bound window also has an entry in the table.
#[derive(Default)]
pub(super) struct Windows {
    /// Windows by index: the 24 bits of the STag that do not change.
    known: HashMap<u32, KnownWindow, StagHash>,
    /// STags of bound type 2 windows, by the QP that bound them.
    of_qps: HashMap<QpId, BTreeSet<Stag>>,
}

/// A window in a worker's table.
struct KnownWindow {
    window: Arc<Window>,
    /// STag of its entry in this worker's table.
    bound: Option<Stag>,
}

impl Windows {
    /// Adds a window.
    pub(super) fn add(&mut self, window: Arc<Window>) {
        let (stag, _) = window.view();
        self.known.insert(index(stag), KnownWindow { window, bound: None });
    }

    /// Removes a window. Returns the STag under which it was bound; `None` if it was not bound.
    pub(super) fn remove(&mut self, window: &Window) -> Option<Stag> {
        let (stag, _) = window.view();
        let known = self.known.remove(&index(stag))?;
        shrink_sparse(&mut self.known);
        known.bound
    }

    /// Returns the window that has this STag, with any key.
    pub(super) fn find(&self, stag: Stag) -> Option<&Arc<Window>> {
        self.known.get(&index(stag)).map(|known| &known.window)
    }

    /// Records that a window is bound to an entry. Returns true if the window still exists.
    pub(super) fn note_bound(&mut self, entry: &StagEntry, binding: &Binding) -> bool {
        let Some(known) = self.known.get_mut(&index(entry.stag)) else { return false };
        if known.window.id() != binding.window() {
            return false;
        }
        known.bound = Some(entry.stag);
        if let Scope::Qp(qp) = entry.scope {
            self.of_qps.entry(qp).or_default().insert(entry.stag);
        }
        true
    }

    /// Records that the entry of a window was removed.
    pub(super) fn note_unbound(&mut self, entry: &StagEntry) {
        if let Some(known) = self.known.get_mut(&index(entry.stag))
            && known.bound == Some(entry.stag)
        {
            known.bound = None;
        }
        if let Scope::Qp(qp) = entry.scope
            && let Some(stags) = self.of_qps.get_mut(&qp)
        {
            stags.remove(&entry.stag);
            if stags.is_empty() {
                self.of_qps.remove(&qp);
            }
        }
    }

    /// Removes and returns the STags of the windows that a QP has bound.
    pub(super) fn take_of(&mut self, qp: QpId) -> BTreeSet<Stag> {
        self.of_qps.remove(&qp).unwrap_or_default()
    }

    /// Removes the windows of a session. Their entries have been removed already.
    pub(super) fn forget_session(&mut self, session: SessionId) {
        self.known.retain(|_, known| known.window.session() != session);
        shrink_sparse(&mut self.known);
    }
}

#[cfg(test)]
mod tests;
