//! Commands of the resource manager, which has already authorised them.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Engine;
use super::datagram::{DatagramPort, DatagramRules};
use super::fault_rules::QpFault;
use super::interface::{EngineOptions, Freed, Notification};
use super::link::Link;
use super::link::emulation::shared::EmulatedLink;
use super::link::tcp::TcpLink;
use super::phase::StreamPhase;
use super::qp::{Qp, QpConfig};
use super::rc::PeerLimits;
use super::reason::Reason;
use super::schedule::Key;
use super::state::Peer;
use crate::device::{ArmedFault, StagChange, StagEntry, Window};
use crate::engine::numbers::count;
use crate::stream::startup::{Negotiated, Role};
use rnic_abi::abi::control::{DisconnectMode, QpChange};
use rnic_abi::faults::FaultName;
use rnic_abi::faults::order::OrderRule;
use rnic_abi::shm::doorbell::DoorbellScanner;
use rnic_abi::types::{AddressPair, QpId, SessionId, Stag, Time, UserId};

/// A command that the engine carries out by itself.
pub enum EngineCommand {
    /// Adds a region to the STag table: its STag and lkey resolve from now on.
    InstallStag(StagEntry),
    /// Removes a region. From now on, only copies under way access it.
    RevokeStag(Stag),
    /// Adds a window to the STag table, so that QPs can bind it.
    AddWindow(Arc<Window>),
    /// Removes a window. From now on, no access uses it.
    RemoveWindow(Arc<Window>),
    /// Carries out a change that a QP of this or another worker requested.
    ChangeStags(StagChange),
    /// Continues a QP after every worker has carried out the change that it requested. A QP has at
    /// most one such request under way.
    StagsChanged(QpId),
    /// Wakes the QPs of this worker that wait for CQ slots or for receives of an SRQ.
    Wake(Freed),
    /// Takes over two QPs that are connected to each other by the direct path, the active end
    /// first.
    AttachDirect(Box<[ConnectedEnd; 2]>),
    /// Takes over a QP in Error that was never connected, and flushes it.
    AttachInError(Box<QpConfig>),
    /// Takes over an RC, UC or UD QP in RTR. An RC or UC QP waits for its stream. All UD QPs of a
    /// device belong to one engine. Once carried out, a UD QP receives the datagrams sent to it.
    AttachRoce(Box<QpConfig>),
    /// Replaces a UD QP's view of the device's ports.
    SetDatagramPort(QpId, Arc<DatagramPort>),
    /// Replaces the administrator's rules of a UD QP.
    SetDatagramRules(QpId, Box<dyn DatagramRules>),
    /// Links two RC or UC QPs of this engine (or one QP to itself) by the direct path, each with
    /// the limits of its peer. If one of them can no longer be linked, reports the other as
    /// [`Notification::Unlinked`] again.
    LinkDirect([(QpId, PeerLimits); 2]),
    /// Changes the state or attributes of an RC, UC or UD QP.
    Change(QpId, QpChange),
    /// Sets the reason why an RC or UC QP has no stream, for its error texts.
    SetUnlinkedReason(QpId, String),
    /// Ends the stream of an RC or UC QP, for this reason. The QP continues to exist and may get
    /// another stream.
    Unlink(QpId, String),
    /// Ends a connection gracefully or immediately. [`DisconnectMode::Abort`] moves the QP to Error
    /// and flushes everything posted: once carried out, only jobs of a copier access memory for it.
    Disconnect(QpId, DisconnectMode),
    /// Ends a QP's connection at an administrator's request: with a Terminate where the stream
    /// allows one, otherwise with a reset. The QP stays in Error, and everything posted is flushed.
    AdminDisconnect(QpId),
    /// Replaces the fault rules of a QP.
    SetFaults(QpId, Vec<Arc<ArmedFault>>),
    /// Resumes the request of a QP that waited for the effect of a rule
    /// ([`Notification::FaultStruck`]).
    FaultTookEffect(QpId),
    /// Ends the connection of a QP or fails it, for a fault rule.
    Inject(QpId, FaultName, QpFault),
    /// Stops a QP because of the named fault rule, or resumes it.
    SetStopped(QpId, Option<FaultName>),
    /// Places incoming data of a QP by this rule from now on. `None` places the data that is held,
    /// and restores the strict order.
    SetOrder(QpId, Option<Box<OrderRule>>),
    /// Sets the emulated link of a QP, for its current stream and later streams. `None` restores
    /// normal operation. Units in flight keep their delay and order.
    SetLink(QpId, Option<Arc<EmulatedLink>>),
    /// Replaces the deadlines, the limits and the policy for FPDU sizes. Running deadlines, the
    /// worker's number and the shared log of diagnoses do not change.
    SetOptions(EngineOptions),
}

