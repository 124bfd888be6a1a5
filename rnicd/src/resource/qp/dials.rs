//! What goes on between this daemon and others for queue pairs that are wired by hand.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use rnic_core::stream::introduction::Introduction;
use rnic_core::types::*;

/// The port at which others find queue pairs of this daemon, and what goes on there.
#[derive(Default)]
pub struct Rendezvous {
    /// Requests whose daemons have been asked whether they began them.
    pub asked: HashMap<RequestId, Introduction>,
    /// Confirmed requests for QPs that are not in RTR yet, by QP.
    held: BTreeMap<(QpId, RequestId), Introduction>,
    /// The QPs of these requests.
    held_qps: HashMap<RequestId, QpId>,
    /// When queue pairs dial, for the first time or once more.
    dials: BTreeSet<(Time, QpId)>,
    /// The same by queue pair, which has one time.
    times: HashMap<QpId, Time>,
    /// Queue pairs of this daemon that look in vain for one of it, by the one that they look for.
    seekers: BTreeSet<(QpId, QpId)>,
    /// The same by the QP that looks: the QP that it looks for, and why in vain.
    sought: HashMap<QpId, (QpId, String)>,
    /// QPs that have changed and whose seekers are to look again, in turn.
    changed: VecDeque<QpId>,
    /// The seeker of each of them that is next.
    next_seeker: HashMap<QpId, QpId>,
}

impl Rendezvous {
    /// Holds a confirmed request until its QP is in RTR.
    pub fn hold(&mut self, request: RequestId, said: Introduction) {
        self.held.insert((said.to_qp, request), said);
        self.held_qps.insert(request, said.to_qp);
    }

    /// Forgets a request that may be held.
    pub fn hold_no_more(&mut self, request: RequestId) {
        if let Some(qp) = self.held_qps.remove(&request) {
            self.held.remove(&(qp, request));
        }
    }

    /// The requests that are held for a QP.
    pub fn held_for(&self, qp: QpId) -> Vec<(RequestId, Introduction)> {
        let all = self.held.range((qp, RequestId(0))..=(qp, RequestId(u32::MAX)));
        all.map(|((_, request), said)| (*request, *said)).collect()
    }

    /// Has a queue pair dial then, and at no other time.
    pub fn dial_at(&mut self, qp: QpId, at: Time) {
        self.dial_no_more(qp);
        self.dials.insert((at, qp));
        self.times.insert(qp, at);
    }

    /// Has a queue pair not dial.
    pub fn dial_no_more(&mut self, qp: QpId) {
        if let Some(at) = self.times.remove(&qp) {
            self.dials.remove(&(at, qp));
        }
    }

    /// Notes that a QP looks for another one of this daemon in vain, and why: it looks again when
    /// that one changes. At most `SEEKERS` do so for one QP. Returns true if this is news for the
    /// QP.
    pub fn seek(&mut self, qp: QpId, peer: QpId, why: &str) -> bool {
        if self.sought.get(&qp).is_some_and(|(sought, known)| *sought == peer && known == why) {
            return false;
        }
        self.seek_no_more(qp);
        if self.seekers_of(peer, QpId(0)).take(SEEKERS).count() < SEEKERS {
            self.seekers.insert((peer, qp));
            self.sought.insert(qp, (peer, why.to_owned()));
        }
        true
    }

    /// Ends the search of a QP.
    pub fn seek_no_more(&mut self, qp: QpId) {
        if let Some((peer, _)) = self.sought.remove(&qp) {
            self.seekers.remove(&(peer, qp));
        }
    }

    /// The QPs that look for this one in vain, from one of them on.
    fn seekers_of(&self, peer: QpId, from: QpId) -> impl Iterator<Item = QpId> {
        self.seekers.range((peer, from)..=(peer, QpId(u32::MAX))).map(|(_, qp)| *qp)
    }

    /// Has the seekers of a QP that has changed look again, later.
    pub fn peer_changed(&mut self, peer: QpId) {
        let is_sought = self.seekers_of(peer, QpId(0)).next().is_some();
        if is_sought && self.next_seeker.insert(peer, QpId(0)).is_none() {
            self.changed.push_back(peer);
        }
    }

    /// The next QP that is to look again. Those of each changed QP take turns.
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

    /// When the next QP dials or looks again.
    pub fn next_dial(&self) -> Option<Time> {
        if !self.changed.is_empty() {
            return Some(Time(0));
        }
        self.dials.first().map(|(at, _)| *at)
    }

    /// One that is to dial by now.
    pub fn pop_due(&mut self, now: Time) -> Option<QpId> {
        let (at, qp) = *self.dials.first()?;
        (at <= now).then(|| {
            self.dial_no_more(qp);
            qp
        })
    }
}

/// Queue pairs that are told of a change of the one that they look for. It will have one peer, and
/// who else looks for it does so by mistake.
const SEEKERS: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qp_seeks_one_peer_and_few_seek_the_same() {
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
            rendezvous.seek_no_more(QpId(n));
        }
        assert!(rendezvous.seekers.is_empty() && rendezvous.sought.is_empty());
    }

    #[test]
    fn the_same_answer_is_no_news_to_a_seeker() {
        let mut rendezvous = Rendezvous::default();
        let seeks = |r: &mut Rendezvous, why| r.seek(QpId(2), QpId(7), why);
        assert!(seeks(&mut rendezvous, "not in RTR"));
        assert!(!seeks(&mut rendezvous, "not in RTR"));
        assert!(seeks(&mut rendezvous, "of another peer"));
        assert!(seeks(&mut rendezvous, "not in RTR"));
        rendezvous.seek_no_more(QpId(2));
        assert!(seeks(&mut rendezvous, "not in RTR"));
    }

    #[test]
    fn seekers_of_changed_qps_look_in_turn() {
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
        // It changes again and keeps its place.
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
        rendezvous.hold_no_more(RequestId(1));
        rendezvous.hold_no_more(RequestId(1));
        assert_eq!((held(&rendezvous, 7), held(&rendezvous, 8)), (vec![3], vec![2]));
        for request in [2, 3] {
            rendezvous.hold_no_more(RequestId(request));
        }
        assert!(rendezvous.held.is_empty() && rendezvous.held_qps.is_empty());
    }

    #[test]
    fn a_queue_pair_dials_once_at_the_time_that_was_said_last() {
        let mut rendezvous = Rendezvous::default();
        rendezvous.dial_at(QpId(2), Time(10));
        rendezvous.dial_at(QpId(3), Time(20));
        rendezvous.dial_at(QpId(2), Time(30));
        assert_eq!((rendezvous.next_dial(), rendezvous.pop_due(Time(19))), (Some(Time(20)), None));
        assert_eq!(rendezvous.pop_due(Time(40)), Some(QpId(3)));
        rendezvous.dial_no_more(QpId(2));
        assert_eq!((rendezvous.pop_due(Time(40)), rendezvous.next_dial()), (None, None));
    }
}
