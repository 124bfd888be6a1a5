//! Safe slices of registered memory: leases on regions that no peer can access.

use std::fmt;
use std::ops::{Deref, DerefMut, RangeBounds};
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_abi::abi::control::{MrRequest, MrSource, ReplyBody, RequestBody};
use rnic_abi::abi::queue::Sge;
use rnic_abi::shm::lease::{self, Done, Lendable, Loan, LoanNumber};
use rnic_abi::types::{Access, MrId, QpId, Scope, SharedBufferId, Stag};

use crate::completion::Completion;
use crate::error::Error;
use crate::mr::RemoteAddr;
use crate::pd::{Pd, PdInner};
use crate::request::{Data, SendRequest};
use crate::session::{Session, unexpected};
use crate::shared_buffer::{self, resolve};

/// A region for this program's own requests only. Its bytes can be leased as slices.
///
/// It has its own memory and one STag, which is never disclosed. Peers have no rights to it, and no
/// window can be bound to it. [`LocalMr::lease`] gives a range of it to one owner, as a
/// `&mut [u8]`. A posted request takes the [`Lease`]
/// ([`Qp::post_send_leased`](crate::Qp::post_send_leased),
/// [`Qp::post_recv_leased`](crate::Qp::post_recv_leased)), and its completion returns it
/// ([`Posted::take`]). No slice of the bytes exists while the daemon may read or write them.
///
/// Safety does not depend on destructors. The range of a forgotten lease or [`Posted`] stays
/// leased. If a request never completes because its QP or CQ is gone, the lease is lost
/// ([`Posted::is_lost`]), and the range stays leased until the region is dropped. SGEs with the
/// lkey of such a region are refused unless they come from a lease ([`Error::LeasedMemory`]).
/// Clones refer to the same region. It is deregistered when the last clone and the last lease have
/// been dropped.
///
/// ```no_run
/// # use rnic_client::*;
/// # fn echo(pd: &Pd, qp: &Qp, cq: &Cq) -> Result<(), Box<dyn std::error::Error>> {
/// let region = pd.reg_local(1 << 20)?;
/// let mut posted = qp.post_recv_leased(1, region.lease(0..4096)?)?;
/// let mut one = [Completion::default()];
/// cq.wait(&mut one, None)?;
/// let mut message = posted.take().expect("its completion has been polled");
/// message[..one[0].ok()?.byte_len as usize].make_ascii_uppercase();
/// qp.post_send_leased(message.send(2))?;
/// # Ok(())
/// # }
/// ```
///
/// A slice cannot outlive the post of its lease:
///
/// ```compile_fail,E0505
/// # use rnic_client::*;
/// # fn wrong(qp: &Qp, lease: Lease) {
/// let slice = &lease[..];
/// let posted = qp.post_recv_leased(1, lease);
/// println!("{slice:?}");
/// # }
/// ```
#[derive(Clone)]
pub struct LocalMr {
    region: Arc<Region>,
}

struct Region {
    pd: Arc<PdInner>,
    memory: Arc<Lendable>,
    buffer: SharedBufferId,
    id: MrId,
    stag: Stag,
}

impl Pd {
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
}

impl LocalMr {
    fn register(pd: &Arc<PdInner>, len: u64) -> Result<LocalMr, Error> {
        let session = &pd.session;
        let (buffer, mapping) = shared_buffer::share(session, len)?;
        let memory = Lendable::new(mapping)
            .map_err(|_| Error::protocol("memory of a new shared buffer is in use already"))?;
        let body = RequestBody::RegMr(MrRequest {
            pd: pd.id,
            source: MrSource::Shared { buffer, offset: 0 },
            length: memory.len() as u64,
            iova: 0,
            access: Access::LOCAL_WRITE,
            scope: Scope::Pd,
        });
        let (id, stag) = match session.request(body) {
            Ok(ReplyBody::Mr { mr, stag }) => (mr, stag),
            other => {
                let _ = session.command(RequestBody::RemoveSharedBuffer { buffer });
                return Err(other.map_or_else(|e| e, |reply| unexpected(&reply)));
            }
        };
        session.local_keys.add(stag);
        Ok(LocalMr { region: Arc::new(Region { pd: pd.clone(), memory, buffer, id, stag }) })
    }

    /// Returns the region's handle in the daemon.
    pub fn id(&self) -> MrId {
        self.region.id
    }

