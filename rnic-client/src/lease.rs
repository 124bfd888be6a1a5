//! Memory as slices, without `unsafe`: leases on regions that no peer can reach.

use std::fmt;
use std::ops::{Deref, DerefMut, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use rnic_core::abi::control::{MrRequest, MrSource, ReplyBody, RequestBody};
use rnic_core::abi::queue::Sge;
use rnic_core::shm::lease::{self, Done, Lendable, Loan, LoanNumber};
use rnic_core::types::{Access, MrId, QpId, Scope, SharedBufferId, Stag};

use crate::completion::Completion;
use crate::error::Error;
use crate::mr::RemoteAddr;
use crate::pd::PdInner;
use crate::request::{Data, SendRequest};
use crate::session::{Session, unexpected};
use crate::shared_buffer::{self, resolve};

/// A region that only this program's own requests reach, whose bytes are leased as slices.
///
/// It has memory of its own, one STag that is told to nobody, and no rights for peers; no window
/// can be bound to it. [`LocalMr::lease`] gives a range of it to one owner, as a `&mut [u8]`. A
/// request takes the [`Lease`] ([`Qp::post_send_leased`](crate::Qp::post_send_leased),
/// [`Qp::post_recv_leased`](crate::Qp::post_recv_leased)), and its completion gives it back
/// ([`Posted::take`]): while the daemon may read or write the bytes nobody has a slice of them.
///
/// Nothing rests on a destructor. A lease or a [`Posted`] that is forgotten stays leased; one whose
/// completion never comes, because its QP or CQ is gone, is lost ([`Posted::is_lost`]): the range
/// stays taken until the region is dropped. Elements built by hand that name such a region are
/// refused ([`Error::LeasedMemory`]). Clones are the same region; it is deregistered when the last
/// clone and the last lease have been dropped.
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
/// A slice cannot be kept while its bytes are posted:
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

impl LocalMr {
    pub(crate) fn register(pd: &Arc<PdInner>, len: u64) -> Result<LocalMr, Error> {
        let session = &pd.session;
        let (buffer, mapping) = shared_buffer::share(session, len)?;
        let memory = Lendable::new(mapping)
            .map_err(|_| Error::protocol("somebody else has memory that was just made"))?;
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

    /// Its handle in the daemon.
    pub fn id(&self) -> MrId {
        self.region.id
    }

    /// Bytes of the region, at least 1.
    pub fn len(&self) -> u64 {
        self.region.memory.len() as u64
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Leases a range, in bytes from the region's start: at least one byte, less than 4 GiB. A new
    /// region is zeroed; what is leased again is as it was left.
    ///
    /// # Errors
    ///
    /// [`Error::Leased`] if a byte of it is leased or posted; [`Error::OutOfRange`] if the region
    /// has no such range.
    pub fn lease(&self, range: impl RangeBounds<u64>) -> Result<Lease, Error> {
        let (offset, length) = resolve(range, self.len())?;
        if length == 0 || u32::try_from(length).is_err() {
            return Err(Error::OutOfRange { offset, length, size: self.len() });
        }
        // Both lie within the region, whose length is a usize.
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
        // A session that has ended has taken both back already.
        let session = &self.pd.session;
        let _ = session.command(RequestBody::DeregMr { mr: self.id });
        let _ = session.command(RequestBody::RemoveSharedBuffer { buffer: self.buffer });
        session.local_keys.remove(self.stag);
    }
}

/// A range of a [`LocalMr`] that is its owner's alone: a slice, until it is posted or dropped.
pub struct Lease {
    bytes: lease::Lease,
    region: Arc<Region>,
}

impl Lease {
    /// Bytes from the region's start.
    pub fn offset(&self) -> u64 {
        self.bytes.offset() as u64
    }

    /// A Send of its bytes ([`SendRequest::send`]).
    pub fn send(self, wr_id: u64) -> LeasedRequest {
        LeasedRequest { request: SendRequest::send(wr_id, &[]), lease: self }
    }

    /// An RDMA Write of its bytes ([`SendRequest::write`]).
    pub fn write(self, wr_id: u64, to: RemoteAddr) -> LeasedRequest {
        LeasedRequest { request: SendRequest::write(wr_id, &[], to), lease: self }
    }

    /// An RDMA Read that fills it ([`SendRequest::read`]).
    pub fn read(self, wr_id: u64, from: RemoteAddr) -> LeasedRequest {
        let request = SendRequest::read(wr_id, self.element(), from);
        LeasedRequest { request, lease: self }
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.region.pd.session
    }

    /// What a request names.
    pub(crate) fn element(&self) -> Sge {
        // The length was checked when it was leased; addresses count from the region's start.
        let length = self.bytes.len() as u32;
        Sge { addr: self.offset(), length, lkey: self.region.stag.0 }
    }

    /// Gives it away to a request that has been written with this number and is not shown to the
    /// daemon yet: what its completion is matched with, and what the program keeps.
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

/// A send request with the lease that it takes. It always writes a completion.
#[derive(Debug)]
pub struct LeasedRequest {
    pub(crate) request: SendRequest<'static>,
    pub(crate) lease: Lease,
}

impl LeasedRequest {
    /// As [`SendRequest::solicited`].
    #[must_use]
    pub fn solicited(self) -> Self {
        LeasedRequest { request: self.request.solicited(), ..self }
    }

    /// As [`SendRequest::fence`].
    #[must_use]
    pub fn fence(self) -> Self {
        LeasedRequest { request: self.request.fence(), ..self }
    }

    /// With this number for the daemon, naming the lease.
    pub(crate) fn numbered(&self, number: &LoanNumber) -> SendRequest<'static> {
        let mut request = self.request.signaled();
        request.header.wr_id = number.wr_id();
        request.data = Data::Element(self.lease.element());
        request
    }
}

/// A posted request that has a lease, until its completion has been polled.
///
/// Dropping it leaves the bytes with the request; its completion then gives them back to the
/// region.
#[must_use = "it brings the lease back"]
pub struct Posted {
    state: Arc<Mutex<LeaseState>>,
    wr_id: u64,
}

/// Where a lease is that was posted.
enum LeaseState {
    /// With the daemon: the request is posted, and its completion has not been polled.
    Lent(Loan, Arc<Region>),
    /// The completion has been polled.
    #[cfg_attr(not(feature = "tokio"), allow(dead_code, reason = "only tasks ask for it"))]
    Back(Lease, Completion),
    /// Taken, or the completion never comes.
    Gone,
}

impl Posted {
    /// The application's name for the request.
    pub fn wr_id(&self) -> u64 {
        self.wr_id
    }

    /// The lease, if the request's completion has been polled ([`Cq::poll`](crate::Cq::poll) and
    /// what calls it), whether it succeeded or not; itself otherwise.
    pub fn take(self) -> Result<Lease, Posted> {
        // One lock from the look to what is left there: the completion may land at any moment.
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

    /// As [`take`](Posted::take), with the completion.
    #[cfg(feature = "tokio")]
    pub(crate) fn finish(self) -> Result<(Lease, Completion), Posted> {
        let completion = match &*self.state.lock() {
            LeaseState::Back(_, completion) => *completion,
            LeaseState::Lent(..) | LeaseState::Gone => Completion::default(),
        };
        self.take().map(|lease| (lease, completion))
    }

    /// Whether its completion will never be polled, because its QP was dropped before or its CQ is
    /// gone. The bytes then stay taken until the region is dropped.
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

/// A lease that was not posted, and why.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct NotPosted {
    /// What kept it from being posted.
    #[source]
    pub error: Error,
    /// It, as it was.
    pub lease: Lease,
}

impl From<NotPosted> for Error {
    fn from(e: NotPosted) -> Self {
        e.error
    }
}

/// A request with a lease whose completion is awaited by its CQ.
pub(crate) struct PendingLease {
    state: Arc<Mutex<LeaseState>>,
    /// The application's name for it.
    pub(crate) wr_id: u64,
    qp: QpId,
    /// A task awaits the completion: no poll returns it.
    pub(crate) is_awaited: bool,
    /// Its QP is gone: what the CQ does not hold already will not come.
    is_orphan: bool,
}

impl PendingLease {
    /// Its completion has been read.
    pub(crate) fn complete(self, done: Done, completion: Completion) {
        let mut state = self.state.lock();
        if let LeaseState::Lent(loan, region) = std::mem::replace(&mut *state, LeaseState::Gone)
            && let Ok(bytes) = loan.reclaim(done)
        {
            *state = LeaseState::Back(Lease { bytes, region }, completion);
        }
    }

    /// Its QP is gone, if it is that one; whether it was.
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

/// STags that elements built by hand may not name.
#[derive(Default)]
pub(crate) struct LocalKeys {
    /// There has been one: what programs without leases pay for each request is a look at this.
    any: AtomicBool,
    keys: RwLock<Vec<u32>>,
}

impl LocalKeys {
    fn add(&self, stag: Stag) {
        self.keys.write().push(stag.0);
        self.any.store(true, Ordering::Release);
    }

    fn remove(&self, stag: Stag) {
        self.keys.write().retain(|key| *key != stag.0);
    }

    /// Refuses a request that is not of a lease and names leased memory, or looks like one of a
    /// lease: its completion would be taken for that one's.
    #[inline]
    pub(crate) fn check(&self, wr_id: u64, elements: &[Sge]) -> Result<(), Error> {
        if !lease::is_loan(wr_id) && !self.any.load(Ordering::Acquire) {
            return Ok(());
        }
        self.look_closer(wr_id, elements)
    }

    #[cold]
    fn look_closer(&self, wr_id: u64, elements: &[Sge]) -> Result<(), Error> {
        if lease::is_loan(wr_id) {
            return Err(Error::ReservedWrId { wr_id });
        }
        let keys = self.keys.read();
        match elements.iter().find(|sge| keys.contains(&sge.lkey)) {
            None => Ok(()),
            Some(sge) => Err(Error::LeasedMemory { lkey: sge.lkey }),
        }
    }
}
