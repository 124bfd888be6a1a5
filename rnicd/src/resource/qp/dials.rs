//! What goes on between this daemon and others for queue pairs that are wired by hand.

use std::collections::{BTreeSet, HashMap};

use rnic_core::stream::introduction::Introduction;
use rnic_core::types::*;

/// The port at which others find queue pairs of this daemon, and what goes on there.
#[derive(Default)]
pub struct Rendezvous {
    /// Requests for queue pairs that have not been told of a peer.
    pub held: HashMap<RequestId, Introduction>,
    /// When queue pairs dial, for the first time or once more.
    dials: BTreeSet<(Time, QpId)>,
    /// The same by queue pair, which has one time.
    times: HashMap<QpId, Time>,
    /// Queue pairs of this daemon that look in vain for one of it, by the one that they look for.
    seekers: BTreeSet<(QpId, QpId)>,
    /// The same by the one that looks, which looks for one.
    sought: HashMap<QpId, QpId>,
}

impl Rendezvous {
    /// The requests that are kept for such queue pairs.
    pub fn held_for(&self, is_meant: impl Fn(QpId) -> bool) -> Vec<(RequestId, Introduction)> {
        let all = self.held.iter().filter(|(_, said)| is_meant(said.to_qp));
        all.map(|(request, said)| (*request, *said)).collect()
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

    /// A queue pair looks for another one of this daemon in vain, and is told when that changes; if
    /// not too many others do.
    pub fn seek(&mut self, qp: QpId, peer: QpId) {
        self.seek_no_more(qp);
        if self.seekers_of(peer).len() < SEEKERS {
            self.seekers.insert((peer, qp));
            self.sought.insert(qp, peer);
        }
    }

    /// A queue pair looks for none.
    pub fn seek_no_more(&mut self, qp: QpId) {
        if let Some(peer) = self.sought.remove(&qp) {
            self.seekers.remove(&(peer, qp));
        }
    }

    /// Who looks for this one in vain.
    pub fn seekers_of(&self, peer: QpId) -> Vec<QpId> {
        let all = self.seekers.range((peer, QpId(0))..=(peer, QpId(u32::MAX)));
        all.map(|(_, qp)| *qp).collect()
    }

    /// When the next one dials.
    pub fn next_dial(&self) -> Option<Time> {
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
    fn a_queue_pair_seeks_one_and_few_are_told_of_it() {
        let mut rendezvous = Rendezvous::default();
        rendezvous.seek(QpId(2), QpId(7));
        rendezvous.seek(QpId(2), QpId(8));
        assert_eq!(rendezvous.seekers_of(QpId(7)), []);
        assert_eq!(rendezvous.seekers_of(QpId(8)), [QpId(2)]);
        for n in 100..200 {
            rendezvous.seek(QpId(n), QpId(8));
        }
        assert_eq!(rendezvous.seekers_of(QpId(8)).len(), SEEKERS);
        for n in 2..200 {
            rendezvous.seek_no_more(QpId(n));
        }
        assert!(rendezvous.seekers.is_empty() && rendezvous.sought.is_empty());
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
