//! What goes on between this daemon and others for queue pairs that are wired by hand.

use std::collections::{BTreeSet, HashMap};

use rnic_core::stream::introduction::Introduction;
use rnic_core::types::*;

use crate::resource::numbers::Handle;

/// The port at which others find queue pairs of this daemon, and what goes on there.
#[derive(Default)]
pub struct Rendezvous {
    pub listeners: Vec<(ListenerId, Handle)>,
    /// Why others find nobody here.
    pub deaf: Option<String>,
    /// Requests for queue pairs that have not been told of a peer.
    pub held: HashMap<RequestId, Introduction>,
    /// When queue pairs dial, for the first time or once more.
    dials: BTreeSet<(Time, QpId)>,
    /// The same by queue pair, which has one time.
    times: HashMap<QpId, Time>,
}

impl Rendezvous {
    /// The requests that are kept for a queue pair.
    pub fn held_for(&self, qp: QpId) -> Vec<(RequestId, Introduction)> {
        let all = self.held.iter().filter(|(_, said)| said.to_qp == qp);
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

#[cfg(test)]
mod tests {
    use super::*;

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
