//! Finds the peers of RC and UC QPs at other daemons.
//!
//! Every daemon listens on one port (`wired.port`). The lower of the two ends, by GID and number,
//! connects as soon as it knows its peer. The higher end gives it a head start and then connects
//! too, because the lower end may be pausing after failed attempts. Both introduce themselves in
//! the Private Data of MPA start-up. A request is decided only after the daemon at its source
//! address has confirmed it (`ask_back`), so each daemon must be able to reach the other one's
//! port. A request for a QP that is not in RTR yet is held until then. A request from a QP that is
//! not the peer is rejected with a reason.

use std::time::Duration;

use rnic_abi::abi::control::Wiring;
use rnic_abi::types::*;
use rnic_core::engine::{EngineCommand, MAX_ACK_REQUESTS, PeerLimits};
use rnic_core::stream::introduction::{Introduction, VerificationQuery};
use rnic_core::stream::startup::Negotiated;

use super::qp_attr::{RcAttr, RcStream};
use super::rejection::{Rejection, path_mtus_differ, psns_differ};
use super::{Connection, QpPhase};
use crate::clock;
use crate::cm::{AcceptParams, ConnectParams, Quota};
use crate::resource::Manager;
use crate::resource::ledger::Kind;
use crate::socket::Socket;
use crate::system;
use crate::worker::Command;

pub(super) use crate::cm::DAEMON;

impl Manager {
    pub(super) fn rendezvous_quota(&self) -> Quota {
        let limits = &self.config.limits;
        Quota {
            user: DAEMON_USER,
            startups: limits.user.count(Kind::Startups),
            startups_key: "limits.user.startups".to_owned(),
            accepts_per_second: limits.user.count(Kind::AcceptsPerSecond),
        }
    }

    /// Returns true if this listener is for other daemons.
    pub(in crate::resource) fn is_rendezvous(&self, listener: ListenerId) -> bool {
        self.wired_port.listeners.iter().any(|(id, _)| *id == listener)
    }

    // --- Connecting --------------------------------------------------------------------------

    /// Decides the requests held for a QP that is now in RTR, or destroyed. At most one of them is
    /// from its peer.
    pub(in crate::resource) fn decide_held(&mut self, qp: QpId) {
        for (request, said) in self.rendezvous.held_for(qp) {
            self.rendezvous.release_held(request);
            self.decide_request(request, said);
        }
    }

    /// Connects to the peer of a QP at another daemon, now or after a delay.
    pub(in crate::resource) fn find_remote_peer(&mut self, qp: QpId) {
        let Some(rc) = self.rc(qp).filter(|rc| rc.stream.is_none()) else { return };
        let RcAttr { wiring, tries, .. } = rc;
        let is_lower = (wiring.local, qp) < (wiring.remote, wiring.remote_qp);
        let tries = *tries;
        match (is_lower, tries) {
            (true, 0) => self.dial(qp),
            // The lower end connects first.
            (false, 0) => self.dial_in(qp, HIGHER_END_DELAY),
            _ => self.dial_in(qp, (FIRST_PAUSE * (1 << tries.min(16))).min(LONGEST_PAUSE)),
        }
    }

    fn dial_in(&mut self, qp: QpId, time: Duration) {
        self.rendezvous.dial_at(qp, clock::now().after(time));
    }

