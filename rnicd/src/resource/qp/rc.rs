//! RC and UC QPs: state transitions, attribute changes and the search for a peer at this daemon.
//!
//! Each of two peers specifies the other by GID and number. They get a stream once both have done
//! so. The first QP goes to any worker. The second one goes to the same worker, so that the direct
//! path can link them.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use rnic_abi::abi::control::{QpChange, Refusal, ReplyBody, Sending, Wiring};
use rnic_abi::types::*;
use rnic_core::engine::{EngineCommand, MAX_ACK_REQUESTS, PeerLimits};
use rustix::io::Errno;

use super::qp_attr::{RcAttr, RcStream};
use super::reads::Reads;
use super::rejection::{Rejection, path_mtus_differ, psns_differ};
use super::rendezvous::LONGEST_PAUSE;
use super::{Connection, Qp, QpPhase, wrong_state};
use crate::clock;
use crate::config::Loopback;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::faults::qp_faults::QpFaults;
use crate::resource::ledger::Kind;
use crate::resource::memory::Attached;
use crate::resource::{Manager, Pending, find, refuse};
use crate::system;
use crate::worker::Command;

impl Manager {
    pub(in crate::resource) fn modify_qp(
        &mut self,
        id: SessionId,
        qp: QpId,
        change: &QpChange,
        now: Time,
    ) -> Answer {
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        if !object.kind.is_roce() {
            return Err(wrong_state(qp, "an iWARP QP", "an RC, UC or UD QP"));
        }
        if object.kind == QpType::Ud {
            return self.modify_datagrams(id, qp, change, now);
        }
        match change {
            QpChange::ReadyToReceive(wiring) => self.ready_to_receive(id, qp, *wiring, now),
            QpChange::ReadyToSend(sending) => self.ready_to_send(id, qp, *sending),
            QpChange::Reset => self.reset_qp(id, qp),
            QpChange::Rights(rights) => {
                check_rights(*rights)?;
                self.forward_change(id, qp, *change)
            }
            QpChange::MinRnrTimer(code) => {
                refuse::at_most("min_rnr_timer", (*code).into(), FIVE_BITS, 31)?;
                self.forward_change(id, qp, *change)
            }
            QpChange::DrainSendQueue => {
                let object = find(&mut self.sessions, id)?.qp(qp)?;
                if object.state() != QpState::Rts {
                    return Err(wrong_state(qp, state_name(object), "Rts"));
                }
                if let Some(rc) = &mut object.rc {
                    rc.drains = true;
                }
                self.forward_change(id, qp, *change)
            }
            QpChange::ReceiveDatagrams { .. } | QpChange::QKey(_) => {
                Err(wrong_state(qp, "an RC or UC QP", "a UD QP"))
            }
        }
    }

    /// Forwards a change to the worker of a QP.
    fn forward_change(&mut self, id: SessionId, qp: QpId, change: QpChange) -> Answer {
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        let QpPhase::Bound(worker) = object.phase else {
            return Err(wrong_state(qp, state_name(object), "Rtr, Rts, Sqd or Sqe"));
        };
        let ticket = self.workers.one_ticketed(worker, EngineCommand::Change(qp, change));
        self.answer_when_modified(id, ticket)
    }

