//! Connecting QPs: checks of rules and limits, and events of the connection manager.

use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::abi::control::{DisconnectMode, Event, Refusal, ReplyBody};
use rnic_abi::types::*;
use rnic_core::engine::{ConnectedEnd, EngineCommand, QpConfig};
use rnic_core::stream::startup::Negotiated;

use super::reads::Reads;
use super::{ConnectOver, Connection, Qp, QpPhase, wrong_state};
use crate::cm::{self, AcceptParams, CmEvent, ConnectFailure, ConnectParams, DirectEnd, Rejection};
use crate::reaper::Passed;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::session::Undecided;
use crate::resource::{Manager, find, refuse};
use crate::worker::Command;

impl Manager {
    pub(in crate::resource) fn connect(
        &mut self,
        id: SessionId,
        mut params: ConnectParams,
        now: Time,
    ) -> Answer {
        if let Some(local) = params.local {
            self.may_use_port(id, "connect from", local)?;
        }
        let qp = params.qp;
        let peer = params.peer;
        let session = find(&mut self.sessions, id)?;
        if session.qp(qp)?.kind == QpType::Ud {
            return self.resolve(id, params, now);
        }
        session.qp(qp)?.refuse_unless_idle(qp)?;
        let who = &session.client.identity;
        self.policy.may_connect(who, peer)?;
        self.policy.may_reach(who, "connect to", peer)?;
        // Services assume that a loopback source address belongs to a local program. If the address
        // is unspecified, the kernel chooses it.
        if let Some(local) = params.local.filter(|local| !local.ip().is_unspecified()) {
            self.policy.may_reach(who, "connect from", local)?;
        }
        self.take_rate(id, now)?;
        let reads = self.charge_reads(id, &mut params.ird, &mut params.ord)?;
        self.cm.connect(params, now)?;
        self.hold(id, qp, reads, QpPhase::Connecting);
        Outcome::done()
    }

    pub(in crate::resource) fn connect_over(
        &mut self,
        id: SessionId,
        wanted: ConnectOver,
        descriptor: Passed,
        now: Time,
    ) -> Answer {
        let socket = self.passed(id, descriptor)?;
        let ConnectOver { qp, ird, ord, private_data } = wanted;
        let session = find(&mut self.sessions, id)?;
        session.qp(qp)?.refuse_unless_idle(qp)?;
        let AddressPair { local, peer } = cm::examine(&socket)?;
        self.policy.may_connect(&session.client.identity, peer)?;
        self.take_rate(id, now)?;
        let local = Some(local);
        let peer_to_peer = self.config.mpa.peer_to_peer;
        let mut params =
            ConnectParams { session: id, qp, peer, local, ird, ord, private_data, peer_to_peer };
        let reads = self.charge_reads(id, &mut params.ird, &mut params.ord)?;
        self.cm.connect_over(params, socket, now)?;
        self.hold(id, qp, reads, QpPhase::Connecting);
        Outcome::done()
    }

    pub(in crate::resource) fn accept(
        &mut self,
        id: SessionId,
        mut params: AcceptParams,
        now: Time,
    ) -> Answer {
        let request = params.request;
        let qp = params.qp;
        let held = self.faults.held_reply.take();
        let session = find(&mut self.sessions, id)?;
        session.request(request)?;
        if self.cm.is_for_ud(request) {
            return self.accept_datagrams(id, params, now);
        }
        session.qp(qp)?.refuse_unless_idle(qp)?;
        let reads = self.charge_reads(id, &mut params.ird, &mut params.ord)?;
        self.accept_by_rules(id, params, held, now)?;
        find(&mut self.sessions, id)?.requests.remove(&request);
        self.hold(id, qp, reads, QpPhase::Accepting);
        Outcome::done()
    }

