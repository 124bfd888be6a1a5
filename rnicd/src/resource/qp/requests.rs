//! Creation and destruction of QPs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::abi::control::{DisconnectMode, QpRequest, Refusal, ReplyBody};
use rnic_abi::abi::queue::QueueShape;
use rnic_abi::types::*;
use rnic_core::device::QpShared;
use rnic_core::engine::{EngineCommand, QpConfig};

use super::parts::QpParts;
use super::{Qp, QpPhase, QpUses, qp_row};
use crate::clock;
use crate::config::{Config, check_device};
use crate::resource::answer::{Answer, Outcome};
use crate::resource::domain::Member;
use crate::resource::faults::qp_faults::QpFaults;
use crate::resource::ledger::Kind;
use crate::resource::memory::Attached;
use crate::resource::queue::{Room, srq_for_qp};
use crate::resource::uses::Use;
use crate::resource::{Manager, Pending, find, refuse};
use crate::worker::{Command, Ticket};

impl Manager {
    pub(in crate::resource) fn create_qp(&mut self, id: SessionId, request: &QpRequest) -> Answer {
        check_qp(&self.config, request)?;
        if request.kind.is_roce() && !self.wired_port.was_attempted() {
            self.open_wired_port();
        }
        let rnr_timeout = self.rnr_timeout_for(request.rnr_policy)?;
        let session = find(&mut self.sessions, id)?;
        let pd = session.pd(request.pd)?.qps.add();
        let srq = match request.srq {
            Some(srq) => Some(srq_for_qp(session.srq(srq)?, request.pd)?),
            None => None,
        };
        //= RDMAP-8.1.1-9
        let send_cq = session.cq(request.send_cq)?.cq.clone();
        //= RDMAP-8.1.1-9
        let recv_cq = session.cq(request.recv_cq)?.cq.clone();
        let charge = session.account.charge(Kind::Qps, 1)?;
        let membership = self.named_pds.enter(&self.policy, request.pd, Member::Qp)?;
        let send = QueueShape::send(request.sq_depth, request.max_send_sge, request.max_inline);
        let doorbell = session.doorbells.allocate()?;
        let handle = self.handles.qps.allocate(id);
        let qp = QpId(handle.number());
        let (sq, rq, made) = match &srq {
            // The receive queue's parameters are ignored, and have not been checked.
            Some(_) => {
                let Room { places: [sq], made } = session.arenas.room([send])?;
                (sq, None, made)
            }
            None => {
                let receive = QueueShape::receive(request.rq_depth, request.max_recv_sge);
                let Room { places: [sq, rq], made } = session.arenas.room([send, receive])?;
                (sq, Some(rq), made)
            }
        };
        let shared = Arc::new(QpShared::default());
        shared.context.store(request.context, Relaxed);
        let uses = QpUses {
            _pd: pd,
            _send_cq: Use::of(&send_cq),
            _recv_cq: (request.recv_cq != request.send_cq).then(|| Use::of(&recv_cq)),
            _srq: srq.as_ref().map(Use::of),
        };
        let parts = QpParts {
            qp,
            session: id,
            pd: request.pd,
            send_cq,
            recv_cq,
            srq,
            sq,
            rq,
            doorbell,
            signal_all: request.signal_all,
            kind: request.kind,
            rnr_timeout,
            shared: shared.clone(),
        };
        let config = parts.config()?;
        let (sq_location, rq_location) = parts.locations();
        let object = Qp {
            pd: request.pd,
            send_cq: request.send_cq,
            recv_cq: request.recv_cq,
            srq: request.srq,
            shared,
            phase: QpPhase::Idle(config),
            kind: request.kind,
            device: request.device.clone(),
            rc: None,
            datagrams: None,
            rejected: None,
            faults: QpFaults::default(),
            held_reply: None,
            connection: None,
            reads: None,
            membership,
            _uses: uses,
            parts,
            _handle: handle,
            _charge: charge,
        };
        session.qps.insert(qp, object);
        let (new_arena, descriptors) = session.arenas.keep(made);
        self.refresh_faults_of(qp);
        let body = ReplyBody::Qp { qp, sq: sq_location, rq: rq_location, new_arena };
        Outcome::with(body, descriptors)
    }

    pub(in crate::resource) fn qp_to_error(&mut self, id: SessionId, qp: QpId) -> Answer {
        let ticket = match find(&mut self.sessions, id)?.qp(qp)?.phase {
            QpPhase::Bound(worker) => {
                let kind = find(&mut self.sessions, id)?.qp(qp)?.kind;
                Some(if kind.is_roce() {
                    let expects_stream = self.expects_stream(qp);
                    self.workers.move_to_error(worker, qp, expects_stream)
                } else {
                    let abort = EngineCommand::Disconnect(qp, DisconnectMode::Abort);
                    self.workers.one_ticketed(worker, abort)
                })
            }
            _ => self.end_unbound(id, qp),
        };
        match ticket {
            Some(ticket) => self.answer_when_modified(id, ticket),
            None => Outcome::done(),
        }
    }

    /// Moves a QP to Error without a request from its program, so no reply is sent.
    pub(in crate::resource) fn fail_qp(&mut self, id: SessionId, qp: QpId) {
        if let Some((_, object)) = self.qp_of(qp)
            && let QpPhase::Bound(worker) = object.phase
        {
            self.workers.one(worker, EngineCommand::Disconnect(qp, DisconnectMode::Abort));
        } else {
            // The ticket is not needed, because no reply waits for it.
            self.end_unbound(id, qp);
        }
    }