    fn ready_to_receive(
        &mut self,
        id: SessionId,
        qp: QpId,
        mut wiring: Wiring,
        now: Time,
    ) -> Answer {
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        if !matches!(object.phase, QpPhase::Idle(_)) {
            return Err(wrong_state(qp, state_name(object), "Idle"));
        }
        let unreliable = object.kind == QpType::Uc;
        if unreliable {
            // A UC QP receives no Reads or Atomics.
            wiring.ird = 0;
        }
        self.check_wiring(id, &wiring)?;
        if self.has_lost_gid(id, qp, wiring.local) {
            return Err(no_gid(wiring.local));
        }
        self.take_rate(id, now)?;
        if !self.uses_direct_path(qp, &wiring) {
            self.check_external(wiring.local, wiring.remote)?;
            self.check_wired_port(wiring.local.address(), wiring.remote.address())?;
            self.check_route(wiring.local, wiring.remote)?;
        }
        // ACK requests use additional slots in each direction.
        let mut ird = Some(wiring.ird + MAX_ACK_REQUESTS);
        let mut ord = Some(MAX_ACK_REQUESTS);
        let account = &find(&mut self.sessions, id)?.account;
        let reads = Reads::charge(account, &mut ird, &mut ord, ANY_READS, ANY_READS)?;
        let worker = match self.find_mutual_peer(qp, &wiring) {
            Ok((_, worker)) => worker,
            Err(_) => self.workers.least_loaded(),
        };
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        let QpPhase::Idle(mut config) = std::mem::replace(&mut object.phase, QpPhase::Leaving)
        else {
            return Outcome::done();
        };
        config.wiring = Some(wiring);
        object.phase = QpPhase::Bound(worker);
        object.reads = Some(reads);
        object.rc = Some(RcAttr::new(wiring, unreliable));
        // Valid until the worker sets the state itself.
        object.shared.set_state(QpState::Rtr);
        self.workers.one(worker, EngineCommand::AttachRoce(config));
        self.refresh_faults_of(qp);
        self.decide_held(qp);
        self.find_local_peer(qp);
        self.rendezvous.peer_changed(qp);
        Outcome::done()
    }

    /// Returns an error if a QP at GID `local` cannot reach other daemons.
    fn check_external(&self, local: Gid, remote: Gid) -> Result<(), Refusal> {
        if !self.is_internal(local) {
            return Ok(());
        }
        let why = format!(
            "{local} is not an address of this host, so QPs with this GID cannot reach {remote} at \
             another daemon; use another GID index, or add the address to the interface"
        );
        Err(refuse::invalid("local", why))
    }

    /// Returns an error if the host has no route from a QP at GID `local` to its peer. The kernel
    /// resolves the GID of the peer in this transition too.
    fn check_route(&self, local: Gid, remote: Gid) -> Result<(), Refusal> {
        let port = self.config.wired.port;
        let own = self.socket_address(local, 0, local);
        let peer = self.socket_address(remote, port, local);
        // An error other than that of the route also fails the connection, which reports it.
        let Ok(socket) = UdpSocket::bind(own) else { return Ok(()) };
        // Selects the route, and sends nothing.
        let Err(error) = socket.connect(peer) else { return Ok(()) };
        let errno = match error.kind() {
            // From a loopback address, or to a link-local address of another interface.
            ErrorKind::InvalidInput | ErrorKind::NetworkUnreachable => Errno::NETUNREACH,
            ErrorKind::HostUnreachable => Errno::HOSTUNREACH,
            _ => return Ok(()),
        };
        Err(Refusal::System {
            what: format!("no route from {local} to {remote}"),
            error: error.to_string(),
            errno: system::number(&errno.into()),
        })
    }

    fn check_wiring(&self, id: SessionId, wiring: &Wiring) -> Result<(), Refusal> {
        let Wiring { local, remote: _, remote_qp, rq_psn, min_rnr_timer, ird, rights, path_mtu } =
            *wiring;
        if !self.has_gid(local) {
            return Err(no_gid(local));
        }
        refuse::at_most("remote_qp", remote_qp.0.into(), TWENTY_FOUR_BITS, MOST_24.into())?;
        refuse::at_most("rq_psn", rq_psn.into(), TWENTY_FOUR_BITS, MOST_24.into())?;
        if !PATH_MTUS.contains(&path_mtu) {
            let why = format!("{path_mtu} bytes is not a path MTU; use one of {PATH_MTUS:?}");
            return Err(refuse::invalid("path_mtu", why));
        }
        refuse::at_most("min_rnr_timer", min_rnr_timer.into(), FIVE_BITS, 31)?;
        refuse::at_most_of(&self.config, Kind::Ird, "ird", ird.into())?;
        check_rights(rights)?;
        self.may_have_peer(id, wiring)
    }

