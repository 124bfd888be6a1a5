//! Regions of memory that the program has by its own means, and that this library never touches:
//! what libraries need that let other programs register any memory of theirs.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rnic_core::abi::control::{MrRequest, MrSource, ReplyBody, RequestBody};
use rnic_core::shm::ProgramRange;
use rnic_core::types::{MrId, SharedBufferId, Stag};

use crate::error::Error;
use crate::mr::MrOptions;
use crate::pd::{Pd, PdInner};
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

/// Memory that a program has by its own means, as a region is to name it.
#[derive(Clone, Copy, Debug)]
pub struct ProgramMemory<'b> {
    /// Where the program has it.
    pub range: &'b ProgramRange,
    /// The memfd that it is a part of, and from which byte on; none if the daemon is to reach it
    /// where it lies.
    pub part_of: Option<(&'b ProgramBuffer, u64)>,
}

impl ProgramMemory<'_> {
    fn request(&self, pd: &PdInner, options: &MrOptions) -> Result<MrRequest, Error> {
        let source = match self.part_of {
            None => {
                pd.session.attach_memory()?;
                MrSource::Attached { address: self.range.address() }
            }
            Some((buffer, _)) if !Arc::ptr_eq(&pd.session, &buffer.inner.session) => {
                return Err(Error::ForeignObject { what: "the buffer" });
            }
            Some((buffer, offset)) => MrSource::Shared { buffer: buffer.id(), offset },
        };
        let MrOptions { access, iova, scope } = *options;
        let iova = iova.unwrap_or(self.range.address());
        Ok(MrRequest { pd: pd.id, source, length: self.range.len(), iova, access, scope })
    }

    fn buffer(&self) -> Option<ProgramBuffer> {
        self.part_of.map(|(buffer, _)| buffer.clone())
    }
}

/// Has a region registered; its handle and its STag.
fn registered(pd: &PdInner, body: RequestBody) -> Result<(MrId, Stag), Error> {
    match pd.session.request(body)? {
        ReplyBody::Mr { mr, stag } => Ok((mr, stag)),
        other => Err(unexpected(&other)),
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
    /// Registers memory.
    pub(crate) fn register(
        pd: &Arc<PdInner>,
        memory: &ProgramMemory<'_>,
        options: &MrOptions,
    ) -> Result<ProgramMr, Error> {
        let request = memory.request(pd, options)?;
        let (id, stag) = registered(pd, RequestBody::RegMr(request))?;
        let MrRequest { iova, length: len, .. } = request;
        let (pd, buffer, gone) = (pd.clone(), memory.buffer(), AtomicBool::new(false));
        Ok(ProgramMr { pd, buffer, id, stag, iova, len, gone })
    }

    /// Registers other memory, rights or another domain in place of what it is, under its handle
    /// and its STag (`ibv_rereg_mr(3)`). When this returns, not one more byte will be read from or
    /// written to what it was.
    ///
    /// # Errors
    ///
    /// Those of [`Pd::reg_program_memory`], and
    /// [`Error::Refused`] while windows are bound to it: it is what it was.
    pub fn reregister(
        &mut self,
        pd: &Pd,
        memory: &ProgramMemory<'_>,
        options: &MrOptions,
    ) -> Result<(), Error> {
        let pd = &pd.inner;
        if !Arc::ptr_eq(&pd.session, &self.pd.session) {
            return Err(Error::ForeignObject { what: "the domain" });
        }
        let to = memory.request(pd, options)?;
        registered(pd, RequestBody::ReregMr { mr: self.id, to })?;
        (self.pd, self.buffer) = (pd.clone(), memory.buffer());
        (self.iova, self.len) = (to.iova, to.length);
        Ok(())
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
