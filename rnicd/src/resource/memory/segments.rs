//! Segments: shared memory, which counts before it is there and until it is unmapped.

use std::os::fd::AsFd;

use rnic_core::abi::control::{Refusal, ReplyBody};
use rnic_core::shm::{AdoptError, Mapping};
use rnic_core::types::*;

use super::Segment;
use crate::reaper::Passed;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::uses::Users;
use crate::resource::{Manager, find, refuse};
use crate::system;

impl Manager {
    /// The descriptor has answered `F_GET_SEALS`, so it is safe to use.
    pub(in crate::resource) fn add_segment(
        &mut self,
        id: SessionId,
        length: u64,
        memfd: Passed,
    ) -> Answer {
        let (segment, mut object) = self.new_segment(id, length)?;
        object.fill(memfd)?;
        find(&mut self.sessions, id)?.segments.insert(segment, object);
        Outcome::now(ReplyBody::Segment { segment })
    }

    /// Counts a segment that has no memory yet: the client is told what it may not have before it
    /// takes it from the machine.
    pub(in crate::resource) fn reserve_segment(&mut self, id: SessionId, length: u64) -> Answer {
        let (segment, object) = self.new_segment(id, length)?;
        find(&mut self.sessions, id)?.segments.insert(segment, object);
        Outcome::now(ReplyBody::Segment { segment })
    }

    /// Gives a reserved segment its memory. The descriptor is as for [`Manager::add_segment`].
    pub(in crate::resource) fn fill_segment(
        &mut self,
        id: SessionId,
        segment: SegmentId,
        memfd: Passed,
    ) -> Answer {
        find(&mut self.sessions, id)?.segment(segment)?.fill(memfd)?;
        Outcome::done()
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

    pub(in crate::resource) fn remove_segment(
        &mut self,
        id: SessionId,
        segment: SegmentId,
    ) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let Segment { mapping, mrs, .. } = session.segment(segment)?;
        if mrs.count() > 0 {
            return Err(refuse::in_use("segment", segment.0, format!("{} MRs", mrs.count())));
        }
        let unmapping = mapping.is_some();
        let object = session.segments.remove(&segment);
        if !unmapping {
            return Outcome::done();
        }
        // It counts until it is unmapped, and its owner waits for that.
        let receipt = self.reaper.drop_counted(session.client.identity.uid, object);
        self.unmapping.insert(receipt, id);
        Outcome::later()
    }

    /// A segment has been unmapped.
    pub(in crate::resource) fn segment_gone(&mut self, id: SessionId) {
        if self.sessions.contains_key(&id) {
            self.outbox.answer(id, ReplyBody::Done);
        }
    }
}

impl Segment {
    /// Gives it its memory. The descriptor has answered `F_GET_SEALS`, so it is safe to use.
    fn fill(&mut self, memfd: Passed) -> Result<(), Refusal> {
        if self.mapping.is_some() {
            return Err(refuse::invalid("segment", "has its memory already"));
        }
        //= DDP-8.3-4, DDP-8.3.2-4, RDMAP-8.1.2-4
        let mapping = Mapping::adopt_segment(memfd.as_fd(), self.length);
        self.mapping = Some(mapping.map_err(|error| segment_refusal(&error))?);
        // Nothing is freed by that: the mapping has it as well.
        drop(memfd.into_inner());
        Ok(())
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
