//! Completion queues that get another size.
//!
//! The queue gets another place, so for a moment it has two; entries count against the limits as
//! those of the larger. Workers know the queue and not its place, which it changes under its own
//! lock ([`Cq::resize`]), so none has to be asked. The old place is free at once: the client has
//! agreed not to touch it from its request on, and if it does so all the same it writes in its own
//! arena, as it can at any time.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rnic_core::abi::control::{Event, Refusal, ReplyBody};
use rnic_core::abi::queue::{QueueKind, QueueShape};
use rnic_core::device::Cq;
use rnic_core::device::cq::{CqFault, ResizeFault};
use rnic_core::types::*;

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
        check_entries(&self.config.limits, entries)?;
        let shape = QueueShape::completion(entries);
        let queue = object.cq.clone();
        let (had, wants) = (object.entries.amount(), u64::from(shape.capacity));
        // Before anything is made for nothing. Workers may need more meanwhile, so the move asks
        // again.
        if let Err(fault) = queue.fits(shape.capacity) {
            return Err(self.not_resized(id, &queue, shape, fault));
        }
        if wants == had {
            let body = ReplyBody::Cq { cq, queue: object.place.location(), new_arena: None };
            return Outcome::now(body);
        }
        let more = match wants > had {
            //= RDMAP-8.1.2-5
            true => Some(session.account.charge(Kind::CqEntries, wants - had)?),
            false => None,
        };
        // Without the move the room is given back, with the arena that was made for it.
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
        self.workers.space_freed(&queue, waiting);
        let (new_arena, descriptors) = session.arenas.keep(made);
        Outcome::with(ReplyBody::Cq { cq, queue: location, new_arena }, descriptors)
    }

    /// The refusal; and if the client has written what cannot be into its queue, the end of both.
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
            self.note("cq_failed", Some(id), format!("completion queue {cq} is dead"));
            self.outbox.end(id, format!("completion queue {cq}: {fault}"));
            self.cq_failed(cq);
        }
        Refusal::WrongState {
            kind: "CQ".to_owned(),
            handle: cq.0,
            state: "dead".to_owned(),
            needs: "a queue that has not overflowed and was not scribbled over".to_owned(),
        }
    }
}
