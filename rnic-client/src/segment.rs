//! Memory shared with the daemon.

use std::ops::{Bound, RangeBounds};
use std::os::fd::AsFd;
use std::sync::Arc;

use rnic_core::abi::control::{ReplyBody, RequestBody};
use rnic_core::shm::Mapping;
use rnic_core::types::SegmentId;

use crate::error::Error;
use crate::session::{Session, unexpected};

/// Zeroed memory that this process and the daemon share, out of which regions are registered.
///
/// It is accessed through the regions, see [`Mr`](crate::Mr). Clones are the same segment; the
/// daemon lets go of it when the last clone and the last region have been dropped.
#[derive(Clone)]
pub struct Segment {
    pub(crate) inner: Arc<SegmentInner>,
}

pub(crate) struct SegmentInner {
    pub(crate) session: Arc<Session>,
    pub(crate) id: SegmentId,
    pub(crate) mapping: Arc<Mapping>,
}

impl Segment {
    pub(crate) fn create(session: &Arc<Session>, len: u64) -> Result<Segment, Error> {
        let page = rustix::param::page_size();
        let size = usize::try_from(len.max(1)).ok().and_then(|n| n.checked_next_multiple_of(page));
        let size = size.ok_or(Error::OutOfRange { offset: 0, length: len, size: u64::MAX })?;
        let (mapping, fd) =
            Mapping::create_segment(size).map_err(|e| Error::io("making a segment", e))?;
        let body =
            RequestBody::AddSegment { length: size as u64, client_address: mapping.address() };
        match session.request_with(body, Some(fd.as_fd()))?.0 {
            ReplyBody::Segment { segment: id } => {
                let inner = SegmentInner { session: session.clone(), id, mapping };
                Ok(Segment { inner: Arc::new(inner) })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Its handle in the daemon.
    pub fn id(&self) -> SegmentId {
        self.inner.id
    }

    /// Its octets, whole pages.
    pub fn len(&self) -> u64 {
        self.inner.mapping.len() as u64
    }

    /// Never: a segment has at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }
}

/// Start and length of a range of `size` octets, if it lies inside.
pub(crate) fn resolve(range: impl RangeBounds<u64>, size: u64) -> Result<(u64, u64), Error> {
    let start = match range.start_bound() {
        Bound::Included(&n) => n,
        Bound::Excluded(&n) => n.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&n) => n.saturating_add(1),
        Bound::Excluded(&n) => n,
        Bound::Unbounded => size,
    };
    match end.checked_sub(start) {
        Some(length) if end <= size => Ok((start, length)),
        length => Err(Error::OutOfRange { offset: start, length: length.unwrap_or(0), size }),
    }
}

impl Drop for SegmentInner {
    fn drop(&mut self) {
        // A session that has ended has let go of it already.
        let _ = self.session.command(RequestBody::RemoveSegment { segment: self.id });
    }
}
