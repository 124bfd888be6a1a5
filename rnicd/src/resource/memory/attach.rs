//! Attached memory: regions in a client's own address space, and their revocation.
//!
//! A copy may wait for a page fault that the client controls. So workers copy only for clients
//! whose user could stop the daemon anyway, or is trusted by the administrator. These clients pass
//! a descriptor of their address space. For all other clients, the client's library copies. It gets
//! jobs through one queue per worker.

use std::time::Instant;

use rnic_abi::abi::control::{DisconnectMode, Event, ReplyBody};
use rnic_abi::abi::queue::{QueueKind, QueueShape};
use rnic_abi::shm::AddressSpace;
use rnic_abi::shm::queue::CopyProducer;
use rnic_abi::types::*;
use rnic_core::device::Copier;
use rnic_core::engine::EngineCommand;

use super::Attached;
use super::attached::Reach;
use crate::reaper::Passed;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::qp::QpPhase;
use crate::resource::queue::Room;
use crate::resource::{Manager, find, refuse};
use crate::worker::Command;

impl Manager {
    /// Attaches an address space. `memory` may be any file. The daemon accesses the file only if
    /// the client is allowed to make the daemon wait. Otherwise the reaper closes it.
    pub(in crate::resource) fn attach_memory(&mut self, id: SessionId, memory: Passed) -> Answer {
        let session = find(&mut self.sessions, id)?;
        if session.attached.is_some() {
            let what = "an address space that is already attached";
            return Err(refuse::in_use("session", id.0, what));
        }
        if session.library_copies {
            let why = "the daemon accesses memory of trusted users only; use ServeCopies to \
                       let the library copy";
            return Err(refuse::invalid("memory", why));
        }
        let user = session.client.identity.uid;
        let adopted = AddressSpace::adopt(memory.into_inner(), session.client.pid);
        let space = adopted.map_err(|(error, descriptor)| {
            drop(Passed::new(descriptor, user, &self.reaper));
            refuse::invalid("memory", error.to_string())
        })?;
        session.attached = Some(Attached { reach: Reach::Own(space), gone: false });
        Outcome::done()
    }

    /// Creates a worker's queue of copy jobs.
    pub(in crate::resource) fn serve_copies(&mut self, id: SessionId, worker: u32) -> Answer {
        let workers = self.capacity.workers;
        let session = find(&mut self.sessions, id)?;
        if !session.library_copies {
            return Err(refuse::invalid("client", "the daemon copies for it; use AttachMemory"));
        }
        let made = match &session.attached {
            Some(Attached { reach: Reach::Library { queues, .. }, .. }) => queues.len(),
            Some(_) => {
                let what = "an address space that is already attached";
                return Err(refuse::in_use("session", id.0, what));
            }
            None => 0,
        };
        if worker as usize != made || worker >= workers {
            let why =
                format!("{worker}: serve each of the {workers} workers once, in order from 0");
            return Err(refuse::invalid("worker", why));
        }
        let doorbell = session.doorbells.allocate()?;
        let Room { places: [place], made: arena } = session.arenas.room([QueueShape::copies()])?;
        let memory = place.format(QueueKind::Copies, worker, &doorbell)?;
        let queue = place.location();
        let attached = session.attached.get_or_insert_with(|| {
            let copier = Copier::new(id, workers);
            let reach = Reach::Library { copier, workers, queues: Vec::new() };
            Attached { reach, gone: false }
        });
        if let Reach::Library { copier, queues, .. } = &mut attached.reach {
            let copier = copier.clone();
            let queue = CopyProducer::new(memory);
            self.workers.one(worker, Command::AddCopyQueue { copier, queue });
            queues.push((place, doorbell));
        }
        let (new_arena, descriptors) = session.arenas.keep(arena);
        Outcome::with(ReplyBody::Copies { queue, new_arena }, descriptors)
    }

    /// Revokes a session's regions in attached memory after the address space has ended. Several
    /// QPs may report this. Only the first report has an effect.
    pub(in crate::resource) fn memory_gone(&mut self, id: SessionId) {
        let Ok(session) = find(&mut self.sessions, id) else { return };
        let reason = match &mut session.attached {
            Some(attached) if !attached.gone => {
                attached.gone = true;
                attached.reason()
            }
            _ => return,
        };
        // Must precede the revocation of the STags: a peer must see RC QPs that no longer answer,
        // not access errors.
        for (&qp, object) in &session.qps {
            if let QpPhase::Bound(worker) = object.phase
                && object.kind.is_roce()
            {
                let abort = EngineCommand::Disconnect(qp, DisconnectMode::Abort);
                self.workers.one(worker, abort);
            }
        }
        let mut revoked = 0;
        for mr in session.mrs.values().filter(|mr| mr.region.buffer.is_none()) {
            let stag = mr.stag.stag();
            // No ticket is needed: any use of the STag until then fails for the same reason.
            self.workers.all(|| EngineCommand::RevokeStag(stag));
            revoked += 1;
        }
        if let Some(suppressed) = self.log_limits.count("memory detached", Instant::now()) {
            let pid = session.client.pid;
            tracing::info!(session = %id, pid, revoked, reason, suppressed, "memory detached");
        }
        session.tell(&Event::Detached { reason: reason.to_owned() });
        self.note("memory_detached", Some(id), format!("{reason}; {revoked} regions are revoked"));
    }
}
