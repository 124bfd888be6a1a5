//! How queue pairs that are wired by hand find their peers at other daemons.
//!
//! Every daemon listens on one port (`wired.port`). The lower of the two ends, by GID and number,
//! dials when it is told of its peer; the higher one waits for that, and dials itself only after a
//! while: the lower one may pause after attempts in vain. Both introduce themselves in the Private
//! Data of MPA start-up. A request is decided once the daemon at the address of its sender has
//! confirmed it (`ask_back`), so each daemon must reach the other one's port: a QP that is not in
//! RTR yet holds it until then; a request from another QP than the peer is rejected with a reason.

use std::net::SocketAddr;
use std::time::Duration;

use rnic_core::abi::control::Wiring;
use rnic_core::engine::{PeerLimits, QUESTIONS};
use rnic_core::stream::introduction::{AskBack, Introduction};
use rnic_core::stream::startup::Negotiated;
use rnic_core::types::*;

use super::rejection::{Rejection, path_mtus_differ, psns_differ};
use super::told::{Wired, WiredStream};
use super::{Connection, QpPhase};
use crate::clock;
use crate::cm::{AcceptParams, ConnectParams, Quota};
use crate::resource::Manager;
use crate::resource::ledger::Kind;
use crate::socket::Socket;
use crate::system;

pub(super) use crate::cm::DAEMON;

impl Manager {
    pub(super) fn rendezvous_quota(&self) -> Quota {
        let limits = &self.config.limits;
        Quota {
            user: DAEMONS,
            startups: limits.user.count(Kind::Startups),
            startups_key: "limits.user.startups".to_owned(),
            accepts_per_second: limits.user.count(Kind::AcceptsPerSecond),
        }
    }

    /// Whether this is the listener at which other daemons find queue pairs of this one.
    pub(in crate::resource) fn is_rendezvous(&self, listener: ListenerId) -> bool {
        self.wired_port.listeners.iter().any(|(id, _)| *id == listener)
    }

    // --- Dialling ----------------------------------------------------------------------------

    /// Decides the requests that were held for a QP that is in RTR now, or gone: at most one of
    /// them is from its peer.
    pub(in crate::resource) fn answer_held(&mut self, qp: QpId) {
        for (request, said) in self.rendezvous.held_for(qp) {
            self.rendezvous.hold_no_more(request);
            self.introduced(request, said);
        }
    }

    /// Looks for the peer of a queue pair at another daemon: dials, now or later.
    pub(in crate::resource) fn seek_far_peer(&mut self, qp: QpId) {
        let Some(wired) = self.wired(qp).filter(|wired| wired.stream.is_none()) else { return };
        let Wired { wiring, tries, .. } = wired;
        let is_lower = (wiring.local, qp) < (wiring.remote, wiring.remote_qp);
        let (is_lower, tries) = (is_lower, *tries);
        match (is_lower, tries) {
            (true, 0) => self.dial(qp),
            // The lower one is to dial.
            (false, 0) => self.dial_in(qp, PATIENCE),
            _ => self.dial_in(qp, (FIRST_PAUSE * (1 << tries.min(16))).min(LONGEST_PAUSE)),
        }
    }

    fn dial_in(&mut self, qp: QpId, time: Duration) {
        self.rendezvous.dial_at(qp, clock::now().after(time));
    }

    fn dial(&mut self, qp: QpId) {
        let port = self.config.wired.port;
        let number = system::random();
        let Some(wiring) = self.wired(qp).map(|wired| wired.wiring) else { return };
        let itself = self.gids.iter().any(|row| row.gid == wiring.remote);
        let daemon = if itself { self.generation } else { 0 };
        let Some((session, object)) = self.qp_of(qp) else { return };
        let works = object.works();
        let (QpPhase::Bound(worker), Some(wired)) = (&object.phase, &mut object.wired) else {
            return;
        };
        if wired.stream.is_some() || !works {
            return;
        }
        let worker = *worker;
        let is_first = wired.tries == 0;
        wired.tries += 1;
        let number = match number {
            Ok(number) => number,
            Err(e) => return self.not_linked(qp, worker, format!("no random number: {e}")),
        };
        wired.stream = Some(WiredStream::Dialling { number: Some(number) });
        let params = ConnectParams {
            session,
            qp,
            peer: SocketAddr::new(wiring.remote.address(), port),
            local: Some(SocketAddr::new(wiring.local.address(), 0)),
            ird: Some(wiring.ird + QUESTIONS),
            ord: None,
            private_data: introduction(qp, wired, number, daemon).emit().to_vec(),
            peer_to_peer: true,
        };
        if is_first {
            // Later on it is known better.
            let Wiring { remote, remote_qp, .. } = wiring;
            let why = format!(
                "queue pair {remote_qp} at {remote}: nobody there has taken a TCP connection to \
                 port {port} yet (wired.port)"
            );
            self.workers.unlinked_because(worker, qp, why);
        }
        let now = clock::now();
        if self.cm.is_guesser(session, wiring.remote.address(), now) {
            let why = Rejection::Guesser.of(wiring.remote_qp, wiring.remote);
            return self.not_linked(qp, worker, why);
        }
        let begun = self
            .may_be_wired(session, &wiring)
            .and_then(|()| self.take_rate(session, now))
            .and_then(|()| self.cm.connect(params, now));
        if let Err(refusal) = begun {
            self.not_linked(qp, worker, refusal.to_string());
        }
    }

