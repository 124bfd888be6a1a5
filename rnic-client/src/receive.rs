//! Posting receives, to a QP's own queue or to a shared one.

use parking_lot::Mutex;
use rnic_core::shm::queue::{PushError, QueueMemory, ReceiveProducer};

use crate::error::{Error, PostError};
use crate::request::RecvRequest;
use crate::session::Session;

/// The client's end of a receive queue.
pub(crate) struct ReceiveQueue {
    producer: Mutex<ReceiveProducer>,
    /// Receives it holds.
    depth: u32,
    /// Elements per receive.
    max_sge: usize,
    doorbell: u32,
}

impl ReceiveQueue {
    /// Of a queue that the daemon just made for receives of at most `max_sge` elements.
    pub(crate) fn new(memory: QueueMemory, max_sge: u8) -> Self {
        ReceiveQueue {
            depth: memory.shape().capacity,
            max_sge: max_sge.into(),
            doorbell: memory.doorbell(),
            producer: Mutex::new(ReceiveProducer::new(memory)),
        }
    }

    pub(crate) fn depth(&self) -> u32 {
        self.depth
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
            if let Err(e) = self.push(&mut producer, request) {
                failure = Some(e);
                break;
            }
            posted += 1;
        }
        producer.publish();
        // Nobody looks for receives before a message comes, unless one is waiting for them (M11).
        let waiting = if posted > 0 { producer.waits() } else { 0 };
        drop(producer);
        let rung = (0..u64::BITS)
            .filter(|worker| waiting >> worker & 1 == 1)
            .try_for_each(|worker| session.ring(worker, self.doorbell));
        match failure.or(rung.err()) {
            None => Ok(()),
            Some(source) => Err(PostError { posted, source }),
        }
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
