//! Shared receive queues.

use std::fmt;
use std::sync::Arc;

use rnic_core::abi::control::{ObjectRef, ReplyBody, RequestBody, SrqRequest, SrqRow};
use rnic_core::abi::queue::QueueKind;
use rnic_core::types::{PdId, SrqId};

use crate::error::{Error, PostError};
use crate::events::Subject;
use crate::pd::PdInner;
use crate::receive::ReceiveQueue;
use crate::request::RecvRequest;
use crate::session::{Session, unexpected};

/// How to make a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqOptions {
    /// Receives outstanding; default 256, rounded up to a power of two.
    pub depth: u32,
    /// Elements per receive; default 4.
    pub max_sge: u8,
    /// Limit event, as of [`Srq::arm_limit`], for the first message that leaves fewer receives than
    /// this; default 0, none.
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
/// its protection domain, taken in order by whichever message begins.
///
/// A receive that a message has taken belongs to that message's QP until it completes; what no
/// message has taken stays when a QP ends, and is gone with the queue. Any number of threads may
/// post; a batch stays together. Clones are the same queue; the daemon destroys it when the last
/// clone and the last QP that uses it have been dropped.
///
/// Its events come by [`Context::next_event`](crate::Context::next_event):
/// [`Event::SrqLimit`](crate::Event::SrqLimit) when it runs low,
/// [`Event::SrqUnfair`](crate::Event::SrqUnfair) when the peer of one QP uses up more than its fair
/// share, [`Event::LastWqeReached`](crate::Event::LastWqeReached) when a QP in Error will take no
/// more, and [`Event::SrqError`](crate::Event::SrqError) when its memory was scribbled over.
///
/// ```no_run
/// # use rnic_client::*;
/// # fn serve(context: &Context, pd: &Pd, cq: &Cq, listener: &Listener)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// // 256 receives of 4 KiB for a thousand peers, of which few send at a time.
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
///     // The slot is free again, for a message to whichever QP comes next.
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
    /// It outlives its queues.
    pd: Arc<PdInner>,
}

impl Srq {
    pub(crate) fn create(pd: &Arc<PdInner>, options: &SrqOptions) -> Result<Srq, Error> {
        let session = &pd.session;
        let SrqOptions { depth, max_sge, limit, context } = *options;
        let request = SrqRequest { pd: pd.id, depth, max_sge, limit, context };
        let reply = session.request(RequestBody::CreateSrq(request))?;
        let ReplyBody::Srq { srq: id, queue, .. } = reply else { return Err(unexpected(&reply)) };
        let memory = session.queue(queue, QueueKind::SharedReceive)?;
        session.events.with(|events| events.open(Subject::Srq(id)));
        let queue = ReceiveQueue::new(memory, max_sge);
        Ok(Srq { inner: Arc::new(SrqInner { id, queue, pd: pd.clone() }) })
    }

    /// Its handle: what completions and events name.
    pub fn id(&self) -> SrqId {
        self.inner.id
    }

    /// Handle of the protection domain whose regions its receives may name.
    pub fn pd(&self) -> PdId {
        self.inner.pd.id
    }

    /// Receives that it has room for, a power of two.
    pub fn capacity(&self) -> u32 {
        self.inner.queue.depth()
    }

    /// Posts receives in order (`ibv_post_srq_recv(3)`).
    ///
    /// # Errors
    ///
    /// Those that can be known here: [`Error::QueueFull`] and [`Error::TooManySges`];
    /// [`PostError::posted`] says how many receives before the wrong one have been posted.
    pub fn post_recv(&self, requests: &[RecvRequest<'_>]) -> Result<(), PostError> {
        self.inner.queue.post(self.session(), requests)
    }

    /// Asks for one [`Event::SrqLimit`](crate::Event::SrqLimit) when fewer receives than `limit`
    /// are posted, at once if that is so already; 0 takes the request back (`ibv_modify_srq(3)`
    /// with `IBV_SRQ_LIMIT`).
    pub fn arm_limit(&self, limit: u32) -> Result<(), Error> {
        self.session().command(RequestBody::ArmSrq { srq: self.inner.id, limit })
    }

    /// Receives posted and taken, the armed limit, QPs (compare `ibv_query_srq(3)`).
    pub fn query(&self) -> Result<SrqRow, Error> {
        match self.session().request(RequestBody::QuerySrq { srq: self.inner.id })? {
            ReplyBody::SrqInfo(row) => Ok(row),
            other => Err(unexpected(&other)),
        }
    }

    /// Changes the context that its events carry.
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
            .field("pd", &self.pd())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        let session = &self.pd.session;
        // A session that has ended has destroyed it already.
        let _ = session.command(RequestBody::DestroySrq { srq: self.id });
        // As with a QP: what was said of it before that reply is read while it has a place to go.
        let _ = session.events.drain();
        session.events.with(|events| events.close(Subject::Srq(self.id)));
    }
}
