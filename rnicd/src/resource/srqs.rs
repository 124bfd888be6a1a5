//! Shared receive queues, and what becomes of messages without a receive.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rnic_core::abi::control::{Event, Refusal, ReplyBody, SrqRequest, SrqRow};
use rnic_core::abi::queue::{QueueKind, QueueShape};
use rnic_core::device::Srq;
use rnic_core::device::srq::SrqFault;
use rnic_core::types::*;

use super::ledger::Kind;
use super::queues::{format, give_back, place, told};
use super::session::SrqObject;
use super::{Answer, Given, Manager, find, refuse};

impl Manager {
    pub(super) fn create_srq(&mut self, id: SessionId, request: &SrqRequest) -> Answer {
        let session = find(&mut self.sessions, id)?;
        session.pd(request.pd)?;
        let SrqRequest { depth, max_sge, limit, context, .. } = *request;
        if depth == 0 {
            return Err(refuse::invalid("depth", "an SRQ has at least one entry"));
        }
        let limits = &self.config.limits;
        refuse::at_most("depth", depth.into(), "limits.wr_depth", limits.wr_depth.into())?;
        refuse::at_most("max_sge", max_sge.into(), "limits.sge", limits.sge.into())?;
        let shape = QueueShape::receive(depth, max_sge);
        check_limit(limit, shape.capacity)?;
        self.ledger.charge(&mut session.counts, Kind::Srqs, 1)?;
        let (places, doorbell, made) = match place(session, &mut self.ledger, &[shape]) {
            Ok(room) => room,
            Err(refusal) => {
                self.ledger.credit(&mut session.counts, Kind::Srqs, 1);
                return Err(refusal);
            }
        };
        let srq = SrqId(self.handles.srqs.allocate(id));
        let at = places[0];
        let queue = match format(session, &at, QueueKind::SharedReceive, srq.0, doorbell) {
            Ok(queue) => queue,
            Err(refusal) => {
                give_back(session, &places, doorbell);
                self.handles.srqs.release(srq.0);
                self.ledger.credit(&mut session.counts, Kind::Srqs, 1);
                return Err(refusal);
            }
        };
        let shared = Arc::new(Srq::new(srq, id, context, limit, queue));
        session.pd(request.pd)?.srqs += 1;
        let object = SrqObject { srq: shared, pd: request.pd, place: at, doorbell };
        session.srqs.insert(srq, object);
        let (new_arena, descriptors) = told(made);
        let body = ReplyBody::Srq { srq, queue: at.location(), new_arena };
        Given::with(body, descriptors)
    }

    pub(super) fn arm_srq(&mut self, id: SessionId, srq: SrqId, limit: u32) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let queue = session.srq(srq)?.srq.clone();
        check_limit(limit, queue.capacity())?;
        let fault = match queue.arm(limit) {
            Ok(due) => {
                if due {
                    let context = queue.context.load(Relaxed);
                    session.tell(&Event::SrqLimit { srq, context });
                }
                return Given::done();
            }
            Err(fault) => fault,
        };
        if queue.kill() {
            let context = queue.context.load(Relaxed);
            session.tell(&Event::SrqError { srq, context });
            if let SrqFault::Scribbled(fault) = fault {
                self.ended.push_back((id, format!("shared receive queue {srq}: {fault}")));
            }
            self.srq_failed(srq);
        }
        Err(dead(srq))
    }

    pub(super) fn query_srq(&mut self, id: SessionId, srq: SrqId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        Given::now(ReplyBody::SrqInfo(srq_row(session.srq(srq)?)))
    }

    pub(super) fn destroy_srq(&mut self, id: SessionId, srq: SrqId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let users = session.srq(srq)?.srq.users.load(Relaxed);
        if users > 0 {
            return Err(refuse::in_use("SRQ", srq.0, format!("{users} QPs")));
        }
        let Some(object) = session.srqs.remove(&srq) else { return Given::done() };
        if let Some(pd) = session.pds.get_mut(&object.pd) {
            pd.srqs -= 1;
        }
        give_back(session, &[object.place], object.doorbell);
        self.handles.srqs.release(srq.0);
        self.ledger.credit(&mut session.counts, Kind::Srqs, 1);
        Given::done()
    }

    /// A dead SRQ takes its QPs with it, wherever they are.
    pub(super) fn srq_failed(&mut self, srq: SrqId) {
        let Some(id) = self.handles.srqs.owner(srq.0) else { return };
        let Ok(session) = find(&mut self.sessions, id) else { return };
        let users: Vec<QpId> =
            session.qps.iter().filter(|(_, qp)| qp.srq == Some(srq)).map(|(id, _)| *id).collect();
        for qp in users {
            // They exist: they were just listed.
            let _ = self.qp_to_error(id, qp);
        }
    }

    /// How long a QP holds a message that finds no receive; `None` if it does not.
    pub(super) fn hold_for(&self, no_receive: NoReceive) -> Result<Option<Duration>, Refusal> {
        match no_receive {
            NoReceive::Terminate => Ok(None),
            NoReceive::Hold { deadline_ms: 0 } => Ok(Some(self.config.mpa.hold_deadline)),
            NoReceive::Hold { deadline_ms } => {
                let field = "no_receive.deadline_ms";
                refuse::at_most(field, deadline_ms.into(), "one hour", LONGEST_HOLD_MS)?;
                Ok(Some(Duration::from_millis(deadline_ms.into())))
            }
        }
    }
}

/// The SRQ of a QP about to be made.
pub(super) fn srq_for_qp(object: &SrqObject, pd: PdId) -> Result<Arc<Srq>, Refusal> {
    let srq = object.srq.id();
    if object.pd != pd {
        let why = format!("SRQ {srq} is of PD {}, the QP of PD {pd}", object.pd);
        return Err(refuse::invalid("srq", why));
    }
    if object.srq.is_dead() {
        return Err(dead(srq));
    }
    Ok(object.srq.clone())
}

pub(super) fn srq_row(object: &SrqObject) -> SrqRow {
    let SrqObject { srq, pd, .. } = object;
    let usage = srq.usage();
    SrqRow {
        srq: srq.id(),
        session: srq.session(),
        pd: *pd,
        capacity: srq.capacity(),
        posted: usage.posted,
        taken: usage.taken,
        limit: usage.limit,
        qps: srq.users.load(Relaxed),
        held: usage.held,
        unfair: usage.unfair,
    }
}

/// A limit above the capacity could never be met.
fn check_limit(limit: u32, capacity: u32) -> Result<(), Refusal> {
    refuse::at_most("limit", limit.into(), "the capacity of the SRQ", capacity.into())
}

fn dead(srq: SrqId) -> Refusal {
    Refusal::WrongState {
        kind: "SRQ".to_owned(),
        handle: srq.0,
        state: "dead".to_owned(),
        needs: "a ring that was not scribbled over".to_owned(),
    }
}

/// What every deadline of the configuration is bounded by, too.
const LONGEST_HOLD_MS: u64 = 3_600_000;
