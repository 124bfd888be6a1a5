//! Shared receive queues, and RNR timeouts.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rnic_abi::abi::control::{Event, Refusal, ReplyBody, SrqRequest, SrqRow};
use rnic_abi::abi::queue::{QueueKind, QueueShape};
use rnic_abi::types::*;
use rnic_core::device::Srq;
use rnic_core::device::srq::SrqFault;

use super::{Room, SrqObject};
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::{Manager, find, refuse};

impl Manager {
    pub(in crate::resource) fn create_srq(
        &mut self,
        id: SessionId,
        request: &SrqRequest,
    ) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let pd = session.pd(request.pd)?.srqs.add();
        let SrqRequest { depth, max_sge, limit, context, .. } = *request;
        if depth == 0 {
            return Err(refuse::invalid("depth", "an SRQ has at least one entry"));
        }
        let limits = &self.config.limits.device;
        let profile = &self.config.wired.profile;
        refuse::above_profile(profile, profile.srq_wr(), depth.into())?;
        refuse::above_profile(profile, profile.srq_sge(), max_sge.into())?;
        refuse::at_most("depth", depth.into(), "limits.queue_depth", limits.of(Kind::QueueDepth))?;
        refuse::at_most("max_sge", max_sge.into(), "limits.sge", limits.of(Kind::Sges))?;
        let shape = QueueShape::receive(depth, max_sge);
        check_limit(limit, shape.capacity)?;
        let charge = session.account.charge(Kind::Srqs, 1)?;
        let doorbell = session.doorbells.allocate()?;
        let Room { places: [place], made } = session.arenas.room([shape])?;
        let handle = self.handles.srqs.allocate(id);
        let srq = SrqId(handle.number());
        let queue = place.format(QueueKind::SharedReceive, srq.0, &doorbell)?;
        let location = place.location();
        let object = SrqObject {
            srq: Arc::new(Srq::new(srq, id, context, limit, queue)),
            pd: request.pd,
            _pd: pd,
            _place: (place, doorbell),
            _handle: handle,
            _charge: charge,
        };
        session.srqs.insert(srq, object);
        let (new_arena, descriptors) = session.arenas.keep(made);
        Outcome::with(ReplyBody::Srq { srq, queue: location, new_arena }, descriptors)
    }

    pub(in crate::resource) fn arm_srq(&mut self, id: SessionId, srq: SrqId, limit: u32) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let queue = session.srq(srq)?.srq.clone();
        check_limit(limit, queue.capacity())?;
        let fault = match queue.arm(limit) {
            Ok(due) => {
                if due {
                    let context = queue.context.load(Relaxed);
                    session.tell(&Event::SrqLimit { srq, context });
                }
                return Outcome::done();
            }
            Err(fault) => fault,
        };
        if queue.kill() {
            let context = queue.context.load(Relaxed);
            session.tell(&Event::SrqError { srq, context });
            if let SrqFault::BadIndex(fault) = fault {
                self.outbox.end(id, format!("shared receive queue {srq}: {fault}"));
            }
            self.srq_failed(srq);
        }
        Err(dead(srq))
    }

    pub(in crate::resource) fn query_srq(&mut self, id: SessionId, srq: SrqId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        Outcome::now(ReplyBody::SrqInfo(srq_row(session.srq(srq)?)))
    }

    pub(in crate::resource) fn destroy_srq(&mut self, id: SessionId, srq: SrqId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let users = session.srq(srq)?.srq.qps.load(Relaxed);
        if users > 0 {
            return Err(refuse::in_use("SRQ", srq.0, format!("{users} QPs")));
        }
        session.srqs.remove(&srq);
        Outcome::done()
    }

    /// Moves all QPs of a dead SRQ to Error.
    pub(in crate::resource) fn srq_failed(&mut self, srq: SrqId) {
        if let Some(id) = self.handles.srqs.owner(srq.0) {
            self.qps_to_error(id, |qp| qp.srq == Some(srq));
        }
    }

    /// Returns the maximum time for which a message of a QP waits for a receive, or `None` if it
    /// must not wait.
    pub(in crate::resource) fn rnr_timeout_for(
        &self,
        rnr_policy: RnrPolicy,
    ) -> Result<Option<Duration>, Refusal> {
        match rnr_policy {
            RnrPolicy::Terminate => Ok(None),
            RnrPolicy::Wait { timeout_ms: 0 } => Ok(Some(self.config.mpa.rnr_timeout)),
            RnrPolicy::Wait { timeout_ms } => {
                let field = "rnr_policy.timeout_ms";
                refuse::at_most(field, timeout_ms.into(), "one hour", LONGEST_RNR_TIMEOUT_MS)?;
                Ok(Some(Duration::from_millis(timeout_ms.into())))
            }
        }
    }
}

/// Returns the SRQ for a new QP of this PD. Returns an error if the SRQ is dead or of another PD.
pub fn srq_for_qp(object: &SrqObject, pd: PdId) -> Result<Arc<Srq>, Refusal> {
    let srq = object.srq.id();
    if object.pd != pd {
        let why = format!("SRQ {srq} belongs to PD {}, the QP to PD {pd}", object.pd);
        return Err(refuse::invalid("srq", why));
    }
    if object.srq.is_dead() {
        return Err(dead(srq));
    }
    Ok(object.srq.clone())
}

pub fn srq_row(object: &SrqObject) -> SrqRow {
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
        qps: srq.qps.load(Relaxed),
        waiting: usage.waiting,
        unfair: usage.unfair,
    }
}

/// Returns an error if a limit is above the capacity, because that many receives cannot be posted.
fn check_limit(limit: u32, capacity: u32) -> Result<(), Refusal> {
    refuse::at_most("limit", limit.into(), "the capacity of the SRQ", capacity.into())
}

fn dead(srq: SrqId) -> Refusal {
    refuse::wrong_state("SRQ", srq.0, "dead", "an undamaged ring")
}

/// Maximum RNR timeout in milliseconds, as for deadlines in the configuration.
const LONGEST_RNR_TIMEOUT_MS: u64 = 3_600_000;
