//! Commands of the resource manager, which has authorised them.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Engine;
use super::datagram::{DatagramPort, DatagramRules};
use super::interface::{EngineOptions, Notification};
use super::link::Link;
use super::link::tcp::TcpLink;
use super::phase::StreamPhase;
use super::qp::{Qp, QpConfig};
use super::schedule::Key;
use super::state::Peer;
use super::wired::PeerLimits;
use crate::abi::control::{DisconnectMode, QpChange};
use crate::device::{StagChange, StagEntry, Window};
use crate::engine::numbers::count;
use crate::shm::doorbell::DoorbellScanner;
use crate::stream::startup::{Negotiated, Role};
use crate::types::{AddressPair, QpId, SessionId, Stag, Time, UserId};

impl Engine {
    /// Starts to serve a session's doorbells. Its QPs take turns with those of other sessions of
    /// this user, and all of them with those of other users.
    pub fn attach_session(
        &mut self,
        session: SessionId,
        user: UserId,
        scanner: DoorbellScanner,
        now: Time,
    ) {
        let seat = self.state.schedule.join(user);
        self.state.doorbells.attach(session, user, seat, scanner, now);
    }

    /// Makes a region known to this worker: from now on its STag and lkey resolve.
    pub fn install_stag(&mut self, entry: StagEntry) {
        self.state.stags.install(entry);
    }

    /// Removes a region. When this has returned, no byte of it will be read or written.
    pub fn revoke_stag(&mut self, stag: Stag) {
        self.state.stags.revoke(stag);
    }

    /// Makes a window known, so that QPs can bind it.
    pub fn add_window(&mut self, window: Arc<Window>) {
        self.state.stags.add_window(window);
    }

    /// Forgets a window. When this has returned, nothing is reached through it.
    pub fn remove_window(&mut self, window: &Window) {
        self.state.stags.remove_window(window);
    }

    /// Carries out a change that a QP of this or another worker asked for.
    pub fn change_stags(&mut self, change: &StagChange) {
        self.state.stags.change(change);
    }

    /// Takes over a QP with its TCP connection, which has been through MPA start-up.
    pub fn attach_tcp(
        &mut self,
        config: Box<QpConfig>,
        negotiated: Negotiated,
        addresses: AddressPair,
        now: Time,
    ) {
        self.state.now = now;
        let id = config.qp;
        let link = Box::new(TcpLink::new(&negotiated));
        self.insert(*config, Link::Tcp(link));
        let Negotiated { role, revision, version, ird, ord, private_data, leftover, .. } =
            negotiated;
        self.with(id, |qp, engine| {
            qp.life.connected(addresses, revision);
            qp.requester.connected(ird, ord, version);
            match role {
                Role::Initiator { .. } => {
                    qp.enter(StreamPhase::Open);
                    qp.emit_established(engine, private_data);
                }
                Role::Responder { .. } => {
                    //= MPA-7.1.2-4
                    qp.enter(StreamPhase::AwaitFirstFpdu);
                    let deadline = now.after(engine.options.first_fpdu_deadline);
                    qp.life.set_deadline(&qp.core, engine, Some(deadline));
                }
            }
            qp.read_later(engine, leftover, 0);
            engine.wake(&mut qp.core);
        });
    }

    /// Takes over two QPs that are connected with each other by the direct path.
    pub fn attach_direct(
        &mut self,
        active: (Box<QpConfig>, Negotiated, AddressPair),
        passive: (Box<QpConfig>, Negotiated, AddressPair),
        now: Time,
    ) {
        self.state.now = now;
        let ids = [active.0.qp, passive.0.qp];
        let mut ends = Vec::with_capacity(2);
        for (config, negotiated, addresses) in [active, passive] {
            let key = self.insert(*config, Link::None);
            ends.push((key, negotiated, addresses));
        }
        let [a, b] = [0, 1].map(|n| Peer { key: ends[n].0, id: ids[n] });
        for ((_, negotiated, addresses), (peer, id)) in
            ends.into_iter().zip([(b, ids[0]), (a, ids[1])])
        {
            self.with(id, |qp, engine| {
                qp.link = Link::Direct(peer);
                qp.life.connected(addresses, negotiated.revision);
                qp.requester.connected(negotiated.ird, negotiated.ord, negotiated.version);
                qp.enter(StreamPhase::Open);
                let private_data = match negotiated.role {
                    Role::Initiator { .. } => negotiated.private_data,
                    Role::Responder { .. } => Vec::new(),
                };
                qp.emit_established(engine, private_data);
                engine.wake(&mut qp.core);
            });
        }
    }

