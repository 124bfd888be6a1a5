//! Memory shared with the daemon.

use std::fmt;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rnic_core::abi::control::{ReplyBody, RequestBody};
use rnic_core::shm::Mapping;
use rnic_core::types::SharedBufferId;

use crate::error::Error;
use crate::memory;
use crate::session::{Session, unexpected};

/// Zeroed memory that this process and the daemon share, out of which regions are registered.
///
/// It is accessed through the regions, see [`Mr`](crate::Mr). Clones are the same shared buffer;
/// the daemon lets go of it when the last clone and the last region have been dropped.
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

    /// Its handle in the daemon.
    pub fn id(&self) -> SharedBufferId {
        self.inner.id
    }

    /// Its bytes, whole pages.
    pub fn len(&self) -> u64 {
        self.inner.mapping.len() as u64
    }

    /// Never: a shared buffer has at least one page.
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

/// Memory of at least `len` bytes that the daemon has mapped. The only handle of it is returned.
pub(crate) fn share(session: &Session, len: u64) -> Result<(SharedBufferId, Arc<Mapping>), Error> {
    let page = rustix::param::page_size();
    let size = usize::try_from(len.max(1)).ok().and_then(|n| n.checked_next_multiple_of(page));
    let size = size.ok_or(Error::OutOfRange { offset: 0, length: len, size: u64::MAX })?;
    // The daemon's limits are asked before the machine's memory is taken.
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

/// A shared buffer that the daemon counts and that has no memory yet; given back unless it is kept.
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
        // A session that has ended has let go of it already.
        let _ = self.session.command(RequestBody::RemoveSharedBuffer { buffer: self.id });
    }
}

/// Memory of `size` bytes that exists, taken in steps as long as the machine has it.
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
        Failed::System(error) => Error::io("making a shared buffer", error),
    })
}

/// Start and length of a range of `size` bytes, if it lies inside.
pub(crate) fn resolve(range: impl RangeBounds<u64>, size: u64) -> Result<(u64, u64), Error> {
    let (start, end) = ends(range, size);
    match end.checked_sub(start) {
        Some(length) if end <= size => Ok((start, length)),
        length => Err(Error::OutOfRange { offset: start, length: length.unwrap_or(0), size }),
    }
}

/// Where a range of `size` bytes begins, and the first byte behind it, whether it lies inside or
/// not.
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
        // A session that has ended has let go of it already.
        let _ = self.session.command(RequestBody::RemoveSharedBuffer { buffer: self.id });
    }
}
