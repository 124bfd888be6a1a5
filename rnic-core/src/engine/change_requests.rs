//! Limits the number of STag changes in progress for a user's QPs of this engine, because each
//! change takes time on the control thread and on every worker.

use std::collections::{HashMap, VecDeque};

use rnic_abi::types::{QpId, UserId};

/// Maximum number of changes that a user's QPs of this engine may have under way.
const MAX_UNDER_WAY: u32 = 4;

/// Changes under way, and the QPs that wait to request theirs.
#[derive(Default)]
pub(super) struct ChangeRequests {
    /// QPs with a change under way, and their users.
    requested: HashMap<QpId, UserId>,
    users: HashMap<UserId, UserChanges>,
}

/// Changes of one user.
#[derive(Default)]
struct UserChanges {
    under_way: u32,
    waiting: VecDeque<QpId>,
}

impl ChangeRequests {
    /// Returns true if a QP may request its change now. Otherwise queues the QP, and
    /// [`ChangeRequests::next`] returns it later.
    pub(super) fn may_begin(&mut self, user: UserId, qp: QpId) -> bool {
        let changes = self.users.entry(user).or_default();
        if changes.under_way == MAX_UNDER_WAY {
            changes.waiting.push_back(qp);
            return false;
        }
        changes.under_way += 1;
        self.requested.insert(qp, user);
        true
    }

    /// Removes the completed change of a QP, which may have been destroyed since. Returns its user,
    /// which may now request another change.
    pub(super) fn finish(&mut self, qp: QpId) -> Option<UserId> {
        let user = self.requested.remove(&qp)?;
        if let Some(changes) = self.users.get_mut(&user) {
            changes.under_way -= 1;
        }
        Some(user)
    }

    /// Takes the QP of this user that has waited longest, if the user may request a change.
    pub(super) fn next(&mut self, user: UserId) -> Option<QpId> {
        let changes = self.users.get_mut(&user).filter(|u| u.under_way < MAX_UNDER_WAY)?;
        let next = changes.waiting.pop_front();
        if next.is_none() && changes.under_way == 0 {
            self.users.remove(&user);
        }
        next
    }
}
