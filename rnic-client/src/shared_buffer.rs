//! Memory shared with the daemon.

use std::fmt;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rnic_abi::abi::control::{ReplyBody, RequestBody};
use rnic_abi::shm::Mapping;
use rnic_abi::types::SharedBufferId;

use crate::error::Error;
use crate::memory;
use crate::session::{Session, unexpected};

/// Zeroed memory shared by this process and the daemon, for regions.
///
/// Regions give access to it, see [`Mr`](crate::Mr). Clones refer to the same shared buffer. The
/// daemon releases it when the last clone and the last region have been dropped.
#[derive(Clone)]
pub struct SharedBuffer {
    pub(crate) inner: Arc<SharedBufferInner>,
}

pub(crate) struct SharedBufferInner {
    pub(crate) session: Arc<Session>,
    pub(crate) id: SharedBufferId,
    pub(crate) mapping: Arc<Mapping>,
}

impl SharedBuffer {
    pub(crate) fn create(session: &Arc<Session>, len: u64) -> Result<SharedBuffer, Error> {
        let (id, mapping) = share(session, len)?;
        Ok(SharedBuffer {
            inner: Arc::new(SharedBufferInner { session: session.clone(), id, mapping }),
        })
    }

    /// Returns the buffer's handle in the daemon.
    pub fn id(&self) -> SharedBufferId {
        self.inner.id
    }

    /// Returns the length in bytes, a multiple of the page size.
    pub fn len(&self) -> u64 {
        self.inner.mapping.len() as u64
    }

    /// Returns false: a shared buffer has at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBuffer")
            .field("id", &self.id())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// Allocates at least `len` bytes and shares them with the daemon. Returns the buffer's handle, of
/// which the caller is the only owner.
pub(crate) fn share(session: &Session, len: u64) -> Result<(SharedBufferId, Arc<Mapping>), Error> {
    let page = rustix::param::page_size();
    let size = usize::try_from(len.max(1)).ok().and_then(|n| n.checked_next_multiple_of(page));
    let size = size.ok_or(Error::OutOfRange { offset: 0, length: len, size: u64::MAX })?;
    // Must come before the allocation, so that a limit is reported before memory is used.
    let reserved =
        match session.request(RequestBody::ReserveSharedBuffer { length: size as u64 })? {
            ReplyBody::SharedBuffer { buffer: id } => Reserved { session, id },
            other => return Err(unexpected(&other)),
        };
    let (mapping, fd) = populated(size)?;
    let body = RequestBody::FillSharedBuffer { buffer: reserved.id };
    match session.request_with(body, Some(fd.as_fd()))?.0 {
        ReplyBody::Done => Ok((reserved.keep(), mapping)),
        other => Err(unexpected(&other)),
    }
}

/// A shared buffer that the daemon has reserved and that has no memory yet. Dropping it removes the
/// reservation.
struct Reserved<'a> {
    session: &'a Session,
    id: SharedBufferId,
}

impl Reserved<'_> {
    fn keep(self) -> SharedBufferId {
        std::mem::ManuallyDrop::new(self).id
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        // If the session has ended, the reservation is removed already.
        let _ = self.session.command(RequestBody::RemoveSharedBuffer { buffer: self.id });
    }
}

/// Allocates and populates `size` bytes in steps. Fails as soon as too little memory is available.
fn populated(size: usize) -> Result<(Arc<Mapping>, OwnedFd), Error> {
    enum Failed {
        NotEnough(Error),
        System(io::Error),
    }
    impl From<io::Error> for Failed {
        fn from(error: io::Error) -> Self {
            Failed::System(error)
        }
    }
    let made = Mapping::create_shared_buffer_by_steps(size, |left| {
        memory::check(left as u64).map_err(Failed::NotEnough)
    });
    made.map_err(|failed| match failed {
        Failed::NotEnough(error) => error,
        Failed::System(error) => Error::io("creating a shared buffer", error),
    })
}

/// Returns a range's start and length in a buffer of `size` bytes. Fails if the range is not inside
/// it.
pub(crate) fn resolve(range: impl RangeBounds<u64>, size: u64) -> Result<(u64, u64), Error> {
    let (start, end) = ends(range, size);
    match end.checked_sub(start) {
        Some(length) if end <= size => Ok((start, length)),
        length => Err(Error::OutOfRange { offset: start, length: length.unwrap_or(0), size }),
    }
}

/// Returns a range's start and end (exclusive) in a buffer of `size` bytes. They may lie outside
/// it.
pub(crate) fn ends(range: impl RangeBounds<u64>, size: u64) -> (u64, u64) {
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
    (start, end)
}

impl Drop for SharedBufferInner {
    fn drop(&mut self) {
        // If the session has ended, the buffer is released already.
        let _ = self.session.command(RequestBody::RemoveSharedBuffer { buffer: self.id });
    }
}
