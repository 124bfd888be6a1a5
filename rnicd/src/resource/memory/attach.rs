//! Attached memory: who may have regions in his own address space, and what becomes of them when it
//! is gone.

use std::os::fd::OwnedFd;
use std::time::Instant;

use rnic_core::abi::control::{Event, Refusal, ReplyBody, RequestBody};
use rnic_core::shm::AddressSpace;
use rnic_core::types::*;

use super::Attached;
use super::attached::Reach;
use crate::clock;
use crate::copier::{CopierReport, NoCopier};
use crate::reaper::Passed;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::qp::QpPhase;
use crate::resource::records::Asked;
use crate::resource::{Manager, find, refuse};

impl Manager {
    /// `descriptor` may be anything: it is touched only if its owner may keep the daemon waiting,
    /// and if it is not wanted it is closed where that may take its time.
    pub(in crate::resource) fn attach_memory(
        &mut self,
        id: SessionId,
        memory: Passed,
        now: Time,
    ) -> Answer {
        self.check_attaching(id, now)?;
        let user = find(&mut self.sessions, id)?.client.identity.uid;
        self.examine_memory(id, memory.into_inner()).map_err(|(refusal, memory)| {
            drop(Passed::new(memory, user, &self.reaper));
            refusal
        })
    }

    /// Refuses a session that has attached its memory already, and a user who asks for copiers too
    /// often: each costs a process, also where it comes to nothing.
    fn check_attaching(&mut self, id: SessionId, now: Time) -> Result<(), Refusal> {
        let session = find(&mut self.sessions, id)?;
        if session.attached.is_some() {
            return Err(refuse::in_use("session", id.0, "the address space attached before"));
        }
        if session.client.is_trusted() {
            return Ok(());
        }
        let rights = session.account.rights();
        let limit = rights.user_count(Kind::AttachmentsPerSecond);
        match self.attachments.take(rights.uid, limit, now) {
            true => Ok(()),
            false => Err(Refusal::Limit {
                key: rights.user_key(Kind::AttachmentsPerSecond),
                limit: limit.into(),
                used: limit.into(),
                wanted: 1,
            }),
        }
    }

    fn examine_memory(
        &mut self,
        id: SessionId,
        descriptor: OwnedFd,
    ) -> Result<Outcome, (Refusal, OwnedFd)> {
        let session = match find(&mut self.sessions, id) {
            Ok(session) => session,
            Err(refusal) => return Err((refusal, descriptor)),
        };
        let pid = session.client.pid;
        // A copy waits for whoever serves the client's pages, so workers make it themselves only
        // for those who could stop the daemon anyway.
        if session.client.is_trusted() {
            let space = AddressSpace::adopt(descriptor, pid)
                .map_err(|(error, d)| (refuse::invalid("memory", error.to_string()), d))?;
            session.attached = Some(Attached { reach: Reach::Own(space), gone: false });
            return Ok(Outcome::Now(Box::new(ReplyBody::Done.into())));
        }
        let charge = match session.account.charge(Kind::Copiers, 1) {
            Ok(charge) => charge,
            Err(refusal) => return Err((refusal, descriptor)),
        };
        let added = self.copiers.add(id, pid, descriptor, self.capacity.workers);
        let (copier, channels) =
            added.map_err(|(error, d)| (refuse::system("cannot start a copier", &error), d))?;
        self.copying.add(id, charge);
        self.workers.add_copier(&copier.shared, channels);
        session.attached = Some(Attached { reach: Reach::Copier(copier), gone: false });
        Ok(Outcome::Later)
    }

    /// A copier has started, or has not, or has ended.
    pub(in crate::resource) fn copier_reported(&mut self, report: CopierReport) {
        match report {
            CopierReport::Ready { session: id, process } => {
                // If the session has ended meanwhile, so does the copier: its channels are closed.
                let Ok(session) = find(&mut self.sessions, id) else { return };
                if let Some(Attached { reach: Reach::Copier(copier), .. }) = &mut session.attached {
                    copier.started(process);
                    self.outbox.answer(id, ReplyBody::Done);
                }
            }
            CopierReport::Refused { session: id, why, memory } => {
                if let Some(memory) = memory {
                    // A session that has ended left nobody to count it for but its user, who is
                    // known by his copier, which is counted until its end is reported as well.
                    let user = self.copying.user(id).unwrap_or(u32::MAX);
                    drop(Passed::new(memory, user, &self.reaper));
                }
                let Ok(session) = find(&mut self.sessions, id) else { return };
                session.attached = None;
                let refusal = match why {
                    NoCopier::Memory(why) => refuse::invalid("memory", why),
                    NoCopier::System(error) => refuse::system("cannot start a copier", &error),
                };
                let asked = Asked::of(&RequestBody::AttachMemory);
                let refused = self.refused(id, asked, refusal, clock::now());
                self.outbox.refuse(id, refused);
            }
            CopierReport::Ended { session } => self.copying.remove(session),
        }
    }

    /// A worker has found a session's address space gone: its regions there go as well. Every QP
    /// that meets it reports it; the first report counts.
    pub(in crate::resource) fn memory_gone(&mut self, id: SessionId) {
        let Ok(session) = find(&mut self.sessions, id) else { return };
        match &mut session.attached {
            Some(attached) if !attached.gone => attached.gone = true,
            _ => return,
        }
        // Before their STags go: a peer must see RC QPs that no longer answer, not access errors.
        for (&qp, object) in &session.qps {
            if let QpPhase::Bound(worker) = object.phase
                && object.kind.is_wired()
            {
                self.workers.to_error(worker, qp);
            }
        }
        let mut revoked = 0;
        for mr in session.mrs.values().filter(|mr| mr.region.buffer.is_none()) {
            // Nobody waits for it: whoever uses such an STag meanwhile meets the same end.
            self.workers.revoke_stag(mr.stag.stag());
            revoked += 1;
        }
        let reason = "the attached address space has ended (by exec, or with its process)";
        if let Some(suppressed) = self.said.count("memory detached", Instant::now()) {
            let pid = session.client.pid;
            tracing::info!(session = %id, pid, revoked, reason, suppressed, "memory detached");
        }
        session.tell(&Event::Detached { reason: reason.to_owned() });
        self.note("memory_detached", Some(id), format!("{reason}; {revoked} regions are revoked"));
    }
}