/// One end of a connection whose start-up is complete.
pub struct ConnectedEnd {
    /// The QP at this end.
    pub config: Box<QpConfig>,
    /// Result of the start-up negotiation.
    pub negotiated: Negotiated,
    /// Addresses as this end sees them.
    pub addresses: AddressPair,
}

impl Engine {
    /// Carries out a command.
    pub fn handle_command(&mut self, command: EngineCommand, now: Time) {
        self.state.now = now;
        match command {
            EngineCommand::InstallStag(entry) => {
                // The entry may replace an entry with held pieces.
                self.place_held(Some(entry.stag));
                self.state.stags.install(entry);
            }
            EngineCommand::RevokeStag(stag) => {
                self.place_held(Some(stag));
                self.state.stags.revoke(stag);
            }
            EngineCommand::AddWindow(window) => self.state.stags.add_window(window),
            EngineCommand::RemoveWindow(window) => {
                self.place_held(None);
                self.state.stags.remove_window(&window);
            }
            EngineCommand::ChangeStags(change) => {
                self.place_held(change.revoked());
                self.state.stags.change(&change);
            }
            EngineCommand::StagsChanged(qp) => self.stags_changed(qp),
            EngineCommand::Wake(freed) => {
                self.state.wake_waiting(&freed);
                self.deliver_pending();
            }
            EngineCommand::AttachDirect(ends) => self.attach_direct(*ends),
            EngineCommand::AttachInError(config) => self.attach_in_error(config),
            EngineCommand::AttachRoce(config) => self.attach_roce(config),
            EngineCommand::SetDatagramPort(qp, port) => {
                self.with(qp, |qp, _| qp.set_datagram_port(port));
            }
            EngineCommand::SetDatagramRules(qp, rules) => {
                self.with(qp, |qp, _| qp.set_datagram_rules(rules));
            }
            EngineCommand::LinkDirect(ends) => self.link_direct(ends),
            EngineCommand::Change(qp, change) => {
                self.with(qp, |qp, engine| match qp.datagrams {
                    Some(_) => qp.change_datagrams(engine, &change),
                    None => qp.change(engine, &change),
                });
            }
            EngineCommand::SetUnlinkedReason(qp, why) => {
                self.with(qp, |qp, _| qp.set_unlinked_reason(why));
            }
            EngineCommand::Unlink(qp, why) => {
                self.with(qp, |qp, engine| {
                    if qp.can_unlink() {
                        qp.unlink(engine, true, &why);
                    }
                });
            }
            EngineCommand::Disconnect(qp, mode) => {
                self.with(qp, |qp, engine| qp.disconnect(engine, mode));
            }
            EngineCommand::AdminDisconnect(qp) => {
                self.with(qp, |qp, engine| qp.end_connection(engine, Reason::AdminDisconnect));
            }
            EngineCommand::SetFaults(qp, rules) => {
                self.with(qp, |qp, engine| qp.set_faults(rules, engine));
            }
            EngineCommand::FaultTookEffect(qp) => {
                self.with(qp, |qp, engine| qp.core.end_request_wait(engine));
            }
            EngineCommand::Inject(qp, fault, effect) => {
                self.with(qp, |qp, engine| qp.inject(fault, effect, engine));
            }
            EngineCommand::SetStopped(qp, by) => {
                self.with(qp, |qp, engine| qp.set_stopped(by, engine));
            }
            EngineCommand::SetOrder(qp, rule) => {
                self.with(qp, |qp, engine| qp.set_order(engine, rule));
            }
            EngineCommand::SetLink(qp, link) => {
                self.with(qp, |qp, engine| qp.set_link(engine, link));
            }
            EngineCommand::SetOptions(options) => self.set_options(options),
        }
    }

