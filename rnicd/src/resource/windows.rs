//! Memory windows: made and taken back here, bound by send requests in the workers.

use std::sync::Arc;

use rnic_core::abi::control::{ReplyBody, WindowRow};
use rnic_core::device::Window;
use rnic_core::types::*;

use super::attach::Attached;
use super::ledger::Kind;
use super::session::{MemoryWindow, Session};
use super::{Answer, Given, Manager, Pending, find, refuse};

impl Manager {
    pub(super) fn alloc_window(&mut self, id: SessionId, pd: PdId, kind: WindowKind) -> Answer {
        let session = find(&mut self.sessions, id)?;
        session.pd(pd)?;
        self.ledger.charge(&mut session.counts, Kind::Windows, 1)?;
        let issued = match self.stags.allocate() {
            Ok(stag) => stag,
            Err(error) => {
                self.ledger.credit(&mut session.counts, Kind::Windows, 1);
                return Err(refuse::system("cannot issue an STag", &error));
            }
        };
        let handle = MwId(self.handles.windows.allocate(id));
        let window = Arc::new(Window::new(handle, id, pd, kind, issued));
        session.pd(pd)?.windows += 1;
        session.windows.insert(handle, MemoryWindow { window: window.clone(), issued });
        let ticket = self.workers.add_window(&window);
        let pending = Pending::AllocWindow { session: id, window: handle, stag: issued };
        self.pending.insert(ticket, pending);
        Given::later()
    }

    pub(super) fn dealloc_window(&mut self, id: SessionId, window: MwId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object =
            session.windows.get(&window).ok_or_else(|| refuse::no_such("window", window.0))?;
        // A mover may be at work on what it is bound to, if it is.
        let mover = session.attached.as_ref().and_then(Attached::mover);
        let ticket = self.workers.remove_window(&object.window);
        self.workers.await_moves(ticket, mover);
        self.pending.insert(ticket, Pending::DeallocWindow { session: id, window });
        Given::later()
    }

    /// No worker knows the window any more.
    pub(super) fn window_gone(&mut self, id: SessionId, handle: MwId) {
        // A session that has ended meanwhile gives everything back itself.
        let Ok(session) = find(&mut self.sessions, id) else { return };
        let Some(MemoryWindow { window, issued }) = session.windows.remove(&handle) else { return };
        window.close();
        if let Some(pd) = session.pds.get_mut(&window.pd()) {
            pd.windows -= 1;
        }
        self.ledger.credit(&mut session.counts, Kind::Windows, 1);
        self.stags.release(issued);
        self.handles.windows.release(handle.0);
        self.answers.push_back((id, ReplyBody::Done.into()));
    }

    /// Gives back what a session that has ended had in windows.
    pub(super) fn release_windows(&mut self, session: &Session) {
        for (handle, MemoryWindow { issued, .. }) in &session.windows {
            self.stags.release(*issued);
            self.handles.windows.release(handle.0);
        }
    }
}

pub(super) fn window_row(session: SessionId, object: &MemoryWindow) -> WindowRow {
    let window = &object.window;
    let (stag, mr) = window.view();
    WindowRow { window: window.id(), session, pd: window.pd(), kind: window.kind(), stag, mr }
}
