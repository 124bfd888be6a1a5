//! The windows that a worker knows, and which of them are bound.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::entry::StagEntry;
use super::hash::{StagHash, shrink_sparse};
use crate::device::allocator::index;
use crate::device::window::{Binding, Window};
use crate::types::{QpId, Scope, SessionId, Stag};

/// Windows, bound or not. A bound one has an entry among the STags as well.
#[derive(Default)]
pub(super) struct Windows {
    /// By the 24 bits of their STag that stay.
    known: HashMap<u32, KnownWindow, StagHash>,
    /// STags of bound windows that only one QP uses, by that QP.
    of_qps: HashMap<QpId, BTreeSet<Stag>>,
}

/// A window as a worker knows it.
struct KnownWindow {
    window: Arc<Window>,
    /// The STag of its entry in this worker's table.
    bound: Option<Stag>,
}

impl Windows {
    /// Makes a window known.
    pub(super) fn add(&mut self, window: Arc<Window>) {
        let (stag, _) = window.view();
        self.known.insert(index(stag), KnownWindow { window, bound: None });
    }

    /// Forgets a window; the STag under which it is bound, if it is.
    pub(super) fn remove(&mut self, window: &Window) -> Option<Stag> {
        let (stag, _) = window.view();
        let known = self.known.remove(&index(stag))?;
        shrink_sparse(&mut self.known);
        known.bound
    }

    /// The window that has this STag, whatever the key.
    pub(super) fn find(&self, stag: Stag) -> Option<&Arc<Window>> {
        self.known.get(&index(stag)).map(|known| &known.window)
    }

    /// Adds the entry of a window to what is known of it; whether the window is still there.
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

    /// Takes the entry of a window that is gone out of what is known of it.
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

    /// Forgets which windows a QP has bound: their STags.
    pub(super) fn take_of(&mut self, qp: QpId) -> BTreeSet<Stag> {
        self.of_qps.remove(&qp).unwrap_or_default()
    }

    /// Forgets the windows of a session; their entries are gone already.
    pub(super) fn forget_session(&mut self, session: SessionId) {
        self.known.retain(|_, known| known.window.session() != session);
        shrink_sparse(&mut self.known);
    }
}

#[cfg(test)]
mod tests;
