//! Send requests that change STags instead of moving data: local invalidate, and binding windows.
//!
//! An STag that only this QP uses lives on this worker and is changed at once. One that the domain
//! shares is in use elsewhere, so the request and all behind it wait until every worker has changed
//! its table: when the completion is there, nothing lands through what was taken away.

use super::ledger::Progress;
use super::qp::Qp;
use super::why::Reason;
use super::{Output, Shard};
use crate::abi::queue::{SendFlags, WindowParams};
use crate::device::StagChange;
use crate::device::window::BindRequest;
use crate::shm::queue::SendEntry;
use crate::types::{CompletionStatus, Stag};

impl Qp {
    /// Invalidates an STag of this QP's own: a region, or a window of type 2 that it has bound.
    pub(super) fn invalidate_locally(
        &mut self,
        stag: Stag,
        seq: u64,
        shard: &mut Shard,
    ) -> Result<(), Reason> {
        let change = shard
            .stags
            .invalidate_by_owner(self.principal(), stag)
            .map_err(|fault| Reason::NotOwned { fault, stag })?;
        self.change_stags(change, seq, shard);
        Ok(())
    }

    /// Binds or unbinds a window.
    pub(super) fn bind_window(
        &mut self,
        entry: &SendEntry,
        seq: u64,
        shard: &mut Shard,
    ) -> Result<(), Reason> {
        let h = &entry.header;
        let inline = h.flags & SendFlags::INLINE.bits() != 0;
        if inline || h.num_sge != 0 || h.remote_addr != 0 {
            return Err(Reason::BindElements);
        }
        let (window, new) = (Stag(h.rkey), Stag(h.inv_rkey));
        let WindowParams { address, length, lkey, access } = WindowParams::from_params(h.params);
        let request = BindRequest { window, new, address, length, lkey, access };
        let change = shard
            .stags
            .bind(self.principal(), &request)
            .map_err(|fault| Reason::Bind { fault, window, address, length })?;
        self.change_stags(change, seq, shard);
        Ok(())
    }

    /// A request is done, or when every worker has carried this out.
    fn change_stags(&mut self, change: Option<StagChange>, seq: u64, shard: &mut Shard) {
        let progress = match change {
            None => Progress::Done(CompletionStatus::Success),
            Some(change) => {
                self.changing.push_back((seq, change));
                if self.changing.len() == 1 {
                    self.ask_for_change(shard);
                }
                Progress::Waiting
            }
        };
        if let Some(e) = self.ledger.get_mut(seq) {
            e.progress = progress;
        }
    }

    fn ask_for_change(&self, shard: &mut Shard) {
        if let Some((_, change)) = self.changing.front() {
            let change = Box::new(change.clone());
            shard.outputs.push_back(Output::ChangeStags { qp: self.id, change });
        }
    }

    /// Every worker has carried out the change at the head of the list.
    pub(super) fn stags_changed(&mut self, shard: &mut Shard) {
        let Some((seq, _)) = self.changing.pop_front() else { return };
        if let Some(entry) = self.ledger.get_mut(seq) {
            entry.progress = Progress::Done(CompletionStatus::Success);
        }
        self.ask_for_change(shard);
        self.retire(shard);
        shard.wake(self);
    }
}
