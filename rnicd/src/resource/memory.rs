//! Protection domains, segments and memory regions.

use std::os::fd::AsFd;
use std::sync::Arc;

use rnic_core::abi::control::{MrSource, Refusal, ReplyBody};
use rnic_core::device::window::WindowCount;
use rnic_core::device::{Memory, Names, StagEntry};
use rnic_core::shm::{AdoptError, Mapping};
use rnic_core::types::*;

use super::attach::Attached;
use super::ledger::Kind;
use super::named_pd::Member;
use super::session::{Mr, Pd, Segment, Session, UseOfSegment};
use super::uses::Users;
use super::{Answer, Given, Manager, Pending, attach, find, refuse};
use crate::reaper::Passed;
use crate::system;

/// What a client asks of a new memory region.
pub struct MrRequest {
    pub pd: PdId,
    pub source: MrSource,
    pub length: u64,
    pub iova: u64,
    pub access: Access,
    pub scope: Scope,
}

impl Manager {
    pub(super) fn open_pd(&mut self, id: SessionId, name: Option<&str>) -> Answer {
        if let Some(name) = name {
            return self.open_named_pd(id, name);
        }
        let session = find(&mut self.sessions, id)?;
        let charge = session.account.charge(Kind::Pds, 1)?;
        let handle = self.handles.pds.allocate(id);
        let pd = PdId(handle.number());
        session.pds.insert(pd, Pd::private(handle, charge));
        Given::now(ReplyBody::Pd { pd })
    }

