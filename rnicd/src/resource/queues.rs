//! Completion channels, completion queues and queue pairs.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rnic_core::abi::control::{QpRequest, Refusal, ReplyBody};
use rnic_core::abi::queue::{QueueKind, QueueShape};
use rnic_core::device::{Cq, QpShared};
use rnic_core::engine::{QpConfig, Receives};
use rnic_core::shm::queue::{ReceiveConsumer, SendConsumer};
use rnic_core::types::*;

use super::arena::{Place, Room};
use super::attach::Attached;
use super::ledger::Kind;
use super::named_pd::Member;
use super::session::{Channel, CqObject, Phase, Qp, QpUses};
use super::srqs::srq_for_qp;
use super::uses::{Use, Users};
use super::{Answer, Given, Manager, Pending, find, refuse};
use crate::config::Limits;
use crate::events::ChannelSender;
use crate::system;

impl Manager {
    pub(super) fn create_channel(&mut self, id: SessionId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let charge = session.account.charge(Kind::Channels, 1)?;
        let made = ChannelSender::pair();
        let (sender, theirs) =
            made.map_err(|error| system::refusal("cannot make a channel", &error))?;
        let handle = self.handles.channels.allocate(id);
        let channel = ChannelId(handle.number());
        let (sender, cqs) = (Arc::new(sender), Users::default());
        let object = Channel { sender, cqs, _handle: handle, _charge: charge };
        session.channels.insert(channel, object);
        Given::with(ReplyBody::Channel { channel }, vec![theirs])
    }

    pub(super) fn destroy_channel(&mut self, id: SessionId, channel: ChannelId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let cqs = session.channel(channel)?.cqs.count();
        if cqs > 0 {
            let by = format!("{cqs} CQs");
            return Err(refuse::in_use("completion channel", channel.0, by));
        }
        session.channels.remove(&channel);
        Given::done()
    }

    pub(super) fn create_cq(
        &mut self,
        id: SessionId,
        entries: u32,
        channel: Option<ChannelId>,
        context: u64,
    ) -> Answer {
        let session = find(&mut self.sessions, id)?;
        check_entries(&self.config.limits, entries)?;
        let notified = channel.map(|c| session.channel(c).map(|c| (c.sender.clone(), c.cqs.add())));
        let notified = notified.transpose()?;
        let shape = QueueShape::completion(entries);
        let charge = session.account.charge(Kind::Cqs, 1)?;
        let entries = session.account.charge(Kind::CqEntries, shape.capacity.into())?;
        let doorbell = session.doorbells.allocate()?;
        let Room { places: [place], made } = session.arenas.room([shape])?;
        let handle = self.handles.cqs.allocate(id);
        let cq = CqId(handle.number());
        let queue = place.format(QueueKind::Completion, cq.0, &doorbell)?;
        let shared = Arc::new(Cq::new(cq, id, context, queue));
        let channel = channel.zip(notified).map(|(channel, (sender, used))| {
            self.workers.register_cq(cq, id, &sender);
            (channel, used)
        });
        let location = place.location();
        let object = CqObject {
            cq: shared,
            channel,
            place,
            doorbell,
            _handle: handle,
            entries,
            _charge: charge,
        };
        session.cqs.insert(cq, object);
        let (new_arena, descriptors) = session.arenas.keep(made);
        Given::with(ReplyBody::Cq { cq, queue: location, new_arena }, descriptors)
    }

    pub(super) fn destroy_cq(&mut self, id: SessionId, cq: CqId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let users = session.cq(cq)?.cq.users.load(Relaxed);
        if users > 0 {
            return Err(refuse::in_use("CQ", cq.0, format!("{users} QPs")));
        }
        let Some(object) = session.cqs.remove(&cq) else { return Given::done() };
        if let Some((channel, _)) = &object.channel
            && let Some(channel) = session.channels.get(channel)
        {
            channel.sender.forget(cq);
            self.workers.unregister_cq(cq);
        }
        Given::done()
    }

    pub(super) fn create_qp(&mut self, id: SessionId, request: &QpRequest) -> Answer {
        check_qp(&self.config.limits, request)?;
        let hold = self.hold_for(request.no_receive)?;
        let session = find(&mut self.sessions, id)?;
        let pd = session.pd(request.pd)?.qps.add();
        let srq = match request.srq {
            Some(srq) => Some(srq_for_qp(session.srq(srq)?, request.pd)?),
            None => None,
        };
        let send_cq = session.cq(request.send_cq)?.cq.clone();
        let recv_cq = session.cq(request.recv_cq)?.cq.clone();
        let charge = session.account.charge(Kind::Qps, 1)?;
        let membership = self.named_pds.enter(&self.policy, request.pd, Member::Qp)?;
        let send = QueueShape::send(request.sq_depth, request.max_send_sge, request.max_inline);
        let doorbell = session.doorbells.allocate()?;
        let handle = self.handles.qps.allocate(id);
        let qp = QpId(handle.number());
        let (sq, rq, receives, made) = match &srq {
            // What is said of a receive queue was not checked.
            Some(srq) => {
                let Room { places: [sq], made } = session.arenas.room([send])?;
                (sq, None, Receives::Shared(srq.clone()), made)
            }
            None => {
                let receive = QueueShape::receive(request.rq_depth, request.max_recv_sge);
                let Room { places: [sq, rq], made } = session.arenas.room([send, receive])?;
                let memory = rq.format(QueueKind::Receive, qp.0, &doorbell)?;
                (sq, Some(rq), Receives::Own(ReceiveConsumer::new(memory)), made)
            }
        };
        let sq_memory = sq.format(QueueKind::Send, qp.0, &doorbell)?;
        let shared = Arc::new(QpShared::default());
        shared.context.store(request.context, Relaxed);
        let uses = QpUses {
            _pd: pd,
            _send_cq: Use::of(&send_cq),
            _recv_cq: (request.recv_cq != request.send_cq).then(|| Use::of(&recv_cq)),
            _srq: srq.as_ref().map(Use::of),
        };
        let config = QpConfig {
            qp,
            session: id,
            pd: request.pd,
            doorbell: doorbell.index(),
            sq: SendConsumer::new(sq_memory),
            rq: receives,
            send_cq,
            recv_cq,
            signal_all: request.signal_all,
            hold,
            shared: shared.clone(),
        };
        let (sq_location, rq_location) = (sq.location(), rq.as_ref().map(Place::location));
        let object = Qp {
            pd: request.pd,
            send_cq: request.send_cq,
            recv_cq: request.recv_cq,
            srq: request.srq,
            shared,
            phase: Phase::Idle(Box::new(config)),
            connection: None,
            reads: None,
            membership,
            _uses: uses,
            _places: (sq, rq, doorbell),
            _handle: handle,
            _charge: charge,
        };
        session.qps.insert(qp, object);
        let (new_arena, descriptors) = session.arenas.keep(made);
        let body = ReplyBody::Qp { qp, sq: sq_location, rq: rq_location, new_arena };
        Given::with(body, descriptors)
    }

