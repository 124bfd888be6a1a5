//! Confirmation of requests at the wired port, in both directions.
//!
//! A request only claims to come from a QP: any program can connect from the address of its host.
//! So before anything is decided, this daemon connects to the wired port of that address and asks
//! whether the daemon there began the dial with the number that the request carries. Only the
//! owner of the dial and the daemon that was dialled know the number. An answer never asks in turn.

use std::net::SocketAddr;

use rnic_core::abi::control::Wiring;
use rnic_core::stream::introduction::{AskBack, Introduction};
use rnic_core::types::*;

use super::QpPhase;
use super::rejection::Rejection;
use super::rendezvous::DAEMON;
use super::told::WiredStream;
use crate::clock;
use crate::cm::ConnectParams;
use crate::resource::{Manager, find};

impl Manager {
    // --- Asking ------------------------------------------------------------------------------

    /// Asks the daemon at the GID of the sender whether it began this request, at the cost of the
    /// QP's owner.
    pub(super) fn ask_back(&mut self, request: RequestId, said: Introduction) {
        let port = self.config.wired.port;
        let owner = self.handles.qps.owner(said.to_qp.0);
        let owner = owner.filter(|owner| find(&mut self.sessions, *owner).is_ok());
        let params = ConnectParams {
            session: owner.unwrap_or(DAEMON),
            qp: said.to_qp,
            peer: SocketAddr::new(said.gid.address(), port),
            local: Some(SocketAddr::new(said.to_gid.address(), 0)),
            ird: None,
            ord: None,
            private_data: AskBack::about(&said).emit().to_vec(),
            peer_to_peer: true,
        };
        match self.cm.ask_back(request, params, clock::now()) {
            Ok(()) => drop(self.rendezvous.asked.insert(request, said)),
            Err(refusal) => self.refuse_unconfirmed(request, &said, &refusal.to_string()),
        }
    }

    /// Decides a request once its daemon has answered.
    pub(in crate::resource) fn asked_back(
        &mut self,
        request: RequestId,
        answer: Result<Vec<u8>, String>,
    ) {
        let Some(said) = self.rendezvous.asked.remove(&request) else { return };
        match answer {
            Ok(answer) if AskBack::is_confirmed_by(&answer) => self.introduced(request, said),
            Ok(_) => self.refuse_unconfirmed(request, &said, "the daemon there did not begin it"),
            Err(why) => self.refuse_unconfirmed(request, &said, &why),
        }
    }

    /// Rejects a request with nothing about the QP. The diagnosis of the QP names the reason if the
    /// request claims to come from its peer; once, as each change costs the worker a message.
    fn refuse_unconfirmed(&mut self, request: RequestId, said: &Introduction, why: &str) {
        self.turn_away(request, Rejection::NotConfirmed);
        let Introduction { gid, qp, to_qp, .. } = *said;
        let port = self.config.wired.port;
        if let Some((_, object)) = self.qp_of(to_qp)
            && let QpPhase::Bound(worker) = object.phase
            && let Some(wired) = &mut object.wired
            && (wired.wiring.remote, wired.wiring.remote_qp) == (gid, qp)
            && !std::mem::replace(&mut wired.has_unconfirmed, true)
        {
            let why = format!(
                "a request in the name of queue pair {qp} at {gid} was not confirmed by asking \
                 port {port} there (wired.port): {why}"
            );
            self.workers.unlinked_because(worker, to_qp, why);
        }
    }

    // --- Answering ---------------------------------------------------------------------------

    /// Answers whether a dial of this daemon is pending.
    pub(super) fn answer_ask_back(
        &mut self,
        request: RequestId,
        question: &AskBack,
        addresses: AddressPair,
    ) {
        let asker = Gid::from(addresses.peer.ip().to_canonical());
        let is_pending = question.gid == asker && self.take_dial(question);
        // It is undecided, and so little always fits.
        let _ = self.cm.reject(request, &AskBack::answer(is_pending), clock::now());
    }

    /// Returns true if this dial is pending, and uses its number up.
    fn take_dial(&mut self, question: &AskBack) -> bool {
        let AskBack { gid, qp, to_gid, to_qp, dial } = *question;
        let Some((_, object)) = self.qp_of(to_qp) else { return false };
        let Some(wired) = &mut object.wired else { return false };
        let Wiring { local, remote, remote_qp, .. } = wired.wiring;
        match &mut wired.stream {
            Some(WiredStream::Dialling { number })
                if (local, remote, remote_qp) == (to_gid, gid, qp) && *number == Some(dial) =>
            {
                *number = None;
                true
            }
            _ => false,
        }
    }
}