    /// Returns an error if the rules do not allow this session a stream with this peer. Called
    /// again for each new stream, because a reload may have changed the rules.
    pub(super) fn may_have_peer(&self, id: SessionId, wiring: &Wiring) -> Result<(), Refusal> {
        let port = self.config.wired.port;
        let local = wiring.local.address();
        let peer = wiring.remote.address();
        let local = SocketAddr::new(local, port);
        let peer = SocketAddr::new(peer, port);
        let session = self.sessions.get(&id).ok_or_else(|| refuse::no_such("session", id.0))?;
        let who = &session.client.identity;
        self.policy.may_listen(who, local)?;
        self.policy.may_reach(who, "be reached at", local)?;
        self.policy.may_connect(who, peer)?;
        self.policy.may_reach(who, "use a peer at", peer)
    }

    fn ready_to_send(&mut self, id: SessionId, qp: QpId, sending: Sending) -> Answer {
        refuse::at_most("sq_psn", sending.sq_psn.into(), TWENTY_FOUR_BITS, MOST_24.into())?;
        refuse::at_most("timeout", sending.timeout.into(), FIVE_BITS, 31)?;
        refuse::at_most("retry_count", sending.retry_count.into(), THREE_BITS, 7)?;
        refuse::at_most("rnr_retry", sending.rnr_retry.into(), THREE_BITS, 7)?;
        refuse::at_most_of(&self.config, Kind::Ord, "ord", sending.ord.into())?;
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        let (&QpPhase::Bound(worker), Some(_)) = (&object.phase, &object.rc) else {
            return Err(wrong_state(qp, state_name(object), "Rtr, Rts, Sqd or Sqe"));
        };
        if !object.works() {
            return Err(wrong_state(qp, state_name(object), "Rtr, Rts, Sqd or Sqe"));
        }
        let account = find(&mut self.sessions, id)?.account.clone();
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        if let Some(reads) = &mut object.reads {
            reads.set_ord(&account, sending.ord + MAX_ACK_REQUESTS)?;
        }
        if let Some(rc) = &mut object.rc {
            rc.sending = Some(sending);
            rc.drains = false;
        }
        let change = EngineCommand::Change(qp, QpChange::ReadyToSend(sending));
        let ticket = self.workers.one_ticketed(worker, change);
        self.find_local_peer(qp);
        self.compare_psns(qp);
        self.answer_when_modified(id, ticket)
    }

    pub(super) fn reset_qp(&mut self, id: SessionId, qp: QpId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object = session.qp(qp)?;
        object.rc = None;
        object.datagrams = None;
        object.connection = None;
        object.reads = None;
        let phase = std::mem::replace(&mut object.phase, QpPhase::Leaving);
        self.leave_rendezvous(qp);
        let session = find(&mut self.sessions, id)?;
        let object = session.qp(qp)?;
        match phase {
            QpPhase::Bound(worker) => {
                // A copier may still write to buffers that the program reuses after the answer.
                let copier = session.attached.as_ref().and_then(Attached::copier);
                let ticket = self.workers.one_ticketed(worker, Command::Destroy(qp));
                self.workers.await_copies(ticket, copier);
                self.pending.insert(ticket, Pending::ResetQp { session: id, qp });
                Outcome::later()
            }
            _ => {
                become_idle(object)?;
                self.refresh_faults_of(qp);
                Outcome::done()
            }
        }
    }

