//! Memory windows: allocated and deallocated here, bound by send requests in the workers.

use std::sync::Arc;

use rnic_abi::abi::control::{ReplyBody, WindowRow};
use rnic_abi::types::*;
use rnic_core::device::Window;
use rnic_core::engine::EngineCommand;

use super::{Attached, MemoryWindow};
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::{Manager, Pending, find, refuse};

impl Manager {
    pub(in crate::resource) fn alloc_window(
        &mut self,
        id: SessionId,
        pd: PdId,
        kind: WindowKind,
    ) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let used = session.pd(pd)?.windows.add();
        let charge = session.account.charge(Kind::Windows, 1)?;
        let issued = self.stags.issue()?;
        let handle = self.handles.windows.allocate(id);
        let number = MwId(handle.number());
        let stag = issued.stag();
        let window = Arc::new(Window::new(number, id, pd, kind, stag));
        let ticket = self.workers.all_ticketed(|| EngineCommand::AddWindow(window.clone()));
        let object =
            MemoryWindow { window, _issued: issued, _pd: used, _handle: handle, _charge: charge };
        session.windows.insert(number, object);
        self.pending.insert(ticket, Pending::AllocWindow { session: id, window: number, stag });
        Outcome::later()
    }

    pub(in crate::resource) fn dealloc_window(&mut self, id: SessionId, window: MwId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object =
            session.windows.get(&window).ok_or_else(|| refuse::no_such("window", window.0))?;
        // A copier may still access the memory that the window is bound to.
        let copier = session.attached.as_ref().and_then(Attached::copier);
        let remove = || EngineCommand::RemoveWindow(object.window.clone());
        let ticket = self.workers.all_ticketed(remove);
        self.workers.await_copies(ticket, copier);
        self.pending.insert(ticket, Pending::DeallocWindow { session: id, window });
        Outcome::later()
    }

    /// Completes a deallocation after all workers have removed the window.
    pub(in crate::resource) fn window_gone(&mut self, id: SessionId, handle: MwId) {
        // If the session has since ended, the window was dropped with it.
        let Ok(session) = find(&mut self.sessions, id) else { return };
        let Some(object) = session.windows.remove(&handle) else { return };
        object.window.close();
        self.outbox.answer(id, ReplyBody::Done);
    }
}

pub fn window_row(session: SessionId, object: &MemoryWindow) -> WindowRow {
    let window = &object.window;
    let (stag, mr) = window.view();
    WindowRow { window: window.id(), session, pd: window.pd(), kind: window.kind(), stag, mr }
}
