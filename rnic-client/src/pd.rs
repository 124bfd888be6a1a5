//! Protection domains.

use std::fmt;
use std::sync::Arc;

use rnic_abi::abi::control::{ReplyBody, RequestBody};
use rnic_abi::shm::ProgramRange;
use rnic_abi::types::{Access, PdId, WindowKind};

use crate::error::Error;
use crate::lease::LocalMr;
use crate::mr::{Mr, MrOptions};
use crate::program::ProgramMr;
use crate::qp::{Qp, QpOptions};
use crate::session::{Session, unexpected};
use crate::shared_buffer::SharedBuffer;
use crate::srq::{Srq, SrqOptions};
use crate::window::MemoryWindow;

/// A protection domain: a QP can access only regions of its own domain (RFC 5040 section 8.1,
/// `ibv_alloc_pd(3)`).
///
/// Clones refer to the same domain. The daemon closes it when the last clone and all objects
/// created from it have been dropped.
#[derive(Clone)]
pub struct Pd {
    pub(crate) inner: Arc<PdInner>,
}

pub(crate) struct PdInner {
    pub(crate) session: Arc<Session>,
    pub(crate) id: PdId,
}

impl Pd {
    pub(crate) fn open(session: &Arc<Session>, name: Option<&str>) -> Result<Pd, Error> {
        match session.request(RequestBody::OpenPd { name: name.map(str::to_owned) })? {
            ReplyBody::Pd { pd: id } => {
                Ok(Pd { inner: Arc::new(PdInner { session: session.clone(), id }) })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Returns the domain's handle in the daemon.
    pub fn id(&self) -> PdId {
        self.inner.id
    }

    /// Registers a range of a shared buffer, in bytes from its start (`ibv_reg_mr(3)`). SGEs and
    /// remote accesses use the range's addresses in this process, or offsets from 0 with
    /// [`Access::ZERO_BASED`].
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] if the range is outside the shared buffer; [`Error::Refused`] with the
    /// limit, or with the right that is not allowed (`REMOTE_WRITE` or `REMOTE_ATOMIC` without
    /// `LOCAL_WRITE`).
    ///
    /// # Examples
    ///
    /// A region for the peer to write to, and the message with its address:
    ///
    /// ```no_run
    /// # use rnic_client::*;
    /// # fn offer(context: &Context, pd: &Pd, qp: &Qp) -> Result<(), Box<dyn std::error::Error>> {
    /// let buffer = context.create_shared_buffer(1 << 20)?;
    /// // Peers may write to the second half. They have no access to the first half.
    /// let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    /// let inbox = pd.reg_mr(&buffer, 512 * 1024.., rights)?;
    /// qp.post_send(&[SendRequest::send_inline(1, &inbox.remote().to_bytes())])?;
    /// // The peer decodes `RemoteMr::from_bytes(..)`, posts `SendRequest::write(2, &sges,
    /// // remote.at(0))` and then sends a message. After that message has arrived:
    /// let mut header = [0; 64];
    /// inbox.read_at(0, &mut header)?;
    /// // After this returns, the peer can no longer write.
    /// inbox.deregister()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn reg_mr(
        &self,
        buffer: &SharedBuffer,
        range: impl std::ops::RangeBounds<u64>,
        access: Access,
    ) -> Result<Mr, Error> {
        Mr::register(&self.inner, buffer, range, &MrOptions { access, ..MrOptions::default() })
    }

    /// Allocates `len` bytes, rounded up to whole pages, and registers them for this program's own
    /// requests only, so that ranges of them can be leased as slices.
    ///
    /// # Errors
    ///
    /// Same as [`Context::create_shared_buffer`](crate::Context::create_shared_buffer) and
    /// [`Pd::reg_mr`].
    pub fn reg_local(&self, len: u64) -> Result<LocalMr, Error> {
        LocalMr::register(&self.inner, len)
    }

    /// Registers a range of a shared buffer with options, such as an address or a single QP.
    ///
    /// # Errors
    ///
    /// Same as [`Pd::reg_mr`]; also [`Error::Refused`] if the addresses from
    /// [`iova`](MrOptions::iova) would exceed 64 bits, or if the QP does not belong to this domain.
    pub fn reg_mr_with(
        &self,
        buffer: &SharedBuffer,
        range: impl std::ops::RangeBounds<u64>,
        options: &MrOptions,
    ) -> Result<Mr, Error> {
        Mr::register(&self.inner, buffer, range, options)
    }

    /// Allocates an unbound memory window (`ibv_alloc_mw(3)`).
    pub fn alloc_window(&self, kind: WindowKind) -> Result<MemoryWindow, Error> {
        MemoryWindow::allocate(&self.inner, kind)
    }

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
    /// deadlock with itself. Each copy costs a system call; a [`SharedBuffer`] is faster.
    ///
    /// The caller must check that the pages permit the requested access, because the daemon's
    /// access to the memory ignores page protection.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with the limit, also if the copy queues exceed one (`arena_bytes`);
    /// [`Error::Io`] if a thread cannot be started, or if the system forbids this process to call
    /// `process_vm_readv(2)` on itself.
    pub fn reg_program_memory(
        &self,
        range: &ProgramRange,
        options: &MrOptions,
    ) -> Result<ProgramMr, Error> {
        ProgramMr::register(&self.inner, range, options)
    }

    /// Creates a QP in state Idle (`ibv_create_qp(3)`).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with the limit: QPs, queue depth, SGEs or inline data;
    /// [`Error::ForeignObject`] if a CQ or the SRQ belongs to another context.
    pub fn create_qp(&self, options: &QpOptions<'_>) -> Result<Qp, Error> {
        Qp::create(&self.inner, options)
    }

    /// Creates a shared receive queue for QPs of this domain (`ibv_create_srq(3)`).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with the limit: SRQs, queue depth or SGEs.
    pub fn create_srq(&self, options: &SrqOptions) -> Result<Srq, Error> {
        Srq::create(&self.inner, options)
    }
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pd").field("id", &self.id()).finish_non_exhaustive()
    }
}

impl Drop for PdInner {
    fn drop(&mut self) {
        // If the session has ended, the domain is closed already.
        let _ = self.session.command(RequestBody::ClosePd { pd: self.id });
    }
}
