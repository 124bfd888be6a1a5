//! Completion queues that get another size.
//!
//! The queue gets another place, so for a moment it has two; entries count against the limits as those
//! of the larger. Workers know the queue and not its place, which it changes under its own lock
//! ([`Cq::resize`]), so none has to be asked. The old place is free at once: the client has agreed not
//! to touch it from its request on, and if it does so all the same it writes in its own arena, as it
//! can at any time.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rnic_core::abi::control::{Event, Refusal, ReplyBody};
use rnic_core::abi::queue::{QueueKind, QueueShape};
use rnic_core::device::Cq;
use rnic_core::device::cq::{CqFault, ResizeFault};
use rnic_core::types::*;

use super::arena::{Made, Place};
use super::ledger::{Kind, Ledger};
use super::queues::{check_entries, format, places, told};
use super::session::{CqObject, Session};
use super::{Answer, Given, Manager, find, refuse};

/// Why a queue was not moved.
enum NotMoved {
    Refused(Refusal),
    Fault(ResizeFault),
}

/// Where a queue is now, the arena made for it, and the workers (by bit) that wait for slots.
type Moved = (Place, Option<Made>, u64);

impl Manager {
    pub(super) fn resize_cq(&mut self, id: SessionId, cq: CqId, entries: u32) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object = session.cq(cq)?;
        check_entries(&self.config.limits, entries)?;
        let shape = QueueShape::completion(entries);
        let (queue, old, doorbell) = (object.cq.clone(), object.place, object.doorbell);
        let (had, wants) = (u64::from(old.shape.capacity), u64::from(shape.capacity));
        // Before anything is made for nothing. Workers may need more meanwhile, so the move asks again.
        if let Err(fault) = queue.fits(shape.capacity) {
            return Err(self.not_resized(id, &queue, shape, fault));
        }
        if wants == had {
            let body = ReplyBody::Cq { cq, queue: old.location(), new_arena: None };
            return Given::now(body);
        }
        if wants > had {
            self.ledger.charge(&mut session.counts, Kind::CqEntries, wants - had)?;
        }
        let moved = move_to_other_place(session, &mut self.ledger, &queue, shape, doorbell);
        let (place, made, waiting) = match moved {
            Ok(moved) => moved,
            Err(why) => {
                let more = wants.saturating_sub(had);
                self.ledger.credit(&mut session.counts, Kind::CqEntries, more);
                return Err(match why {
                    NotMoved::Refused(refusal) => refusal,
                    NotMoved::Fault(fault) => self.not_resized(id, &queue, shape, fault),
                });
            }
        };
        session.arenas.release(&old);
        self.ledger.credit(&mut session.counts, Kind::CqEntries, had.saturating_sub(wants));
        session.cqs.entry(cq).and_modify(|object: &mut CqObject| object.place = place);
        self.workers.space_freed(&queue, waiting);
        let (new_arena, descriptors) = told(made);
        Given::with(ReplyBody::Cq { cq, queue: place.location(), new_arena }, descriptors)
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
        if let CqFault::Scribbled(fault) = fault
            && queue.kill()
        {
            if let Ok(session) = find(&mut self.sessions, id) {
                session.tell(&Event::CqError { cq, context: queue.context.load(Relaxed) });
            }
            self.note("cq_failed", Some(id), format!("completion queue {cq} is dead"));
            self.ended.push_back((id, format!("completion queue {cq}: {fault}")));
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

/// Moves a queue, or leaves everything as it was.
fn move_to_other_place(
    session: &mut Session,
    ledger: &mut Ledger,
    queue: &Arc<Cq>,
    shape: QueueShape,
    doorbell: u32,
) -> Result<Moved, NotMoved> {
    let (places, made) = places(session, ledger, &[shape]).map_err(NotMoved::Refused)?;
    let place = places[0];
    let moved = format(session, &place, QueueKind::Completion, queue.id().0, doorbell)
        .map_err(NotMoved::Refused)
        .and_then(|memory| queue.resize(memory).map_err(NotMoved::Fault));
    match moved {
        Ok(waiting) => Ok((place, made, waiting)),
        Err(why) => {
            session.arenas.release(&place);
            // The client is not told of it, and so it could have no queue in it.
            if let Some(made) = &made {
                let bytes = session.arenas.shrink(made);
                ledger.credit(&mut session.counts, Kind::ArenaBytes, bytes);
            }
            Err(why)
        }
    }
}
