//! Queue pairs: creation, posting and queries. [`crate::connect`] connects them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rnic_abi::abi::control::{
    CallObject, Function, LibraryCall, ObjectRef, QpRequest, QpRow, ReplyBody, RequestBody,
};
use rnic_abi::abi::queue::{QueueKind, SendOpcode};
use rnic_abi::shm::lease::LoanNumber;
use rnic_abi::shm::queue::{PushError, QueueMemory, SendProducer};
use rnic_abi::types::{QpId, QpType, RnrPolicy};

use crate::cq::Cq;
use crate::error::{Error, PostError};
use crate::events::Subject;
use crate::lease::{Lease, LeasedRequest, NotPosted, Posted};
use crate::pd::{Pd, PdInner};
use crate::receive::ReceiveQueue;
use crate::request::{Data, RecvRequest, SendRequest};
use crate::session::{Session, unexpected};
use crate::srq::Srq;

/// Options for creating a QP.
#[derive(Clone, Copy, Debug)]
pub struct QpOptions<'a> {
    /// CQ for completions of send requests.
    pub send_cq: &'a Cq,
    /// CQ for completions of receives.
    pub recv_cq: &'a Cq,
    /// Shared receive queue of the same protection domain; by default the QP has its own receive
    /// queue.
    pub srq: Option<&'a Srq>,
    /// Maximum outstanding send requests, rounded up to a power of two; default 64.
    pub sq_depth: u32,
    /// Maximum outstanding receives, rounded up to a power of two; default 64. `rq_depth` and
    /// `max_recv_sge` are ignored if `srq` is set.
    pub rq_depth: u32,
    /// Maximum SGEs per send request; default 4.
    pub max_send_sge: u8,
    /// Maximum SGEs per receive; default 4.
    pub max_recv_sge: u8,
    /// Maximum bytes of inline data per send request; default 64.
    pub max_inline: u16,
    /// Every send request writes a completion, not only signaled ones; default false.
    pub signal_all: bool,
    /// Policy for a message that finds no receive. The default terminates the connection (RFC 5041
    /// section 7.1). With [`RnrPolicy::Wait`] the message waits until a receive is posted, and all
    /// later messages wait too, including the responses to this QP's own Reads.
    pub rnr_policy: RnrPolicy,
    /// Returned in the QP's events; default 0.
    pub context: u64,
    /// QP type (`ibv_qp_type`); by default iWARP, which connects or accepts. An RC QP ignores
    /// `rnr_policy`: messages wait for a receive as long as the peer retries.
    pub kind: QpType,
    /// Name of the device that the program uses, for fault rules that select a device; default
    /// empty. Without a name, the daemon identifies the device of an RC or UC QP by its GID.
    pub device: &'a str,
}

impl<'a> QpOptions<'a> {
    /// Returns the defaults, with one CQ for sends and receives.
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
            kind: QpType::Iwarp,
            device: "",
        }
    }
}

/// A queue pair: one end of a connection (`ibv_create_qp(3)`).
///
/// Any number of threads may post, and the requests of a batch stay together. Dropping the QP ends
/// its connection and destroys it: outstanding requests no longer complete, but completions already
/// written can still be polled.
pub struct Qp {
    pub(crate) pd: Arc<PdInner>,
    pub(crate) id: QpId,
    max_send_sge: usize,
    max_inline: usize,
    /// Memory of the send queue. Its header contains the worker to ring after posting. There is no
    /// worker until the daemon binds the QP to one.
    memory: QueueMemory,
    sq: Mutex<SendSide>,
    /// The QP's own receive queue; `None` with an SRQ.
    rq: Option<ReceiveQueue>,
    /// Send CQ and receive CQ. They must outlive the QP.
    cqs: [Cq; 2],
    srq: Option<Srq>,
    /// Set once the QP is destroyed.
    gone: AtomicBool,
}

