//! Memory regions. A region is registered once every worker has it, and removed once no worker has
//! it.

use std::sync::Arc;

use rnic_abi::abi::control::{MrRequest, MrSource, Refusal, ReplyBody};
use rnic_abi::types::*;
use rnic_core::device::{Memory, StagEntry, StagKind};
use rnic_core::engine::EngineCommand;

use super::attached::attached_memory;
use super::{Attached, Mr, NextRegion, Region, SharedBuffer, UseOfBuffer};
use crate::resource::answer::{Answer, Outcome};
use crate::resource::domain::Member;
use crate::resource::ledger::Kind;
use crate::resource::session::Session;
use crate::resource::{Manager, Pending, find, refuse};
use crate::worker::Ticket;

impl Manager {
    pub(in crate::resource) fn reg_mr(&mut self, id: SessionId, request: &MrRequest) -> Answer {
        let next = self.next_region(id, request, None)?;
        let charge = find(&mut self.sessions, id)?.account.charge(Kind::Mrs, 1)?;
        let issued = self.stags.issue()?;
        let handle = self.handles.mrs.allocate(id);
        let mr = MrId(handle.number());
        let NextRegion { region, memory } = next;
        let object = Mr { stag: issued, region, _handle: handle, _charge: charge };
        find(&mut self.sessions, id)?.mrs.insert(mr, object);
        self.install(id, mr, memory);
        Outcome::later()
    }

    /// Replaces a region under the same handle and STag, after all workers have removed the old
    /// region.
    pub(in crate::resource) fn rereg_mr(
        &mut self,
        id: SessionId,
        mr: MrId,
        request: &MrRequest,
    ) -> Answer {
        let object = find(&mut self.sessions, id)?.mrs.get(&mr);
        let member_of = object.ok_or_else(|| refuse::no_such("MR", mr.0))?.region.pd;
        let next = Box::new(self.next_region(id, request, Some(member_of))?);
        let ticket = self.withdraw(id, mr)?;
        self.pending.insert(ticket, Pending::ReregMr { session: id, mr, next });
        Outcome::later()
    }

    /// Installs the new region after all workers have removed the old one.
    pub(in crate::resource) fn install_next_region(
        &mut self,
        id: SessionId,
        mr: MrId,
        next: NextRegion,
    ) {
        let Ok(session) = find(&mut self.sessions, id) else { return };
        let Some(object) = session.mrs.get_mut(&mr) else { return };
        let before = std::mem::replace(&mut object.region, next.region);
        if before.pd == object.region.pd {
            object.region.membership = before.membership;
        }
        self.install(id, mr, next.memory);
    }

    pub(in crate::resource) fn dereg_mr(&mut self, id: SessionId, mr: MrId) -> Answer {
        let ticket = self.withdraw(id, mr)?;
        self.pending.insert(ticket, Pending::DeregMr { session: id, mr });
        Outcome::later()
    }

    /// Completes a deregistration after all workers have removed the region.
    pub(in crate::resource) fn mr_revoked(&mut self, id: SessionId, mr: MrId) {
        // If the session has ended in between, the region is dropped with it.
        let Ok(session) = find(&mut self.sessions, id) else { return };
        if session.mrs.remove(&mr).is_some() {
            self.outbox.answer(id, ReplyBody::Done);
        }
    }

    /// Checks a request, and counts the region in its domain and its shared buffer. A region that
    /// stays in its domain keeps its membership.
    fn next_region(
        &mut self,
        id: SessionId,
        request: &MrRequest,
        member_of: Option<PdId>,
    ) -> Result<NextRegion, Refusal> {
        let profile = &self.config.wired.profile;
        refuse::above_profile(profile, profile.mr_size(), request.length)?;
        let session = find(&mut self.sessions, id)?;
        check(session, request)?;
        //= DDP-8.3-4, DDP-8.3.2-4, RDMAP-8.1.2-4
        let (buffer, memory) = named_memory(session, request.source, request.length)?;
        let membership = if member_of == Some(request.pd) {
            None
        } else {
            self.named_pds.enter(&self.policy, request.pd, Member::Mr)?
        };
        let MrRequest { pd, length, iova, access, scope, .. } = *request;
        let uses = session.pd(pd)?.mrs.add();
        let region = Region {
            pd,
            buffer: buffer.as_ref().map(|(buffer, _)| *buffer),
            iova,
            length,
            access,
            scope,
            windows: Arc::default(),
            membership,
            _uses: (uses, buffer.map(|(_, used)| used)),
        };
        Ok(NextRegion { region, memory })
    }

