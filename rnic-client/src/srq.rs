//! Shared receive queues.

use std::fmt;
use std::sync::Arc;

use rnic_abi::abi::control::{LibraryCall, ObjectRef, ReplyBody, RequestBody, SrqRequest, SrqRow};
use rnic_abi::abi::queue::QueueKind;
use rnic_abi::types::SrqId;

use crate::error::{Error, PostError};
use crate::events::Subject;
use crate::pd::{Pd, PdInner};
use crate::receive::ReceiveQueue;
use crate::request::RecvRequest;
use crate::session::{Session, unexpected};

/// Options for creating a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqOptions {
    /// Maximum outstanding receives, rounded up to a power of two; default 256.
    pub depth: u32,
    /// Maximum SGEs per receive; default 4.
    pub max_sge: u8,
    /// Arms the limit event ([`Srq::arm_limit`]) at creation, for the first message that leaves
    /// fewer receives than this; default 0 (off).
    pub limit: u32,
    /// Returned in the queue's events; default 0.
    pub context: u64,
}

impl Default for SrqOptions {
    fn default() -> Self {
        SrqOptions { depth: 256, max_sge: 4, limit: 0, context: 0 }
    }
}

/// A shared receive queue (`ibv_create_srq(3)`): receives for the messages of any number of QPs of
/// its protection domain. Each new message consumes the oldest receive.
///
/// A receive that a message has consumed belongs to that message's QP until it completes. The other
/// receives remain when a QP ends, and are discarded with the queue. Any number of threads may
/// post, and the receives of a batch stay together. Clones refer to the same queue. The daemon
/// destroys it when the last clone and the last QP that uses it have been dropped.
///
/// [`Context::next_event`](crate::Context::next_event) returns its events:
/// [`Event::SrqLimit`](crate::Event::SrqLimit) when the number of receives falls below the limit,
/// [`Event::SrqUnfair`](crate::Event::SrqUnfair) when the peer of one QP uses more than its fair
/// share, [`Event::LastWqeReached`](crate::Event::LastWqeReached) when a QP in Error takes no more
/// receives, and [`Event::SrqError`](crate::Event::SrqError) when its memory is corrupted.
///
/// ```no_run
/// # use rnic_client::*;
/// # fn serve(context: &Context, pd: &Pd, cq: &Cq, listener: &Listener)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// // 256 receives of 4 KiB for a thousand peers, if only few of them send at a time.
/// const SLOT: u64 = 4096;
/// let srq = pd.create_srq(&SrqOptions { depth: 256, limit: 64, ..SrqOptions::default() })?;
/// let buffer = context.create_shared_buffer(256 * SLOT)?;
/// let inbox = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)?;
/// let post = |slot: u64| {
///     srq.post_recv(&[RecvRequest::new(slot, &[inbox.sge(slot * SLOT, SLOT as u32)])])
/// };
/// (0..256).try_for_each(post)?;
///
/// let mut peers = Vec::new();
/// while peers.len() < 1000 {
///     let request = listener.accept_request(None)?;
///     let qp = pd.create_qp(&QpOptions { srq: Some(&srq), ..QpOptions::new(cq) })?;
///     request.start_accept(&qp, &AcceptOptions::default())?;
///     peers.push(qp);
/// }
/// loop {
///     let mut one = [Completion::default()];
///     cq.wait(&mut one, None)?;
///     let received = one[0].ok()?;
///     println!("{} bytes for QP {}", received.byte_len, received.qp);
///     // The slot is free again, for the next message to any QP.
///     post(received.wr_id)?;
/// }
/// # }
/// ```
#[derive(Clone)]
pub struct Srq {
    pub(crate) inner: Arc<SrqInner>,
}

pub(crate) struct SrqInner {
    pub(crate) id: SrqId,
    queue: ReceiveQueue,
    /// Its session must outlive the queue.
    pd: Arc<PdInner>,
}

impl Pd {
    /// Creates a shared receive queue for QPs of this domain (`ibv_create_srq(3)`).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with the limit: SRQs, queue depth or SGEs.
    pub fn create_srq(&self, options: &SrqOptions) -> Result<Srq, Error> {
        let pd = &self.inner;
        let session = &pd.session;
        let SrqOptions { depth, max_sge, limit, context } = *options;
        let request = SrqRequest { pd: pd.id, depth, max_sge, limit, context };
        let reply = session.request(RequestBody::CreateSrq(request))?;
        let ReplyBody::Srq { srq: id, queue, .. } = reply else { return Err(unexpected(&reply)) };
        let memory = session.queue(queue, QueueKind::SharedReceive)?;
        session.events.with(|events| events.open(Subject::Srq(id)));
        let queue = ReceiveQueue::new(memory, max_sge, LibraryCall::PostSrqRecv { srq: id });
        Ok(Srq { inner: Arc::new(SrqInner { id, queue, pd: pd.clone() }) })
    }
}

impl Srq {
    /// Returns the queue's handle, which completions and events contain.
    pub fn id(&self) -> SrqId {
        self.inner.id
    }

    /// Returns the maximum number of outstanding receives, a power of two.
    pub fn capacity(&self) -> u32 {
        self.inner.queue.depth()
    }

    /// Posts receives in order (`ibv_post_srq_recv(3)`).
    ///
    /// # Errors
    ///
    /// [`Error::QueueFull`], [`Error::TooManySges`], [`Error::LeasedMemory`] and
    /// [`Error::ReservedWrId`]; [`PostError::posted`] is the number of receives posted.
    pub fn post_recv(&self, requests: &[RecvRequest<'_>]) -> Result<(), PostError> {
        self.inner.queue.post(self.session(), requests)
    }

    /// Requests one [`Event::SrqLimit`](crate::Event::SrqLimit) when fewer than `limit` receives
    /// are posted, immediately if that is already the case (`ibv_modify_srq(3)` with
    /// `IBV_SRQ_LIMIT`). 0 cancels the request.
    pub fn arm_limit(&self, limit: u32) -> Result<(), Error> {
        self.session().command(RequestBody::ArmSrq { srq: self.inner.id, limit })
    }

    /// Queries receives posted and taken, the armed limit and the QPs (compare `ibv_query_srq(3)`).
    pub fn query(&self) -> Result<SrqRow, Error> {
        match self.session().request(RequestBody::QuerySrq { srq: self.inner.id })? {
            ReplyBody::SrqInfo(row) => Ok(row),
            other => Err(unexpected(&other)),
        }
    }

    /// Sets the context that the queue's events carry.
    pub fn set_context(&self, context: u64) -> Result<(), Error> {
        let object = ObjectRef::Srq(self.inner.id);
        self.session().command(RequestBody::SetContext { object, context })
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.inner.pd.session
    }
}

impl fmt::Debug for Srq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Srq")
            .field("id", &self.id())
            .field("pd", &self.inner.pd.id)
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        let session = &self.pd.session;
        // If the session has ended, the SRQ is destroyed already.
        let _ = session.command(RequestBody::DestroySrq { srq: self.id });
        // As for a QP, reads the events that were sent before that reply while the subject is open.
        let _ = session.events.drain();
        session.events.with(|events| events.close(Subject::Srq(self.id)));
    }
}