    fn dial(&mut self, qp: QpId) {
        let port = self.config.wired.port;
        let number = system::random();
        let Some(wiring) = self.rc(qp).map(|rc| rc.wiring) else { return };
        let itself = self.gids.iter().any(|row| row.gid == wiring.remote);
        let daemon = if itself { self.generation } else { 0 };
        let peer = self.socket_address(wiring.remote, port, wiring.local);
        let local = self.socket_address(wiring.local, 0, wiring.local);
        let Some((session, object)) = self.qp_of(qp) else { return };
        let works = object.works();
        let (QpPhase::Bound(worker), Some(rc)) = (&object.phase, &mut object.rc) else {
            return;
        };
        if rc.stream.is_some() || !works {
            return;
        }
        let worker = *worker;
        let is_first = rc.tries == 0;
        rc.tries += 1;
        let number = match number {
            Ok(number) => number,
            Err(e) => return self.retry_later(qp, worker, format!("cannot get random bytes: {e}")),
        };
        rc.stream = Some(RcStream::Connecting { number: Some(number) });
        let params = ConnectParams {
            session,
            qp,
            peer,
            local: Some(local),
            ird: Some(wiring.ird + MAX_ACK_REQUESTS),
            ord: None,
            private_data: introduction(qp, rc, number, daemon).emit().to_vec(),
            peer_to_peer: true,
        };
        if is_first {
            // Before later attempts, the diagnosis already has the result of an earlier one.
            let Wiring { remote, remote_qp, .. } = wiring;
            let why = format!(
                "queue pair {remote_qp} at {remote}: its host has accepted no TCP connection to \
                 port {port} yet (wired.port)"
            );
            self.workers.one(worker, EngineCommand::SetUnlinkedReason(qp, why));
        }
        let now = clock::now();
        if self.cm.is_guesser(session, wiring.remote.address(), now) {
            let why = Rejection::StagGuesses.of(wiring.remote_qp, wiring.remote);
            return self.retry_later(qp, worker, why);
        }
        let begun = self
            .may_have_peer(session, &wiring)
            .and_then(|()| self.take_rate(session, now))
            .and_then(|()| self.cm.connect(params, now));
        if let Err(refusal) = begun {
            self.retry_later(qp, worker, refusal.to_string());
        }
    }

    /// Updates the reason for the missing stream after the peer's daemon has accepted the TCP
    /// connection. The daemon would reply at once if the peer were in RTR.
    pub(in crate::resource) fn reached(&mut self, qp: QpId) {
        let Some((_, object)) = self.qp_of(qp) else { return };
        let (QpPhase::Bound(worker), Some(rc)) = (&object.phase, &object.rc) else { return };
        let worker = *worker;
        let Wiring { remote, remote_qp, .. } = rc.wiring;
        let why = format!(
            "queue pair {remote_qp} at {remote} is not in RTR yet: its daemon has accepted the \
             connection, but has not replied"
        );
        self.workers.one(worker, EngineCommand::SetUnlinkedReason(qp, why));
    }

    /// Records why there is no stream, and schedules another attempt.
    fn retry_later(&mut self, qp: QpId, worker: u32, why: String) {
        if let Some((_, object)) = self.qp_of(qp)
            && let Some(rc) = &mut object.rc
        {
            rc.stream = None;
            rc.tries = rc.tries.max(1);
            self.workers.one(worker, EngineCommand::SetUnlinkedReason(qp, why));
            self.find_remote_peer(qp);
        }
    }

    /// Returns the time of the next attempt of any QP.
    pub fn next_dial(&self) -> Option<Time> {
        self.rendezvous.next_dial()
    }

    /// Runs due attempts and searches, a bounded number of each.
    pub fn dial_due(&mut self, now: Time) {
        for _ in 0..DIALS_PER_CALL {
            let Some(qp) = self.rendezvous.pop_due(now) else { break };
            let Some(wiring) = self.rc(qp).map(|rc| rc.wiring) else { continue };
            if self.uses_direct_path(qp, &wiring) {
                self.seek_again(qp, now);
            } else {
                self.dial(qp);
            }
        }
        for _ in 0..SEEKERS_PER_CALL {
            let Some(qp) = self.rendezvous.pop_seeker() else { break };
            self.seek_again(qp, now);
        }
        self.settle();
    }

    /// Cancels all attempts of a QP to reach its peer.
    pub(in crate::resource) fn leave_rendezvous(&mut self, qp: QpId) {
        self.cm.cancel(qp);
        self.rendezvous.cancel_dial(qp);
        self.rendezvous.cancel_seek(qp);
    }

    // --- Requests from other daemons ---------------------------------------------------------

