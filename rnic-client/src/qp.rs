//! Queue pairs: making them, posting to them, asking about them. [`crate::connect`] connects them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rnic_core::abi::control::{ObjectRef, QpRequest, QpRow, ReplyBody, RequestBody};
use rnic_core::abi::queue::QueueKind;
use rnic_core::shm::lease::LoanNumber;
use rnic_core::shm::queue::{PushError, QueueMemory, SendProducer};
use rnic_core::types::{QpId, QpType, RnrPolicy};

use crate::cq::Cq;
use crate::error::{Error, PostError};
use crate::events::Subject;
use crate::lease::{Lease, LeasedRequest, NotPosted, Posted};
use crate::pd::PdInner;
use crate::receive::ReceiveQueue;
use crate::request::{Data, RecvRequest, SendRequest};
use crate::session::{Session, unexpected};
use crate::srq::Srq;

/// How to make a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpOptions<'a> {
    /// Where completions of send requests go.
    pub send_cq: &'a Cq,
    /// Where completions of receives go.
    pub recv_cq: &'a Cq,
    /// Shared receive queue of the same protection domain to take receives from; by default the QP
    /// has a receive queue of its own.
    pub srq: Option<&'a Srq>,
    /// Send requests outstanding; default 64, rounded up to a power of two.
    pub sq_depth: u32,
    /// Receives outstanding; default 64, rounded up to a power of two. Of no account with a shared
    /// receive queue, like `max_recv_sge`.
    pub rq_depth: u32,
    /// Elements per send request; default 4.
    pub max_send_sge: u8,
    /// Elements per receive; default 4.
    pub max_recv_sge: u8,
    /// Bytes of inline data per send request; default 64.
    pub max_inline: u16,
    /// Write a completion for every send request, not only for those marked signaled; default no.
    pub signal_all: bool,
    /// What becomes of a message that finds no receive: by default it ends the connection, as RFC
    /// 5041 section 7.1 has it; or it is held until one is posted, which keeps everything behind
    /// it waiting too, the responses to this QP's own Reads included.
    pub rnr_policy: RnrPolicy,
    /// Returned in the QP's events; default 0.
    pub context: u64,
    /// How it comes by its peer; by default it connects or accepts. One that is wired by hand holds
    /// what finds no receive, whatever `rnr_policy` says: its peer decides for how long.
    pub kind: QpType,
}

impl<'a> QpOptions<'a> {
    /// Defaults, with one CQ for sends and receives.
    pub fn new(cq: &'a Cq) -> Self {
        QpOptions {
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            sq_depth: 64,
            rq_depth: 64,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 64,
            signal_all: false,
            rnr_policy: RnrPolicy::Terminate,
            context: 0,
            kind: QpType::Connected,
        }
    }
}

/// A queue pair: one end of a connection (`ibv_create_qp(3)`).
///
/// Any number of threads may post; a batch stays together. Dropping it ends its connection and
/// destroys it: nothing that was posted completes any more, and completions already written can
/// still be polled.
pub struct Qp {
    pub(crate) pd: Arc<PdInner>,
    pub(crate) id: QpId,
    max_send_sge: usize,
    max_inline: usize,
    /// The send queue's memory, whose header says which worker to ring after posting to it: none
    /// until the QP is bound to one.
    memory: QueueMemory,
    sq: Mutex<SendSide>,
    /// Its own receive queue, if it has one.
    rq: Option<ReceiveQueue>,
    /// They outlive their QP.
    cqs: [Cq; 2],
    srq: Option<Srq>,
    /// Whether it has been destroyed.
    gone: AtomicBool,
}

struct SendSide {
    producer: SendProducer,
    depth: u32,
}

