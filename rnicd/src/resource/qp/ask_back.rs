//! Verification of requests at `wired.port`: sends queries to other daemons, and answers theirs.
//!
//! Any program on a host can connect from the host's address and claim to be any QP of the host. So
//! before it accepts a request, this daemon connects to `wired.port` at the source address and asks
//! whether the daemon there made the attempt with the number in the request. Only the daemon that
//! made the attempt and the daemon that received it know the number. Queries are answered without
//! verification.

use rnic_abi::abi::control::Wiring;
use rnic_abi::types::*;
use rnic_core::engine::EngineCommand;
use rnic_core::stream::introduction::{Introduction, VerificationQuery};

use super::QpPhase;
use super::qp_attr::RcStream;
use super::rejection::Rejection;
use super::rendezvous::DAEMON;
use crate::clock;
use crate::cm::ConnectParams;
use crate::resource::{Manager, find};

impl Manager {
    // --- Verifying ---------------------------------------------------------------------------

    /// Asks the daemon at the sender's GID whether it made this request. The connection counts
    /// against the QP's owner.
    pub(super) fn ask_back(&mut self, request: RequestId, said: Introduction) {
        let port = self.config.wired.port;
        let owner = self.handles.qps.owner(said.to_qp.0);
        let owner = owner.filter(|owner| find(&mut self.sessions, *owner).is_ok());
        let params = ConnectParams {
            session: owner.unwrap_or(DAEMON),
            qp: said.to_qp,
            peer: self.socket_address(said.gid, port, said.to_gid),
            local: Some(self.socket_address(said.to_gid, 0, said.to_gid)),
            ird: None,
            ord: None,
            private_data: VerificationQuery::about(&said).emit().to_vec(),
            peer_to_peer: true,
        };
        match self.cm.ask_back(request, params, clock::now()) {
            Ok(()) => drop(self.rendezvous.unconfirmed.insert(request, said)),
            Err(refusal) => self.refuse_unconfirmed(request, &said, &refusal.to_string()),
        }
    }

    /// Accepts, holds or rejects a request after the reply to the verification query.
    pub(in crate::resource) fn asked_back(
        &mut self,
        request: RequestId,
        answer: Result<Vec<u8>, String>,
    ) {
        let Some(said) = self.rendezvous.unconfirmed.remove(&request) else { return };
        match answer {
            Ok(answer) if VerificationQuery::is_confirmed_by(&answer) => {
                self.decide_request(request, said)
            }
            Ok(_) => self.refuse_unconfirmed(request, &said, "the daemon there did not make it"),
            Err(why) => self.refuse_unconfirmed(request, &said, &why),
        }
    }

    /// Rejects a request. The rejection discloses nothing about the QP. If the request claims to
    /// come from the QP's peer, the QP's diagnosis reports the reason, but only once per stream,
    /// because each change costs a message to the worker.
    fn refuse_unconfirmed(&mut self, request: RequestId, said: &Introduction, why: &str) {
        self.reject_daemon(request, Rejection::NotConfirmed);
        let Introduction { gid, qp, to_qp, .. } = *said;
        let port = self.config.wired.port;
        if let Some((_, object)) = self.qp_of(to_qp)
            && let QpPhase::Bound(worker) = object.phase
            && let Some(rc) = &mut object.rc
            && (rc.wiring.remote, rc.wiring.remote_qp) == (gid, qp)
            && !std::mem::replace(&mut rc.unconfirmed_reported, true)
        {
            let why = format!(
                "a request that claims to be from queue pair {qp} at {gid} was not confirmed by \
                 port {port} there (wired.port): {why}"
            );
            self.workers.one(worker, EngineCommand::SetUnlinkedReason(to_qp, why));
        }
    }

    // --- Answering ---------------------------------------------------------------------------

    /// Replies to the query of another daemon whether this daemon made an attempt.
    pub(super) fn answer_ask_back(
        &mut self,
        request: RequestId,
        question: &VerificationQuery,
        addresses: AddressPair,
    ) {
        let asker = Gid::from(addresses.peer.ip().to_canonical());
        let is_pending = question.gid == asker && self.take_dial(question);
        // Cannot fail: the request is undecided, and this data always fits.
        let _ = self.cm.reject(request, &VerificationQuery::answer(is_pending), clock::now());
    }

    /// Returns true if this attempt is pending. An attempt can be confirmed only once.
    fn take_dial(&mut self, question: &VerificationQuery) -> bool {
        let VerificationQuery { gid, qp, to_gid, to_qp, dial } = *question;
        let Some((_, object)) = self.qp_of(to_qp) else { return false };
        let Some(rc) = &mut object.rc else { return false };
        let Wiring { local, remote, remote_qp, .. } = rc.wiring;
        match &mut rc.stream {
            Some(RcStream::Connecting { number })
                if (local, remote, remote_qp) == (to_gid, gid, qp) && *number == Some(dial) =>
            {
                *number = None;
                true
            }
            _ => false,
        }
    }
}