    pub(in crate::resource) fn reject(
        &mut self,
        id: SessionId,
        request: RequestId,
        private_data: &[u8],
        now: Time,
    ) -> Answer {
        let session = find(&mut self.sessions, id)?;
        session.request(request)?;
        let rejection = self.cm.reject(request, private_data, now)?;
        session.requests.remove(&request);
        match rejection {
            Rejection::Done => Outcome::done(),
            Rejection::Sending => Outcome::later(),
        }
    }

    pub(in crate::resource) fn disconnect(
        &mut self,
        id: SessionId,
        qp: QpId,
        mode: DisconnectMode,
        now: Time,
    ) -> Answer {
        let kind = find(&mut self.sessions, id)?.qp(qp)?.kind;
        if self.cm.has_connection(qp) {
            self.cm.disconnect_rc(qp, now)?;
            return Outcome::done();
        }
        match kind {
            QpType::Ud => return self.cancel_resolution(qp),
            QpType::Rc | QpType::Uc => {
                return Err(wrong_state(qp, "not connected", "a connection or an attempt"));
            }
            QpType::Iwarp => {}
        }
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        match object.phase {
            QpPhase::Bound(worker) => {
                self.workers.one(worker, EngineCommand::Disconnect(qp, mode));
            }
            QpPhase::Connecting(_) | QpPhase::Accepting(_) => {
                self.cancel_startup(qp);
                self.unreachable(qp, ConnectFailure::reset("cancelled by this side"));
            }
            QpPhase::Idle(_) | QpPhase::Leaving => {
                let state = object.phase.name();
                return Err(wrong_state(qp, state, "connecting or connected"));
            }
        }
        Outcome::done()
    }

    /// Handles an event from the connection manager.
    pub(in crate::resource) fn handle_cm_event(&mut self, event: CmEvent) {
        match event {
            CmEvent::Request {
                listener,
                request,
                addresses,
                peer_ird,
                peer_ord,
                revision,
                peer_to_peer,
                private_data,
            } => {
                if self.is_rendezvous(listener) {
                    return self.dialled(request, addresses, &private_data);
                }
                let Some((session, context)) = self.session_of_listener(listener) else { return };
                let peer = addresses.peer.ip();
                session.requests.insert(request, Undecided { listener, peer });
                session.tell(&Event::ConnectionRequest {
                    listener,
                    context,
                    request,
                    addresses,
                    peer_ird,
                    peer_ord,
                    revision,
                    peer_to_peer,
                    private_data,
                });
            }
            CmEvent::Withdrawn { listener, request, reason } => {
                if self.is_rendezvous(listener) {
                    return self.withdrawn(request);
                }
                if self.held_accept_withdrawn(request, &reason) {
                    return;
                }
                let Some((session, context)) = self.session_of_listener(listener) else { return };
                // The client gets no event for a request that it has accepted or rejected.
                if session.requests.remove(&request).is_some() {
                    let event = Event::RequestWithdrawn { listener, context, request, reason };
                    session.tell_in_order(event);
                }
            }
            CmEvent::NoRequest { listener, reason } => self.no_request(listener, reason),
            CmEvent::Returned { session } => {
                self.outbox.answer(session, ReplyBody::Done);
            }
            CmEvent::Answered { request, answer } => self.asked_back(request, answer),
            CmEvent::Reached { qp } => self.reached(qp),
            CmEvent::ConnectedTcp { qp, stream, negotiated, addresses } => {
                if self.rc(qp).is_some() {
                    return self.stream_established(qp, stream, negotiated, addresses);
                }
                // If the QP is gone, the stream is dropped, which ends the connection.
                let Some(config) = self.take_connected(qp) else { return };
                let worker = self.workers.least_loaded();
                self.connected(qp, worker, "tcp", &negotiated, addresses);
                let end = ConnectedEnd { config, negotiated: *negotiated, addresses };
                self.workers.one(worker, Command::AttachTcp { end, stream });
                self.refresh_faults_of(qp);
            }
            CmEvent::ConnectedDirect { active, passive } => self.attach_direct(*active, *passive),
            CmEvent::Resolved { .. } => self.handle_resolution(event),
            CmEvent::RcRequest { .. }
            | CmEvent::RcReply { .. }
            | CmEvent::RcEstablished { .. }
            | CmEvent::RcRejected { .. }
            | CmEvent::RcUnreachable { .. }
            | CmEvent::RcDisconnected { .. } => self.handle_rc_event(event),
            CmEvent::RcStale { qp, remote_qp, peer } => self.end_stale(qp, remote_qp, peer),
            CmEvent::Message(message) => self.send_by_rules(message),
            CmEvent::Management { from, to, mad } => self.send_management(from, to, &mad),
            CmEvent::Rejected { qp, .. } | CmEvent::Unreachable { qp, .. } if self.is_ud(qp) => {
                self.handle_resolution(event);
            }
            CmEvent::Rejected { qp, private_data } => {
                if self.connect_to_peer_failed(qp, Err(&private_data)) {
                    return;
                }
                let Some((session, object)) = self.qp_of(qp) else { return };
                let context = object.shared.context.load(Relaxed);
                become_idle(object);
                self.release_reads(qp);
                let given = private_data.len();
                let reason =
                    format!("the peer rejected the connection, with {given} bytes of private data");
                self.connect_failed(session, qp, &reason);
                self.tell(session, &Event::Rejected { qp, context, private_data });
            }
            CmEvent::Unreachable { qp, why } => {
                if !self.connect_to_peer_failed(qp, Ok(&why.reason)) {
                    self.unreachable(qp, why);
                }
            }
        }
    }