    fn open_named_pd(&mut self, id: SessionId, name: &str) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let rule = self.policy.named_pd(&session.client.identity, name)?;
        if let Some(pd) = self.named_pds.find(name)
            && let Some(object) = session.pds.get_mut(&pd)
        {
            object.reopened = object.reopened.saturating_add(1);
            return Given::now(ReplyBody::Pd { pd });
        }
        let charge = session.account.charge(Kind::Pds, 1)?;
        let (pd, opened) = self.named_pds.join(rule, id, &self.handles.pds)?;
        session.pds.insert(pd, Pd::named(opened, charge));
        Given::now(ReplyBody::Pd { pd })
    }

    pub(super) fn close_pd(&mut self, id: SessionId, pd: PdId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object = session.pd(pd)?;
        if object.reopened > 0 {
            object.reopened -= 1;
            return Given::done();
        }
        let Pd { mrs, qps, windows, srqs, .. } = object;
        let users = [(mrs, "MRs"), (qps, "QPs"), (windows, "windows"), (srqs, "SRQs")];
        let users = users.map(|(users, kind)| (users.count(), kind));
        let users = users.iter().filter(|(n, _)| *n > 0).map(|(n, kind)| format!("{n} {kind}"));
        let users: Vec<String> = users.collect();
        if !users.is_empty() {
            return Err(refuse::in_use("PD", pd.0, users.join(", ")));
        }
        session.pds.remove(&pd);
        Given::done()
    }

    /// The descriptor has answered `F_GET_SEALS`, so it is safe to use.
    pub(super) fn add_segment(&mut self, id: SessionId, length: u64, memfd: Passed) -> Answer {
        let (segment, mut object) = self.new_segment(id, length)?;
        object.fill(memfd)?;
        find(&mut self.sessions, id)?.segments.insert(segment, object);
        Given::now(ReplyBody::Segment { segment })
    }

    /// Counts a segment that has no memory yet: the client is told what it may not have before it
    /// takes it from the machine.
    pub(super) fn reserve_segment(&mut self, id: SessionId, length: u64) -> Answer {
        let (segment, object) = self.new_segment(id, length)?;
        find(&mut self.sessions, id)?.segments.insert(segment, object);
        Given::now(ReplyBody::Segment { segment })
    }

    /// Gives a reserved segment its memory. The descriptor is as for [`Manager::add_segment`].
    pub(super) fn fill_segment(
        &mut self,
        id: SessionId,
        segment: SegmentId,
        memfd: Passed,
    ) -> Answer {
        find(&mut self.sessions, id)?.segment(segment)?.fill(memfd)?;
        Given::done()
    }

    /// A segment that is counted and has no memory.
    fn new_segment(&mut self, id: SessionId, length: u64) -> Result<(SegmentId, Segment), Refusal> {
        let session = find(&mut self.sessions, id)?;
        if length == 0 || !length.is_multiple_of(PAGE) {
            let why = format!("{length} is no multiple of the page size, {PAGE}");
            return Err(refuse::invalid("length", why));
        }
        let charge = session.account.charge(Kind::Segments, 1)?;
        let bytes = session.account.charge(Kind::SegmentBytes, length)?;
        let handle = self.handles.segments.allocate(id);
        let segment = SegmentId(handle.number());
        let object = Segment {
            mapping: None,
            length,
            mrs: Users::default(),
            _handle: handle,
            _charges: [bytes, charge],
        };
        Ok((segment, object))
    }

    pub(super) fn remove_segment(&mut self, id: SessionId, segment: SegmentId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let Segment { mapping, mrs, .. } = session.segment(segment)?;
        if mrs.count() > 0 {
            return Err(refuse::in_use("segment", segment.0, format!("{} MRs", mrs.count())));
        }
        let unmapping = mapping.is_some();
        let object = session.segments.remove(&segment);
        if !unmapping {
            return Given::done();
        }
        // It counts until it is unmapped, and its owner waits for that.
        let receipt = self.reaper.drop_counted(session.client.identity.uid, object);
        self.unmapping.insert(receipt, id);
        Given::later()
    }

    /// A segment has been unmapped.
    pub(super) fn segment_gone(&mut self, id: SessionId) {
        if self.sessions.contains_key(&id) {
            self.answers.push_back((id, ReplyBody::Done.into()));
        }
    }

    pub(super) fn reg_mr(&mut self, id: SessionId, request: MrRequest) -> Answer {
        let session = find(&mut self.sessions, id)?;
        check(session, &request)?;
        let (segment, memory) = named_memory(session, request.source, request.length)?;
        let charge = session.account.charge(Kind::Mrs, 1)?;
        let membership = self.named_pds.enter(&self.policy, request.pd, Member::Mr)?;
        let issued = self.stags.issue()?;
        let handle = self.handles.mrs.allocate(id);
        let (mr, stag) = (MrId(handle.number()), issued.stag());
        let MrRequest { pd, length, iova, access, scope, .. } = request;
        let windows = Arc::new(WindowCount::default());
        let names = Names::Region(windows.clone());
        let object = Mr {
            pd,
            segment: segment.as_ref().map(|(segment, _)| *segment),
            stag: issued,
            iova,
            length,
            access,
            scope,
            windows,
            membership,
            _uses: (session.pd(pd)?.mrs.add(), segment.map(|(_, used)| used)),
            _handle: handle,
            _charge: charge,
        };
        session.mrs.insert(mr, object);
        let session = id;
        let entry = StagEntry { stag, names, mr, session, pd, scope, access, iova, length, memory };
        let ticket = self.workers.install_stag(entry);
        self.pending.insert(ticket, Pending::RegMr { session: id, mr, stag });
        Given::later()
    }

    pub(super) fn dereg_mr(&mut self, id: SessionId, mr: MrId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object = session.mrs.get(&mr).ok_or_else(|| refuse::no_such("MR", mr.0))?;
        let in_use = |n| refuse::in_use("MR", mr.0, format!("{n} bound windows"));
        object.windows.withdraw().map_err(in_use)?;
        let (stag, attached) = (object.stag.stag(), object.segment.is_none());
        let mover = session.attached.as_ref().and_then(Attached::mover).filter(|_| attached);
        let ticket = self.workers.revoke_stag(stag);
        self.workers.await_moves(ticket, mover);
        self.pending.insert(ticket, Pending::DeregMr { session: id, mr });
        Given::later()
    }

    /// No worker knows the region any more.
    pub(super) fn mr_revoked(&mut self, id: SessionId, mr: MrId) {
        // A session that has ended meanwhile gives everything back itself.
        let Ok(session) = find(&mut self.sessions, id) else { return };
        if session.mrs.remove(&mr).is_some() {
            self.answers.push_back((id, ReplyBody::Done.into()));
        }
    }
}

