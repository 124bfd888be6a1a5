//! Changes of STags that all workers are carrying out for QPs of this engine, so many at a time for
//! each user: each takes the control thread and every worker some time.

use std::collections::{HashMap, VecDeque};

use crate::types::{QpId, UserId};

/// Changes of a user's that all workers are carrying out at one time, for QPs of this one.
const UNDER_WAY: u32 = 4;

/// Changes that all workers are carrying out, and QPs that are to ask for theirs later.
#[derive(Default)]
pub(super) struct ChangeRequests {
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

impl ChangeRequests {
    /// Whether a QP may ask now. If not, [`ChangeRequests::answered`] will name it.
    pub(super) fn may_ask(&mut self, user: UserId, qp: QpId) -> bool {
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