    /// Returns the length of the region in bytes, at least 1.
    pub fn len(&self) -> u64 {
        self.region.memory.len() as u64
    }

    /// Returns false: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Leases a range, in bytes from the region's start: at least one byte, less than 4 GiB. A new
    /// region is zeroed. Leasing a range again does not change its contents.
    ///
    /// # Errors
    ///
    /// [`Error::Leased`] if a byte of the range is leased or posted; [`Error::OutOfRange`] if the
    /// range is empty, too long or outside the region.
    pub fn lease(&self, range: impl RangeBounds<u64>) -> Result<Lease, Error> {
        let (offset, length) = resolve(range, self.len())?;
        if length == 0 || u32::try_from(length).is_err() {
            return Err(Error::OutOfRange { offset, length, size: self.len() });
        }
        // Both lie within the region, and its length is a usize.
        let bytes = self.region.memory.lease(offset as usize, length as usize);
        let bytes = bytes.ok_or(Error::Leased { offset, length })?;
        Ok(Lease { bytes, region: self.region.clone() })
    }
}

impl fmt::Debug for LocalMr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalMr")
            .field("id", &self.id())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // If the session has ended, the daemon has removed both already.
        let session = &self.pd.session;
        let _ = session.command(RequestBody::DeregMr { mr: self.id });
        let _ = session.command(RequestBody::RemoveSharedBuffer { buffer: self.buffer });
        session.local_keys.remove(self.stag);
    }
}

/// A range of a [`LocalMr`] with a single owner. Dereferences to a slice until it is posted.
pub struct Lease {
    bytes: lease::Lease,
    region: Arc<Region>,
}

impl Lease {
    /// Returns the offset from the region's start, in bytes.
    pub fn offset(&self) -> u64 {
        self.bytes.offset() as u64
    }

    /// Returns a Send request for the bytes ([`SendRequest::send`]).
    pub fn send(self, wr_id: u64) -> LeasedRequest {
        LeasedRequest { request: SendRequest::send(wr_id, &[]), lease: self }
    }

    /// Returns an RDMA Write request for the bytes ([`SendRequest::write`]).
    pub fn write(self, wr_id: u64, to: RemoteAddr) -> LeasedRequest {
        LeasedRequest { request: SendRequest::write(wr_id, &[], to), lease: self }
    }

    /// Returns an RDMA Read request into the bytes ([`SendRequest::read`]).
    pub fn read(self, wr_id: u64, from: RemoteAddr) -> LeasedRequest {
        let request = SendRequest::read(wr_id, self.element(), from);
        LeasedRequest { request, lease: self }
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.region.pd.session
    }

    /// Returns the SGE for a work request.
    pub(crate) fn element(&self) -> Sge {
        // `LocalMr::lease` has checked the length. Addresses count from the region's start.
        let length = self.bytes.len() as u32;
        Sge { addr: self.offset(), length, lkey: self.region.stag.0 }
    }

    /// Lends the bytes to the request with this number, which must not be published to the daemon
    /// yet. Returns the part for the CQ and the part for the program.
    pub(crate) fn lend(
        self,
        number: LoanNumber,
        wr_id: u64,
        qp: QpId,
        is_awaited: bool,
    ) -> (PendingLease, Posted) {
        let Lease { bytes, region } = self;
        let state = Arc::new(Mutex::new(LeaseState::Lent(bytes.lend(number), region)));
        let pending =
            PendingLease { state: state.clone(), wr_id, qp, is_awaited, is_orphan: false };
        (pending, Posted { state, wr_id })
    }
}

impl Deref for Lease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("region", &self.region.id)
            .field("offset", &self.offset())
            .field("len", &self.bytes.len())
            .finish()
    }
}

/// A send request and its lease. It always writes a completion.
#[derive(Debug)]
pub struct LeasedRequest {
    pub(crate) request: SendRequest<'static>,
    pub(crate) lease: Lease,
}

impl LeasedRequest {
    /// Same as [`SendRequest::solicited`].
    #[must_use]
    pub fn solicited(self) -> Self {
        LeasedRequest { request: self.request.solicited(), ..self }
    }

    /// Same as [`SendRequest::fence`].
    #[must_use]
    pub fn fence(self) -> Self {
        LeasedRequest { request: self.request.fence(), ..self }
    }