impl Segment {
    /// Gives it its memory. The descriptor has answered `F_GET_SEALS`, so it is safe to use.
    fn fill(&mut self, memfd: Passed) -> Result<(), Refusal> {
        if self.mapping.is_some() {
            return Err(refuse::invalid("segment", "has its memory already"));
        }
        let mapping = Mapping::adopt_segment(memfd.as_fd(), self.length);
        self.mapping = Some(mapping.map_err(|error| segment_refusal(&error))?);
        // Nothing is freed by that: the mapping has it as well.
        drop(memfd.into_inner());
        Ok(())
    }
}

/// Whether a request makes sense, but for the memory it names.
fn check(session: &mut Session, r: &MrRequest) -> Result<(), Refusal> {
    session.pd(r.pd)?;
    if let Scope::Qp(qp) = r.scope {
        let of = session.qp(qp)?.pd;
        if of != r.pd {
            let why = format!("QP {qp} belongs to PD {of}, not to PD {}", r.pd);
            return Err(refuse::invalid("scope", why));
        }
    }
    if r.length == 0 {
        return Err(refuse::invalid("length", "a region has at least one byte"));
    }
    if r.iova.checked_add(r.length).is_none() {
        let why = format!("{:#x} plus {} bytes wraps", r.iova, r.length);
        return Err(refuse::invalid("iova", why));
    }
    if !Access::all().contains(r.access) {
        return Err(refuse::invalid("access", format!("{:#x} has unknown bits", r.access.bits())));
    }
    if r.access.contains(Access::REMOTE_ATOMIC) {
        return Err(refuse::unsupported("atomic access"));
    }
    if r.access.contains(Access::REMOTE_WRITE) && !r.access.contains(Access::LOCAL_WRITE) {
        return Err(refuse::invalid("access", "REMOTE_WRITE needs LOCAL_WRITE"));
    }
    if r.access.contains(Access::ZERO_BASED) && r.iova != 0 {
        return Err(refuse::invalid("iova", "must be 0 in a zero-based region"));
    }
    Ok(())
}

/// A segment that is used.
type UsedSegment = (SegmentId, UseOfSegment);

/// The memory that a new region of `length` bytes names, and the segment it is in.
fn named_memory(
    session: &mut Session,
    source: MrSource,
    length: u64,
) -> Result<(Option<UsedSegment>, Memory), Refusal> {
    match source {
        MrSource::Segment { segment, offset } => {
            let Segment { mapping, length: len, mrs, .. } = session.segment(segment)?;
            if offset.checked_add(length).is_none_or(|end| end > *len) {
                let why = format!("{length} bytes at {offset} leave the segment of {len}");
                return Err(refuse::invalid("length", why));
            }
            let too_large = |_| refuse::invalid("offset", "is too large");
            let offset = usize::try_from(offset).map_err(too_large)?;
            let Some(mapping) = mapping else {
                return Err(refuse::invalid("segment", "is reserved and has no memory yet"));
            };
            let memory = Memory::Segment { mapping: mapping.clone(), offset };
            Ok((Some((segment, mrs.add())), memory))
        }
        MrSource::Attached { address } => {
            Ok((None, attach::attached_memory(session, address, length)?))
        }
    }
}

fn segment_refusal(error: &AdoptError) -> Refusal {
    match error {
        AdoptError::Map(e) => system::refusal("cannot map the segment", e),
        AdoptError::Seal(e) => system::refusal("cannot seal the segment", e),
        AdoptError::Examine(e) => system::refusal("cannot examine the segment", e),
        _ => refuse::invalid("segment", error.to_string()),
    }
}

/// Bytes of a page on every machine this runs on.
const PAGE: u64 = rnic_core::abi::queue::PAGE as u64;