    /// Takes over a QP that is in Error without ever having been connected, to flush it.
    pub fn attach_in_error(&mut self, config: Box<QpConfig>, now: Time) {
        self.state.now = now;
        let id = config.qp;
        self.insert(*config, Link::None);
        self.with(id, |qp, engine| {
            qp.enter(StreamPhase::Ended);
            qp.life.ended_before(qp.core.shared.diagnosis.load(Relaxed));
            qp.flush(engine);
        });
    }

    /// Takes over a QP that is wired by hand, in Rtr: its stream may come, or its datagrams may.
    /// All QPs of datagrams of a device belong to one engine.
    pub fn attach_wired(&mut self, config: Box<QpConfig>, now: Time) {
        self.state.now = now;
        let id = config.qp;
        let (link, phase) = match config.datagrams {
            Some(_) => (Link::Datagrams, StreamPhase::Open),
            None => (Link::None, StreamPhase::Unlinked),
        };
        self.insert(*config, link);
        self.with(id, |qp, engine| {
            qp.requester.set_pace(false, 0);
            qp.enter(phase);
            engine.wake(&mut qp.core);
        });
    }

    /// Has a QP of datagrams keep to other rules of the administrator's.
    pub fn set_datagram_rules(&mut self, qp: QpId, rules: Box<dyn DatagramRules>) {
        self.with(qp, |qp, _| qp.set_datagram_rules(rules));
    }

    /// Gives a UD QP the device's ports as they are now.
    pub fn set_datagram_port(&mut self, qp: QpId, port: &Arc<DatagramPort>) {
        self.with(qp, |qp, _| qp.set_datagram_port(port.clone()));
    }

    /// Moves a QP that is wired by hand, or changes what it was told.
    pub fn change_qp(&mut self, qp: QpId, change: &QpChange, now: Time) {
        self.state.now = now;
        self.with(qp, |qp, engine| match qp.datagrams {
            Some(_) => qp.change_datagrams(engine, change),
            None => qp.change(engine, change),
        });
    }

    /// Says why a QP that is wired by hand has no stream.
    pub fn set_unlinked_because(&mut self, qp: QpId, why: String) {
        self.with(qp, |qp, _| qp.set_unlinked_because(why));
    }

    /// Links two QPs of this engine that are wired to each other, or one to itself, by the direct
    /// path; each with what the other one has said. If one of them has ended meanwhile, the other
    /// one goes on without a stream, and that is said once more.
    pub fn link_direct(&mut self, ends: [(QpId, PeerLimits); 2], now: Time) {
        self.state.now = now;
        let peer = |(id, _): &(QpId, PeerLimits)| {
            let key = *self.by_id.get(id)?;
            let qp = self.qps.get(key as usize)?.as_ref()?;
            (qp.life.phase() == StreamPhase::Unlinked).then_some(Peer { key, id: *id })
        };
        let (a, b) = match (peer(&ends[0]), peer(&ends[1])) {
            (Some(a), Some(b)) => (a, b),
            (one, other) => {
                for Peer { id: qp, .. } in one.into_iter().chain(other) {
                    self.state.report(Notification::Unlinked { qp });
                }
                return;
            }
        };
        let ends_of_one = if a.id == b.id { 1 } else { 2 };
        for ((id, limits), other) in ends.into_iter().zip([b, a]).take(ends_of_one) {
            self.with(id, |qp, engine| {
                qp.linked(engine, Link::Direct(other), StreamPhase::Open, limits);
            });
        }
    }

