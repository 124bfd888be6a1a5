//! Queue pairs: making them, posting to them, asking about them. [`crate::connect`] connects them.

use std::sync::Arc;

use parking_lot::Mutex;
use rnic_core::abi::control::{ObjectRef, QpRequest, QpRow, ReplyBody, RequestBody};
use rnic_core::abi::queue::QueueKind;
use rnic_core::shm::queue::{PushError, QueueMemory, ReceiveProducer, SendProducer};
use rnic_core::types::{NoReceive, QpId};

use crate::cq::Cq;
use crate::error::{Error, PostError};
use crate::events::Subject;
use crate::pd::PdInner;
use crate::request::{Data, RecvRequest, SendRequest};
use crate::session::{Session, unexpected};

/// How to make a queue pair.
#[derive(Clone, Copy)]
pub struct QpOptions<'a> {
    /// Where completions of send requests go.
    pub send_cq: &'a Cq,
    /// Where completions of receives go.
    pub recv_cq: &'a Cq,
    /// Send requests outstanding; default 64, rounded up to a power of two.
    pub sq_depth: u32,
    /// Receives outstanding; default 64, rounded up to a power of two.
    pub rq_depth: u32,
    /// Elements per send request; default 4.
    pub max_send_sge: u8,
    /// Elements per receive; default 4.
    pub max_recv_sge: u8,
    /// Octets of inline data per send request; default 64.
    pub max_inline: u16,
    /// Write a completion for every send request, not only for those marked signaled; default no.
    pub signal_all: bool,
    /// Returned in the QP's events; default 0.
    pub context: u64,
}

impl<'a> QpOptions<'a> {
    /// Defaults, with one CQ for sends and receives.
    pub fn new(cq: &'a Cq) -> Self {
        QpOptions {
            send_cq: cq,
            recv_cq: cq,
            sq_depth: 64,
            rq_depth: 64,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 64,
            signal_all: false,
            context: 0,
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
    max_recv_sge: usize,
    max_inline: usize,
    /// The send queue's memory, whose header says which worker to ring after posting to either
    /// queue: none until the QP is bound to one (M14).
    memory: QueueMemory,
    sq: Mutex<SendSide>,
    rq: Mutex<ReceiveSide>,
    /// They outlive their QP.
    cqs: [Cq; 2],
}

struct SendSide {
    producer: SendProducer,
    depth: u32,
}

struct ReceiveSide {
    producer: ReceiveProducer,
    depth: u32,
}

impl Qp {
    pub(crate) fn create(pd: &Arc<PdInner>, options: &QpOptions<'_>) -> Result<Qp, Error> {
        let session = &pd.session;
        let cqs = [options.send_cq.clone(), options.recv_cq.clone()];
        if cqs.iter().any(|cq| !Arc::ptr_eq(&cq.inner.session, session)) {
            return Err(Error::ForeignObject { what: "a completion queue" });
        }
        let reply = session.request(RequestBody::CreateQp(QpRequest {
            pd: pd.id,
            send_cq: cqs[0].inner.id,
            recv_cq: cqs[1].inner.id,
            srq: None,
            sq_depth: options.sq_depth,
            rq_depth: options.rq_depth,
            max_send_sge: options.max_send_sge,
            max_recv_sge: options.max_recv_sge,
            max_inline: options.max_inline,
            signal_all: options.signal_all,
            no_receive: NoReceive::Terminate,
            context: options.context,
        }))?;
        let ReplyBody::Qp { qp: id, sq, rq, .. } = reply else { return Err(unexpected(&reply)) };
        let send = session.queue(sq, QueueKind::Send)?;
        let receive = session.queue(rq, QueueKind::Receive)?;
        session.events.with(|events| events.open(Subject::Qp(id)));
        Ok(Qp {
            pd: pd.clone(),
            id,
            max_send_sge: options.max_send_sge.into(),
            max_recv_sge: options.max_recv_sge.into(),
            max_inline: options.max_inline.into(),
            sq: Mutex::new(SendSide {
                producer: SendProducer::new(send.clone()),
                depth: sq.shape.capacity,
            }),
            rq: Mutex::new(ReceiveSide {
                producer: ReceiveProducer::new(receive),
                depth: rq.shape.capacity,
            }),
            memory: send,
            cqs,
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

    /// Posts send requests in order, ringing once (`ibv_post_send(3)`). They may be posted before
    /// the QP is connected and start when it is.
    ///
    /// Checks what can be known here: room in the queue, number of elements, inline length. The
    /// daemon checks everything again and the rest, and fails the request with a completion.
    pub fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        self.alive()?;
        let mut sq = self.sq.lock();
        let mut posted = 0;
        let mut failure = None;
        for request in requests {
            if let Err(e) = self.push_send(&mut sq, request) {
                failure = Some(e);
                break;
            }
            posted += 1;
        }
        sq.producer.publish();
        drop(sq);
        self.finish(posted, posted > 0, failure)
    }

    /// Posts receives in order (`ibv_post_recv(3)`), at best before the QP is connected: a message
    /// that finds none ends the connection.
    ///
    /// Checks what can be known here: room in the queue and number of elements.
    pub fn post_recv(&self, requests: &[RecvRequest<'_>]) -> Result<(), PostError> {
        self.alive()?;
        let mut rq = self.rq.lock();
        let mut posted = 0;
        let mut failure = None;
        for request in requests {
            if let Err(e) = self.push_recv(&mut rq, request) {
                failure = Some(e);
                break;
            }
            posted += 1;
        }
        rq.producer.publish();
        // Nobody looks for receives before a message comes, unless one is waiting for them (M11).
        let awaited = posted > 0 && rq.producer.waits();
        drop(rq);
        self.finish(posted, awaited, failure)
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

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.pd.session
    }

    #[inline]
    fn push_send(&self, sq: &mut SendSide, request: &SendRequest<'_>) -> Result<(), Error> {
        let (elements, inline) = match &request.data {
            Data::Elements(elements) => (*elements, &[][..]),
            Data::Element(element) => (std::slice::from_ref(element), &[][..]),
            Data::Inline(octets) => (&[][..], *octets),
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

    #[inline]
    fn push_recv(&self, rq: &mut ReceiveSide, request: &RecvRequest<'_>) -> Result<(), Error> {
        let given = request.sges.len();
        if given > self.max_recv_sge {
            return Err(Error::TooManySges { given, max: self.max_recv_sge });
        }
        rq.producer
            .push(request.wr_id, request.sges)
            .map_err(|e| push_error(e, rq.depth, given, self.max_recv_sge))
    }

    #[inline]
    fn alive(&self) -> Result<(), PostError> {
        self.session().check().map_err(|source| PostError { posted: 0, source })
    }

    /// Rings for the whole batch, after its producer index has been published.
    #[inline]
    fn finish(&self, posted: usize, ring: bool, failure: Option<Error>) -> Result<(), PostError> {
        let rung = match ring.then(|| self.memory.worker()).flatten() {
            Some(worker) => self.session().ring(worker, self.memory.doorbell()),
            None => Ok(()),
        };
        match failure.or(rung.err()) {
            None => Ok(()),
            Some(source) => Err(PostError { posted, source }),
        }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // A session that has ended has destroyed it already.
        let _ = self.session().command(RequestBody::DestroyQp { qp: self.id });
        // What the daemon had to say of it was sent before that reply: read it while it still has
        // a place to go, so that it cannot be taken for an event of a later QP of the same number.
        let _ = self.session().events.drain();
        self.session().events.with(|events| events.close(Subject::Qp(self.id)));
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