    /// Starts to serve a session's doorbells. Its QPs share the turns of `user` with QPs of the
    /// user's other sessions.
    pub fn attach_session(
        &mut self,
        session: SessionId,
        user: UserId,
        scanner: DoorbellScanner,
        now: Time,
    ) {
        let slot = self.state.schedule.join(user);
        self.state.doorbells.attach(session, user, slot, scanner, now);
    }

    /// Takes over a QP with its TCP connection, which has completed MPA start-up.
    pub fn attach_tcp(&mut self, end: ConnectedEnd, now: Time) {
        self.state.now = now;
        let ConnectedEnd { config, negotiated, addresses } = end;
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

    fn attach_direct(&mut self, connected: [ConnectedEnd; 2]) {
        let ids = connected.each_ref().map(|end| end.config.qp);
        let mut ends = Vec::with_capacity(2);
        for ConnectedEnd { config, negotiated, addresses } in connected {
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

    fn attach_in_error(&mut self, config: Box<QpConfig>) {
        let id = config.qp;
        self.insert(*config, Link::None);
        self.with(id, |qp, engine| {
            qp.enter(StreamPhase::Ended);
            qp.life.ended_before(qp.core.shared.diagnosis.load(Relaxed));
            qp.flush(engine);
        });
    }

    fn attach_roce(&mut self, config: Box<QpConfig>) {
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

    fn link_direct(&mut self, ends: [(QpId, PeerLimits); 2]) {
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

    /// Returns true if an RC or UC QP has no stream and may get one.
    pub fn is_unlinked(&mut self, qp: QpId) -> bool {
        self.with(qp, |qp, _| qp.life.phase() == StreamPhase::Unlinked).unwrap_or(false)
    }

    /// Gives an RC or UC QP that [has no stream](Self::is_unlinked) a TCP connection that has
    /// completed start-up.
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

    fn stags_changed(&mut self, qp: QpId) {
        let user = self.state.changes.finish(qp);
        self.with(qp, |qp, engine| qp.stags_changed(engine));
        // Other QPs of the user may have waited. A QP that no longer needs a change is skipped.
        while let Some(next) = user.and_then(|user| self.state.changes.next(user)) {
            self.with(next, |qp, engine| qp.requester.request_delayed_change(&qp.core, engine));
        }
    }

    fn set_options(&mut self, options: EngineOptions) {
        let state = &mut self.state;
        let worker = state.options.worker;
        let diagnoses = state.options.diagnoses.clone();
        state.partials.set_limits(options.partial);
        state.unsent.set_limits(options.unsent);
        state.held.set_limits(options.unsent);
        state.options = EngineOptions { worker, diagnoses, ..options };
    }

    /// Destroys a QP. The peer of an iWARP QP gets a Terminate if the stream allows it, otherwise a
    /// FIN or a reset. The stream of an RC or UC QP closes gracefully unless a message is partly
    /// sent. No request or receive of the QP completes after this.
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
        let slot = self.state.doorbells.slot(config.session);
        let qp = Box::new(Qp::new(key, slot, config, link));
        self.by_id.insert(qp.core.id, key);
        self.state.doorbells.route(slot, qp.core.doorbell, key);
        // Until now, posting to this QP rang no doorbell. From now on it does, and the caller
        // checks both queues once.
        qp.requester.set_worker(self.state.worker);
        qp.responder.set_worker(self.state.worker);
        self.qps[key as usize] = Some(qp);
        key
    }
}