    /// Completes the reset of a QP after its worker has released it.
    pub(in crate::resource) fn qp_was_reset(&mut self, id: SessionId, qp: QpId) {
        let Ok(object) = find(&mut self.sessions, id).and_then(|s| s.qp(qp)) else { return };
        match become_idle(object) {
            Ok(()) => {
                self.refresh_faults_of(qp);
                self.outbox.answer(id, ReplyBody::Done);
                self.rendezvous.peer_changed(qp);
            }
            Err(refusal) => self.outbox.end(id, format!("QP {qp} cannot be reset: {refusal}")),
        }
    }

    /// Searches for the peer again after the stream of an RC or UC QP has ended.
    pub(in crate::resource) fn unlinked(&mut self, qp: QpId) {
        let Some((_, object)) = self.qp_of(qp) else { return };
        object.connection = None;
        if let Some(rc) = &mut object.rc {
            rc.stream = None;
            self.find_local_peer(qp);
        }
    }

    // --- Finding the peer --------------------------------------------------------------------

    /// Links a QP with its peer if the peer also specifies it, otherwise records the reason.
    /// Connects to the peer's daemon if the two do not use the direct path.
    fn find_local_peer(&mut self, qp: QpId) {
        self.rendezvous.cancel_seek(qp);
        self.seek_on(qp);
    }

    /// Like `find_local_peer`, but after a change of the peer. Counts as a connection in the
    /// owner's rate limit. The worker gets the reason only if it differs from the previous one.
    pub(super) fn seek_again(&mut self, qp: QpId, now: Time) {
        let Some((session, _)) = self.qp_of(qp) else { return };
        if self.take_rate(session, now).is_err() {
            return self.rendezvous.dial_at(qp, now.after(SEEK_PAUSE));
        }
        self.seek_on(qp);
    }

    fn seek_on(&mut self, qp: QpId) {
        let Some((_, object)) = self.qp_of(qp) else { return };
        let (QpPhase::Bound(worker), Some(rc)) = (&object.phase, &object.rc) else { return };
        if rc.stream.is_some() || !object.works() {
            self.rendezvous.cancel_seek(qp);
            return;
        }
        let worker = *worker;
        let wiring = rc.wiring;
        let sending = rc.sending;
        if !self.uses_direct_path(qp, &wiring) {
            return self.find_remote_peer(qp);
        }
        if let Some(why) = self.forbidden_because(qp, &wiring) {
            self.workers.one(worker, EngineCommand::SetUnlinkedReason(qp, why));
            return self.rendezvous.dial_at(qp, clock::now().after(LONGEST_PAUSE));
        }
        let found = self.find_mutual_peer(qp, &wiring).and_then(|(peer, of)| {
            let theirs = self.rc(peer).ok_or_else(|| "its peer is gone".to_owned())?;
            if self.forbidden_because(peer, &theirs.wiring).is_some() {
                return Err(Rejection::Forbidden.of(peer, wiring.remote));
            }
            self.config.wired.compare.then(|| ends_match(&wiring, sending, theirs)).transpose()?;
            if theirs.stream.is_some() || of != worker {
                return Err(format!("the previous stream of queue pair {peer} has not ended yet"));
            }
            Ok((peer, theirs.wiring))
        });
        match found {
            Ok((peer, theirs)) => {
                let port = self.config.wired.port;
                let address = |gid: Gid| SocketAddr::new(gid.address(), port);
                let ends = [(qp, wiring, theirs), (peer, theirs, wiring)];
                for (end, own, other) in ends {
                    let Some((_, object)) = self.qp_of(end) else { continue };
                    let Some(rc) = &mut object.rc else { continue };
                    rc.stream = Some(RcStream::Direct);
                    let local = address(own.local);
                    let peer = address(own.remote);
                    let ord = rc.sending.map_or(0, |s| s.ord).min(other.ird);
                    let addresses = AddressPair { local, peer };
                    let connection = Connection { path: "direct", addresses, ird: own.ird, ord };
                    object.connection = Some(connection);
                }
                let ends = [(qp, limits_of(&theirs)), (peer, limits_of(&wiring))];
                self.workers.one(worker, EngineCommand::LinkDirect(ends));
            }
            Err(why) => {
                if self.rendezvous.seek(qp, wiring.remote_qp, &why) {
                    self.workers.one(worker, EngineCommand::SetUnlinkedReason(qp, why));
                }
            }
        }
    }