    /// Handles a request from another daemon.
    pub(in crate::resource) fn dialled(
        &mut self,
        request: RequestId,
        addresses: AddressPair,
        private_data: &[u8],
    ) {
        if let Some(question) = VerificationQuery::parse(private_data) {
            return self.answer_ask_back(request, &question, addresses);
        }
        let Some(said) = Introduction::parse(private_data) else {
            return self.reject_daemon(request, Rejection::Malformed);
        };
        // The GIDs in the request must be the addresses of its connection.
        let comes_from = Gid::from(addresses.peer.ip().to_canonical());
        let came_to = Gid::from(addresses.local.ip().to_canonical());
        if said.gid != comes_from || said.to_gid != came_to {
            return self.reject_daemon(request, Rejection::OtherGid);
        }
        if ![0, self.generation].contains(&said.daemon) {
            return self.reject_daemon(request, Rejection::OtherDaemon);
        }
        // QPs of this daemon that use the direct path never connect, so the sender is another
        // program.
        if self.is_direct_gid(said.gid) {
            return self.reject_daemon(request, Rejection::NotConfirmed);
        }
        self.ask_back(request, said);
    }

    /// Accepts, holds or rejects a confirmed request.
    pub(super) fn decide_request(&mut self, request: RequestId, said: Introduction) {
        if self.draining {
            return self.reject_daemon(request, Rejection::Draining);
        }
        match self.check_introduction(&said) {
            Ok(None) if self.rendezvous.held_for(said.to_qp).len() >= MAX_HELD => {
                self.reject_daemon(request, Rejection::TooManyHeld);
            }
            Ok(None) => self.rendezvous.hold(request, said),
            Err(why) => {
                self.reject_daemon(request, why);
                self.explain_mismatch(&said, why);
            }
            Ok(Some(worker)) => {
                let qp = said.to_qp;
                // The incoming request replaces the QP's own attempt.
                self.leave_rendezvous(qp);
                let Some((_, object)) = self.qp_of(qp) else { return };
                let Some(rc) = &mut object.rc else { return };
                rc.stream = Some(RcStream::Accepting);
                rc.peer = Some(said);
                let private_data = introduction(qp, rc, 0, 0).emit().to_vec();
                let ird = Some(rc.wiring.ird + MAX_ACK_REQUESTS);
                let params = AcceptParams { request, qp, ird, ord: None, private_data };
                if let Err(refusal) = self.cm.accept(params, clock::now()) {
                    self.retry_later(qp, worker, refusal.to_string());
                }
            }
        }
    }

    /// Returns the worker of the requested QP if the sender is its peer, or `None` if the QP is not
    /// in RTR yet.
    fn check_introduction(&mut self, said: &Introduction) -> Result<Option<u32>, Rejection> {
        let qp = said.to_qp;
        let owner = self.handles.qps.owner(qp.0);
        let object = owner.and_then(|owner| self.sessions.get(&owner)?.qps.get(&qp));
        let object = object.filter(|o| o.kind.is_roce()).ok_or(Rejection::NoQueuePair)?;
        let (worker, rc) = match (&object.phase, &object.rc) {
            (QpPhase::Bound(worker), Some(rc)) => (*worker, rc),
            (QpPhase::Idle(_) | QpPhase::Leaving, _) => return Ok(None),
            _ => return Err(Rejection::InError),
        };
        if !object.works() {
            return Err(Rejection::InError);
        }
        if let Some(owner) = owner
            && self.cm.is_guesser(owner, said.gid.address(), clock::now())
        {
            return Err(Rejection::StagGuesses);
        }
        let wiring = &rc.wiring;
        if (wiring.remote, wiring.remote_qp) != (said.gid, said.qp) {
            return Err(Rejection::OtherPeer);
        }
        if wiring.local != said.to_gid {
            return Err(Rejection::OtherGid);
        }
        if rc.unreliable != said.unreliable {
            return Err(Rejection::OtherType);
        }
        if self.forbidden_because(qp, wiring).is_some() {
            return Err(Rejection::Forbidden);
        }
        if self.config.wired.compare {
            if said.path_mtu != wiring.path_mtu {
                return Err(Rejection::PathMtu);
            }
            if rc.sending.is_some_and(|sending| sending.sq_psn != said.rq_psn) {
                return Err(Rejection::Psn { awaited: said.rq_psn });
            }
            if let Some(sends) = said.sq_psn.filter(|psn| *psn != wiring.rq_psn) {
                return Err(Rejection::OwnPsn { sends });
            }
        }
        match rc.stream {
            None => Ok(Some(worker)),
            // If both ends connect, the attempt of the lower end wins. The lower end accepts the
            // other attempt only if its own has not reached the peer.
            Some(RcStream::Connecting { .. })
                if (said.gid, said.qp) < (wiring.local, qp) || self.cm.is_unseen_by_peer(qp) =>
            {
                Ok(Some(worker))
            }
            Some(_) => Err(Rejection::Busy),
        }
    }

