//! Send requests that change STags instead of moving data: local invalidate, and binding windows.
//!
//! An STag that only this QP uses lives on this worker and is changed at once. One that the domain
//! shares is in use elsewhere, so the request and all behind it wait until every worker has changed
//! its table: when the completion is there, nothing lands through what was taken away.

use std::collections::{HashMap, VecDeque};

use super::ledger::Progress;
use super::qp::Qp;
use super::reason::Reason;
use super::schedule::CHANGE_COST;
use super::{Output, Shard};
use crate::abi::queue::{SendFlags, WindowParams};
use crate::device::StagChange;
use crate::device::window::BindRequest;
use crate::shm::queue::SendEntry;
use crate::types::{CompletionStatus, QpId, Stag, UserId};

/// Changes of a user's that all workers are carrying out at one time, for QPs of this one.
const UNDER_WAY: u32 = 4;

/// Changes that all workers are carrying out, and QPs that are to ask for theirs later.
#[derive(Default)]
pub(super) struct Changes {
    /// Who asked for one, and for whom.
    asked: HashMap<QpId, UserId>,
    users: HashMap<UserId, OfUser>,
}

/// One user's.
#[derive(Default)]
struct OfUser {
    under_way: u32,
    waiting: VecDeque<QpId>,
}

impl Changes {
    /// Whether a QP may ask now. If not, [`Changes::answered`] will name it.
    fn may_ask(&mut self, user: UserId, qp: QpId) -> bool {
        let of_user = self.users.entry(user).or_default();
        if of_user.under_way == UNDER_WAY {
            of_user.waiting.push_back(qp);
            return false;
        }
        of_user.under_way += 1;
        self.asked.insert(qp, user);
        true
    }

    /// The change that a QP asked for is carried out, whether or not there still is such a QP: its
    /// user, who may ask for another one.
    pub(super) fn answered(&mut self, qp: QpId) -> Option<UserId> {
        let user = self.asked.remove(&qp)?;
        if let Some(of_user) = self.users.get_mut(&user) {
            of_user.under_way -= 1;
        }
        Some(user)
    }

    /// The QP of this user that has waited longest to ask, if he may.
    pub(super) fn next(&mut self, user: UserId) -> Option<QpId> {
        let of_user = self.users.get_mut(&user).filter(|u| u.under_way < UNDER_WAY)?;
        let next = of_user.waiting.pop_front();
        if next.is_none() && of_user.under_way == 0 {
            self.users.remove(&user);
        }
        next
    }
}

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
                self.deficit -= CHANGE_COST;
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

    /// Asks for the change at the head of the list, or has it asked for when fewer of this user's are
    /// under way: each takes the control thread and every worker some time.
    fn ask_for_change(&self, shard: &mut Shard) {
        let Some(user) = shard.schedule.user(self.seat) else { return };
        if let Some((_, change)) = self.changing.front()
            && shard.changes.may_ask(user, self.id)
        {
            let change = Box::new(change.clone());
            shard.outputs.push_back(Output::ChangeStags { qp: self.id, change });
        }
    }

    /// It is this QP's turn to ask for the change that it waits for; whether it still does.
    pub(super) fn ask_at_last(&self, shard: &mut Shard) -> bool {
        let waits = !self.changing.is_empty();
        if waits {
            self.ask_for_change(shard);
        }
        waits
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
