//! Send requests that change STags instead of moving data: local invalidate, and binding windows.
//!
//! An STag that only this QP uses lives on this worker and is changed at once. One that the domain
//! shares is in use elsewhere, so the request and all behind it wait until every worker has changed
//! its table: when the completion is there, nothing lands through what was taken away.

use super::Requester;
use super::in_flight::Progress;
use crate::abi::queue::{SendFlags, WindowParams};
use crate::device::StagChange;
use crate::device::window::{BindFault, BindRequest};
use crate::engine::interface::Notification;
use crate::engine::qp_core::QpCore;
use crate::engine::reason::Reason;
use crate::engine::schedule::CHANGE_COST;
use crate::engine::state::EngineState;
use crate::shm::queue::SendEntry;
use crate::types::{Access, CompletionStatus, Stag};

impl Requester {
    /// Invalidates an STag of this QP's own: a region, or a window of type 2 that it has bound.
    pub(in crate::engine) fn invalidate_locally(
        &mut self,
        stag: Stag,
        seq: u64,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<(), Reason> {
        let change = engine
            .stags
            .invalidate_by_owner(core.principal(), stag)
            .map_err(|fault| Reason::NotOwned { fault, stag })?;
        self.change_stags(change, seq, core, engine);
        Ok(())
    }

    /// Binds or unbinds a window.
    pub(in crate::engine) fn bind_window(
        &mut self,
        entry: &SendEntry,
        seq: u64,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<(), Reason> {
        let h = &entry.header;
        let inline = h.flags & SendFlags::INLINE.bits() != 0;
        if inline || h.num_sge != 0 || h.remote_addr != 0 {
            return Err(Reason::BindElements);
        }
        let (window, new) = (Stag(h.rkey), Stag(h.inv_rkey));
        let WindowParams { address, length, lkey, access } = WindowParams::from_params(h.params);
        let request = BindRequest { window, new, address, length, lkey, access };
        let refused = |fault| Reason::Bind { fault, window, address, length };
        // As the kernel's `rxe_check_bind_mw`. No RFC forbids it to iWARP. A bind of no bytes
        // unbinds, whatever region it names.
        let region = engine.stags.get(Stag(lkey)).filter(|e| e.session == core.session);
        if self.by_hand
            && length > 0
            && region.is_some_and(|e| e.access.contains(Access::ZERO_BASED))
        {
            return Err(refused(BindFault::ZeroBased));
        }
        let change = engine.stags.bind(core.principal(), &request).map_err(refused)?;
        self.change_stags(change, seq, core, engine);
        Ok(())
    }

    /// A request is done, or when every worker has carried this out.
    fn change_stags(
        &mut self,
        change: Option<StagChange>,
        seq: u64,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) {
        let progress = match change {
            None => Progress::Done(CompletionStatus::Success),
            Some(change) => {
                self.changing.push_back((seq, change));
                core.turn.charge(CHANGE_COST);
                if self.changing.len() == 1 {
                    self.ask_for_change(core, engine);
                }
                Progress::Waiting
            }
        };
        if let Some(request) = self.in_flight.get_mut(seq) {
            request.progress = progress;
        }
    }

    /// Asks for the change at the head of the list, or has it asked for when fewer of this user's
    /// are under way: each takes the control thread and every worker some time.
    fn ask_for_change(&self, core: &QpCore, engine: &mut EngineState) {
        let Some(user) = engine.schedule.user(core.seat) else { return };
        if let Some((_, change)) = self.changing.front()
            && engine.changes.may_ask(user, core.id)
        {
            let change = Box::new(change.clone());
            engine.report(Notification::ChangeStags { qp: core.id, change });
        }
    }

    /// It is this QP's turn to ask for the change that it waits for; whether it still does.
    pub(in crate::engine) fn ask_at_last(&self, core: &QpCore, engine: &mut EngineState) -> bool {
        let waits = !self.changing.is_empty();
        if waits {
            self.ask_for_change(core, engine);
        }
        waits
    }

    /// Every worker has carried out the change at the head of the list; whether there was one.
    pub(in crate::engine) fn stags_changed(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
    ) -> bool {
        let Some((seq, _)) = self.changing.pop_front() else { return false };
        if let Some(request) = self.in_flight.get_mut(seq) {
            request.progress = Progress::Done(CompletionStatus::Success);
        }
        self.ask_for_change(core, engine);
        true
    }
}