    /// Returns the reason if the rules do not allow this QP's stream.
    pub(super) fn forbidden_because(&self, qp: QpId, wiring: &Wiring) -> Option<String> {
        let owner = self.handles.qps.owner(qp.0)?;
        self.may_have_peer(owner, wiring).err().map(|refusal| refusal.to_string())
    }

    /// Decides the held requests for destroyed QPs, and schedules a new search for the QPs that
    /// wait for them.
    pub(in crate::resource) fn peers_gone(&mut self, gone: &BTreeSet<QpId>) {
        for qp in gone {
            self.decide_held(*qp);
            self.rendezvous.peer_changed(*qp);
        }
    }

    /// Returns a QP's peer and the peer's worker, if the peer is at this daemon and has this QP as
    /// its own peer. The error is the reason for the diagnosis.
    fn find_mutual_peer(&self, qp: QpId, wiring: &Wiring) -> Result<(QpId, u32), String> {
        let Wiring { local, remote, remote_qp: peer, .. } = *wiring;
        if !self.uses_direct_path(qp, wiring) {
            return Err(format!("{remote} is not a GID of this daemon"));
        }
        let Some(object) = self.find_qp(peer) else {
            return Err(format!("there is no queue pair {peer} at {remote}"));
        };
        let (QpPhase::Bound(worker), Some(theirs)) = (&object.phase, &object.rc) else {
            return Err(format!("queue pair {peer} at {remote} is not in RTR yet"));
        };
        if !object.works() {
            return Err(format!("queue pair {peer} at {remote} is in Error"));
        }
        let Wiring { local: at, remote: to, remote_qp: to_qp, .. } = theirs.wiring;
        if (to, to_qp) != (local, qp) {
            return Err(format!(
                "queue pair {peer} at {remote} has another peer: queue pair {to_qp} at {to}"
            ));
        }
        if theirs.unreliable != self.is_unreliable(qp) {
            return Err(format!(
                "the type of queue pair {peer} at {remote} differs: one end is RC, the other UC"
            ));
        }
        if at != remote {
            return Err(format!("queue pair {peer} has the GID {at}, not {remote}"));
        }
        Ok((peer, *worker))
    }

    /// Returns true if this QP and its peer use the direct path. A QP that is its own peer always
    /// does, because it cannot be both ends of a TCP connection.
    pub(super) fn uses_direct_path(&self, qp: QpId, wiring: &Wiring) -> bool {
        let itself = wiring.remote_qp == qp && wiring.remote == wiring.local;
        let ends = [wiring.local, wiring.remote];
        itself || self.has_gid(wiring.remote) && ends.iter().any(|gid| self.is_direct_gid(*gid))
    }

    /// Returns true if QPs at this GID reach QPs of this daemon on the direct path. With
    /// `loopback = "tcp"` they do so if their connections would not reach this daemon.
    pub(super) fn is_direct_gid(&self, gid: Gid) -> bool {
        let is_direct = self.config.engine.loopback == Loopback::Direct;
        self.has_gid(gid) && (is_direct || self.is_internal(gid) || !self.has_port_at(gid))
    }

    /// Ends the stream of a QP and its peer if their PSNs do not match.
    fn compare_psns(&mut self, qp: QpId) {
        if !self.config.wired.compare {
            return;
        }
        let Some(own) = self.rc(qp) else { return };
        let wiring = own.wiring;
        let sending = own.sending;
        let matched = match own.stream {
            Some(RcStream::Direct) => match self.rc(wiring.remote_qp) {
                Some(theirs) => ends_match(&wiring, sending, theirs),
                None => return,
            },
            Some(RcStream::Tcp) => own.compare_far(),
            _ => return,
        };
        let Err(why) = matched else { return };
        if let Some((_, object)) = self.qp_of(qp)
            && let QpPhase::Bound(worker) = object.phase
        {
            self.workers.one(worker, EngineCommand::Unlink(qp, why));
        }
    }