    pub(super) fn qp_to_error(&mut self, id: SessionId, qp: QpId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object = session.qp(qp)?;
        match std::mem::replace(&mut object.phase, Phase::Leaving) {
            Phase::Idle(config) => self.bind_dead(id, config),
            Phase::Connecting(config) | Phase::Accepting(config) => {
                self.cm.cancel(qp);
                self.bind_dead(id, config);
            }
            Phase::Bound(worker) => {
                object.phase = Phase::Bound(worker);
                self.workers.to_error(worker, qp);
            }
            // One request at a time: nobody can ask while it is being destroyed.
            Phase::Leaving => {}
        }
        Given::done()
    }

    pub(super) fn destroy_qp(&mut self, id: SessionId, qp: QpId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object = session.qp(qp)?;
        match std::mem::replace(&mut object.phase, Phase::Leaving) {
            Phase::Bound(worker) => {
                // What it had a mover write would land in buffers that are its owner's again.
                let mover = session.attached.as_ref().and_then(Attached::mover);
                let ticket = self.workers.destroy_qp(worker, qp);
                self.workers.await_moves(ticket, mover);
                self.pending.insert(ticket, Pending::DestroyQp { session: id, qp });
                return Given::later();
            }
            Phase::Connecting(_) | Phase::Accepting(_) => self.cm.cancel(qp),
            Phase::Idle(_) | Phase::Leaving => {}
        }
        self.qp_gone(id, qp);
        Given::done()
    }

    /// A dead CQ takes its QPs with it, wherever they are.
    pub(super) fn cq_failed(&mut self, cq: CqId) {
        let Some(id) = self.handles.cqs.owner(cq.0) else { return };
        let Ok(session) = find(&mut self.sessions, id) else { return };
        let uses = |qp: &Qp| qp.send_cq == cq || qp.recv_cq == cq;
        let users: Vec<QpId> =
            session.qps.iter().filter(|(_, qp)| uses(qp)).map(|(id, _)| *id).collect();
        for qp in users {
            // They exist: they were just listed.
            let _ = self.qp_to_error(id, qp);
        }
    }

    /// Lets a QP go with all it had; no worker knows it any more.
    pub(super) fn qp_gone(&mut self, id: SessionId, qp: QpId) {
        let Ok(session) = find(&mut self.sessions, id) else { return };
        let Some(object) = session.qps.remove(&qp) else { return };
        self.terminates.count(&object.shared);
        self.past.add_qp(session.client.identity.uid, &object.shared);
    }

    /// Hands a QP that has no connection to a worker, to flush what is posted.
    pub(super) fn bind_dead(&mut self, id: SessionId, config: Box<QpConfig>) {
        let (qp, worker) = (config.qp, self.workers.least_loaded());
        self.release_reads(qp);
        if let Ok(object) = find(&mut self.sessions, id).and_then(|s| s.qp(qp)) {
            object.phase = Phase::Bound(worker);
        }
        self.workers.bind_dead(worker, config);
    }
}

pub(super) fn check_entries(limits: &Limits, entries: u32) -> Result<(), Refusal> {
    if entries == 0 {
        return Err(refuse::invalid("entries", "a CQ has at least one entry"));
    }
    let most = limits.device.of(Kind::EntriesOfCq);
    refuse::at_most("entries", u64::from(entries), "limits.cq_entries", most)
}

fn check_qp(limits: &Limits, r: &QpRequest) -> Result<(), Refusal> {
    // With a shared receive queue, what is said of a queue of its own is of no account.
    let own = if r.srq.is_some() { 1 } else { 2 };
    for (field, depth) in [("sq_depth", r.sq_depth), ("rq_depth", r.rq_depth)].into_iter().take(own)
    {
        let most = limits.device.of(Kind::QueueDepth);
        refuse::at_most(field, u64::from(depth), "limits.wr_depth", most)?;
    }
    let sges = [("max_send_sge", r.max_send_sge), ("max_recv_sge", r.max_recv_sge)];
    for (field, sges) in sges.into_iter().take(own) {
        refuse::at_most(field, u64::from(sges), "limits.sge", limits.device.of(Kind::Sges))?;
    }
    let most = limits.device.of(Kind::InlineBytes);
    refuse::at_most("max_inline", r.max_inline.into(), "limits.inline", most)
}
