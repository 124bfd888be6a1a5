//! Requests that a task awaits: their completions go to the task and to no [`Cq::poll`].
//!
//! A task that waits takes completions of other requests out of the queue as well. They are kept
//! for whoever polls next, so that awaited and polled requests may share a CQ.

use crate::completion::Completion;
use crate::cq::{Cq, Watch};
use crate::error::Error;
use crate::lease::{Lease, Posted};
use crate::qp::Qp;
use crate::tasks::Armed;

impl Qp {
    /// Sends the bytes of a lease as one message and waits for the completion. Returns the lease.
    ///
    /// The Send completes when the bytes may be used again: on the TCP path they have been handed
    /// to TCP, which does not say that the peer has them. Dropping the future does not take the
    /// Send back; the bytes return to their region with its completion.
    ///
    /// # Errors
    ///
    /// Those of [`Qp::post_send_leased`]; [`Error::Failed`] if the Send failed. The bytes then
    /// return to their region, from which they can be leased again.
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
    /// the message in bytes. The receive is posted when the future is first polled, and messages go
    /// to receives in the order in which these were posted.
    ///
    /// # Errors
    ///
    /// Those of [`Qp::post_recv_leased`]; [`Error::Failed`] if the receive failed, as it does with
    /// the status `WrFlush` when the connection ends.
    pub async fn recv(&self, lease: Lease) -> Result<(Lease, usize), Error> {
        let posted = self.post_recv_lease(0, lease, true)?;
        let (lease, completion) = self.recv_cq().finished(posted).await?;
        Ok((lease, completion.byte_len as usize))
    }
}

impl Cq {
    /// Waits for the completion of an awaited request that was posted for this CQ.
    async fn finished(&self, mut posted: Posted) -> Result<(Lease, Completion), Error> {
        loop {
            posted = match self.look_for(posted)? {
                Ok(finished) => return Ok(finished),
                Err(posted) => posted,
            };
            let watch = Watch::begin(&self.inner);
            let seen = watch.prepare_sleep()?;
            // From here on the arm is taken back unless its event has come.
            let armed = Armed::new(&watch);
            posted = match self.look_for(posted)? {
                Ok(finished) => return Ok(finished),
                Err(posted) => posted,
            };
            self.inner.channel.task_wait_beyond(self.inner.id, seen).await?;
            armed.fired();
        }
    }

    fn look_for(&self, posted: Posted) -> Result<Result<(Lease, Completion), Posted>, Error> {
        self.inner.deliver()?;
        match posted.finish() {
            Ok((lease, completion)) => Ok(Ok((lease, completion.ok()?))),
            Err(posted) if posted.is_lost() => Err(Error::DestroyedQp),
            Err(posted) => Ok(Err(posted)),
        }
    }
}
