//! Regions of memory that the program has by its own means, and that this library never touches:
//! what libraries need that let other programs register any memory of theirs.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rnic_core::abi::control::{MrSource, ReplyBody, RequestBody};
use rnic_core::shm::ProgramRange;
use rnic_core::types::{MrId, SharedBufferId, Stag};

use crate::error::Error;
use crate::mr::MrOptions;
use crate::pd::PdInner;
use crate::session::{Session, unexpected};

/// A memfd of the program that the daemon has mapped, wherever the program has mapped it itself.
///
/// The daemon lets go of it when the last clone and the last region have been dropped.
#[derive(Clone)]
pub struct ProgramBuffer {
    inner: Arc<BufferInner>,
}

struct BufferInner {
    session: Arc<Session>,
    id: SharedBufferId,
    len: u64,
}

impl ProgramBuffer {
    pub(crate) fn share(
        session: &Arc<Session>,
        memfd: BorrowedFd<'_>,
        len: u64,
    ) -> Result<ProgramBuffer, Error> {
        let body = RequestBody::AddSharedBuffer { length: len };
        match session.request_with(body, Some(memfd))?.0 {
            ReplyBody::SharedBuffer { buffer: id } => {
                let inner = BufferInner { session: session.clone(), id, len };
                Ok(ProgramBuffer { inner: Arc::new(inner) })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Its handle in the daemon.
    pub fn id(&self) -> SharedBufferId {
        self.inner.id
    }

    /// Bytes of it, whole pages.
    pub fn len(&self) -> u64 {
        self.inner.len
    }

    /// Never: it has at least one page.
    pub fn is_empty(&self) -> bool {
        self.inner.len == 0
    }
}

impl fmt::Debug for ProgramBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProgramBuffer")
            .field("id", &self.id())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl Drop for BufferInner {
    fn drop(&mut self) {
        // A session that has ended has let go of it already.
        let _ = self.session.command(RequestBody::RemoveSharedBuffer { buffer: self.id });
    }
}

/// A region of memory that this library never touches: an STag, a range and rights.
///
/// Dropping it deregisters it.
pub struct ProgramMr {
    pd: Arc<PdInner>,
    buffer: Option<ProgramBuffer>,
    id: MrId,
    stag: Stag,
    iova: u64,
    len: u64,
    gone: AtomicBool,
}

impl ProgramMr {
    /// Registers memory as it lies; its address is the one in this process.
    pub(crate) fn attached(
        pd: &Arc<PdInner>,
        range: &ProgramRange,
        options: &MrOptions,
    ) -> Result<ProgramMr, Error> {
        pd.session.attach_memory()?;
        let source = MrSource::Attached { address: range.address() };
        Self::register(pd, None, source, (range.address(), range.len()), options)
    }

    /// Registers a part of a memfd, which the program has mapped at `address`.
    pub(crate) fn shared(
        pd: &Arc<PdInner>,
        buffer: &ProgramBuffer,
        offset: u64,
        range: &ProgramRange,
        options: &MrOptions,
    ) -> Result<ProgramMr, Error> {
        if !Arc::ptr_eq(&pd.session, &buffer.inner.session) {
            return Err(Error::ForeignObject { what: "the buffer" });
        }
        let source = MrSource::Shared { buffer: buffer.id(), offset };
        let buffer = Some(buffer.clone());
        Self::register(pd, buffer, source, (range.address(), range.len()), options)
    }

    fn register(
        pd: &Arc<PdInner>,
        buffer: Option<ProgramBuffer>,
        source: MrSource,
        (address, length): (u64, u64),
        options: &MrOptions,
    ) -> Result<ProgramMr, Error> {
        let iova = options.iova.unwrap_or(address);
        let MrOptions { access, scope, .. } = *options;
        let body = RequestBody::RegMr { pd: pd.id, source, length, iova, access, scope };
        match pd.session.request(body)? {
            ReplyBody::Mr { mr: id, stag } => {
                let gone = AtomicBool::new(false);
                Ok(ProgramMr { pd: pd.clone(), buffer, id, stag, iova, len: length, gone })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Its handle in the daemon.
    pub fn id(&self) -> MrId {
        self.id
    }

    /// Its STag, as local elements and peers name it.
    pub fn stag(&self) -> Stag {
        self.stag
    }

    /// Address of its first byte in elements and remote offsets.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Bytes of the region, at least 1.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Deregisters it (`ibv_dereg_mr(3)`). When this returns, not one more byte will be read from
    /// or written to it.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] while windows are bound to it: it is registered still.
    pub fn deregister(&self) -> Result<(), Error> {
        if !self.gone.load(Ordering::Acquire) {
            self.pd.session.command(RequestBody::DeregMr { mr: self.id })?;
            self.gone.store(true, Ordering::Release);
        }
        Ok(())
    }
}

impl fmt::Debug for ProgramMr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProgramMr")
            .field("id", &self.id)
            .field("stag", &self.stag)
            .field("iova", &self.iova)
            .field("len", &self.len)
            .field("buffer", &self.buffer)
            .finish_non_exhaustive()
    }
}

impl Drop for ProgramMr {
    fn drop(&mut self) {
        // A session that has ended has taken it back; one that refuses keeps it until it ends.
        let _ = self.deregister();
    }
}