    fn attach_direct(&mut self, active: DirectEnd, passive: DirectEnd) {
        let a = self.take_connected(active.qp);
        let p = self.take_connected(passive.qp);
        let (active_config, passive_config) = match (a, p) {
            (Some(a), Some(p)) => (a, p),
            // The other side has just destroyed its QP, so this side has no peer.
            (Some(config), None) | (None, Some(config)) => {
                let qp = config.qp;
                let connects = qp == active.qp;
                if let Some((_, object)) = self.qp_of(qp) {
                    object.phase = if connects {
                        QpPhase::Connecting(config)
                    } else {
                        QpPhase::Accepting(config)
                    };
                }
                return self
                    .unreachable(qp, ConnectFailure::reset("the peer's queue pair is gone"));
            }
            (None, None) => return,
        };
        let worker = self.workers.least_loaded();
        let ends_of = [active.qp, passive.qp];
        let mut end = |end: DirectEnd, config| {
            self.connected(end.qp, worker, "direct", &end.negotiated, end.addresses);
            ConnectedEnd { config, negotiated: end.negotiated, addresses: end.addresses }
        };
        let active = end(active, active_config);
        let passive = end(passive, passive_config);
        let ends = Box::new([active, passive]);
        self.workers.one(worker, EngineCommand::AttachDirect(ends));
        for qp in ends_of {
            self.refresh_faults_of(qp);
        }
    }

    /// Reports a failed connection. A connecting QP becomes Idle again, and an accepting QP moves
    /// to Error.
    pub(in crate::resource) fn unreachable(&mut self, qp: QpId, why: ConnectFailure) {
        let ConnectFailure { errno, reason } = why;
        let Some((session, object)) = self.qp_of(qp) else { return };
        let context = object.shared.context.load(Relaxed);
        if !matches!(object.phase, QpPhase::Accepting(_) | QpPhase::Connecting(_)) {
            return;
        }
        let shared = object.shared.clone();
        let phase = std::mem::replace(&mut object.phase, QpPhase::Leaving);
        let why = self.connect_failed(session, qp, &reason);
        match phase {
            QpPhase::Accepting(config) => {
                shared.diagnosis.store(why, Relaxed);
                self.attach_in_error(session, config);
            }
            phase => {
                if let (QpPhase::Connecting(config), Some((_, object))) = (phase, self.qp_of(qp)) {
                    object.phase = QpPhase::Idle(config);
                    self.release_reads(qp);
                }
            }
        }
        self.tell(session, &Event::Unreachable { qp, context, errno, reason });
    }

