//! Resizing of completion queues.
//!
//! A resize moves the queue. During the move the queue has two places, and is charged for the
//! larger one. Workers refer to the [`Cq`] and not to its place, which changes under the queue's
//! lock ([`Cq::resize`]), so no worker is involved. The old place is freed at once: the client must
//! not access it after its request, and a later write only damages its own arena.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::abi::control::{Event, Refusal, ReplyBody};
use rnic_abi::abi::queue::{QueueKind, QueueShape};
use rnic_abi::types::*;
use rnic_core::device::Cq;
use rnic_core::device::cq::{CqFault, ResizeFault};
use rnic_core::engine::{EngineCommand, Freed};

use super::Room;
use super::cqs::check_entries;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::{Manager, find, refuse};

impl Manager {
    pub(in crate::resource) fn resize_cq(
        &mut self,
        id: SessionId,
        cq: CqId,
        entries: u32,
    ) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object = session.cq(cq)?;
        check_entries(&self.config, entries)?;
        let shape = QueueShape::completion(entries);
        let queue = object.cq.clone();
        let had = object.entries.amount();
        let wants = u64::from(shape.capacity);
        // Check before any allocation. A worker may reserve more entries in between, so the move
        // checks again.
        if let Err(fault) = queue.fits(shape.capacity) {
            return Err(self.not_resized(id, &queue, shape, fault));
        }
        if wants == had {
            let body = ReplyBody::Cq { cq, queue: object.place.location(), new_arena: None };
            return Outcome::now(body);
        }
        let more = if wants > had {
            //= RDMAP-8.1.2-5
            Some(session.account.charge(Kind::CqEntries, wants - had)?)
        } else {
            None
        };
        // If the move fails, the new place is freed, together with the arena created for it.
        let Room { places: [place], made } = session.arenas.room([shape])?;
        let memory = place.format(QueueKind::Completion, cq.0, &object.doorbell)?;
        let waiting = match queue.resize(memory) {
            Ok(waiting) => waiting,
            Err(fault) => return Err(self.not_resized(id, &queue, shape, fault)),
        };
        let location = place.location();
        if let Some(object) = session.cqs.get_mut(&cq) {
            object.place = place;
            object.entries.reduce_to(wants);
            more.into_iter().for_each(|more| object.entries.add(more));
        }
        // The client rings no doorbell for these slots.
        self.workers.some(waiting, || EngineCommand::Wake(Freed::Slots(queue.clone())));
        let (new_arena, descriptors) = session.arenas.keep(made);
        Outcome::with(ReplyBody::Cq { cq, queue: location, new_arena }, descriptors)
    }

    /// Returns the refusal of a failed resize. If the client has written an invalid index, kills
    /// the CQ and ends the session.
    fn not_resized(
        &mut self,
        id: SessionId,
        queue: &Arc<Cq>,
        wanted: QueueShape,
        fault: ResizeFault,
    ) -> Refusal {
        let cq = queue.id();
        let fault = match fault {
            ResizeFault::TooSmall { unread, reserved } => {
                let why = format!(
                    "{unread} completions of CQ {cq} are unread and {reserved} entries are \
                     reserved, which is more than {}",
                    wanted.capacity
                );
                return refuse::invalid("entries", why);
            }
            ResizeFault::Cq(fault) => fault,
        };
        if let CqFault::BadIndex(fault) = fault
            && queue.kill()
        {
            if let Ok(session) = find(&mut self.sessions, id) {
                session.tell(&Event::CqError { cq, context: queue.context.load(Relaxed) });
            }
            let text = format!("completion queue {cq} has failed");
            self.note("cq_failed", Some(id), text);
            self.outbox.end(id, format!("completion queue {cq}: {fault}"));
            self.cq_failed(cq);
        }
        Refusal::WrongState {
            kind: "CQ".to_owned(),
            handle: cq.0,
            state: "dead".to_owned(),
            needs: "an undamaged ring that has not overflowed".to_owned(),
        }
    }
}