struct SendSide {
    producer: SendProducer,
    depth: u32,
}

impl Pd {
    /// Creates a QP in state Idle (`ibv_create_qp(3)`).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with the limit: QPs, queue depth, SGEs or inline data;
    /// [`Error::ForeignObject`] if a CQ or the SRQ belongs to another context.
    pub fn create_qp(&self, options: &QpOptions<'_>) -> Result<Qp, Error> {
        let pd = &self.inner;
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
            device: options.device.to_owned(),
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
            rq: receive.map(|memory| {
                ReceiveQueue::new(memory, options.max_recv_sge, LibraryCall::PostRecv { qp: id })
            }),
            memory: send,
            cqs,
            srq,
            gone: AtomicBool::new(false),
        })
    }
}

impl Qp {
    /// Returns the QP number, which completions and events contain.
    pub fn id(&self) -> QpId {
        self.id
    }

    /// Returns the CQ for completions of send requests.
    pub fn send_cq(&self) -> &Cq {
        &self.cqs[0]
    }

    /// Returns the CQ for completions of receives.
    pub fn recv_cq(&self) -> &Cq {
        &self.cqs[1]
    }

    /// Posts send requests in order with one doorbell (`ibv_post_send(3)`). Requests may be posted
    /// before the QP is connected; they start when it is.
    ///
    /// # Errors
    ///
    /// [`Error::QueueFull`] (poll completions, then post the rest), [`Error::TooManySges`],
    /// [`Error::InlineTooLong`], [`Error::LeasedMemory`], [`Error::ReservedWrId`]. The requests
    /// before the failed one are posted; [`PostError::posted`] is their number. The daemon checks
    /// each posted request itself, and reports a failure in the request's completion.
    pub fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        let mut posting = self.posting().map_err(|source| PostError { posted: 0, source })?;
        let failure = requests.iter().find_map(|request| posting.push(request).err());
        let posted = posting.pushed;
        match failure.or(posting.finish().err()) {
            None => Ok(()),
            Some(source) => Err(PostError { posted, source }),
        }
    }

    /// Starts a batch of requests that are built one at a time. Other threads cannot post sends
    /// until it ends.
    pub fn posting(&self) -> Result<Posting<'_>, Error> {
        self.session().check()?;
        Ok(Posting { qp: self, sq: Some(self.sq.lock()), pushed: 0, admitted: 0 })
    }

    /// Posts a send request together with its lease, which its completion returns. The request
    /// always writes a completion. On failure the error contains the lease.
    pub fn post_send_leased(&self, request: LeasedRequest) -> Result<Posted, NotPosted> {
        self.post_send_lease(request, false)
    }

    /// Same as [`Qp::post_send_leased`]. If `is_awaited`, no poll returns its completion.
    pub(crate) fn post_send_lease(
        &self,
        request: LeasedRequest,
        is_awaited: bool,
    ) -> Result<Posted, NotPosted> {
        let refuse = |lease, error| Err(NotPosted { error, lease });
        let wr_id = request.request.wr_id();
        let number = match self.loan_number(&request.lease) {
            Ok(number) => number,
            Err(error) => return refuse(request.lease, error),
        };
        let mut sq = self.sq.lock();
        let numbered = request.numbered(&number);
        let admitted = self.session().admit(self.post_of(numbered.header.opcode));
        if let Err(error) = admitted.and_then(|()| self.push_send(&mut sq, &numbered)) {
            return refuse(request.lease, error);
        }
        // Must run before the daemon sees the request, so that its completion finds the lease.
        let key = number.wr_id();
        let (pending, posted) = request.lease.lend(number, wr_id, self.id, is_awaited);
        self.cqs[0].inner.await_lease(key, pending);
        sq.producer.publish();
        drop(sq);
        // Ignores an unknown worker, because the request is already published.
        let _ = self.ring();
        Ok(posted)
    }

    /// Posts a receive together with its lease, which its completion returns. On failure the error
    /// contains the lease. The QP must have its own receive queue.
    pub fn post_recv_leased(&self, wr_id: u64, lease: Lease) -> Result<Posted, NotPosted> {
        self.post_recv_lease(wr_id, lease, false)
    }

    /// Same as [`Qp::post_recv_leased`]. If `is_awaited`, no poll returns its completion.
    pub(crate) fn post_recv_lease(
        &self,
        wr_id: u64,
        lease: Lease,
        is_awaited: bool,
    ) -> Result<Posted, NotPosted> {
        let refuse = |lease, error| Err(NotPosted { error, lease });
        let Some(rq) = &self.rq else { return refuse(lease, Error::SharedReceives) };
        let number = match self.loan_number(&lease) {
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
            // Either the closure ran or `post_one` failed.
            (_, None, _) => unreachable!("a receive was neither posted nor refused"),
        }
    }

    /// Returns a loan number for this lease. Fails if the lease is from another session or the
    /// session has ended.
    fn loan_number(&self, lease: &Lease) -> Result<LoanNumber, Error> {
        self.session().check()?;
        if !Arc::ptr_eq(lease.session(), self.session()) {
            return Err(Error::ForeignObject { what: "the lease" });
        }
        LoanNumber::next()
            .ok_or_else(|| Error::protocol("this process has used all 2^52 loan numbers"))
    }

    /// Posts receives in order (`ibv_post_recv(3)`), preferably before the QP is connected, because
    /// a message without a receive ends the connection or waits ([`QpOptions::rnr_policy`]).
    ///
    /// # Errors
    ///
    /// [`Error::QueueFull`], [`Error::TooManySges`], [`Error::LeasedMemory`] and
    /// [`Error::ReservedWrId`]; [`PostError::posted`] is the number of receives posted. A QP with a
    /// shared receive queue fails with [`Error::SharedReceives`].
    pub fn post_recv(&self, requests: &[RecvRequest<'_>]) -> Result<(), PostError> {
        match &self.rq {
            Some(rq) => rq.post(self.session(), requests),
            None => Err(PostError { posted: 0, source: Error::SharedReceives }),
        }
    }

    /// Queries state, addresses and counters (compare `ibv_query_qp(3)`).
    pub fn query(&self) -> Result<QpRow, Error> {
        self.session().check_owner()?;
        self.session().admit(Function::QueryQp.of(CallObject::Qp(self.id)))?;
        self.query_unruled()
    }

    /// Same as [`query`](Self::query), without fault rules.
    pub fn query_unruled(&self) -> Result<QpRow, Error> {
        match self.session().request(RequestBody::QueryQp { qp: self.id })? {
            ReplyBody::QpInfo(row) => Ok(row),
            other => Err(unexpected(&other)),
        }
    }

    /// Moves the QP to Error: its connection ends and all outstanding requests are flushed
    /// (`ibv_modify_qp(3)` with `IBV_QPS_ERR`).
    pub fn to_error(&self) -> Result<(), Error> {
        self.session().command(RequestBody::QpToError { qp: self.id })
    }

    /// Sets the context that the QP's events carry (compare `rdma_migrate_id(3)`).
    pub fn set_context(&self, context: u64) -> Result<(), Error> {
        let object = ObjectRef::Qp(self.id);
        self.session().command(RequestBody::SetContext { object, context })
    }

    /// Destroys the QP as dropping it does, even if other references to it remain
    /// (`ibv_destroy_qp(3)`). After this returns, outstanding requests no longer complete, and the
    /// daemon refuses all calls for this QP. Later posts have no effect.
    pub fn destroy(&self) {
        if self.gone.swap(true, Ordering::AcqRel) {
            return;
        }
        // A forked child must not change the session of its parent.
        if self.session().check_owner().is_err() {
            return;
        }
        // If the session has ended, the QP is destroyed already.
        let _ = self.session().command(RequestBody::DestroyQp { qp: self.id });
        // The daemon sent all events of this QP before that reply. Read them while the subject is
        // still open, so that they cannot be mistaken for events of a later QP with the same
        // number.
        let _ = self.session().events.drain();
        self.session().events.with(|events| events.close(Subject::Qp(self.id)));
        // The daemon writes no more completions for this QP.
        self.cqs.iter().for_each(|cq| cq.inner.orphan(self.id));
    }

    /// Empties this end of both queues after the closure `daemon` has made the daemon empty its
    /// end. Other threads cannot post until both ends are empty.
    pub(crate) fn reset_queues(
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
            Some(rq) => rq.reset_queues(renew)?,
            None => renew()?,
        }
        drop(sq);
        // The removed requests never complete: their leases are lost.
        self.cqs.iter().for_each(|cq| cq.inner.orphan(self.id));
        Ok(())
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.pd.session
    }

    /// Returns the call that posts one send request.
    #[inline]
    fn post_of(&self, opcode: u8) -> LibraryCall {
        LibraryCall::PostSend { qp: self.id, opcode }
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

    /// Rings the QP's worker. The producer index must be published first.
    #[inline]
    fn ring(&self) -> Result<(), Error> {
        match self.memory.worker() {
            Some(worker) => self.session().ring(worker, self.memory.doorbell()),
            None => Ok(()),
        }
    }
}

