//! Completion channels, completion queues and queue pairs.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rnic_core::abi::control::{NewArena, QpRequest, Refusal, ReplyBody};
use rnic_core::abi::queue::{QueueKind, QueueShape};
use rnic_core::device::{Cq, QpShared};
use rnic_core::engine::{QpConfig, Receives};
use rnic_core::shm::queue::{QueueMemory, ReceiveConsumer, SendConsumer};
use rnic_core::types::*;

use super::arena::{Made, Place};
use super::attach::Attached;
use super::ledger::{Kind, Ledger};
use super::named_pd::Member;
use super::reads::Reads;
use super::session::{Channel, CqObject, Phase, Qp, Session};
use super::srqs::srq_for_qp;
use super::{Answer, Given, Manager, Pending, find, refuse};
use crate::config::Limits;
use crate::events::ChannelSender;
use crate::system;

impl Manager {
    pub(super) fn create_channel(&mut self, id: SessionId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        self.ledger.charge(&mut session.counts, Kind::Channels, 1)?;
        let (sender, theirs) = match ChannelSender::pair() {
            Ok((sender, theirs)) => (Arc::new(sender), theirs),
            Err(error) => {
                self.ledger.credit(&mut session.counts, Kind::Channels, 1);
                return Err(system::refusal("cannot make a channel", &error));
            }
        };
        let channel = ChannelId(self.handles.channels.allocate(id));
        session.channels.insert(channel, Channel { sender, cqs: 0 });
        Given::with(ReplyBody::Channel { channel }, vec![theirs])
    }

    pub(super) fn destroy_channel(&mut self, id: SessionId, channel: ChannelId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let cqs = session.channel(channel)?.cqs;
        if cqs > 0 {
            let by = format!("{cqs} CQs");
            return Err(refuse::in_use("completion channel", channel.0, by));
        }
        session.channels.remove(&channel);
        self.handles.channels.release(channel.0);
        self.ledger.credit(&mut session.counts, Kind::Channels, 1);
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
        let sender = channel.map(|c| session.channel(c).map(|c| c.sender.clone())).transpose()?;
        let shape = QueueShape::completion(entries);
        self.ledger.charge(&mut session.counts, Kind::Cqs, 1)?;
        let slots = u64::from(shape.capacity);
        if let Err(refusal) = self.ledger.charge(&mut session.counts, Kind::CqEntries, slots) {
            self.ledger.credit(&mut session.counts, Kind::Cqs, 1);
            return Err(refusal);
        }
        let room = place(session, &mut self.ledger, &[shape]);
        let (places, doorbell, made) = match room {
            Ok(room) => room,
            Err(refusal) => {
                self.ledger.credit(&mut session.counts, Kind::Cqs, 1);
                self.ledger.credit(&mut session.counts, Kind::CqEntries, slots);
                return Err(refusal);
            }
        };
        let cq = CqId(self.handles.cqs.allocate(id));
        let at = places[0];
        let queue = match format(session, &at, QueueKind::Completion, cq.0, doorbell) {
            Ok(queue) => queue,
            Err(refusal) => {
                give_back(session, &places, doorbell);
                self.handles.cqs.release(cq.0);
                self.ledger.credit(&mut session.counts, Kind::Cqs, 1);
                self.ledger.credit(&mut session.counts, Kind::CqEntries, slots);
                return Err(refusal);
            }
        };
        let shared = Arc::new(Cq::new(cq, id, context, queue));
        if let (Some(sender), Some(channel)) = (sender, channel) {
            session.channel(channel)?.cqs += 1;
            self.workers.register_cq(cq, id, &sender);
        }
        session.cqs.insert(cq, CqObject { cq: shared, channel, place: at, doorbell });
        let (new_arena, descriptors) = told(made);
        let body = ReplyBody::Cq { cq, queue: at.location(), new_arena };
        Given::with(body, descriptors)
    }

    pub(super) fn destroy_cq(&mut self, id: SessionId, cq: CqId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let users = session.cq(cq)?.cq.users.load(Relaxed);
        if users > 0 {
            return Err(refuse::in_use("CQ", cq.0, format!("{users} QPs")));
        }
        let Some(object) = session.cqs.remove(&cq) else { return Given::done() };
        if let Some(channel) = object.channel.and_then(|c| session.channels.get_mut(&c)) {
            channel.cqs -= 1;
            channel.sender.forget(cq);
            self.workers.unregister_cq(cq);
        }
        give_back(session, &[object.place], object.doorbell);
        self.handles.cqs.release(cq.0);
        self.ledger.credit(&mut session.counts, Kind::Cqs, 1);
        let slots = u64::from(object.place.shape.capacity);
        self.ledger.credit(&mut session.counts, Kind::CqEntries, slots);
        Given::done()
    }