    /// Records why a QP has no stream after it has rejected its peer.
    fn explain_mismatch(&mut self, said: &Introduction, why: Rejection) {
        let qp = said.to_qp;
        let Some(RcAttr { wiring, sending, .. }) = self.rc(qp) else { return };
        let peer = format!("queue pair {}", said.qp);
        let why = match (why, sending) {
            (Rejection::Forbidden, _) => match self.forbidden_because(qp, wiring) {
                Some(why) => why,
                None => return,
            },
            (Rejection::PathMtu, _) => path_mtus_differ(wiring.path_mtu, said.qp, said.path_mtu),
            (Rejection::Psn { awaited }, Some(sending)) => {
                psns_differ("this side", sending.sq_psn, &peer, awaited)
            }
            (Rejection::OwnPsn { sends }, _) => {
                psns_differ(&peer, sends, "this side", wiring.rq_psn)
            }
            _ => return,
        };
        if let Some((_, object)) = self.qp_of(qp)
            && let QpPhase::Bound(worker) = object.phase
        {
            self.workers.one(worker, EngineCommand::SetUnlinkedReason(qp, why));
        }
    }

    pub(super) fn reject_daemon(&mut self, request: RequestId, why: Rejection) {
        // Cannot fail: the request is undecided, and this data always fits.
        let _ = self.cm.reject(request, &why.private_data(), clock::now());
    }

    /// Removes a request after the end of its connection.
    pub(in crate::resource) fn withdrawn(&mut self, request: RequestId) {
        self.rendezvous.unconfirmed.remove(&request);
        self.rendezvous.release_held(request);
    }

    // --- Results -----------------------------------------------------------------------------

    /// Links an RC or UC QP with its peer after the end of MPA start-up.
    pub(in crate::resource) fn stream_established(
        &mut self,
        qp: QpId,
        stream: Socket,
        negotiated: Box<Negotiated>,
        addresses: AddressPair,
    ) {
        let compare = self.config.wired.compare;
        // A reload may have changed the rules during start-up.
        let forbidden = self.rc(qp).and_then(|rc| self.forbidden_because(qp, &rc.wiring));
        let Some((_, object)) = self.qp_of(qp) else { return };
        let (QpPhase::Bound(worker), Some(rc)) = (&object.phase, &mut object.rc) else {
            return;
        };
        let worker = *worker;
        if let Some(why) = forbidden {
            return self.retry_later(qp, worker, why);
        }
        let dialled = matches!(rc.stream, Some(RcStream::Connecting { .. }));
        if dialled {
            rc.peer = Introduction::parse(&negotiated.private_data);
            if let Some(said) = rc.peer
                && !answers_for_peer(&said, qp, &rc.wiring)
            {
                let Introduction { gid, qp: other, to_gid, to_qp, .. } = said;
                let why = format!(
                    "the daemon at {} answered for a different connection: from queue pair {other} \
                     at {gid} to queue pair {to_qp} at {to_gid}",
                    rc.wiring.remote
                );
                return self.retry_later(qp, worker, why);
            }
        }
        let Some(peer) = rc.peer else {
            let why = "the peer did not introduce itself".to_owned();
            return self.retry_later(qp, worker, why);
        };
        if compare && let Err(why) = rc.compare_far() {
            return self.retry_later(qp, worker, why);
        }
        rc.stream = Some(RcStream::Tcp);
        rc.unconfirmed_reported = false;
        // Requires a pause before the next attempt, because the peer may end each stream as soon as
        // it has accepted it.
        rc.tries = u32::from(dialled);
        let ord = rc.sending.map_or(0, |s| s.ord).min(peer.ird);
        object.connection = Some(Connection { path: "tcp", addresses, ird: rc.wiring.ird, ord });
        let limits = PeerLimits { ird: peer.ird, min_rnr_timer: peer.min_rnr_timer };
        let link = Command::LinkTcp { qp, negotiated, peer: limits, stream };
        self.workers.one(worker, link);
    }

