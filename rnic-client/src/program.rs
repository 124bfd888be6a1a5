//! Regions of any memory of the program, for libraries that register memory on behalf of other
//! programs. This library accesses it only to copy for the daemon.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rnic_abi::abi::control::{MrRequest, MrSource, ReplyBody, RequestBody};
use rnic_abi::shm::ProgramRange;
use rnic_abi::types::{MrId, Stag};

use crate::error::Error;
use crate::mr::MrOptions;
use crate::pd::{Pd, PdInner};
use crate::session::unexpected;

/// Returns the request to register a range of the program's memory. Attaches the memory first.
fn request(pd: &PdInner, range: &ProgramRange, options: &MrOptions) -> Result<MrRequest, Error> {
    pd.session.attach_memory()?;
    let source = MrSource::Attached { address: range.address() };
    let MrOptions { access, iova, scope } = *options;
    let iova = iova.unwrap_or(range.address());
    Ok(MrRequest { pd: pd.id, source, length: range.len(), iova, access, scope })
}

/// Sends a registration request. Returns the handle and the STag of the region.
fn registered(pd: &PdInner, body: RequestBody) -> Result<(MrId, Stag), Error> {
    match pd.session.request(body)? {
        ReplyBody::Mr { mr, stag } => Ok((mr, stag)),
        other => Err(unexpected(&other)),
    }
}

/// A region of any memory of the program: an STag, a range and rights.
///
/// Dropping it deregisters it.
pub struct ProgramMr {
    pd: Arc<PdInner>,
    id: MrId,
    stag: Stag,
    iova: u64,
    len: u64,
    gone: AtomicBool,
}

impl Pd {
    /// Registers any memory of the program in place: heap, stack or a mapped file. Addresses are
    /// those of this process unless the options specify others.
    ///
    /// The first call attaches the memory of the process to the session. A daemon that runs as this
    /// process's user, or that trusts that user, receives access to the address space
    /// (`/proc/self/mem`) and copies the data itself. After `exec` it has no access to the new
    /// program, and a child made by `fork` has its own memory. For any other daemon the library
    /// copies the data, in one thread per worker with all signals blocked and in threads that poll
    /// a [`Cq`](crate::Cq). In that case, a thread that serves page faults of registered memory
    /// (userfaultfd, a FUSE file system) must not poll a [`Cq`](crate::Cq), because it could
    /// deadlock with itself. Each copy costs a system call; a
    /// [`SharedBuffer`](crate::SharedBuffer) is faster.
    ///
    /// The caller must check that the pages permit the requested access, because the daemon's
    /// access to the memory ignores page protection.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with the limit (`arena_bytes` for the copy queues); [`Error::Io`] if a
    /// thread cannot be started, or if the system forbids this process to call
    /// `process_vm_readv(2)` on itself.
    pub fn reg_program_memory(
        &self,
        range: &ProgramRange,
        options: &MrOptions,
    ) -> Result<ProgramMr, Error> {
        let pd = &self.inner;
        let request = request(pd, range, options)?;
        let (id, stag) = registered(pd, RequestBody::RegMr(request))?;
        let MrRequest { iova, length: len, .. } = request;
        Ok(ProgramMr { pd: pd.clone(), id, stag, iova, len, gone: AtomicBool::new(false) })
    }
}

impl ProgramMr {
    /// Replaces the region's range, rights or domain, and keeps its handle and STag
    /// (`ibv_rereg_mr(3)`). After this returns, no byte of the previous range is read or written.
    ///
    /// # Errors
    ///
    /// Same as [`Pd::reg_program_memory`], and [`Error::Refused`] while windows are bound to the
    /// region. The region is then unchanged.
    pub fn reregister(
        &mut self,
        pd: &Pd,
        range: &ProgramRange,
        options: &MrOptions,
    ) -> Result<(), Error> {
        let pd = &pd.inner;
        if !Arc::ptr_eq(&pd.session, &self.pd.session) {
            return Err(Error::ForeignObject { what: "the domain" });
        }
        let to = request(pd, range, options)?;
        registered(pd, RequestBody::ReregMr { mr: self.id, to })?;
        self.pd = pd.clone();
        self.iova = to.iova;
        self.len = to.length;
        Ok(())
    }

    /// Returns the region's handle in the daemon.
    pub fn id(&self) -> MrId {
        self.id
    }

    /// Returns the STag for local SGEs and for peers.
    pub fn stag(&self) -> Stag {
        self.stag
    }

    /// Returns the address of the first byte in SGEs and for remote access.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Returns the length of the region in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the region has no bytes. Only zero-length SGEs can then use it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Deregisters the region (`ibv_dereg_mr(3)`). After this returns, no byte of it is read or
    /// written.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] while windows are bound to the region, which then remains registered.
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
            .finish_non_exhaustive()
    }
}

impl Drop for ProgramMr {
    fn drop(&mut self) {
        // Fails if the session has ended, or if windows are bound. In the latter case the region
        // remains until the session ends.
        let _ = self.deregister();
    }
}
