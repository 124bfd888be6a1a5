//! Queue pairs that are wired by hand: what they are told, and how two that are wired to each other
//! find each other within this daemon.
//!
//! Each of two names the other by GID and number, and neither gets a stream before both have. Who
//! is told first waits, in a worker; the other one goes to the same worker, so that the direct path
//! can link them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use rnic_core::abi::control::{QpChange, Refusal, ReplyBody, Sending, Wiring};
use rnic_core::engine::{PeerLimits, QUESTIONS};
use rnic_core::types::*;

use super::reads::Reads;
use super::rejection::{Rejection, path_mtus_differ, psns_differ};
use super::rendezvous::LONGEST_PAUSE;
use super::told::{Wired, WiredStream};
use super::{Connection, Qp, QpPhase, wrong_state};
use crate::clock;
use crate::config::Loopback;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::memory::Attached;
use crate::resource::{Manager, Pending, find, refuse};

impl Manager {
    pub(in crate::resource) fn modify_qp(
        &mut self,
        id: SessionId,
        qp: QpId,
        change: &QpChange,
        now: Time,
    ) -> Answer {
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        if !object.kind.is_wired() {
            return Err(wrong_state(qp, "one that connects", "one that is wired by hand"));
        }
        if object.kind == QpType::Datagrams {
            return self.modify_datagrams(id, qp, change, now);
        }
        match change {
            QpChange::ReadyToReceive(wiring) => self.ready_to_receive(id, qp, *wiring, now),
            QpChange::ReadyToSend(sending) => self.ready_to_send(id, qp, *sending),
            QpChange::Reset => self.reset_qp(id, qp),
            QpChange::Rights(rights) => {
                check_rights(*rights)?;
                self.pass_on(id, qp, *change)
            }
            QpChange::MinRnrTimer(code) => {
                refuse::at_most("min_rnr_timer", (*code).into(), FIVE_BITS, 31)?;
                self.pass_on(id, qp, *change)
            }
            QpChange::DrainSendQueue => {
                let object = find(&mut self.sessions, id)?.qp(qp)?;
                if object.state() != QpState::Rts {
                    return Err(wrong_state(qp, state_name(object), "Rts"));
                }
                if let Some(wired) = &mut object.wired {
                    wired.drains = true;
                }
                self.pass_on(id, qp, *change)
            }
            QpChange::ReceiveDatagrams { .. } | QpChange::QKey(_) => {
                Err(wrong_state(qp, "one that has a peer", "one of datagrams"))
            }
        }
    }