    pub(super) fn create_qp(&mut self, id: SessionId, request: &QpRequest) -> Answer {
        check_qp(&self.config.limits, request)?;
        let hold = self.hold_for(request.no_receive)?;
        let session = find(&mut self.sessions, id)?;
        session.pd(request.pd)?;
        let srq = match request.srq {
            Some(srq) => Some(srq_for_qp(session.srq(srq)?, request.pd)?),
            None => None,
        };
        let send_cq = session.cq(request.send_cq)?.cq.clone();
        let recv_cq = session.cq(request.recv_cq)?.cq.clone();
        self.ledger.charge(&mut session.counts, Kind::Qps, 1)?;
        if let Err(refusal) = self.named_pds.charge(&self.policy, request.pd, Member::Qp) {
            self.ledger.credit(&mut session.counts, Kind::Qps, 1);
            return Err(refusal);
        }
        let send = QueueShape::send(request.sq_depth, request.max_send_sge, request.max_inline);
        // With a shared receive queue there is no other, and what is said of one was not checked.
        let receive = || QueueShape::receive(request.rq_depth, request.max_recv_sge);
        let shapes: Vec<QueueShape> =
            std::iter::once(send).chain(srq.is_none().then(receive)).collect();
        let (places, doorbell, made) = match place(session, &mut self.ledger, &shapes) {
            Ok(room) => room,
            Err(refusal) => {
                self.named_pds.credit(request.pd, Member::Qp);
                self.ledger.credit(&mut session.counts, Kind::Qps, 1);
                return Err(refusal);
            }
        };
        let qp = QpId(self.handles.qps.allocate(id));
        let (sq, rq) = (places[0], places.get(1).copied());
        let receives = match (&srq, &rq) {
            (Some(srq), _) => Ok(Receives::Shared(srq.clone())),
            (None, rq) => rq
                .as_ref()
                .ok_or_else(|| refuse::system("cannot place the queues", &"no room"))
                .and_then(|rq| format(session, rq, QueueKind::Receive, qp.0, doorbell))
                .map(|rq| Receives::Own(ReceiveConsumer::new(rq))),
        };
        let formatted = format(session, &sq, QueueKind::Send, qp.0, doorbell)
            .and_then(|sq| Ok((sq, receives?)));
        let (sq_memory, receives) = match formatted {
            Ok(both) => both,
            Err(refusal) => {
                give_back(session, &places, doorbell);
                self.handles.qps.release(qp.0);
                self.named_pds.credit(request.pd, Member::Qp);
                self.ledger.credit(&mut session.counts, Kind::Qps, 1);
                return Err(refusal);
            }
        };
        let shared = Arc::new(QpShared::default());
        shared.context.store(request.context, Relaxed);
        send_cq.users.fetch_add(1, Relaxed);
        if request.recv_cq != request.send_cq {
            recv_cq.users.fetch_add(1, Relaxed);
        }
        if let Some(srq) = &srq {
            srq.users.fetch_add(1, Relaxed);
        }
        session.pd(request.pd)?.qps += 1;
        let config = QpConfig {
            qp,
            session: id,
            pd: request.pd,
            doorbell,
            sq: SendConsumer::new(sq_memory),
            rq: receives,
            send_cq,
            recv_cq,
            signal_all: request.signal_all,
            rnr_timeout: hold,
            shared: shared.clone(),
        };
        let object = Qp {
            pd: request.pd,
            send_cq: request.send_cq,
            recv_cq: request.recv_cq,
            srq: request.srq,
            shared,
            sq,
            rq,
            doorbell,
            phase: Phase::Idle(Box::new(config)),
            connection: None,
            reads: Reads::default(),
        };
        session.qps.insert(qp, object);
        let (new_arena, descriptors) = told(made);
        let rq = rq.map(|rq| rq.location());
        let body = ReplyBody::Qp { qp, sq: sq.location(), rq, new_arena };
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

    /// Gives back what a QP had; no worker knows it any more.
    pub(super) fn qp_gone(&mut self, id: SessionId, qp: QpId) {
        let Ok(session) = find(&mut self.sessions, id) else { return };
        let Some(mut object) = session.qps.remove(&qp) else { return };
        let Qp { send_cq, recv_cq, .. } = object;
        let other = (recv_cq != send_cq).then_some(recv_cq);
        for cq in [Some(send_cq), other].into_iter().flatten() {
            if let Some(cq) = session.cqs.get(&cq) {
                cq.cq.users.fetch_sub(1, Relaxed);
            }
        }
        if let Some(srq) = object.srq.and_then(|srq| session.srqs.get(&srq)) {
            srq.srq.users.fetch_sub(1, Relaxed);
        }
        if let Some(pd) = session.pds.get_mut(&object.pd) {
            pd.qps -= 1;
        }
        self.named_pds.credit(object.pd, Member::Qp);
        object.reads.credit_all(&mut self.ledger, &mut session.counts);
        self.terminates.count(&object.shared);
        self.past.add_qp(session.client.identity.uid, &object.shared);
        let places: Vec<Place> = [Some(object.sq), object.rq].into_iter().flatten().collect();
        give_back(session, &places, object.doorbell);
        self.handles.qps.release(qp.0);
        self.ledger.credit(&mut session.counts, Kind::Qps, 1);
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

/// Places, a doorbell, and the arena that had to be made for them.
pub(super) type Room = (Vec<Place>, u32, Option<Made>);

/// Finds room for queues, in a new arena if need be.
pub(super) fn place(
    session: &mut Session,
    ledger: &mut Ledger,
    shapes: &[QueueShape],
) -> Result<Room, Refusal> {
    let doorbell = session.doorbells.allocate().ok_or_else(|| Refusal::Limit {
        key: "doorbells of a session".to_owned(),
        limit: u64::from(rnic_core::abi::queue::doorbell::INDICES),
        used: u64::from(rnic_core::abi::queue::doorbell::INDICES),
        wanted: 1,
    })?;
    match places(session, ledger, shapes) {
        Ok((places, made)) => Ok((places, doorbell, made)),
        Err(refusal) => {
            session.doorbells.release(doorbell);
            Err(refusal)
        }
    }
}

/// Finds places for queues that have a doorbell, in a new arena if need be.
pub(super) fn places(
    session: &mut Session,
    ledger: &mut Ledger,
    shapes: &[QueueShape],
) -> Result<(Vec<Place>, Option<Made>), Refusal> {
    let found = session.arenas.place(shapes).map(|places| (places, None));
    found.map_or_else(|| place_in_new(session, ledger, shapes), Ok)
}

fn place_in_new(
    session: &mut Session,
    ledger: &mut Ledger,
    shapes: &[QueueShape],
) -> Result<(Vec<Place>, Option<Made>), Refusal> {
    let room = ledger.room(&session.counts, Kind::ArenaBytes);
    let len = session.arenas.next_length(shapes, room);
    ledger.charge(&mut session.counts, Kind::ArenaBytes, len as u64)?;
    let made = match session.arenas.grow(session.id, len) {
        Ok(made) => made,
        Err(refusal) => {
            ledger.credit(&mut session.counts, Kind::ArenaBytes, len as u64);
            return Err(refusal);
        }
    };
    let places = session.arenas.place(shapes);
    let places = places.ok_or_else(|| refuse::system("cannot place the queues", &"no room"))?;
    Ok((places, Some(made)))
}

pub(super) fn give_back(session: &mut Session, places: &[Place], doorbell: u32) {
    for place in places {
        session.arenas.release(place);
    }
    session.doorbells.release(doorbell);
}

pub(super) fn format(
    session: &Session,
    place: &Place,
    kind: QueueKind,
    owner: u32,
    doorbell: u32,
) -> Result<QueueMemory, Refusal> {
    let mapping = session.arenas.mapping(place).cloned();
    let mapping = mapping.ok_or_else(|| refuse::system("cannot make the queue", &"no arena"))?;
    QueueMemory::format(mapping, place.offset, kind, place.shape, owner, doorbell)
        .map_err(|e| refuse::system("cannot make the queue", &e))
}

pub(super) fn told(made: Option<Made>) -> (Option<NewArena>, Vec<std::os::fd::OwnedFd>) {
    made.map_or((None, Vec::new()), |(arena, descriptor)| (Some(arena), vec![descriptor]))
}

pub(super) fn check_entries(limits: &Limits, entries: u32) -> Result<(), Refusal> {
    if entries == 0 {
        return Err(refuse::invalid("entries", "a CQ has at least one entry"));
    }
    let most = u64::from(limits.cq_entries);
    refuse::at_most("entries", u64::from(entries), "limits.cq_entries", most)
}

fn check_qp(limits: &Limits, r: &QpRequest) -> Result<(), Refusal> {
    // With a shared receive queue, what is said of a queue of its own is of no account.
    let own = if r.srq.is_some() { 1 } else { 2 };
    for (field, depth) in [("sq_depth", r.sq_depth), ("rq_depth", r.rq_depth)].into_iter().take(own)
    {
        let most = u64::from(limits.wr_depth);
        refuse::at_most(field, u64::from(depth), "limits.wr_depth", most)?;
    }
    let sges = [("max_send_sge", r.max_send_sge), ("max_recv_sge", r.max_recv_sge)];
    for (field, sges) in sges.into_iter().take(own) {
        refuse::at_most(field, u64::from(sges), "limits.sge", u64::from(limits.sge))?;
    }
    refuse::at_most("max_inline", r.max_inline.into(), "limits.inline", limits.inline.into())
}