    /// Returns the request with this number as `wr_id` and the lease as its SGE.
    pub(crate) fn numbered(&self, number: &LoanNumber) -> SendRequest<'static> {
        let mut request = self.request.signaled();
        request.header.wr_id = number.wr_id();
        request.data = Data::Element(self.lease.element());
        request
    }
}

/// A posted request that has a lease. Polling its completion returns the lease.
///
/// If it is dropped, the completion returns the bytes to the region.
#[must_use = "it returns the lease"]
pub struct Posted {
    state: Arc<Mutex<LeaseState>>,
    wr_id: u64,
}

/// State of a posted lease.
enum LeaseState {
    /// Held by the daemon: the request is posted, and its completion has not been polled.
    Lent(Loan, Arc<Region>),
    /// The completion has been polled.
    #[cfg_attr(not(feature = "tokio"), allow(dead_code, reason = "only tasks ask for it"))]
    Back(Lease, Completion),
    /// Taken by the program, or lost because the request will never complete.
    Gone,
}

impl Posted {
    /// Returns the request's `wr_id`.
    pub fn wr_id(&self) -> u64 {
        self.wr_id
    }

    /// Returns the lease if the request's completion has been polled, successful or not
    /// ([`Cq::poll`](crate::Cq::poll) and functions that call it); otherwise returns `self`.
    pub fn take(self) -> Result<Lease, Posted> {
        // One critical section, because the completion may arrive at any time.
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, LeaseState::Gone) {
            LeaseState::Back(lease, _) => Ok(lease),
            other => {
                *state = other;
                drop(state);
                Err(self)
            }
        }
    }

    /// Same as [`take`](Posted::take), with the completion.
    #[cfg(feature = "tokio")]
    pub(crate) fn finish(self) -> Result<(Lease, Completion), Posted> {
        let completion = match &*self.state.lock() {
            LeaseState::Back(_, completion) => *completion,
            LeaseState::Lent(..) | LeaseState::Gone => Completion::default(),
        };
        self.take().map(|lease| (lease, completion))
    }

    /// Returns true if the completion will never be polled, because the QP was dropped before the
    /// request completed or the CQ is gone. The bytes then stay leased until the region is dropped.
    pub fn is_lost(&self) -> bool {
        matches!(*self.state.lock(), LeaseState::Gone)
    }
}

impl fmt::Debug for Posted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &*self.state.lock() {
            LeaseState::Lent(..) => "with the daemon",
            LeaseState::Back(..) => "back",
            LeaseState::Gone => "lost",
        };
        f.debug_struct("Posted").field("wr_id", &self.wr_id).field("lease", &state).finish()
    }
}

/// Error of a post, with the lease.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct NotPosted {
    /// Cause of the failure.
    #[source]
    pub error: Error,
    /// The lease, unchanged.
    pub lease: Lease,
}

impl From<NotPosted> for Error {
    fn from(e: NotPosted) -> Self {
        e.error
    }
}

/// A posted request with a lease, kept in its CQ until it completes.
pub(crate) struct PendingLease {
    state: Arc<Mutex<LeaseState>>,
    /// The request's `wr_id` from the program.
    pub(crate) wr_id: u64,
    qp: QpId,
    /// A task awaits the completion, so no poll returns it.
    pub(crate) is_awaited: bool,
    /// The QP is gone, so the request will not complete unless its completion is already in the CQ.
    is_orphan: bool,
}

impl PendingLease {
    /// Returns the bytes to [`Posted`], with the completion.
    pub(crate) fn complete(self, done: Done, completion: Completion) {
        let mut state = self.state.lock();
        if let LeaseState::Lent(loan, region) = std::mem::replace(&mut *state, LeaseState::Gone)
            && let Ok(bytes) = loan.reclaim(done)
        {
            *state = LeaseState::Back(Lease { bytes, region }, completion);
        }
    }

    /// Marks the lease if it belongs to `qp`, which has been destroyed or reset. Returns true if
    /// the lease is marked.
    pub(crate) fn orphan(&mut self, qp: QpId) -> bool {
        self.is_orphan |= self.qp == qp;
        self.is_orphan
    }

    pub(crate) fn is_orphan(&self) -> bool {
        self.is_orphan
    }
}

impl Drop for PendingLease {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        if let LeaseState::Lent(..) = *state {
            *state = LeaseState::Gone;
        }
    }
}
