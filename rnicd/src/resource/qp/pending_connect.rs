//! Pending attempts and requests of RC and UC QPs.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use rnic_abi::types::*;
use rnic_core::stream::introduction::Introduction;

/// Attempts to connect to other daemons, and requests from other daemons.
#[derive(Default)]
pub struct Rendezvous {
    /// Requests that the daemons at their source addresses have not confirmed yet.
    pub unconfirmed: HashMap<RequestId, Introduction>,
    /// Confirmed requests for QPs that are not in RTR yet, by QP.
    held: BTreeMap<(QpId, RequestId), Introduction>,
    /// The QPs of the held requests.
    held_qps: HashMap<RequestId, QpId>,
    /// Times of the next attempts to connect.
    dials: BTreeSet<(Time, QpId)>,
    /// Time of each QP's entry in `dials`.
    times: HashMap<QpId, Time>,
    /// Pairs of a peer at this daemon and a QP that waits for a change of this peer.
    seekers: BTreeSet<(QpId, QpId)>,
    /// Peer of each waiting QP, and the reason why the last search failed.
    sought: HashMap<QpId, (QpId, String)>,
    /// Changed peers, in round-robin order. The QPs that wait for them must search again.
    changed: VecDeque<QpId>,
    /// First QP that has not searched again yet, by changed peer.
    next_seeker: HashMap<QpId, QpId>,
}

impl Rendezvous {
    /// Holds a confirmed request until its QP is in RTR.
    pub fn hold(&mut self, request: RequestId, said: Introduction) {
        self.held.insert((said.to_qp, request), said);
        self.held_qps.insert(request, said.to_qp);
    }

    /// Removes a request, if it is held.
    pub fn release_held(&mut self, request: RequestId) {
        if let Some(qp) = self.held_qps.remove(&request) {
            self.held.remove(&(qp, request));
        }
    }

    /// Returns the requests held for a QP.
    pub fn held_for(&self, qp: QpId) -> Vec<(RequestId, Introduction)> {
        let all = self.held.range((qp, RequestId(0))..=(qp, RequestId(u32::MAX)));
        all.map(|((_, request), said)| (*request, *said)).collect()
    }

    /// Schedules the next attempt of a QP. Replaces an earlier time.
    pub fn dial_at(&mut self, qp: QpId, at: Time) {
        self.cancel_dial(qp);
        self.dials.insert((at, qp));
        self.times.insert(qp, at);
    }

    /// Cancels the next attempt of a QP.
    pub fn cancel_dial(&mut self, qp: QpId) {
        if let Some(at) = self.times.remove(&qp) {
            self.dials.remove(&(at, qp));
        }
    }

    /// Records why a QP has not found its peer at this daemon. The QP searches again when the peer
    /// changes. At most `SEEKERS` QPs wait for the same peer. Returns false if this reason is
    /// already recorded.
    pub fn seek(&mut self, qp: QpId, peer: QpId, why: &str) -> bool {
        if self.sought.get(&qp).is_some_and(|(sought, known)| *sought == peer && known == why) {
            return false;
        }
        self.cancel_seek(qp);
        if self.seekers_of(peer, QpId(0)).take(SEEKERS).count() < SEEKERS {
            self.seekers.insert((peer, qp));
            self.sought.insert(qp, (peer, why.to_owned()));
        }
        true
    }

    /// Removes a QP that waits for its peer.
    pub fn cancel_seek(&mut self, qp: QpId) {
        if let Some((peer, _)) = self.sought.remove(&qp) {
            self.seekers.remove(&(peer, qp));
        }
    }

    /// Returns the QPs from `from` on that wait for this peer, in ascending order.
    fn seekers_of(&self, peer: QpId, from: QpId) -> impl Iterator<Item = QpId> {
        self.seekers.range((peer, from)..=(peer, QpId(u32::MAX))).map(|(_, qp)| *qp)
    }

    /// Schedules a new search for all QPs that wait for this peer.
    pub fn peer_changed(&mut self, peer: QpId) {
        let is_sought = self.seekers_of(peer, QpId(0)).next().is_some();
        if is_sought && self.next_seeker.insert(peer, QpId(0)).is_none() {
            self.changed.push_back(peer);
        }
    }

    /// Takes the next QP that must search again. The changed peers are served round-robin.
    pub fn pop_seeker(&mut self) -> Option<QpId> {
        while let Some(peer) = self.changed.pop_front() {
            let from = self.next_seeker.remove(&peer).unwrap_or(QpId(u32::MAX));
            let seeker = self.seekers_of(peer, from).next();
            if let Some(seeker) = seeker {
                self.next_seeker.insert(peer, QpId(seeker.0.saturating_add(1)));
                self.changed.push_back(peer);
                return Some(seeker);
            }
        }
        None
    }

    /// Returns the time of the next attempt or search. `Time(0)` if a search is already due.
    pub fn next_dial(&self) -> Option<Time> {
        if !self.changed.is_empty() {
            return Some(Time(0));
        }
        self.dials.first().map(|(at, _)| *at)
    }

