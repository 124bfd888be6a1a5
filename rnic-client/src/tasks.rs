//! Waiting in tasks of a tokio runtime (feature `tokio`).
//!
//! Posting and polling never wait, so tasks call the usual functions. Each blocking call for
//! completions, connections, disconnections or events has a counterpart here that yields the thread
//! to other tasks while it waits. Tasks and blocking calls of other threads may wait for the same
//! objects at the same time.
//!
//! All functions require a tokio runtime with I/O enabled and panic outside one, as
//! [`AsyncFd`](tokio::io::unix::AsyncFd) does. They have no timeouts: use
//! [`tokio::time::timeout`]. Dropping a future only stops the wait, unless its method documents
//! another effect. Some functions start with a request to the daemon, which blocks the thread for a
//! few microseconds.
//!
//! ```no_run
//! use rnic_client::*;
//!
//! # async fn serve(context: Context, pd: Pd) -> Result<(), Error> {
//! let listener = context.listen("127.0.0.1:7471", 16)?;
//! loop {
//!     let request = listener.accept_request_async().await?;
//!     let context = context.clone();
//!     let pd = pd.clone();
//!     tokio::spawn(async move {
//!         let cq = context.create_cq(16, None)?;
//!         let qp = pd.create_qp(&QpOptions::new(&cq))?;
//!         // Post receives here, then:
//!         request.accept_async(&qp, &AcceptOptions::default()).await?;
//!         loop {
//!             for completion in cq.completions().await? {
//!                 println!("{:?}", completion.ok()?);
//!             }
//!         }
//!         # #[allow(unreachable_code)]
//!         # Ok::<(), Error>(())
//!     });
//! }
//! # }
//! ```

use rnic_abi::abi::control::{DisconnectReason, Event};
use tokio::net::ToSocketAddrs;

use crate::addresses::{concerns_address, no_address, unresolved};
use crate::completion::Completion;
use crate::connect::{Claim, ConnectOptions, Connected, outcome};
use crate::context::Context;
use crate::cq::{Cq, Watch};
use crate::error::Error;
use crate::events::{Ending, Subject, concerns_end, is_connection_request, settles_connection};
use crate::listener::{AcceptOptions, ConnectionRequest, Listener};
use crate::qp::Qp;

/// Maximum number of completions that [`Cq::completions`] returns at once.
const BATCH: usize = 64;

impl Cq {
    /// Waits for completions and returns 1 to 64 of them, oldest first.
    ///
    /// Polls the CQ. If it is empty, arms it, polls again and sleeps until its event. Several tasks
    /// and threads may wait; each completion goes to one of them. Dropping the future loses no
    /// completion.
    pub async fn completions(&self) -> Result<Vec<Completion>, Error> {
        self.admit_poll()?;
        loop {
            if let Some(some) = self.poll_some()? {
                return Ok(some);
            }
            let watch = Watch::begin(&self.inner);
            let seen = watch.prepare_sleep()?;
            // Dropping `armed` disarms the CQ unless its event has arrived.
            let armed = Armed::new(&watch);
            if let Some(some) = self.poll_some()? {
                return Ok(some);
            }
            self.inner.channel.task_wait_beyond(self.inner.id, seen).await?;
            armed.fired();
        }
    }

    fn poll_some(&self) -> Result<Option<Vec<Completion>>, Error> {
        let mut space = [Completion::default(); BATCH];
        let n = self.poll_admitted(&mut space)?;
        Ok((n > 0).then(|| space[..n].to_vec()))
    }
}

/// A CQ armed for a task. Disarms the CQ when dropped without the event.
pub(crate) struct Armed<'a>(Option<&'a Watch<'a>>);

impl<'a> Armed<'a> {
    pub(crate) fn new(watch: &'a Watch<'a>) -> Self {
        Armed(Some(watch))
    }

    /// Drops the value without disarming the CQ, because its event has been received.
    pub(crate) fn fired(mut self) {
        self.0 = None;
    }
}

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        if let Some(watch) = self.0 {
            watch.disarm();
        }
    }
}

impl Qp {
    /// Connects an Idle QP like [`Qp::connect`]. The runtime resolves names, and
    /// [`ConnectOptions::timeout`] is ignored. Dropping the future aborts the attempt.
    pub async fn connect_async(
        &self,
        peer: impl ToSocketAddrs,
        options: &ConnectOptions,
    ) -> Result<Connected, Error> {
        let _claim = Claim::new(self.session(), Subject::Qp(self.id), settles_connection);
        let mut last = no_address();
        for peer in tokio::net::lookup_host(peer).await.map_err(unresolved)? {
            self.start_connect(peer, options)?;
            match self.settle_async().await {
                Err(error) if concerns_address(&error) => last = error,
                settled => return settled,
            }
        }
        Err(last)
    }

    /// Waits for the outcome of a connection attempt like [`Qp::wait_connected`]. Dropping the
    /// future aborts the attempt.
    pub async fn wait_connected_async(&self) -> Result<Connected, Error> {
        let _claim = Claim::new(self.session(), Subject::Qp(self.id), settles_connection);
        self.settle_async().await
    }

    /// Waits for the end of the connection like [`Qp::wait_disconnected`].
    pub async fn wait_disconnected_async(&self) -> Result<DisconnectReason, Error> {
        let _claim = Claim::new(self.session(), Subject::Qp(self.id), concerns_end);
        loop {
            match self.session().task_event(|events| events.ending(self.id)).await? {
                Ending::Ended(reason) => return Ok(reason),
                Ending::PeerClosed => self.finish_sending()?,
            }
        }
    }

    /// Waits for the outcome of an attempt. The caller must hold the claim.
    async fn settle_async(&self) -> Result<Connected, Error> {
        let attempt = Attempt(Some(self));
        let subject = Subject::Qp(self.id);
        let decision =
            self.session().task_event(|events| events.take(subject, settles_connection)).await?;
        attempt.settled();
        outcome(decision)
    }
}

/// A connection attempt that a task waits for. Aborts it when dropped without an outcome.
struct Attempt<'a>(Option<&'a Qp>);

impl Attempt<'_> {
    fn settled(mut self) {
        self.0 = None;
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if let Some(qp) = self.0 {
            // Refused if the attempt is over already; then there is nothing to abort.
            let _ = qp.abort();
        }
    }
}

impl Listener {
    /// Waits for a connection request like [`Listener::accept_request`]. Several tasks and threads
    /// may wait; each request goes to one of them.
    pub async fn accept_request_async(&self) -> Result<ConnectionRequest, Error> {
        let subject = Subject::Listener(self.id());
        let _claim = Claim::new(self.session(), subject, is_connection_request);
        let event =
            self.session().task_event(|events| events.take(subject, is_connection_request)).await?;
        ConnectionRequest::from_event(self.session(), event)
            .map_err(|other| Error::protocol(format!("{other:?} is not a request")))
    }
}

impl ConnectionRequest {
    /// Accepts with an Idle QP and waits until the connection is established, like
    /// [`ConnectionRequest::accept`]. [`AcceptOptions::timeout`] is ignored. Dropping the future
    /// ends the connection.
    pub async fn accept_async(self, qp: &Qp, options: &AcceptOptions) -> Result<Connected, Error> {
        let _claim = Claim::new(qp.session(), Subject::Qp(qp.id), settles_connection);
        self.start_accept(qp, options)?;
        qp.settle_async().await
    }
}

impl Context {
    /// Returns the next connection event or asynchronous event that no other call has claimed, like
    /// [`Context::next_event`].
    pub async fn next_event_async(&self) -> Result<Event, Error> {
        self.session.task_event(|events| events.take_any()).await
    }
}