    /// Whether a QP that is wired by hand is without a stream, and may get one.
    pub fn is_unlinked(&mut self, qp: QpId) -> bool {
        self.with(qp, |qp, _| qp.life.phase() == StreamPhase::Unlinked).unwrap_or(false)
    }

    /// Takes the stream from a QP that is wired by hand; it stays, and may get another one.
    pub fn unlink(&mut self, qp: QpId, why: &str, now: Time) {
        self.state.now = now;
        self.with(qp, |qp, engine| {
            if qp.is_wired() && qp.life.phase().is_linked() {
                qp.unlink(engine, true, why);
            }
        });
    }

    /// Links a QP that is wired by hand, and [has no stream](Self::is_unlinked), by a TCP
    /// connection that has been through start-up.
    pub fn link_tcp(&mut self, qp: QpId, negotiated: Negotiated, peer: PeerLimits, now: Time) {
        self.state.now = now;
        self.with(qp, |qp, engine| {
            let link = Link::Tcp(Box::new(TcpLink::new(&negotiated)));
            let Negotiated { role, leftover, .. } = negotiated;
            match role {
                Role::Initiator { .. } => qp.linked(engine, link, StreamPhase::Open, peer),
                Role::Responder { .. } => {
                    //= MPA-7.1.2-4
                    qp.linked(engine, link, StreamPhase::AwaitFirstFpdu, peer);
                    let deadline = now.after(engine.options.first_fpdu_deadline);
                    qp.life.set_deadline(&qp.core, engine, Some(deadline));
                }
            }
            qp.read_later(engine, leftover, 0);
        });
    }

    /// Ends a connection, in order or at once.
    pub fn disconnect(&mut self, qp: QpId, mode: DisconnectMode, now: Time) {
        self.state.now = now;
        self.with(qp, |qp, engine| qp.disconnect(engine, mode));
    }

    /// Moves a QP to Error: its connection is aborted, everything posted is flushed.
    pub fn to_error(&mut self, qp: QpId, now: Time) {
        self.disconnect(qp, DisconnectMode::Abort, now);
    }

    /// Ends a QP's connection for reasons of its administrator: with a Terminate where the stream
    /// allows one, else with a reset. The QP stays in Error, and everything posted is flushed.
    pub fn admin_disconnect(&mut self, qp: QpId, now: Time) {
        self.state.now = now;
        self.with(qp, |qp, engine| qp.admin_disconnect(engine));
    }

    /// Takes other deadlines and another policy of FPDU sizes from now on. Deadlines that run are
    /// not touched; the worker's number stays, and so does the log of reasons, which others read.
    pub fn set_options(&mut self, options: EngineOptions) {
        let state = &mut self.state;
        let (worker, diagnoses) = (state.options.worker, state.options.diagnoses.clone());
        state.partials.set_limits(options.partial);
        state.unsent.set_limits(options.unsent);
        state.options = EngineOptions { worker, diagnoses, ..options };
    }

    /// Forgets a QP. Its peer is told by a Terminate where the stream allows it, else by a reset;
    /// nothing of it completes any more.
    pub fn destroy(&mut self, id: QpId, now: Time) {
        self.state.now = now;
        let Some(key) = self.by_id.remove(&id) else { return };
        let Some(mut qp) = self.qps[key as usize].take() else { return };
        qp.destroy(&mut self.state);
        self.free.push(key);
        self.deliver_pending();
    }

    fn insert(&mut self, config: QpConfig, link: Link) -> Key {
        let key = self.free.pop().unwrap_or_else(|| {
            self.qps.push(None);
            count(self.qps.len() - 1)
        });
        let seat = self.state.doorbells.seat(config.session);
        let qp = Box::new(Qp::new(key, seat, config, link));
        self.by_id.insert(qp.core.id, key);
        self.state.doorbells.route(seat, qp.core.doorbell, key);
        // Posting rang nothing before this; from now on it does, and the caller scans both rings
        // once.
        qp.requester.set_worker(self.state.worker);
        qp.responder.set_worker(self.state.worker);
        self.qps[key as usize] = Some(qp);
        key
    }
}
