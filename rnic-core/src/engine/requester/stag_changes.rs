//! Send requests that change STags: local invalidate, and bind of windows.
//!
//! An STag that only this QP may use changes immediately, on this worker. An STag that the whole
//! domain shares is in use on other workers, so this and all later requests wait until every worker
//! has changed its table. After the completion no access uses the old STag.

use super::Requester;
use super::in_flight::Progress;
use crate::device::StagChange;
use crate::device::window::{BindFault, BindRequest};
use crate::engine::interface::Broadcast;
use crate::engine::qp_core::QpCore;
use crate::engine::reason::Reason;
use crate::engine::schedule::CHANGE_COST;
use crate::engine::state::EngineState;
use rnic_abi::abi::queue::{SendFlags, WindowParams};
use rnic_abi::shm::queue::SendEntry;
use rnic_abi::types::{Access, CompletionStatus, Stag};

impl Requester {
    /// Invalidates an STag of this QP: a region, or a window of type 2 that it has bound.
    pub(in crate::engine) fn invalidate_locally(
        &mut self,
        stag: Stag,
        seq: u64,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<(), Reason> {
        core.place_pending(engine);
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
            return Err(Reason::BindSges);
        }
        core.place_pending(engine);
        let window = Stag(h.rkey);
        let new = Stag(h.inv_rkey);
        let WindowParams { address, length, lkey, access } = WindowParams::from_params(h.params);
        let request = BindRequest { window, new, address, length, lkey, access };
        let refused = |fault| Reason::Bind { fault, window, address, length };
        // A zero-length bind unbinds, regardless of its region.
        let region = engine.stags.get(Stag(lkey)).filter(|e| e.session == core.session);
        if core.transport.restricts_stags()
            && length > 0
            && region.is_some_and(|e| e.access.contains(Access::ZERO_BASED))
        {
            return Err(refused(BindFault::ZeroBased));
        }
        let change = engine.stags.bind(core.principal(), &request).map_err(refused)?;
        self.change_stags(change, seq, core, engine);
        Ok(())
    }

    /// Completes a request, or makes it wait until every worker has applied `change`.
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
                    self.request_change(core, engine);
                }
                Progress::Waiting
            }
        };
        if let Some(request) = self.in_flight.get_mut(seq) {
            request.progress = progress;
        }
    }

    /// Requests the change at the head of the list, or queues the QP if too many changes of this
    /// user are in progress. Each change takes time on the control thread and on every worker.
    fn request_change(&self, core: &QpCore, engine: &mut EngineState) {
        let Some(user) = engine.schedule.user(core.slot) else { return };
        if let Some((_, change)) = self.changing.front()
            && engine.changes.may_begin(user, core.id)
        {
            let change = Box::new(change.clone());
            engine.broadcast(Broadcast::ChangeStags { qp: core.id, change });
        }
    }

    /// Requests the change that this QP waits for, in its turn. Returns true if it still waits.
    pub(in crate::engine) fn request_delayed_change(
        &self,
        core: &QpCore,
        engine: &mut EngineState,
    ) -> bool {
        let waits = !self.changing.is_empty();
        if waits {
            self.request_change(core, engine);
        }
        waits
    }

    /// Completes the request at the head of the list, whose change every worker has applied.
    /// Returns false if the list is empty.
    pub(in crate::engine) fn stags_changed(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
    ) -> bool {
        let Some((seq, _)) = self.changing.pop_front() else { return false };
        if let Some(request) = self.in_flight.get_mut(seq) {
            request.progress = Progress::Done(CompletionStatus::Success);
        }
        self.request_change(core, engine);
        true
    }
}