    /// The daemon of a peer has been reached. It answers at once, if the peer has been wired.
    pub(in crate::resource) fn reached(&mut self, qp: QpId) {
        let Some((_, object)) = self.qp_of(qp) else { return };
        let (QpPhase::Bound(worker), Some(wired)) = (&object.phase, &object.wired) else { return };
        let (worker, Wiring { remote, remote_qp, .. }) = (*worker, wired.wiring);
        let why = format!(
            "queue pair {remote_qp} at {remote} has not been wired (RTR) yet: its daemon has been \
             reached, and has not answered"
        );
        self.workers.unlinked_because(worker, qp, why);
    }

    /// No stream came about: says why, and tries once more later.
    fn not_linked(&mut self, qp: QpId, worker: u32, why: String) {
        if let Some((_, object)) = self.qp_of(qp)
            && let Some(wired) = &mut object.wired
        {
            wired.stream = None;
            wired.tries = wired.tries.max(1);
            self.workers.unlinked_because(worker, qp, why);
            self.seek_far_peer(qp);
        }
    }

    /// When a queue pair dials next.
    pub fn next_dial(&self) -> Option<Time> {
        self.rendezvous.next_dial()
    }

    /// Has queue pairs dial whose time has come, some at a time.
    pub fn dial_due(&mut self, now: Time) {
        for _ in 0..DIALS {
            let Some(qp) = self.rendezvous.pop_due(now) else { break };
            let Some(wiring) = self.wired(qp).map(|wired| wired.wiring) else { continue };
            if self.meet_here(qp, &wiring) {
                self.seek_again(qp, now);
            } else {
                self.dial(qp);
            }
        }
        for _ in 0..SEEKERS {
            let Some(qp) = self.rendezvous.pop_seeker() else { break };
            self.seek_again(qp, now);
        }
        self.settle();
    }

    /// A queue pair has no peer any more: whatever goes on for it at other daemons ends.
    pub(in crate::resource) fn leave_rendezvous(&mut self, qp: QpId) {
        self.cm.cancel(qp);
        self.rendezvous.dial_no_more(qp);
        self.rendezvous.seek_no_more(qp);
    }

    // --- Being dialled -----------------------------------------------------------------------

    /// A request of another daemon.
    pub(in crate::resource) fn dialled(
        &mut self,
        request: RequestId,
        addresses: AddressPair,
        private_data: &[u8],
    ) {
        if let Some(question) = AskBack::parse(private_data) {
            return self.answer_ask_back(request, &question, addresses);
        }
        let Some(said) = Introduction::parse(private_data) else {
            return self.turn_away(request, Rejection::Malformed);
        };
        // A request speaks for the address that it comes from.
        let comes_from = Gid::from(addresses.peer.ip().to_canonical());
        let came_to = Gid::from(addresses.local.ip().to_canonical());
        if said.gid != comes_from || said.to_gid != came_to {
            return self.turn_away(request, Rejection::OtherGid);
        }
        if ![0, self.generation].contains(&said.daemon) {
            return self.turn_away(request, Rejection::OtherDaemon);
        }
        // QPs of this daemon that find each other directly do not dial.
        if self.is_near(said.gid) {
            return self.turn_away(request, Rejection::NotConfirmed);
        }
        self.ask_back(request, said);
    }

