//! Posting receives, to a QP's own queue or to a shared one.

use parking_lot::{Mutex, MutexGuard};
use rnic_core::abi::queue::Sge;
use rnic_core::shm::queue::{PushError, QueueMemory, ReceiveProducer};

use crate::error::{Error, PostError};
use crate::request::RecvRequest;
use crate::session::Session;

/// The client's end of a receive queue.
pub(crate) struct ReceiveQueue {
    producer: Mutex<ReceiveProducer>,
    /// Receives that it has room for, a power of two.
    depth: u32,
    /// Most elements of a receive.
    max_sge: usize,
    memory: QueueMemory,
}

impl ReceiveQueue {
    /// Of a queue that the daemon just made for receives of at most `max_sge` elements.
    pub(crate) fn new(memory: QueueMemory, max_sge: u8) -> Self {
        ReceiveQueue {
            depth: memory.shape().capacity,
            max_sge: max_sge.into(),
            producer: Mutex::new(ReceiveProducer::new(memory.clone())),
            memory,
        }
    }

    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    /// Empties the queue when the daemon has done so, by `daemon`: nobody posts meanwhile.
    pub(crate) fn begin_anew(
        &self,
        daemon: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut producer = self.producer.lock();
        daemon()?;
        *producer = ReceiveProducer::new(self.memory.clone());
        Ok(())
    }

    /// Posts receives in order, as many as can be.
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
            if let Err(e) = allowed.and_then(|()| self.push(&mut producer, request)) {
                failure = Some(e);
                break;
            }
            posted += 1;
        }
        let rung = self.show(session, producer, posted);
        match failure.or(rung.err()) {
            None => Ok(()),
            Some(source) => Err(PostError { posted, source }),
        }
    }

    /// Posts one receive of this number; `before` runs when it stands in the queue and before the
    /// daemon is shown it.
    pub(crate) fn post_one(
        &self,
        session: &Session,
        wr_id: u64,
        sges: &[Sge],
        before: impl FnOnce(),
    ) -> Result<(), Error> {
        let mut producer = self.producer.lock();
        self.push(&mut producer, &RecvRequest::new(wr_id, sges))?;
        before();
        self.show(session, producer, 1)
    }

    /// Shows the daemon what was pushed, and rings the workers that wait for it.
    #[inline]
    fn show(
        &self,
        session: &Session,
        mut producer: MutexGuard<'_, ReceiveProducer>,
        posted: usize,
    ) -> Result<(), Error> {
        producer.publish();
        // Nobody looks for receives before a message comes, unless one is waiting for them.
        let waiting = if posted > 0 { producer.waits() } else { 0 };
        drop(producer);
        (0..u64::BITS)
            .filter(|worker| waiting >> worker & 1 == 1)
            .try_for_each(|worker| session.ring(worker, self.memory.doorbell()))
    }

    #[inline]
    fn push(&self, producer: &mut ReceiveProducer, request: &RecvRequest<'_>) -> Result<(), Error> {
        let (given, max) = (request.sges.len(), self.max_sge);
        if given > max {
            return Err(Error::TooManySges { given, max });
        }
        producer.push(request.wr_id, request.sges).map_err(|e| match e {
            PushError::Full => Error::QueueFull { depth: self.depth },
            // What is left is a queue smaller than was asked for.
            PushError::TooLong | PushError::Mixed => Error::TooManySges { given, max },
        })
    }
}
