//! Regions of any memory of the program, which this library never touches: for libraries through
//! which other programs register their memory.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rnic_core::abi::control::{MrRequest, MrSource, ReplyBody, RequestBody};
use rnic_core::shm::ProgramRange;
use rnic_core::types::{MrId, Stag};

use crate::error::Error;
use crate::mr::MrOptions;
use crate::pd::{Pd, PdInner};
use crate::session::unexpected;

/// The request that registers a range of the program's memory.
fn request(pd: &PdInner, range: &ProgramRange, options: &MrOptions) -> Result<MrRequest, Error> {
    pd.session.attach_memory()?;
    let source = MrSource::Attached { address: range.address() };
    let MrOptions { access, iova, scope } = *options;
    let iova = iova.unwrap_or(range.address());
    Ok(MrRequest { pd: pd.id, source, length: range.len(), iova, access, scope })
}

/// Sends a registration. Returns the handle and the STag of the region.
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
        range: &ProgramRange,
        options: &MrOptions,
    ) -> Result<ProgramMr, Error> {
        let request = request(pd, range, options)?;
        let (id, stag) = registered(pd, RequestBody::RegMr(request))?;
        let MrRequest { iova, length: len, .. } = request;
        Ok(ProgramMr { pd: pd.clone(), id, stag, iova, len, gone: AtomicBool::new(false) })
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

    /// Bytes of the region.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the region has no bytes; zero-length elements may name it.
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
            .finish_non_exhaustive()
    }
}

impl Drop for ProgramMr {
    fn drop(&mut self) {
        // A session that has ended has taken it back; one that refuses keeps it until it ends.
        let _ = self.deregister();
    }
}
