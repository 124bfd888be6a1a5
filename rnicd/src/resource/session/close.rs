//! Ends sessions, in an order in which no object is used after it has been destroyed.
//!
//! 1. The session is removed from the table. Its requests are no longer carried out, and no list
//!    contains it.
//! 2. Its listeners close, and its undecided requests and connections in start-up end.
//! 3. One command makes every worker stop the session's QPs, so that they answer nothing more,
//!    remove its STags, destroy its QPs without completions, and drop its doorbells and its copy
//!    queue. Jobs in that queue fail. A peer sees a closed connection and no access error, because
//!    no QP answers after its STags are removed.
//! 4. When all workers have acknowledged the command, nothing refers to the session's memory, and
//!    its tables go to the reaper.
//! 5. For each object that the reaper drops, its mappings and descriptors are released first, then
//!    its handle and STag, then its charges. The session's own handle and charge come last.

use std::collections::BTreeSet;

use rnic_abi::types::*;

use crate::resource::memory::Attached;
use crate::resource::{Manager, Pending};
use crate::worker::Command;

impl Manager {
    /// Ends a session. Its objects are dropped after all workers have acknowledged.
    pub fn close_session(&mut self, id: SessionId, now: Time) {
        let Some(session) = self.sessions.remove(&id) else { return };
        self.outdated.remove(&id);
        self.clear_faults_of(id, now);
        self.cm.drop_session(id, now);
        let ticket = self.workers.detach_session(id);
        for (cq, object) in &session.cqs {
            if object.channel.is_some() {
                self.workers.all(|| Command::UnregisterCq(*cq));
            }
        }
        self.pending.insert(ticket, Pending::Detach { session: id });
        let roce = session.qps.iter().filter(|(_, object)| object.kind.is_roce());
        let roce: BTreeSet<QpId> = roce.map(|(qp, _)| *qp).collect();
        self.leaving.insert(id, session);
        roce.iter().for_each(|qp| self.leave_rendezvous(*qp));
        self.peers_gone(&roce);
        self.settle();
    }

    /// Passes a session to the reaper after all workers have released it.
    pub(in crate::resource) fn detached(&mut self, id: SessionId) {
        let Some(mut session) = self.leaving.remove(&id) else { return };
        // Keeps its diagnoses with those of other ended sessions.
        self.records.diagnoses.end(id);
        for qp in session.qps.values() {
            let device = self.device_of(qp).to_owned();
            self.records.past.add_qp(session.client.identity.uid, &device, &qp.shared);
        }
        session.leave_named_pds();
        if let Some(copier) = session.attached.as_ref().and_then(Attached::copier) {
            copier.end();
        }
        self.reaper.drop_later(session.client.identity.uid, session);
    }

    /// Returns the number of sessions, MRs, MWs, CQs, QPs, SRQs and start-ups of all users.
    pub fn objects(&self) -> u64 {
        self.ledger.objects()
    }

    /// Returns the number of sessions that exist or are being closed.
    pub fn sessions(&self) -> usize {
        self.sessions.len() + self.leaving.len()
    }

    /// Returns true if users other than this one have any sessions or objects.
    pub fn has_others(&self, uid: u32) -> bool {
        self.ledger.has_others(uid)
    }

    /// Stops the workers and waits for them.
    pub fn stop(self) {
        self.workers.stop();
    }
}