    fn is_unreliable(&self, qp: QpId) -> bool {
        self.find_qp(qp).is_some_and(|object| object.kind == QpType::Uc)
    }

    /// Returns true if the QP is about to have its first stream to another daemon.
    pub(super) fn expects_stream(&self, qp: QpId) -> bool {
        self.rc(qp).is_some_and(|rc| {
            let is_far = !self.uses_direct_path(qp, &rc.wiring);
            is_far && (rc.tries == 0 || rc.stream.is_some())
        })
    }

    pub(super) fn rc(&self, qp: QpId) -> Option<&RcAttr> {
        self.find_qp(qp)?.rc.as_ref()
    }
}

/// Resets a QP to Idle. No worker may hold the QP.
fn become_idle(object: &mut Qp) -> Result<(), Refusal> {
    object.faults = QpFaults::default();
    object.phase = QpPhase::Idle(object.parts.config()?);
    object.shared.set_state(QpState::Idle);
    Ok(())
}

/// Returns an error if the path MTUs or the known PSNs of the two ends do not match.
fn ends_match(wiring: &Wiring, sending: Option<Sending>, theirs: &RcAttr) -> Result<(), String> {
    let peer = wiring.remote_qp;
    let other = format!("queue pair {peer}");
    if wiring.path_mtu != theirs.wiring.path_mtu {
        return Err(path_mtus_differ(wiring.path_mtu, peer, theirs.wiring.path_mtu));
    }
    match (sending, theirs.sending) {
        (Some(s), _) if s.sq_psn != theirs.wiring.rq_psn => {
            Err(psns_differ("this side", s.sq_psn, &other, theirs.wiring.rq_psn))
        }
        (_, Some(s)) if s.sq_psn != wiring.rq_psn => {
            Err(psns_differ(&other, s.sq_psn, "this side", wiring.rq_psn))
        }
        _ => Ok(()),
    }
}

fn no_gid(local: Gid) -> Refusal {
    refuse::invalid("local", format!("{local} is not a GID of this device"))
}

fn limits_of(peer: &Wiring) -> PeerLimits {
    PeerLimits { ird: peer.ird, min_rnr_timer: peer.min_rnr_timer }
}

fn check_rights(rights: Access) -> Result<(), Refusal> {
    let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    if remote.contains(rights) {
        Ok(())
    } else {
        Err(refuse::invalid("rights", "use only REMOTE_WRITE, REMOTE_READ and REMOTE_ATOMIC"))
    }
}

pub(super) fn state_name(object: &Qp) -> &'static str {
    match (&object.phase, object.state()) {
        (QpPhase::Leaving, _) => "being reset or destroyed",
        (_, QpState::Idle) => "Idle",
        (_, QpState::Rtr) => "Rtr",
        (_, QpState::Rts) => "Rts",
        (_, QpState::Sqd) => "Sqd",
        (_, QpState::Sqe) => "Sqe",
        _ => "Error",
    }
}

/// Delay of a new search if the owner's connection rate limit is exhausted.
const SEEK_PAUSE: Duration = Duration::from_millis(100);
/// No maximum: the values have already been checked against the limits.
const ANY_READS: u16 = u16::MAX;
pub(super) const MOST_24: u32 = (1 << 24) - 1;
pub(super) const TWENTY_FOUR_BITS: &str = "24 bits";
/// Path MTUs of verbs (`ibv_mtu`), in bytes.
pub(super) const PATH_MTUS: [u16; 5] = [256, 512, 1024, 2048, 4096];
const FIVE_BITS: &str = "5 bits";
pub(super) const THREE_BITS: &str = "3 bits";