    /// Records that a worker holds a QP, and the QP's connection.
    fn connected(
        &mut self,
        qp: QpId,
        worker: u32,
        path: &'static str,
        negotiated: &Negotiated,
        addresses: AddressPair,
    ) {
        if let Some((_, object)) = self.qp_of(qp) {
            object.phase = QpPhase::Bound(worker);
            let Negotiated { ird, ord, .. } = *negotiated;
            if let Some(reads) = &mut object.reads {
                reads.settle(ird, ord);
            }
            object.connection = Some(Connection { path, addresses, ird, ord });
        }
    }

    /// Takes the configuration of a QP that connects or accepts.
    fn take_connected(&mut self, qp: QpId) -> Option<Box<QpConfig>> {
        let (_, object) = self.qp_of(qp)?;
        match std::mem::replace(&mut object.phase, QpPhase::Leaving) {
            QpPhase::Connecting(config) | QpPhase::Accepting(config) => Some(config),
            other => {
                object.phase = other;
                None
            }
        }
    }

    /// Moves an Idle QP to `phase`, in which the connection manager holds it, and stores the charge
    /// for its Reads.
    pub(in crate::resource) fn hold(
        &mut self,
        id: SessionId,
        qp: QpId,
        reads: Reads,
        phase: impl FnOnce(Box<QpConfig>) -> QpPhase,
    ) {
        if let Ok(object) = find(&mut self.sessions, id).and_then(|s| s.qp(qp)) {
            object.reads = Some(reads);
            object.phase = match std::mem::replace(&mut object.phase, QpPhase::Leaving) {
                QpPhase::Idle(config) => phase(config),
                other => other,
            };
        }
    }

    /// Counts a connection against the rate limit of the session's user. Returns an error if the
    /// limit is exceeded.
    pub(in crate::resource) fn take_rate(
        &mut self,
        id: SessionId,
        now: Time,
    ) -> Result<(), Refusal> {
        let rights = find(&mut self.sessions, id)?.account.rights();
        let most = rights.user_count(Kind::ConnectionsPerSecond);
        if self.connects.take(rights.uid, most, now) {
            Ok(())
        } else {
            Err(Refusal::Limit {
                key: rights.user_key(Kind::ConnectionsPerSecond),
                limit: most.into(),
                used: most.into(),
                wanted: 1,
            })
        }
    }

    /// Checks the IRD and ORD of a connection against the limits, and charges them.
    pub(in crate::resource) fn charge_reads(
        &mut self,
        id: SessionId,
        ird: &mut Option<u16>,
        ord: &mut Option<u16>,
    ) -> Result<Reads, Refusal> {
        let config = &self.config;
        for (field, value, kind) in [("ird", *ird, Kind::Ird), ("ord", *ord, Kind::Ord)] {
            refuse::at_most_of(config, kind, field, value.unwrap_or(0).into())?;
        }
        let (most_ird, most_ord) = config.reads_of_qp();
        let account = &find(&mut self.sessions, id)?.account;
        Reads::charge(account, ird, ord, most_ird, most_ord)
    }

    /// Credits the charge for the Reads of a QP that no longer has a connection.
    pub(in crate::resource) fn release_reads(&mut self, qp: QpId) {
        if let Some((_, object)) = self.qp_of(qp) {
            object.reads = None;
        }
    }

    pub(in crate::resource) fn tell(&mut self, session: SessionId, event: &Event) {
        if let Ok(session) = find(&mut self.sessions, session) {
            session.tell(event);
        }
    }
}

/// Makes a rejected QP Idle, so that it can connect again.
fn become_idle(object: &mut Qp) {
    object.phase = match std::mem::replace(&mut object.phase, QpPhase::Leaving) {
        QpPhase::Connecting(config) => QpPhase::Idle(config),
        other => other,
    };
}