    /// Passes a change on to the worker of a QP.
    fn pass_on(&mut self, id: SessionId, qp: QpId, change: QpChange) -> Answer {
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        let QpPhase::Bound(worker) = object.phase else {
            return Err(wrong_state(qp, state_name(object), "Rtr, Rts, Sqd or Sqe"));
        };
        let ticket = self.workers.change_qp(worker, qp, change);
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
        let unreliable = object.kind == QpType::WiredUnreliable;
        if unreliable {
            // Nothing is ever answered.
            wiring.ird = 0;
        }
        self.check_wiring(id, &wiring)?;
        self.take_rate(id, now)?;
        if !self.meet_here(qp, &wiring) {
            self.check_wired_port(wiring.local.address(), wiring.remote.address())?;
        }
        // Some more of each way are for acknowledgements.
        let (mut ird, mut ord) = (Some(wiring.ird + QUESTIONS), Some(QUESTIONS));
        let account = &find(&mut self.sessions, id)?.account;
        let reads = Reads::charge(account, (&mut ird, &mut ord), ANY_READS)?;
        let worker = match self.wired_to_each_other(qp, &wiring) {
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
        object.wired = Some(Wired {
            wiring,
            unreliable,
            sending: None,
            drains: false,
            stream: None,
            tries: 0,
            peer: None,
            has_unconfirmed: false,
        });
        // Until the worker has it.
        object.shared.set_state(QpState::Rtr);
        self.workers.attach_wired(worker, config);
        self.answer_held(qp);
        self.seek_peer(qp);
        self.rendezvous.peer_changed(qp);
        Outcome::done()
    }

    fn check_wiring(&self, id: SessionId, wiring: &Wiring) -> Result<(), Refusal> {
        let Wiring { local, remote: _, remote_qp, rq_psn, min_rnr_timer, ird, rights, path_mtu } =
            *wiring;
        if !self.has_gid(local) {
            let why = format!("{local} is no GID of this device");
            return Err(refuse::invalid("local", why));
        }
        refuse::at_most("remote_qp", remote_qp.0.into(), TWENTY_FOUR_BITS, MOST_24.into())?;
        refuse::at_most("rq_psn", rq_psn.into(), TWENTY_FOUR_BITS, MOST_24.into())?;
        if !PATH_MTUS.contains(&path_mtu) {
            let why = format!("{path_mtu} bytes are no MTU of a packet: {PATH_MTUS:?}");
            return Err(refuse::invalid("path_mtu", why));
        }
        refuse::at_most("min_rnr_timer", min_rnr_timer.into(), FIVE_BITS, 31)?;
        refuse::at_most("ird", ird.into(), "limits.ird", self.config.limits.device.of(Kind::Ird))?;
        check_rights(rights)?;
        self.may_be_wired(id, wiring)
    }

    /// Refuses a stream that the rules do not allow this session. A reload may have changed them
    /// since the wiring, so each new stream is checked as well.
    pub(super) fn may_be_wired(&self, id: SessionId, wiring: &Wiring) -> Result<(), Refusal> {
        let port = self.config.wired.port;
        let (local, peer) = (wiring.local.address(), wiring.remote.address());
        let (local, peer) = (SocketAddr::new(local, port), SocketAddr::new(peer, port));
        let session = self.sessions.get(&id).ok_or_else(|| refuse::no_such("session", id.0))?;
        let who = &session.client.identity;
        self.policy.may_listen(who, local)?;
        self.policy.may_reach(who, "be reached by", local)?;
        self.policy.may_connect(who, peer)?;
        self.policy.may_reach(who, "be wired to", peer)
    }

    fn ready_to_send(&mut self, id: SessionId, qp: QpId, sending: Sending) -> Answer {
        let limits = &self.config.limits.device;
        refuse::at_most("sq_psn", sending.sq_psn.into(), TWENTY_FOUR_BITS, MOST_24.into())?;
        refuse::at_most("timeout", sending.timeout.into(), FIVE_BITS, 31)?;
        refuse::at_most("retry_count", sending.retry_count.into(), THREE_BITS, 7)?;
        refuse::at_most("rnr_retry", sending.rnr_retry.into(), THREE_BITS, 7)?;
        refuse::at_most("ord", sending.ord.into(), "limits.ord", limits.of(Kind::Ord))?;
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        let (&QpPhase::Bound(worker), Some(_)) = (&object.phase, &object.wired) else {
            return Err(wrong_state(qp, state_name(object), "Rtr, Rts, Sqd or Sqe"));
        };
        if !object.works() {
            return Err(wrong_state(qp, state_name(object), "Rtr, Rts, Sqd or Sqe"));
        }
        let account = find(&mut self.sessions, id)?.account.clone();
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        if let Some(reads) = &mut object.reads {
            reads.set_ord(&account, sending.ord + QUESTIONS)?;
        }
        if let Some(wired) = &mut object.wired {
            (wired.sending, wired.drains) = (Some(sending), false);
        }
        let ticket = self.workers.change_qp(worker, qp, QpChange::ReadyToSend(sending));
        self.seek_peer(qp);
        self.compare_psns(qp);
        self.answer_when_modified(id, ticket)
    }

    pub(super) fn reset_qp(&mut self, id: SessionId, qp: QpId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object = session.qp(qp)?;
        (object.wired, object.datagrams) = (None, None);
        (object.connection, object.reads) = (None, None);
        let phase = std::mem::replace(&mut object.phase, QpPhase::Leaving);
        self.leave_rendezvous(qp);
        let session = find(&mut self.sessions, id)?;
        let object = session.qp(qp)?;
        match phase {
            QpPhase::Bound(worker) => {
                // What it had a copier write would land in buffers that are its owner's again.
                let copier = session.attached.as_ref().and_then(Attached::copier);
                let ticket = self.workers.destroy_qp(worker, qp);
                self.workers.await_copies(ticket, copier);
                self.pending.insert(ticket, Pending::ResetQp { session: id, qp });
                Outcome::later()
            }
            _ => {
                become_idle(object)?;
                Outcome::done()
            }
        }
    }

    /// No worker knows a QP any more that is being reset.
    pub(in crate::resource) fn qp_left(&mut self, id: SessionId, qp: QpId) {
        let Ok(object) = find(&mut self.sessions, id).and_then(|s| s.qp(qp)) else { return };
        match become_idle(object) {
            Ok(()) => {
                self.outbox.answer(id, ReplyBody::Done);
                self.rendezvous.peer_changed(qp);
            }
            Err(refusal) => self.outbox.end(id, format!("QP {qp} cannot be reset: {refusal}")),
        }
    }

    /// The stream of a QP that is wired by hand has ended.
    pub(in crate::resource) fn unlinked(&mut self, qp: QpId) {
        let Some((_, object)) = self.qp_of(qp) else { return };
        object.connection = None;
        if let Some(wired) = &mut object.wired {
            wired.stream = None;
            self.seek_peer(qp);
        }
    }

    // --- Finding each other ------------------------------------------------------------------

    /// Links a QP with the one it is wired to, if that is there and wired to it; else says why not.
    fn seek_peer(&mut self, qp: QpId) {
        self.rendezvous.seek_no_more(qp);
        self.seek_on(qp);
    }

    /// As `seek_peer`, for a QP whose peer has changed: it costs the owner of the QP one connection
    /// of its rate, and an answer that is still the same is not sent to the worker.
    pub(super) fn seek_again(&mut self, qp: QpId, now: Time) {
        let Some((session, _)) = self.qp_of(qp) else { return };
        if self.take_rate(session, now).is_err() {
            return self.rendezvous.dial_at(qp, now.after(SEEK_PAUSE));
        }
        self.seek_on(qp);
    }

    fn seek_on(&mut self, qp: QpId) {
        let Some((_, object)) = self.qp_of(qp) else { return };
        let (QpPhase::Bound(worker), Some(wired)) = (&object.phase, &object.wired) else { return };
        if wired.stream.is_some() || !object.works() {
            self.rendezvous.seek_no_more(qp);
            return;
        }
        let (worker, wiring, sending) = (*worker, wired.wiring, wired.sending);
        if !self.meet_here(qp, &wiring) {
            return self.seek_far_peer(qp);
        }
        if let Some(why) = self.forbids(qp, &wiring) {
            self.workers.unlinked_because(worker, qp, why);
            return self.rendezvous.dial_at(qp, clock::now().after(LONGEST_PAUSE));
        }
        let found = self.wired_to_each_other(qp, &wiring).and_then(|(peer, of)| {
            let theirs = self.wired(peer).ok_or_else(|| "its peer is gone".to_owned())?;
            if self.forbids(peer, &theirs.wiring).is_some() {
                return Err(Rejection::Forbidden.of(peer, wiring.remote));
            }
            self.config.wired.compare.then(|| ends_match(&wiring, sending, theirs)).transpose()?;
            if theirs.stream.is_some() || of != worker {
                return Err(format!("queue pair {peer} has not left its last stream yet"));
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
                    let Some(wired) = &mut object.wired else { continue };
                    wired.stream = Some(WiredStream::Direct);
                    let (local, peer) = (address(own.local), address(own.remote));
                    let ord = wired.sending.map_or(0, |s| s.ord).min(other.ird);
                    let addresses = AddressPair { local, peer };
                    let connection = Connection { path: "direct", addresses, ird: own.ird, ord };
                    object.connection = Some(connection);
                }
                let ends = [(qp, limits_of(&theirs)), (peer, limits_of(&wiring))];
                self.workers.link_direct(worker, ends);
            }
            Err(why) => {
                if self.rendezvous.seek(qp, wiring.remote_qp, &why) {
                    self.workers.unlinked_because(worker, qp, why);
                }
            }
        }
    }

    /// Why the rules forbid this queue pair the stream for which it is wired.
    pub(super) fn forbids(&self, qp: QpId, wiring: &Wiring) -> Option<String> {
        let owner = self.handles.qps.owner(qp.0)?;
        self.may_be_wired(owner, wiring).err().map(|refusal| refusal.to_string())
    }

    /// Answers the requests for QPs that are gone, and the QPs that look for them.
    pub(in crate::resource) fn are_no_peers(&mut self, gone: &BTreeSet<QpId>) {
        for qp in gone {
            self.answer_held(*qp);
            self.rendezvous.peer_changed(*qp);
        }
    }

    /// The QP of this daemon that this one is wired to and that is wired to it, and its worker;
    /// else why there is none.
    fn wired_to_each_other(&self, qp: QpId, wiring: &Wiring) -> Result<(QpId, u32), String> {
        let Wiring { local, remote, remote_qp: peer, .. } = *wiring;
        if !self.meet_here(qp, wiring) {
            return Err(format!("{remote} is no GID of this daemon"));
        }
        let owner = self.handles.qps.owner(peer.0);
        let object = owner.and_then(|owner| self.sessions.get(&owner)?.qps.get(&peer));
        let Some(object) = object else {
            return Err(format!("there is no queue pair {peer} at {remote}"));
        };
        let (QpPhase::Bound(worker), Some(theirs)) = (&object.phase, &object.wired) else {
            return Err(format!("queue pair {peer} at {remote} has not been wired (RTR) yet"));
        };
        if !object.works() {
            return Err(format!("queue pair {peer} at {remote} is in Error"));
        }
        let Wiring { local: at, remote: to, remote_qp: to_qp, .. } = theirs.wiring;
        if (to, to_qp) != (local, qp) {
            return Err(format!(
                "queue pair {peer} at {remote} is wired to queue pair {to_qp} at {to}, not to \
                 this one"
            ));
        }
        if theirs.unreliable != self.is_unreliable(qp) {
            return Err(format!(
                "queue pair {peer} at {remote} is of another type: one is reliable (RC), the other \
                 not (UC)"
            ));
        }
        if at != remote {
            return Err(format!("queue pair {peer} is reached by {at}, not by {remote}"));
        }
        Ok((peer, *worker))
    }

    /// Whether this queue pair and its peer are linked by the direct path. One that is wired to
    /// itself always is: it cannot be both ends of a TCP connection.
    pub(super) fn meet_here(&self, qp: QpId, wiring: &Wiring) -> bool {
        let itself = wiring.remote_qp == qp && wiring.remote == wiring.local;
        itself || self.is_near(wiring.remote)
    }

    /// Whether queue pairs at this GID are linked by the direct path.
    pub(super) fn is_near(&self, remote: Gid) -> bool {
        self.has_gid(remote) && self.config.engine.loopback == Loopback::Direct
    }

    /// Ends the stream of two whose PSNs turn out not to match.
    fn compare_psns(&mut self, qp: QpId) {
        if !self.config.wired.compare {
            return;
        }
        let Some(own) = self.wired(qp) else { return };
        let (wiring, sending) = (own.wiring, own.sending);
        let matched = match own.stream {
            Some(WiredStream::Direct) => match self.wired(wiring.remote_qp) {
                Some(theirs) => ends_match(&wiring, sending, theirs),
                None => return,
            },
            Some(WiredStream::Tcp) => own.compare_far(),
            _ => return,
        };
        let Err(why) = matched else { return };
        if let Some((_, object)) = self.qp_of(qp)
            && let QpPhase::Bound(worker) = object.phase
        {
            self.workers.unlink(worker, qp, why);
        }
    }

    fn is_unreliable(&self, qp: QpId) -> bool {
        let owner = self.handles.qps.owner(qp.0);
        let object = owner.and_then(|owner| self.sessions.get(&owner)?.qps.get(&qp));
        object.is_some_and(|object| object.kind == QpType::WiredUnreliable)
    }

    pub(super) fn wired(&self, qp: QpId) -> Option<&Wired> {
        let owner = self.handles.qps.owner(qp.0)?;
        self.sessions.get(&owner)?.qps.get(&qp)?.wired.as_ref()
    }
}

/// A QP that no worker knows is as it was made.
fn become_idle(object: &mut Qp) -> Result<(), Refusal> {
    object.phase = QpPhase::Idle(object.parts.config()?);
    object.shared.set_state(QpState::Idle);
    Ok(())
}

/// Why two ends would not take each other's packets, as far as both have said by now.
fn ends_match(wiring: &Wiring, sending: Option<Sending>, theirs: &Wired) -> Result<(), String> {
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

fn limits_of(peer: &Wiring) -> PeerLimits {
    PeerLimits { ird: peer.ird, min_rnr_timer: peer.min_rnr_timer }
}

fn check_rights(rights: Access) -> Result<(), Refusal> {
    let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    match remote.contains(rights) {
        true => Ok(()),
        false => Err(refuse::invalid("rights", "they are of a peer: REMOTE_WRITE, _READ, _ATOMIC")),
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

/// Until a QP looks again whose owner's rate is used up.
const SEEK_PAUSE: Duration = Duration::from_millis(100);
/// What is asked for has been checked.
const ANY_READS: (u16, u16) = (u16::MAX, u16::MAX);
pub(super) const MOST_24: u32 = (1 << 24) - 1;
pub(super) const TWENTY_FOUR_BITS: &str = "24 bits";
/// Path MTUs of verbs (`ibv_mtu`), in bytes.
const PATH_MTUS: [u16; 5] = [256, 512, 1024, 2048, 4096];
const FIVE_BITS: &str = "5 bits";
const THREE_BITS: &str = "3 bits";
