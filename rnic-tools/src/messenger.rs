//! Short messages over a queue pair: the control messages of `rnic-copy`.
//!
//! Owns a QP, its CQ and a small region with message buffers, and keeps every receive posted. It
//! does not interpret messages. Other requests may be posted on the same QP with a `wr_id` below
//! [`OWN`]; their completions are returned like messages.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use rnic_client::{
    Access, Completion, CompletionOpcode, Context, Cq, Error, Mr, Pd, Qp, QpOptions,
};
use rnic_client::{RecvRequest, SendRequest};

use crate::link::LinkError;

/// Capacities of a messenger.
#[derive(Clone, Copy)]
pub(crate) struct MessengerSizes {
    /// Longest message in bytes, in either direction.
    pub(crate) length: u32,
    /// Messages that may arrive before the first of them is read.
    pub(crate) receives: u32,
    /// Messages that may be in flight to the peer.
    pub(crate) sends: u32,
    /// Other requests that may be outstanding on the QP.
    pub(crate) others: u32,
}

/// One end of a connection for messages.
pub(crate) struct Messenger {
    qp: Qp,
    cq: Cq,
    /// Buffers for receives, then buffers for sends, each `stride` bytes.
    region: Mr,
    sizes: MessengerSizes,
    stride: u64,
    peer: SocketAddr,
    patience: Duration,
    /// Free buffers for sends.
    free: Vec<u32>,
    /// Completions not returned yet; at most all receives and other requests.
    arrived: VecDeque<Arrived>,
    /// The first request that failed. Reported after everything that arrived before it.
    failure: Option<Error>,
    /// The last message returned.
    message: Vec<u8>,
}

/// Result of [`Messenger::next`].
pub(crate) enum MessengerEvent<'a> {
    /// A message from the peer.
    Message(&'a [u8]),
    /// One of the other requests has completed.
    Done(u64),
}

enum Arrived {
    Message { slot: u32, length: u32 },
    Done(u64),
}

impl Messenger {
    /// Creates an unconnected QP with all receives posted.
    pub(crate) fn new(
        context: &Context,
        pd: &Pd,
        sizes: MessengerSizes,
        peer: SocketAddr,
        patience: Duration,
    ) -> Result<Self, LinkError> {
        let MessengerSizes { length, receives, sends, others } = sizes;
        let cq = context.create_cq(receives + sends + others, None)?;
        let mut options = QpOptions::new(&cq);
        options.sq_depth = sends + others;
        options.rq_depth = receives;
        options.max_send_sge = 1;
        options.max_recv_sge = 1;
        options.max_inline = 0;
        let qp = pd.create_qp(&options)?;
        let stride = u64::from(length).next_multiple_of(64);
        let buffer = context.create_shared_buffer(stride * u64::from(receives + sends))?;
        // The peer has no rights to this region: it can only send messages.
        let region = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)?;
        let messenger = Messenger {
            qp,
            cq,
            region,
            sizes,
            stride,
            peer,
            patience,
            free: (receives..receives + sends).rev().collect(),
            arrived: VecDeque::with_capacity((receives + others) as usize),
            failure: None,
            message: Vec::with_capacity(length as usize),
        };
        (0..receives).try_for_each(|slot| messenger.post_receive(slot))?;
        Ok(messenger)
    }

    pub(crate) fn qp(&self) -> &Qp {
        &self.qp
    }

    /// Sends a message. Waits if no buffer is free.
    pub(crate) fn send(&mut self, message: &[u8]) -> Result<(), LinkError> {
        self.send_after(None, message)
    }

    /// Posts a request, and a message that reaches the peer after it. Waits if no buffer is free.
    pub(crate) fn send_after(
        &mut self,
        before: Option<SendRequest<'_>>,
        message: &[u8],
    ) -> Result<(), LinkError> {
        let slot = loop {
            match self.free.pop() {
                Some(slot) => break slot,
                None => self.pump()?,
            }
            if let Some(e) = self.failure.take() {
                return Err(LinkError::after(e, &self.qp, self.peer));
            }
        };
        let at = self.at(slot);
        self.region.write_at(at, message)?;
        // The length fits: messages are at most `sizes.length` bytes.
        let sge = [self.region.sge(at, message.len() as u32)];
        let send = SendRequest::send(OWN | SEND | u64::from(slot), &sge).signaled();
        match before {
            Some(before) => self.qp.post_send(&[before, send])?,
            None => self.qp.post_send(&[send])?,
        }
        Ok(())
    }

    /// Waits for the next message or completion. Posts the receive again before it returns a
    /// message. Everything that arrived before a failure is returned before the failure.
    pub(crate) fn next(&mut self) -> Result<MessengerEvent<'_>, LinkError> {
        loop {
            match self.arrived.pop_front() {
                Some(Arrived::Done(wr_id)) => return Ok(MessengerEvent::Done(wr_id)),
                Some(Arrived::Message { slot, length }) => {
                    self.message.resize(length as usize, 0);
                    self.region.read_at(self.at(slot), &mut self.message)?;
                    // After a failure, receives are flushed at once, which does no harm.
                    self.post_receive(slot)?;
                    return Ok(MessengerEvent::Message(&self.message));
                }
                None => {}
            }
            match self.failure.take() {
                Some(e) => return Err(LinkError::after(e, &self.qp, self.peer)),
                None => self.pump()?,
            }
        }
    }

    /// Waits until all messages have been sent, then closes the connection gracefully.
    pub(crate) fn finish(mut self) {
        while self.free.len() < self.sizes.sends as usize && self.failure.is_none() {
            if self.pump().is_err() {
                return;
            }
        }
        super::link::end(&self.qp);
    }

    /// Waits for at least one completion and sorts all completions found.
    fn pump(&mut self) -> Result<(), LinkError> {
        let mut completions = [Completion::default(); 16];
        let n = self.cq.wait(&mut completions, Some(self.patience))?;
        if n == 0 {
            return Err(LinkError::Silent { peer: self.peer, after: self.patience });
        }
        for completion in &completions[..n] {
            self.sort(completion);
        }
        Ok(())
    }

    fn sort(&mut self, completion: &Completion) {
        // The lower half of the wr_id is the buffer.
        let slot = completion.wr_id as u32;
        match completion.ok() {
            Err(e) => {
                self.failure.get_or_insert(e);
            }
            Ok(c) if c.wr_id & OWN == 0 => self.arrived.push_back(Arrived::Done(c.wr_id)),
            Ok(c) if c.opcode == CompletionOpcode::Receive => {
                self.arrived.push_back(Arrived::Message { slot, length: c.byte_len });
            }
            Ok(_) => self.free.push(slot),
        }
    }

    fn post_receive(&self, slot: u32) -> Result<(), LinkError> {
        let sge = [self.region.sge(self.at(slot), self.sizes.length)];
        Ok(self.qp.post_recv(&[RecvRequest::new(OWN | u64::from(slot), &sge)])?)
    }

    fn at(&self, slot: u32) -> u64 {
        u64::from(slot) * self.stride
    }
}

/// Set in the `wr_id` of the messenger's own requests.
pub(crate) const OWN: u64 = 1 << 63;
/// Also set in the `wr_id` of its sends.
const SEND: u64 = 1 << 62;