    /// Takes a QP whose attempt is due.
    pub fn pop_due(&mut self, now: Time) -> Option<QpId> {
        let (at, qp) = *self.dials.first()?;
        (at <= now).then(|| {
            self.cancel_dial(qp);
            qp
        })
    }
}

/// Maximum number of QPs that wait for changes of the same peer. A peer accepts only one of them,
/// so the others have the wrong peer.
const SEEKERS: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_qps_seek_the_same_peer() {
        let mut rendezvous = Rendezvous::default();
        let seekers = |r: &Rendezvous, peer| r.seekers_of(QpId(peer), QpId(0)).count();
        assert!(rendezvous.seek(QpId(2), QpId(7), "first"));
        assert!(rendezvous.seek(QpId(2), QpId(8), "first"));
        assert_eq!((seekers(&rendezvous, 7), seekers(&rendezvous, 8)), (0, 1));
        for n in 100..200 {
            rendezvous.seek(QpId(n), QpId(8), "");
        }
        assert_eq!(seekers(&rendezvous, 8), SEEKERS);
        for n in 2..200 {
            rendezvous.cancel_seek(QpId(n));
        }
        assert!(rendezvous.seekers.is_empty() && rendezvous.sought.is_empty());
    }

    #[test]
    fn repeated_reason_is_not_reported() {
        let mut rendezvous = Rendezvous::default();
        let seeks = |r: &mut Rendezvous, why| r.seek(QpId(2), QpId(7), why);
        assert!(seeks(&mut rendezvous, "not in RTR"));
        assert!(!seeks(&mut rendezvous, "not in RTR"));
        assert!(seeks(&mut rendezvous, "of another peer"));
        assert!(seeks(&mut rendezvous, "not in RTR"));
        rendezvous.cancel_seek(QpId(2));
        assert!(seeks(&mut rendezvous, "not in RTR"));
    }

    #[test]
    fn seekers_of_changed_qps_search_in_turn() {
        let mut rendezvous = Rendezvous::default();
        for n in 10..20 {
            rendezvous.seek(QpId(n), QpId(1), "");
        }
        rendezvous.seek(QpId(30), QpId(3), "");
        rendezvous.peer_changed(QpId(2));
        assert_eq!(rendezvous.next_dial(), None);
        rendezvous.peer_changed(QpId(1));
        rendezvous.peer_changed(QpId(3));
        assert_eq!(rendezvous.next_dial(), Some(Time(0)));
        assert_eq!(rendezvous.pop_seeker(), Some(QpId(10)));
        // QP 1 changes again and keeps its place in the order.
        rendezvous.peer_changed(QpId(1));
        assert_eq!(rendezvous.pop_seeker(), Some(QpId(30)));
        let rest: Vec<_> = std::iter::from_fn(|| rendezvous.pop_seeker()).collect();
        assert_eq!(rest, (10..20).map(QpId).collect::<Vec<_>>());
        assert_eq!((rendezvous.next_dial(), rendezvous.next_seeker.len()), (None, 0));
    }

    #[test]
    fn requests_are_held_by_qp() {
        let said = |to_qp| {
            let gids = [Gid([1; 16]), Gid([2; 16])];
            Introduction {
                gid: gids[0],
                qp: QpId(9),
                to_gid: gids[1],
                to_qp: QpId(to_qp),
                ird: 1,
                min_rnr_timer: 0,
                unreliable: false,
                path_mtu: 1024,
                rq_psn: 0,
                sq_psn: None,
                dial: 5,
                daemon: 0,
            }
        };
        let mut rendezvous = Rendezvous::default();
        for (request, qp) in [(1, 7), (2, 8), (3, 7)] {
            rendezvous.hold(RequestId(request), said(qp));
        }
        let held = |r: &Rendezvous, qp| {
            r.held_for(QpId(qp)).into_iter().map(|(request, _)| request.0).collect::<Vec<_>>()
        };
        assert_eq!((held(&rendezvous, 7), held(&rendezvous, 8)), (vec![1, 3], vec![2]));
        rendezvous.release_held(RequestId(1));
        rendezvous.release_held(RequestId(1));
        assert_eq!((held(&rendezvous, 7), held(&rendezvous, 8)), (vec![3], vec![2]));
        for request in [2, 3] {
            rendezvous.release_held(RequestId(request));
        }
        assert!(rendezvous.held.is_empty() && rendezvous.held_qps.is_empty());
    }

    #[test]
    fn last_dial_time_replaces_the_earlier() {
        let mut rendezvous = Rendezvous::default();
        rendezvous.dial_at(QpId(2), Time(10));
        rendezvous.dial_at(QpId(3), Time(20));
        rendezvous.dial_at(QpId(2), Time(30));
        assert_eq!((rendezvous.next_dial(), rendezvous.pop_due(Time(19))), (Some(Time(20)), None));
        assert_eq!(rendezvous.pop_due(Time(40)), Some(QpId(3)));
        rendezvous.cancel_dial(QpId(2));
        assert_eq!((rendezvous.pop_due(Time(40)), rendezvous.next_dial()), (None, None));
    }
}