    /// Accepts, holds or rejects a confirmed request.
    pub(super) fn introduced(&mut self, request: RequestId, said: Introduction) {
        if self.draining {
            return self.turn_away(request, Rejection::Draining);
        }
        match self.asked_for(&said) {
            Ok(None) if self.rendezvous.held_for(said.to_qp).len() >= HELD => {
                self.turn_away(request, Rejection::Crowded);
            }
            Ok(None) => self.rendezvous.hold(request, said),
            Err(why) => {
                self.turn_away(request, why);
                self.explain_mismatch(&said, why);
            }
            Ok(Some(worker)) => {
                let qp = said.to_qp;
                // Its own attempt gives way.
                self.leave_rendezvous(qp);
                let Some((_, object)) = self.qp_of(qp) else { return };
                let Some(wired) = &mut object.wired else { return };
                (wired.stream, wired.peer) = (Some(WiredStream::Accepting), Some(said));
                let private_data = introduction(qp, wired, 0, 0).emit().to_vec();
                let ird = Some(wired.wiring.ird + QUESTIONS);
                let params = AcceptParams { request, qp, ird, ord: None, private_data };
                if let Err(refusal) = self.cm.accept(params, clock::now()) {
                    self.not_linked(qp, worker, refusal.to_string());
                }
            }
        }
    }

    /// The worker of the queue pair that is meant, if that means the one that speaks; none if its
    /// program has not told it of a peer.
    fn asked_for(&mut self, said: &Introduction) -> Result<Option<u32>, Rejection> {
        let qp = said.to_qp;
        let owner = self.handles.qps.owner(qp.0);
        let object = owner.and_then(|owner| self.sessions.get(&owner)?.qps.get(&qp));
        let object = object.filter(|o| o.kind.is_wired()).ok_or(Rejection::NoQueuePair)?;
        let (worker, wired) = match (&object.phase, &object.wired) {
            (QpPhase::Bound(worker), Some(wired)) => (*worker, wired),
            (QpPhase::Idle(_) | QpPhase::Leaving, _) => return Ok(None),
            _ => return Err(Rejection::InError),
        };
        if !object.works() {
            return Err(Rejection::InError);
        }
        if let Some(owner) = owner
            && self.cm.is_guesser(owner, said.gid.address(), clock::now())
        {
            return Err(Rejection::Guesser);
        }
        let wiring = &wired.wiring;
        if (wiring.remote, wiring.remote_qp) != (said.gid, said.qp) {
            return Err(Rejection::OtherPeer);
        }
        if wiring.local != said.to_gid {
            return Err(Rejection::OtherGid);
        }
        if wired.unreliable != said.unreliable {
            return Err(Rejection::OtherType);
        }
        if self.forbids(qp, wiring).is_some() {
            return Err(Rejection::Forbidden);
        }
        if self.config.wired.compare {
            if said.path_mtu != wiring.path_mtu {
                return Err(Rejection::PathMtu);
            }
            if wired.sending.is_some_and(|sending| sending.sq_psn != said.rq_psn) {
                return Err(Rejection::Psn { awaited: said.rq_psn });
            }
            if let Some(sends) = said.sq_psn.filter(|psn| *psn != wiring.rq_psn) {
                return Err(Rejection::OwnPsn { sends });
            }
        }
        match wired.stream {
            None => Ok(Some(worker)),
            // Of two that dial each other the lower one goes on, if it gets through.
            Some(WiredStream::Dialling { .. })
                if (said.gid, said.qp) < (wiring.local, qp) || self.cm.is_unheard(qp) =>
            {
                Ok(Some(worker))
            }
            Some(_) => Err(Rejection::Busy),
        }
    }