impl Qp {
    pub(crate) fn create(pd: &Arc<PdInner>, options: &QpOptions<'_>) -> Result<Qp, Error> {
        let session = &pd.session;
        let cqs = [options.send_cq.clone(), options.recv_cq.clone()];
        if cqs.iter().any(|cq| !Arc::ptr_eq(&cq.inner.session, session)) {
            return Err(Error::ForeignObject { what: "a completion queue" });
        }
        let srq = options.srq.cloned();
        if srq.as_ref().is_some_and(|srq| !Arc::ptr_eq(srq.session(), session)) {
            return Err(Error::ForeignObject { what: "the shared receive queue" });
        }
        let reply = session.request(RequestBody::CreateQp(QpRequest {
            pd: pd.id,
            send_cq: cqs[0].inner.id,
            recv_cq: cqs[1].inner.id,
            srq: srq.as_ref().map(Srq::id),
            sq_depth: options.sq_depth,
            rq_depth: options.rq_depth,
            max_send_sge: options.max_send_sge,
            max_recv_sge: options.max_recv_sge,
            max_inline: options.max_inline,
            signal_all: options.signal_all,
            rnr_policy: options.rnr_policy,
            context: options.context,
            kind: options.kind,
        }))?;
        let ReplyBody::Qp { qp: id, sq, rq, .. } = reply else { return Err(unexpected(&reply)) };
        let send = session.queue(sq, QueueKind::Send)?;
        let receive = match rq {
            Some(at) => Some(session.queue(at, QueueKind::Receive)?),
            None => None,
        };
        session.events.with(|events| events.open(Subject::Qp(id)));
        Ok(Qp {
            pd: pd.clone(),
            id,
            max_send_sge: options.max_send_sge.into(),
            max_inline: options.max_inline.into(),
            sq: Mutex::new(SendSide {
                producer: SendProducer::new(send.clone()),
                depth: sq.shape.capacity,
            }),
            rq: receive.map(|memory| ReceiveQueue::new(memory, options.max_recv_sge)),
            memory: send,
            cqs,
            srq,
            gone: AtomicBool::new(false),
        })
    }

    /// Its number: what completions and events name.
    pub fn id(&self) -> QpId {
        self.id
    }

    /// Where completions of its send requests go.
    pub fn send_cq(&self) -> &Cq {
        &self.cqs[0]
    }

    /// Where completions of its receives go.
    pub fn recv_cq(&self) -> &Cq {
        &self.cqs[1]
    }

    /// Where its receives come from, if they are shared.
    pub fn srq(&self) -> Option<&Srq> {
        self.srq.as_ref()
    }

