//! Who is served next: sessions in turn, and within a session its ready QPs in turn.
//!
//! Deficit round robin (Shreedhar and Varghese 1996): a turn is worth [`QUANTUM`] octets, what a QP
//! overdraws it repays in its next turn. Turns rotate over sessions first, so a client with a thousand
//! busy QPs gets no more of a worker than a client with one.

use std::collections::{HashMap, VecDeque};

use crate::types::SessionId;

/// Octets a QP may move per turn.
pub(super) const QUANTUM: i64 = 256 * 1024;
/// Octets that a request costs at least, which bounds the requests of a turn.
pub(super) const REQUEST_COST: i64 = 1024;

/// Index of a QP in its engine.
pub(super) type Key = u32;

/// Ready QPs by session.
#[derive(Default)]
pub(super) struct Schedule {
    turns: VecDeque<SessionId>,
    ready: HashMap<SessionId, VecDeque<Key>>,
}

impl Schedule {
    /// Adds a QP that is not in the schedule.
    pub(super) fn push(&mut self, session: SessionId, key: Key) {
        let queue = self.ready.entry(session).or_default();
        if queue.is_empty() {
            self.turns.push_back(session);
        }
        queue.push_back(key);
    }

    /// The QP whose turn it is; it leaves the schedule.
    pub(super) fn pop(&mut self) -> Option<Key> {
        let session = self.turns.pop_front()?;
        let queue = self.ready.get_mut(&session)?;
        let key = queue.pop_front();
        if !queue.is_empty() {
            self.turns.push_back(session);
        }
        key
    }

    /// Whether nobody is ready.
    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Removes a QP wherever it waits.
    pub(super) fn remove(&mut self, session: SessionId, key: Key) {
        if let Some(queue) = self.ready.get_mut(&session) {
            queue.retain(|k| *k != key);
            if queue.is_empty() {
                self.turns.retain(|s| *s != session);
            }
        }
    }

    /// Forgets a session that has no QP any more.
    pub(super) fn drop_session(&mut self, session: SessionId) {
        self.ready.remove(&session);
        self.turns.retain(|s| *s != session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_take_turns_however_many_qps_they_have() {
        let mut s = Schedule::default();
        for key in 0..10 {
            s.push(SessionId(1), key);
        }
        s.push(SessionId(2), 100);
        let mut order = Vec::new();
        for _ in 0..6 {
            let key = s.pop().unwrap();
            order.push(key);
            s.push(if key == 100 { SessionId(2) } else { SessionId(1) }, key);
        }
        assert_eq!(order, [0, 100, 1, 100, 2, 100]);
    }

    #[test]
    fn a_removed_qp_is_not_served() {
        let mut s = Schedule::default();
        s.push(SessionId(1), 1);
        s.push(SessionId(2), 2);
        s.remove(SessionId(1), 1);
        assert_eq!(s.pop(), Some(2));
        assert_eq!(s.pop(), None);
        assert!(s.is_empty());
    }
}
