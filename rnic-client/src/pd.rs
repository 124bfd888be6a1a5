//! Protection domains.

use std::fmt;
use std::sync::Arc;

use rnic_core::abi::control::{ReplyBody, RequestBody};
use rnic_core::shm::ProgramRange;
use rnic_core::types::{Access, PdId, WindowKind};

use crate::attached::AttachedBuffer;
use crate::error::Error;
use crate::lease::LocalMr;
use crate::mr::{Mr, MrOptions};
use crate::program::ProgramMr;
use crate::qp::{Qp, QpOptions};
use crate::session::{Session, unexpected};
use crate::shared_buffer::SharedBuffer;
use crate::srq::{Srq, SrqOptions};
use crate::window::MemoryWindow;

/// A protection domain: QPs reach only regions of their own one (RFC 5040 section 8.1,
/// `ibv_alloc_pd(3)`).
///
/// Clones are the same domain; the daemon closes it when the last clone and everything made with it
/// have been dropped.
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

    /// Its handle in the daemon.
    pub fn id(&self) -> PdId {
        self.inner.id
    }

    /// Registers a range of a shared buffer, in bytes from its start, with these rights
    /// (`ibv_reg_mr(3)`). Local elements and remote offsets count from the range's address in this
    /// process, or from 0 with [`Access::ZERO_BASED`].
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] if the shared buffer has no such range; [`Error::Refused`] names the
    /// limit, or the right that may not be given (`REMOTE_WRITE` without `LOCAL_WRITE`).
    ///
    /// # Examples
    ///
    /// A region that the peer writes into, and the message that tells it where:
    ///
    /// ```no_run
    /// # use rnic_client::*;
    /// # fn offer(context: &Context, pd: &Pd, qp: &Qp) -> Result<(), Box<dyn std::error::Error>> {
    /// let buffer = context.create_shared_buffer(1 << 20)?;
    /// // The second half, for peers to write; the first half stays out of their reach.
    /// let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    /// let inbox = pd.reg_mr(&buffer, 512 * 1024.., rights)?;
    /// qp.post_send(&[SendRequest::send_inline(1, &inbox.remote().to_bytes())])?;
    /// // The peer has a `RemoteMr::from_bytes(..)`, and posts
    /// // `SendRequest::write(2, &sges, remote.at(0))`. Once its message says that it has:
    /// let mut header = [0; 64];
    /// inbox.read_at(0, &mut header)?;
    /// // When this returns, the peer writes no more.
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

    /// Makes `len` bytes of memory, rounded up to whole pages, and registers them for this
    /// program's own requests alone, so that ranges of them can be leased as slices.
    ///
    /// # Errors
    ///
    /// As of [`Context::create_shared_buffer`](crate::Context::create_shared_buffer) and
    /// [`Pd::reg_mr`].
    pub fn reg_local(&self, len: u64) -> Result<LocalMr, Error> {
        LocalMr::register(&self.inner, len)
    }

    /// Registers a range of a shared buffer with an address of the caller's choice or for one QP.
    ///
    /// # Errors
    ///
    /// As of [`Pd::reg_mr`]; [`Error::Refused`] also if the addresses from
    /// [`iova`](MrOptions::iova) on would wrap, or if the QP is no QP of this domain.
    pub fn reg_mr_with(
        &self,
        buffer: &SharedBuffer,
        range: impl std::ops::RangeBounds<u64>,
        options: &MrOptions,
    ) -> Result<Mr, Error> {
        Mr::register(&self.inner, buffer, range, options)
    }

    /// Makes a memory window that is bound to nothing yet (`ibv_alloc_mw(3)`).
    pub fn alloc_window(&self, kind: WindowKind) -> Result<MemoryWindow, Error> {
        MemoryWindow::allocate(&self.inner, kind)
    }

    /// Registers a range of attached memory, in bytes from the buffer's start. The context must
    /// have attached its memory ([`Context::attach_memory`](crate::Context::attach_memory)).
    ///
    /// # Errors
    ///
    /// [`Error::NotWritable`] if rights to write are asked for where this process may not write
    /// itself, because the daemon's way to the memory ignores page protection;
    /// [`Error::OutOfRange`] if the buffer has no such range; [`Error::Refused`] names the limit,
    /// and is what comes if no memory has been attached.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use rnic_client::*;
    /// # fn fetch(context: &Context, pd: &Pd, qp: &Qp, cq: &Cq, from: RemoteMr)
    /// # -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    /// // Once for the session; a daemon that may not do it says so.
    /// context.attach_memory()?;
    /// // Memory of the program's own, which an RDMA Read of the peer's region fills.
    /// let buffer = AttachedBuffer::new(from.len as usize)?;
    /// let sink = pd.reg_mr_attached(&buffer, .., &MrOptions::default())?;
    /// let read = SendRequest::read(1, sink.sge(0, from.len as u32), from.at(0));
    /// qp.post_send(&[read.signaled()])?;
    /// let mut one = [Completion::default()];
    /// cq.wait(&mut one, None)?;
    /// one[0].ok()?;
    /// // The bytes are the program's again when no region names them.
    /// sink.deregister()?;
    /// Ok(buffer.into_vec().expect("the region is gone"))
    /// # }
    /// ```
    pub fn reg_mr_attached(
        &self,
        buffer: &AttachedBuffer,
        range: impl std::ops::RangeBounds<u64>,
        options: &MrOptions,
    ) -> Result<Mr, Error> {
        buffer.register(&self.inner, range, options)
    }

    /// Registers any memory of the program: heap, stack or mapped file, reached where it lies. The
    /// memory of the process is attached first if it is not yet. Addresses are those of this
    /// process unless the options say otherwise. Page protection is for the caller to check.
    ///
    /// # Errors
    ///
    /// As of [`reg_mr_attached`](Self::reg_mr_attached).
    pub fn reg_program_memory(
        &self,
        range: &ProgramRange,
        options: &MrOptions,
    ) -> Result<ProgramMr, Error> {
        ProgramMr::register(&self.inner, range, options)
    }

    /// Makes a queue pair in state Idle (`ibv_create_qp(3)`).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] names the limit: of queue pairs, of a queue's depth, of elements or of
    /// inline data; [`Error::ForeignObject`] if a CQ or the shared queue is of another context.
    pub fn create_qp(&self, options: &QpOptions<'_>) -> Result<Qp, Error> {
        Qp::create(&self.inner, options)
    }

    /// Makes a shared receive queue for QPs of this domain (`ibv_create_srq(3)`).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] names the limit: of queues, of their depth or of elements.
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
        // A session that has ended has taken the domain along.
        let _ = self.session.command(RequestBody::ClosePd { pd: self.id });
    }
}