    /// Posts send requests in order, ringing once (`ibv_post_send(3)`). They may be posted before
    /// the QP is connected and start when it is.
    ///
    /// # Errors
    ///
    /// What can be known here: [`Error::QueueFull`] (poll completions, then post the rest),
    /// [`Error::TooManySges`], [`Error::InlineTooLong`], [`Error::LeasedMemory`]. Requests before
    /// the wrong one have been posted, [`PostError::posted`] says how many. The daemon checks
    /// everything again and the rest, and fails the request with a completion.
    pub fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        let mut posting = self.posting().map_err(|source| PostError { posted: 0, source })?;
        let failure = requests.iter().find_map(|request| posting.push(request).err());
        let posted = posting.pushed;
        match failure.or(posting.finish().err()) {
            None => Ok(()),
            Some(source) => Err(PostError { posted, source }),
        }
    }

    /// Begins a batch whose requests are made one after the other. Others who post wait until it
    /// has been dropped.
    pub fn posting(&self) -> Result<Posting<'_>, Error> {
        self.session().check()?;
        Ok(Posting { qp: self, sq: Some(self.sq.lock()), pushed: 0 })
    }

    /// Posts a send request that takes a lease along until its completion has been polled. It
    /// writes a completion in any case; the error gives the lease back.
    pub fn post_send_leased(&self, request: LeasedRequest) -> Result<Posted, NotPosted> {
        self.post_send_lease(request, false)
    }

    /// As [`Qp::post_send_leased`]. If it is awaited, no poll returns its completion.
    pub(crate) fn post_send_lease(
        &self,
        request: LeasedRequest,
        is_awaited: bool,
    ) -> Result<Posted, NotPosted> {
        let refuse = |lease, error| Err(NotPosted { error, lease });
        let wr_id = request.request.wr_id();
        let number = match self.may_lend(&request.lease) {
            Ok(number) => number,
            Err(error) => return refuse(request.lease, error),
        };
        let mut sq = self.sq.lock();
        if let Err(error) = self.push_send(&mut sq, &request.numbered(&number)) {
            return refuse(request.lease, error);
        }
        // Awaited before the daemon sees it, so that its completion finds it.
        let key = number.wr_id();
        let (pending, posted) = request.lease.lend(number, wr_id, self.id, is_awaited);
        self.cqs[0].inner.await_lease(key, pending);
        sq.producer.publish();
        drop(sq);
        // A worker that does not exist is found out by whoever waits.
        let _ = self.ring();
        Ok(posted)
    }

    /// Posts a receive that takes a lease along until its completion has been polled; the error
    /// gives the lease back. The QP must have a receive queue of its own.
    pub fn post_recv_leased(&self, wr_id: u64, lease: Lease) -> Result<Posted, NotPosted> {
        self.post_recv_lease(wr_id, lease, false)
    }

    /// As [`Qp::post_recv_leased`]. If it is awaited, no poll returns its completion.
    pub(crate) fn post_recv_lease(
        &self,
        wr_id: u64,
        lease: Lease,
        is_awaited: bool,
    ) -> Result<Posted, NotPosted> {
        let refuse = |lease, error| Err(NotPosted { error, lease });
        let Some(rq) = &self.rq else { return refuse(lease, Error::SharedReceives) };
        let number = match self.may_lend(&lease) {
            Ok(number) => number,
            Err(error) => return refuse(lease, error),
        };
        let key = number.wr_id();
        let mut slot = Some((lease, number));
        let mut posted = None;
        let element = slot.as_ref().map(|(lease, _)| lease.element());
        let pushed = rq.post_one(self.session(), key, element.as_slice(), || {
            if let Some((lease, number)) = slot.take() {
                let (pending, ticket) = lease.lend(number, wr_id, self.id, is_awaited);
                self.cqs[1].inner.await_lease(key, pending);
                posted = Some(ticket);
            }
        });
        match (pushed, posted, slot) {
            (_, Some(posted), _) => Ok(posted),
            (Err(error), None, Some((lease, _))) => refuse(lease, error),
            // Either the closure ran or there was an error.
            (_, None, _) => unreachable!("a receive was neither posted nor refused"),
        }
    }

    /// A number for a loan of this lease, if it is of this session and the daemon is there.
    fn may_lend(&self, lease: &Lease) -> Result<LoanNumber, Error> {
        self.session().check()?;
        if !Arc::ptr_eq(lease.session(), self.session()) {
            return Err(Error::ForeignObject { what: "the lease" });
        }
        LoanNumber::next().ok_or_else(|| Error::protocol("this process has lent 2^52 times"))
    }

    /// Posts receives in order (`ibv_post_recv(3)`), at best before the QP is connected: a message
    /// that finds none ends the connection, or waits, see [`QpOptions::rnr_policy`].
    ///
    /// # Errors
    ///
    /// What can be known here: [`Error::QueueFull`] and [`Error::TooManySges`], with the number of
    /// receives that have been posted in [`PostError::posted`]. A QP on a shared receive queue has
    /// none of its own: [`Error::SharedReceives`].
    pub fn post_recv(&self, requests: &[RecvRequest<'_>]) -> Result<(), PostError> {
        match &self.rq {
            Some(rq) => rq.post(self.session(), requests),
            None => Err(PostError { posted: 0, source: Error::SharedReceives }),
        }
    }

    /// State, addresses and counters (compare `ibv_query_qp(3)`).
    pub fn query(&self) -> Result<QpRow, Error> {
        match self.session().request(RequestBody::QueryQp { qp: self.id })? {
            ReplyBody::QpInfo(row) => Ok(row),
            other => Err(unexpected(&other)),
        }
    }

    /// Moves it to Error: its connection ends and everything posted is flushed (`ibv_modify_qp(3)`
    /// with `IBV_QPS_ERR`).
    pub fn to_error(&self) -> Result<(), Error> {
        self.session().command(RequestBody::QpToError { qp: self.id })
    }

    /// Changes the context that its events carry (compare `rdma_migrate_id(3)`).
    pub fn set_context(&self, context: u64) -> Result<(), Error> {
        let object = ObjectRef::Qp(self.id);
        self.session().command(RequestBody::SetContext { object, context })
    }

    /// Destroys it, as dropping it does, while others may still hold it (`ibv_destroy_qp(3)`): when
    /// this returns, nothing that was posted completes any more, and every request about it is
    /// refused. Whoever still posts to it posts to nobody.
    pub fn destroy(&self) {
        if self.gone.swap(true, Ordering::AcqRel) {
            return;
        }
        // A child made by fork leaves the session of its parent alone.
        if self.session().check_owner().is_err() {
            return;
        }
        // A session that has ended has destroyed it already.
        let _ = self.session().command(RequestBody::DestroyQp { qp: self.id });
        // What the daemon had to say of it was sent before that reply: read it while it still has
        // a place to go, so that it cannot be taken for an event of a later QP of the same number.
        let _ = self.session().events.drain();
        self.session().events.with(|events| events.close(Subject::Qp(self.id)));
        // The daemon writes no more completions of it.
        self.cqs.iter().for_each(|cq| cq.inner.orphan(self.id));
    }

    /// Empties both queues while `daemon` has the daemon do the same: nobody posts meanwhile.
    pub(crate) fn begin_anew(
        &self,
        daemon: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut sq = self.sq.lock();
        let renew = || {
            daemon()?;
            sq.producer = SendProducer::new(self.memory.clone());
            Ok(())
        };
        match &self.rq {
            Some(rq) => rq.begin_anew(renew)?,
            None => renew()?,
        }
        drop(sq);
        // What was lent to its requests comes back.
        self.cqs.iter().for_each(|cq| cq.inner.orphan(self.id));
        Ok(())
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.pd.session
    }

    #[inline]
    fn push_send(&self, sq: &mut SendSide, request: &SendRequest<'_>) -> Result<(), Error> {
        let (elements, inline) = match &request.data {
            Data::Elements(elements) => (*elements, &[][..]),
            Data::Element(element) => (std::slice::from_ref(element), &[][..]),
            Data::Inline(bytes) => (&[][..], *bytes),
        };
        if elements.len() > self.max_send_sge {
            return Err(Error::TooManySges { given: elements.len(), max: self.max_send_sge });
        }
        if inline.len() > self.max_inline {
            return Err(Error::InlineTooLong { given: inline.len(), max: self.max_inline });
        }
        sq.producer
            .push(&request.header, elements, inline)
            .map_err(|e| push_error(e, sq.depth, elements.len(), self.max_send_sge))
    }

    /// Rings for what was posted, after its producer index has been published.
    #[inline]
    fn ring(&self) -> Result<(), Error> {
        match self.memory.worker() {
            Some(worker) => self.session().ring(worker, self.memory.doorbell()),
            None => Ok(()),
        }
    }
}