/// A batch of send requests. [`Posting::finish`] or dropping it publishes the requests and rings
/// the doorbell once.
pub struct Posting<'a> {
    qp: &'a Qp,
    /// `None` once the batch is finished.
    sq: Option<MutexGuard<'a, SendSide>>,
    pushed: usize,
    /// Requests whose fault rules were evaluated ahead of [`push`](Posting::push).
    admitted: usize,
}

impl Posting<'_> {
    /// Evaluates the fault rules of one more request, before [`push`](Self::push) adds it. A caller
    /// that posts all requests or none first calls this for each of them.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if a rule fails the request.
    pub fn admit(&mut self, opcode: SendOpcode) -> Result<(), Error> {
        self.qp.session().admit(self.qp.post_of(opcode as u8))?;
        self.admitted += 1;
        Ok(())
    }

    /// Evaluates the fault rules of the next request, unless [`admit`](Self::admit) has done so.
    #[cold]
    fn admit_next(&mut self, call: LibraryCall) -> Result<(), Error> {
        if self.admitted > 0 {
            self.admitted -= 1;
            return Ok(());
        }
        self.qp.session().admit(call)
    }

    /// Adds a request to the batch.
    ///
    /// # Errors
    ///
    /// Same as [`Qp::post_send`]. The failed request is not added; earlier ones are.
    #[inline]
    pub fn push(&mut self, request: &SendRequest<'_>) -> Result<(), Error> {
        self.qp.session().local_keys.check(request.wr_id(), request.elements())?;
        let call = self.qp.post_of(request.header.opcode);
        // `|` instead of `||`, so that requests without rules cost one branch.
        if self.qp.session().has_rules_for(call) | (self.admitted > 0) {
            self.admit_next(call)?;
        }
        if let Some(sq) = &mut self.sq {
            self.qp.push_send(sq, request)?;
            self.pushed += 1;
        }
        Ok(())
    }

    /// Publishes the batch and rings the doorbell.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] if the QP is bound to an unknown worker.
    #[inline]
    pub fn finish(mut self) -> Result<(), Error> {
        self.publish()
    }

    #[inline]
    fn publish(&mut self) -> Result<(), Error> {
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
        // A destructor cannot report an unknown worker.
        let _ = self.publish();
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
        // The lengths were checked against the options, and `SendRequest` never mixes inline data
        // with SGEs. The remaining cause is a queue smaller than requested.
        PushError::TooLong | PushError::Mixed => Error::TooManySges { given, max },
    }
}