    /// Handles a failed connection of an RC or UC QP, as initiator or responder. Returns false for
    /// other QPs.
    pub(in crate::resource) fn connect_to_peer_failed(
        &mut self,
        qp: QpId,
        why: Result<&str, &[u8]>,
    ) -> bool {
        let Some((_, object)) = self.qp_of(qp) else { return false };
        let (QpPhase::Bound(worker), Some(rc)) = (&object.phase, &object.rc) else {
            return object.kind.is_roce();
        };
        let worker = *worker;
        let wiring = rc.wiring;
        let why = match why {
            Ok(why) => format!("queue pair {} at {}: {why}", wiring.remote_qp, wiring.remote),
            Err(data) => Rejection::explain(data, wiring.remote_qp, wiring.remote),
        };
        self.retry_later(qp, worker, why);
        true
    }
}

fn introduction(qp: QpId, rc: &RcAttr, dial: u64, daemon: u64) -> Introduction {
    let wiring = &rc.wiring;
    Introduction {
        gid: wiring.local,
        qp,
        to_gid: wiring.remote,
        to_qp: wiring.remote_qp,
        ird: wiring.ird,
        min_rnr_timer: wiring.min_rnr_timer,
        unreliable: rc.unreliable,
        path_mtu: wiring.path_mtu,
        rq_psn: wiring.rq_psn,
        sq_psn: rc.sending.map(|sending| sending.sq_psn),
        dial,
        daemon,
    }
}

/// Returns true if the introduction is from the QP's peer and for this QP.
fn answers_for_peer(said: &Introduction, qp: QpId, wiring: &Wiring) -> bool {
    (said.gid, said.qp) == (wiring.remote, wiring.remote_qp)
        && (said.to_gid, said.to_qp) == (wiring.local, qp)
}

/// User ID to which start-ups of other daemons are charged. No user of the host should have it, so
/// these start-ups reduce the limit of no user. Guessed STags are checked once the owner of the
/// requested QP is known.
const DAEMON_USER: u32 = u32::MAX - 1;
/// Backlog of undecided requests: unlimited, because `limits.startups` and the limits of the owners
/// of their QPs apply.
pub(super) const BACKLOG: u32 = u32::MAX;
/// Maximum number of requests held for one QP. Only one of them can be from its peer. The others
/// are mistakes, or attempts to keep the peer out.
const MAX_HELD: usize = 32;
/// Maximum number of attempts per call.
const DIALS_PER_CALL: usize = 16;
/// Maximum number of QPs per call that search again for a changed peer of this daemon.
const SEEKERS_PER_CALL: usize = 4;
/// Head start of the lower end before the higher end connects. It is at most half of the shortest
/// retry time of a program, so that the reason is known before the program gives up.
const HIGHER_END_DELAY: Duration = Duration::from_millis(500);
/// Half of the pause after the first failed attempt. The pause doubles after each further failure.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// Maximum pause between attempts. The other end makes its own attempts in the meantime.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(10);