/// A batch of send requests that is being posted: the daemon is shown them, and rung once, when it
/// is finished or dropped.
pub struct Posting<'a> {
    qp: &'a Qp,
    /// There until it has been finished.
    sq: Option<MutexGuard<'a, SendSide>>,
    pushed: usize,
}

impl Posting<'_> {
    /// Adds a request.
    ///
    /// # Errors
    ///
    /// As of [`Qp::post_send`]: the request has not been added, those before it have.
    #[inline]
    pub fn push(&mut self, request: &SendRequest<'_>) -> Result<(), Error> {
        self.qp.session().local_keys.check(request.wr_id(), request.elements())?;
        if let Some(sq) = &mut self.sq {
            self.qp.push_send(sq, request)?;
            self.pushed += 1;
        }
        Ok(())
    }

    /// Shows the daemon what was added.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] if the QP is bound to a worker that does not exist.
    #[inline]
    pub fn finish(mut self) -> Result<(), Error> {
        self.show()
    }

    #[inline]
    fn show(&mut self) -> Result<(), Error> {
        match self.sq.take() {
            Some(mut sq) if self.pushed > 0 => sq.producer.publish(),
            _ => return Ok(()),
        }
        self.qp.ring()
    }
}

impl fmt::Debug for Posting<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Posting").field("qp", &self.qp.id).finish_non_exhaustive()
    }
}

impl Drop for Posting<'_> {
    fn drop(&mut self) {
        // A worker that does not exist is found out by whoever waits.
        let _ = self.show();
    }
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp")
            .field("id", &self.id)
            .field("pd", &self.pd.id)
            .field("send_cq", &self.cqs[0].id())
            .field("recv_cq", &self.cqs[1].id())
            .field("srq", &self.srq.as_ref().map(Srq::id))
            .finish_non_exhaustive()
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.destroy();
    }
}

#[cold]
fn push_error(e: PushError, depth: u32, given: usize, max: usize) -> Error {
    match e {
        PushError::Full => Error::QueueFull { depth },
        // Inline data and elements have both been checked against what the queue was made for, and
        // `SendRequest` never mixes them; what is left is a queue smaller than was asked for.
        PushError::TooLong | PushError::Mixed => Error::TooManySges { given, max },
    }
}
