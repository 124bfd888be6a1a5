//! Requests that a task awaits. Their completions go to the task and never to [`Cq::poll`].
//!
//! A waiting task also takes completions of other requests from the queue and keeps them for the
//! next poll, so awaited and polled requests may share a CQ.

use crate::completion::Completion;
use crate::cq::{Cq, Watch};
use crate::error::Error;
use crate::lease::{Lease, Posted};
use crate::qp::Qp;
use crate::tasks::Armed;

impl Qp {
    /// Sends the bytes of a lease as one message and waits for the completion. Returns the lease.
    ///
    /// The Send completes when the bytes may be reused. Over TCP, the bytes have then been handed
    /// to TCP, but the peer may not have received them. Dropping the future does not cancel the
    /// Send; its completion returns the bytes to their region.
    ///
    /// # Errors
    ///
    /// Same as [`Qp::post_send_leased`]; [`Error::Failed`] if the Send failed. The bytes then
    /// return to their region and can be leased again.
    ///
    /// ```no_run
    /// # use rnic_client::*;
    /// # async fn echo(pd: &Pd, qp: &Qp) -> Result<(), Error> {
    /// let region = pd.reg_local(1 << 20)?;
    /// let (message, length) = qp.recv(region.lease(0..4096)?).await?;
    /// let mut answer = region.lease(4096..4096 + length as u64)?;
    /// answer.copy_from_slice(&message[..length]);
    /// qp.send(answer).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn send(&self, lease: Lease) -> Result<Lease, Error> {
        let posted = self.post_send_lease(lease.send(0), true)?;
        let (lease, _) = self.send_cq().finished(posted).await?;
        Ok(lease)
    }

    /// Posts a lease as a receive and waits for the message. Returns the lease and the length of
    /// the message in bytes. The receive is posted when the future is first polled. Messages fill
    /// receives in the order in which the receives were posted.
    ///
    /// # Errors
    ///
    /// Same as [`Qp::post_recv_leased`]; [`Error::Failed`] if the receive failed, for example with
    /// status `WrFlush` when the connection ends.
    pub async fn recv(&self, lease: Lease) -> Result<(Lease, usize), Error> {
        let posted = self.post_recv_lease(0, lease, true)?;
        let (lease, completion) = self.recv_cq().finished(posted).await?;
        Ok((lease, completion.byte_len as usize))
    }
}

impl Cq {
    /// Waits for the completion of an awaited request of this CQ.
    async fn finished(&self, mut posted: Posted) -> Result<(Lease, Completion), Error> {
        loop {
            posted = match self.poll_posted(posted)? {
                Ok(finished) => return Ok(finished),
                Err(posted) => posted,
            };
            let watch = Watch::begin(&self.inner);
            let seen = watch.prepare_sleep()?;
            // Dropping `armed` disarms the CQ unless its event has arrived.
            let armed = Armed::new(&watch);
            posted = match self.poll_posted(posted)? {
                Ok(finished) => return Ok(finished),
                Err(posted) => posted,
            };
            self.inner.channel.task_wait_beyond(self.inner.id, seen).await?;
            armed.fired();
        }
    }

    fn poll_posted(&self, posted: Posted) -> Result<Result<(Lease, Completion), Posted>, Error> {
        self.inner.deliver()?;
        match posted.finish() {
            Ok((lease, completion)) => Ok(Ok((lease, completion.ok()?))),
            Err(posted) if posted.is_lost() => Err(Error::DestroyedQp),
            Err(posted) => Ok(Err(posted)),
        }
    }
}