    /// Installs a region in all workers. The owner gets the answer when all have it.
    fn install(&mut self, session: SessionId, mr: MrId, memory: Memory) {
        let Ok(of) = find(&mut self.sessions, session) else { return };
        let Some(object) = of.mrs.get(&mr) else { return };
        let stag = object.stag.stag();
        let Region { pd, iova, length, access, scope, ref windows, .. } = object.region;
        let kind = StagKind::Region(windows.clone());
        //= DDP-8.3.2-3, RDMAP-8.1.2-3
        let entry = StagEntry { stag, kind, mr, session, pd, scope, access, iova, length, memory };
        let ticket = self.workers.all_ticketed(|| EngineCommand::InstallStag(entry.clone()));
        self.pending.insert(ticket, Pending::RegMr { session, mr, stag });
    }

    /// Revokes a region without bound windows in all workers. The ticket also waits for copies in
    /// progress.
    fn withdraw(&mut self, id: SessionId, mr: MrId) -> Result<Ticket, Refusal> {
        let session = find(&mut self.sessions, id)?;
        let object = session.mrs.get(&mr).ok_or_else(|| refuse::no_such("MR", mr.0))?;
        let in_use = |n| refuse::in_use("MR", mr.0, format!("{n} bound windows"));
        object.region.windows.withdraw().map_err(in_use)?;
        let stag = object.stag.stag();
        let attached = object.region.buffer.is_none();
        let copier = session.attached.as_ref().and_then(Attached::copier).filter(|_| attached);
        //= DDP-8.3.1-6, RDMAP-8.1.1-6
        let ticket = self.workers.all_ticketed(|| EngineCommand::RevokeStag(stag));
        self.workers.await_copies(ticket, copier);
        Ok(ticket)
    }
}

/// Checks a request, except for its memory.
fn check(session: &mut Session, r: &MrRequest) -> Result<(), Refusal> {
    session.pd(r.pd)?;
    if let Scope::Qp(qp) = r.scope {
        let of = session.qp(qp)?.pd;
        if of != r.pd {
            let why = format!("QP {qp} belongs to PD {of}, not to PD {}", r.pd);
            return Err(refuse::invalid("scope", why));
        }
    }
    if r.iova.checked_add(r.length).is_none() {
        let why = format!("{:#x} plus {} bytes wraps", r.iova, r.length);
        return Err(refuse::invalid("iova", why));
    }
    if !Access::all().contains(r.access) {
        return Err(refuse::invalid("access", format!("{:#x} has unknown bits", r.access.bits())));
    }
    //= DDP-8.3-4
    for (right, name) in
        [(Access::REMOTE_WRITE, "REMOTE_WRITE"), (Access::REMOTE_ATOMIC, "REMOTE_ATOMIC")]
    {
        if r.access.contains(right) && !r.access.contains(Access::LOCAL_WRITE) {
            return Err(refuse::invalid("access", format!("{name} needs LOCAL_WRITE")));
        }
    }
    if r.access.contains(Access::ZERO_BASED) && r.iova != 0 {
        return Err(refuse::invalid("iova", "must be 0 in a zero-based region"));
    }
    Ok(())
}

/// A shared buffer with its counted use.
type UsedBuffer = (SharedBufferId, UseOfBuffer);

/// Returns the memory of a new region of `length` bytes, and its shared buffer.
fn named_memory(
    session: &mut Session,
    source: MrSource,
    length: u64,
) -> Result<(Option<UsedBuffer>, Memory), Refusal> {
    match source {
        MrSource::Shared { buffer, offset } => {
            let SharedBuffer { mapping, length: len, mrs, .. } = session.shared_buffer(buffer)?;
            if offset.checked_add(length).is_none_or(|end| end > *len) {
                let why = format!("{length} bytes at {offset} exceed the shared buffer of {len}");
                return Err(refuse::invalid("length", why));
            }
            let too_large = |_| refuse::invalid("offset", "is too large");
            let offset = usize::try_from(offset).map_err(too_large)?;
            let Some(mapping) = mapping else {
                return Err(refuse::invalid("shared buffer", "is reserved and has no memory yet"));
            };
            let memory = Memory::Shared { mapping: mapping.clone(), offset };
            Ok((Some((buffer, mrs.add())), memory))
        }
        MrSource::Attached { address } => {
            Ok((None, attached_memory(session.attached.as_ref(), address, length)?))
        }
    }
}