    /// A queue pair that turns its peer away has no stream for the same reason.
    fn explain_mismatch(&mut self, said: &Introduction, why: Rejection) {
        let qp = said.to_qp;
        let Some(Wired { wiring, sending, .. }) = self.wired(qp) else { return };
        let peer = format!("queue pair {}", said.qp);
        let why = match (why, sending) {
            (Rejection::Forbidden, _) => match self.forbids(qp, wiring) {
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
            self.workers.unlinked_because(worker, qp, why);
        }
    }

    pub(super) fn turn_away(&mut self, request: RequestId, why: Rejection) {
        // It is undecided, and so little always fits.
        let _ = self.cm.reject(request, &why.private_data(), clock::now());
    }

    /// Forgets a request whose connection has ended.
    pub(in crate::resource) fn withdrawn(&mut self, request: RequestId) {
        self.rendezvous.asked.remove(&request);
        self.rendezvous.hold_no_more(request);
    }

    // --- What came of it ---------------------------------------------------------------------

    /// Start-up is done between a queue pair that is wired by hand and its peer.
    pub(in crate::resource) fn stream_stands(
        &mut self,
        qp: QpId,
        stream: Socket,
        negotiated: Box<Negotiated>,
        addresses: AddressPair,
    ) {
        let compare = self.config.wired.compare;
        // A reload may have come while it was under way.
        let forbidden = self.wired(qp).and_then(|wired| self.forbids(qp, &wired.wiring));
        let Some((_, object)) = self.qp_of(qp) else { return };
        let (QpPhase::Bound(worker), Some(wired)) = (&object.phase, &mut object.wired) else {
            return;
        };
        let worker = *worker;
        if let Some(why) = forbidden {
            return self.not_linked(qp, worker, why);
        }
        let dialled = matches!(wired.stream, Some(WiredStream::Dialling { .. }));
        if dialled {
            wired.peer = Introduction::parse(&negotiated.private_data);
            if let Some(said) = wired.peer
                && !names_back(&said, qp, &wired.wiring)
            {
                let Introduction { gid, qp: other, to_gid, to_qp, .. } = said;
                let why = format!(
                    "the daemon at {} answers as somebody else: as queue pair {other} at {gid}, to \
                     queue pair {to_qp} at {to_gid}",
                    wired.wiring.remote
                );
                return self.not_linked(qp, worker, why);
            }
        }
        let Some(peer) = wired.peer else {
            let why = "the peer did not introduce itself".to_owned();
            return self.not_linked(qp, worker, why);
        };
        if compare && let Err(why) = wired.compare_far() {
            return self.not_linked(qp, worker, why);
        }
        wired.stream = Some(WiredStream::Tcp);
        wired.has_unconfirmed = false;
        // Whoever dialled does not do so again without a pause: a peer may end what it has taken.
        wired.tries = u32::from(dialled);
        let ord = wired.sending.map_or(0, |s| s.ord).min(peer.ird);
        object.connection = Some(Connection { path: "tcp", addresses, ird: wired.wiring.ird, ord });
        let limits = PeerLimits { ird: peer.ird, min_rnr_timer: peer.min_rnr_timer };
        self.workers.link_tcp(worker, qp, negotiated, limits, stream);
    }

    /// A queue pair that is wired by hand dialled in vain, or what it accepted came to nothing.
    /// Whether it is one.
    pub(in crate::resource) fn dialled_in_vain(
        &mut self,
        qp: QpId,
        why: Result<&str, &[u8]>,
    ) -> bool {
        let Some((_, object)) = self.qp_of(qp) else { return false };
        let (QpPhase::Bound(worker), Some(wired)) = (&object.phase, &object.wired) else {
            return object.kind.is_wired();
        };
        let (worker, wiring) = (*worker, wired.wiring);
        let why = match why {
            Ok(why) => format!("queue pair {} at {}: {why}", wiring.remote_qp, wiring.remote),
            Err(data) => Rejection::explain(data, wiring.remote_qp, wiring.remote),
        };
        self.not_linked(qp, worker, why);
        true
    }
}

fn introduction(qp: QpId, wired: &Wired, dial: u64, daemon: u64) -> Introduction {
    let wiring = &wired.wiring;
    Introduction {
        gid: wiring.local,
        qp,
        to_gid: wiring.remote,
        to_qp: wiring.remote_qp,
        ird: wiring.ird,
        min_rnr_timer: wiring.min_rnr_timer,
        unreliable: wired.unreliable,
        path_mtu: wiring.path_mtu,
        rq_psn: wiring.rq_psn,
        sq_psn: wired.sending.map(|sending| sending.sq_psn),
        dial,
        daemon,
    }
}

/// Whether the one that was dialled is the one that was meant, and means this side.
fn names_back(said: &Introduction, qp: QpId, wiring: &Wiring) -> bool {
    (said.gid, said.qp) == (wiring.remote, wiring.remote_qp)
        && (said.to_gid, said.to_qp) == (wiring.local, qp)
}

/// The user in whose name other daemons are let in, which no process can have: they use up nobody's
/// start-ups, and whose STags they have guessed is asked when it is known whom they mean.
const DAEMONS: u32 = u32::MAX - 1;
/// Requests that may wait for a decision: as many as `limits.startups` and the limits of the owners
/// of their QPs allow.
pub(super) const BACKLOG: u32 = u32::MAX;
/// Of them, for one queue pair. It will have one peer, and who else asks for it does so by mistake
/// or in order to keep others out.
const HELD: usize = 32;
/// Queue pairs that dial between two looks at everything else.
const DIALS: usize = 16;
/// QPs that look again for a changed peer of this daemon, likewise.
const SEEKERS: usize = 4;
/// How long the higher end leaves it to the lower one to dial. Whoever has nobody acknowledge a
/// request waits for twice as long at least, and is to know by then what is wrong.
const PATIENCE: Duration = Duration::from_millis(500);
/// Until it is tried once more; twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// At most; the other end will dial as well by then.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(10);
