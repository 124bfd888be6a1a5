//! Posting receives to a QP's own receive queue or to an SRQ.

use parking_lot::{Mutex, MutexGuard};
use rnic_abi::abi::control::LibraryCall;
use rnic_abi::abi::queue::Sge;
use rnic_abi::shm::queue::{PushError, QueueMemory, ReceiveProducer};

use crate::error::{Error, PostError};
use crate::request::RecvRequest;
use crate::session::Session;

/// The client's end of a receive queue.
pub(crate) struct ReceiveQueue {
    producer: Mutex<ReceiveProducer>,
    /// Maximum outstanding receives, a power of two.
    depth: u32,
    /// Maximum SGEs of a receive.
    max_sge: usize,
    memory: QueueMemory,
    /// The call that posts one receive.
    call: LibraryCall,
}

impl ReceiveQueue {
    /// Creates the client's end of a queue that the daemon has just created.
    pub(crate) fn new(memory: QueueMemory, max_sge: u8, call: LibraryCall) -> Self {
        ReceiveQueue {
            depth: memory.shape().capacity,
            max_sge: max_sge.into(),
            producer: Mutex::new(ReceiveProducer::new(memory.clone())),
            memory,
            call,
        }
    }

    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    /// Empties this end of the queue after `daemon` has caused the daemon to do the same. Other
    /// threads cannot post until then.
    pub(crate) fn reset_queues(
        &self,
        daemon: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut producer = self.producer.lock();
        daemon()?;
        *producer = ReceiveProducer::new(self.memory.clone());
        Ok(())
    }

    /// Posts receives in order, up to the first that fails.
    pub(crate) fn post(
        &self,
        session: &Session,
        requests: &[RecvRequest<'_>],
    ) -> Result<(), PostError> {
        session.check().map_err(|source| PostError { posted: 0, source })?;
        let mut producer = self.producer.lock();
        let mut posted = 0;
        let mut failure = None;
        for request in requests {
            let allowed = session.local_keys.check(request.wr_id, request.sges);
            let admitted = allowed.and_then(|()| session.admit(self.call));
            if let Err(e) = admitted.and_then(|()| self.push(&mut producer, request)) {
                failure = Some(e);
                break;
            }
            posted += 1;
        }
        let rung = self.publish(session, producer, posted);
        match failure.or(rung.err()) {
            None => Ok(()),
            Some(source) => Err(PostError { posted, source }),
        }
    }

    /// Posts one receive with this `wr_id`. `before` runs after the receive is in the queue and
    /// before it is published to the daemon.
    pub(crate) fn post_one(
        &self,
        session: &Session,
        wr_id: u64,
        sges: &[Sge],
        before: impl FnOnce(),
    ) -> Result<(), Error> {
        let mut producer = self.producer.lock();
        session.admit(self.call)?;
        self.push(&mut producer, &RecvRequest::new(wr_id, sges))?;
        before();
        self.publish(session, producer, 1)
    }

    /// Publishes the pushed receives and rings the workers that wait for them.
    #[inline]
    fn publish(
        &self,
        session: &Session,
        mut producer: MutexGuard<'_, ReceiveProducer>,
        posted: usize,
    ) -> Result<(), Error> {
        producer.publish();
        // A worker checks for receives only when a message arrives, or if rung while a message
        // waits for a receive.
        let waiting = if posted > 0 { producer.waits() } else { 0 };
        drop(producer);
        (0..u64::BITS)
            .filter(|worker| waiting >> worker & 1 == 1)
            .try_for_each(|worker| session.ring(worker, self.memory.doorbell()))
    }

    #[inline]
    fn push(&self, producer: &mut ReceiveProducer, request: &RecvRequest<'_>) -> Result<(), Error> {
        let given = request.sges.len();
        let max = self.max_sge;
        if given > max {
            return Err(Error::TooManySges { given, max });
        }
        producer.push(request.wr_id, request.sges).map_err(|e| match e {
            PushError::Full => Error::QueueFull { depth: self.depth },
            // The length is checked above, so the queue is smaller than requested.
            PushError::TooLong | PushError::Mixed => Error::TooManySges { given, max },
        })
    }
}
