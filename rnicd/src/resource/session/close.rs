//! The end of a session, in an order in which nobody ever uses what is gone.
//!
//! 1. Its table is taken out: no command of it is carried out any more, no list shows it.
//! 2. Its listeners close, its undecided requests and half-open connections are ended.
//! 3. Every worker stops its QPs, so that they answer nothing more, drops its STags, ends its QPs
//!    (Terminate if the stream is at a boundary, then reset) without completions, and forgets its
//!    doorbells and its queue of copies, whose jobs fail: one command, acknowledged by all. A peer
//!    sees a QP that is gone and no access error, because no QP answers once its STags are off.
//! 4. After the last acknowledgement nothing refers to its memory: its tables go to the reaper.
//! 5. With each object that the reaper drops, its mappings and descriptors, its handle and STag and
//!    then its charges are given back; last what the session itself had.

use std::collections::BTreeSet;

use rnic_core::types::*;

use crate::resource::memory::Attached;
use crate::resource::{Manager, Pending};

impl Manager {
    /// Ends a session; it is gone when the workers have acknowledged.
    pub fn close_session(&mut self, id: SessionId, now: Time) {
        let Some(session) = self.sessions.remove(&id) else { return };
        self.outdated.remove(&id);
        self.cm.drop_session(id, now);
        let ticket = self.workers.detach_session(id);
        for (cq, object) in &session.cqs {
            if object.channel.is_some() {
                self.workers.unregister_cq(*cq);
            }
        }
        self.pending.insert(ticket, Pending::Detach { session: id });
        let wired = session.qps.iter().filter(|(_, object)| object.kind.is_wired());
        let wired: BTreeSet<QpId> = wired.map(|(qp, _)| *qp).collect();
        self.leaving.insert(id, session);
        wired.iter().for_each(|qp| self.leave_rendezvous(*qp));
        self.are_no_peers(&wired);
        self.settle();
    }

    /// Every worker has forgotten the session.
    pub(in crate::resource) fn detached(&mut self, id: SessionId) {
        let Some(mut session) = self.leaving.remove(&id) else { return };
        self.records.end(id);
        for qp in session.qps.values() {
            self.records.add_qp(session.client.identity.uid, qp.kind, &qp.shared);
        }
        session.leave_named_pds();
        if let Some(copier) = session.attached.as_ref().and_then(Attached::copier) {
            copier.end();
        }
        self.reaper.drop_later(session.client.identity.uid, session);
    }

    /// Objects of all sessions that cost the daemon memory.
    pub fn objects(&self) -> u64 {
        self.ledger.objects()
    }

    /// Sessions that exist or are being taken down.
    pub fn sessions(&self) -> usize {
        self.sessions.len() + self.leaving.len()
    }

    /// Whether users other than this one have any, or something else.
    pub fn has_others(&self, uid: u32) -> bool {
        self.ledger.has_others(uid)
    }

    /// Ends the workers, waiting for them.
    pub fn stop(self) {
        self.workers.stop();
    }
}