    /// Moves a QP that no worker holds to Error. Returns the ticket of the worker that takes it, or
    /// `None` if the QP is leaving.
    pub(in crate::resource) fn end_unbound(&mut self, id: SessionId, qp: QpId) -> Option<Ticket> {
        let object = find(&mut self.sessions, id).and_then(|session| session.qp(qp)).ok()?;
        match std::mem::replace(&mut object.phase, QpPhase::Leaving) {
            QpPhase::Idle(config) => Some(self.attach_in_error(id, config)),
            QpPhase::Connecting(config) | QpPhase::Accepting(config) => {
                self.cancel_startup(qp);
                Some(self.attach_in_error(id, config))
            }
            phase => {
                object.phase = phase;
                None
            }
        }
    }

    /// Answers `Done` after the worker has changed a QP and the copier has finished the QP's jobs.
    /// A program that revokes a right relies on this order.
    pub(super) fn answer_when_modified(&mut self, id: SessionId, ticket: Ticket) -> Answer {
        let attached = &find(&mut self.sessions, id)?.attached;
        let copier = attached.as_ref().and_then(Attached::copier);
        self.workers.await_copies(ticket, copier);
        self.pending.insert(ticket, Pending::ModifyQp { session: id });
        Outcome::later()
    }

    pub(in crate::resource) fn destroy_qp(&mut self, id: SessionId, qp: QpId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object = session.qp(qp)?;
        let phase = std::mem::replace(&mut object.phase, QpPhase::Leaving);
        if object.kind.is_roce() {
            self.leave_rendezvous(qp);
            self.cm.abandon_rc(qp, clock::now());
        }
        let session = find(&mut self.sessions, id)?;
        match phase {
            QpPhase::Bound(worker) => {
                // A copier may still write to buffers that the program reuses after the answer.
                let copier = session.attached.as_ref().and_then(Attached::copier);
                let ticket = self.workers.one_ticketed(worker, Command::Destroy(qp));
                self.workers.await_copies(ticket, copier);
                self.pending.insert(ticket, Pending::DestroyQp { session: id, qp });
                return Outcome::later();
            }
            QpPhase::Connecting(_) | QpPhase::Accepting(_) => self.cancel_startup(qp),
            QpPhase::Idle(_) | QpPhase::Leaving => {}
        }
        self.qp_gone(id, qp);
        Outcome::done()
    }

    /// Removes a QP that no worker holds any more.
    pub(in crate::resource) fn qp_gone(&mut self, id: SessionId, qp: QpId) {
        let Ok(session) = find(&mut self.sessions, id) else { return };
        let Some(object) = session.qps.remove(&qp) else { return };
        let uid = session.client.identity.uid;
        let device = self.device_of(&object).to_owned();
        self.records.past.add_qp(uid, &device, &object.shared);
        if object.kind.is_roce() {
            self.peers_gone(&BTreeSet::from([qp]));
        }
    }

    /// Gives a QP without a connection to a worker, which flushes its work requests.
    pub(in crate::resource) fn attach_in_error(
        &mut self,
        id: SessionId,
        config: Box<QpConfig>,
    ) -> Ticket {
        let qp = config.qp;
        let worker = self.workers.least_loaded();
        self.release_reads(qp);
        if let Ok(object) = find(&mut self.sessions, id).and_then(|s| s.qp(qp)) {
            object.phase = QpPhase::Bound(worker);
        }
        self.workers.one_ticketed(worker, EngineCommand::AttachInError(config))
    }

    pub(in crate::resource) fn query_qp(&mut self, id: SessionId, qp: QpId) -> Answer {
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        let row = qp_row(id, qp, object);
        Outcome::now(ReplyBody::QpInfo(row))
    }

    /// Returns a QP of any session that is not being closed.
    pub(super) fn find_qp(&self, qp: QpId) -> Option<&Qp> {
        let owner = self.handles.qps.owner(qp.0)?;
        self.sessions.get(&owner)?.qps.get(&qp)
    }

    /// Like [`find_qp`](Self::find_qp), with the session, to change the QP.
    pub(in crate::resource) fn qp_of(&mut self, qp: QpId) -> Option<(SessionId, &mut Qp)> {
        let owner = self.handles.qps.owner(qp.0)?;
        let object = find(&mut self.sessions, owner).ok()?.qps.get_mut(&qp)?;
        Some((owner, object))
    }
}

fn check_qp(config: &Config, r: &QpRequest) -> Result<(), Refusal> {
    if !r.device.is_empty() {
        check_device(&r.device).map_err(|why| refuse::invalid("device", why))?;
    }
    // Receive queue parameters are ignored with an SRQ.
    let own = if r.srq.is_some() { 1 } else { 2 };
    for (field, depth) in [("sq_depth", r.sq_depth), ("rq_depth", r.rq_depth)].into_iter().take(own)
    {
        refuse::at_most_of(config, Kind::QueueDepth, field, depth.into())?;
    }
    let sges = [("max_send_sge", r.max_send_sge), ("max_recv_sge", r.max_recv_sge)];
    for (field, sges) in sges.into_iter().take(own) {
        refuse::at_most_of(config, Kind::Sges, field, sges.into())?;
    }
    refuse::at_most_of(config, Kind::InlineBytes, "max_inline", r.max_inline.into())
}
