//! The same waits for tasks of a tokio runtime, with the feature `tokio`.
//!
//! Posting and polling never wait, so tasks call them as they are. What waits has a counterpart
//! here that gives the thread to other tasks meanwhile: for completions, for connections and their
//! ends, for events. Tasks and blocking calls of other threads may wait for the same things at the
//! same time.
//!
//! All of it runs inside of a tokio runtime with I/O enabled, and panics outside of one, as
//! [`AsyncFd`] does. There are no timeouts: put [`tokio::time::timeout`] around it. A future that
//! is dropped takes nothing along, unless its method says otherwise. The requests to the daemon
//! that some of these begin with are answered within some microseconds, for which the thread waits.
//!
//! ```no_run
//! use rnic_client::*;
//!
//! # async fn serve(context: Context, pd: Pd) -> Result<(), Error> {
//! let listener = context.listen("127.0.0.1:7471", 16)?;
//! loop {
//!     let request = listener.accept_request_async().await?;
//!     let (context, pd) = (context.clone(), pd.clone());
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

use std::future::poll_fn;
use std::os::fd::AsFd;
use std::task::Poll;

use rnic_core::abi::control::{DisconnectReason, Event};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::ToSocketAddrs;

use crate::addresses::{concerns_address, no_address, unresolved};
use crate::completion::Completion;
use crate::connect::{Claim, ConnectOptions, Connected, outcome};
use crate::context::Context;
use crate::cq::{Cq, Watch};
use crate::error::Error;
use crate::events::{Ending, Subject, asks_to_connect, concerns_end, settles_connection};
use crate::inbox::Inbox;
use crate::listener::{AcceptOptions, ConnectionRequest, Listener};
use crate::qp::Qp;

/// Most completions that [`Cq::completions`] returns at once.
const BATCH: usize = 64;

impl Cq {
    /// The next completions, oldest first, as soon as there are any: at least one, at most 64.
    ///
    /// Polls, and if there is nothing arms the CQ, polls again and sleeps until its event comes.
    /// Several tasks and threads may wait; each completion goes to one of them. Dropping the future
    /// loses no completion.
    pub async fn completions(&self) -> Result<Vec<Completion>, Error> {
        loop {
            if let Some(some) = self.poll_some()? {
                return Ok(some);
            }
            let watch = Watch::begin(&self.inner);
            let seen = watch.prepare_sleep()?;
            // From here on the arm is taken back unless its event has come.
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
        let n = self.poll(&mut space)?;
        Ok((n > 0).then(|| space[..n].to_vec()))
    }
}

/// A CQ that was armed for a task, which may leave without the event.
pub(crate) struct Armed<'a>(Option<&'a Watch<'a>>);

impl<'a> Armed<'a> {
    pub(crate) fn new(watch: &'a Watch<'a>) -> Self {
        Armed(Some(watch))
    }

    /// The event has come.
    pub(crate) fn fired(mut self) {
        self.0 = None;
    }
}

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        if let Some(watch) = self.0 {
            watch.left_armed();
        }
    }
}

impl Qp {
    /// Connects an Idle QP, as [`Qp::connect`] does; names are resolved by the runtime, and
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

    /// Waits until a connection that was begun stands or has failed, as [`Qp::wait_connected`]
    /// does. Dropping the future aborts the attempt.
    pub async fn wait_connected_async(&self) -> Result<Connected, Error> {
        let _claim = Claim::new(self.session(), Subject::Qp(self.id), settles_connection);
        self.settle_async().await
    }

    /// Waits until the connection has ended, as [`Qp::wait_disconnected`] does.
    pub async fn wait_disconnected_async(&self) -> Result<DisconnectReason, Error> {
        let _claim = Claim::new(self.session(), Subject::Qp(self.id), concerns_end);
        loop {
            match self.session().task_event(|events| events.ending(self.id)).await? {
                Ending::Ended(reason) => return Ok(reason),
                Ending::PeerClosed => self.finish_as_well()?,
            }
        }
    }

    /// Waits for the decision about an attempt; the caller has claimed it.
    async fn settle_async(&self) -> Result<Connected, Error> {
        let attempt = Attempt(Some(self));
        let subject = Subject::Qp(self.id);
        let decision =
            self.session().task_event(|events| events.take(subject, settles_connection)).await?;
        attempt.settled();
        outcome(decision)
    }
}

/// An attempt to connect whose outcome somebody awaits.
struct Attempt<'a>(Option<&'a Qp>);

impl Attempt<'_> {
    fn settled(mut self) {
        self.0 = None;
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if let Some(qp) = self.0 {
            // Refused if it is over already, or the daemon is gone: as was wanted.
            let _ = qp.abort();
        }
    }
}

impl Listener {
    /// Waits for a peer that asks to connect, as [`Listener::accept_request`] does. Several tasks
    /// and threads may wait; each request goes to one of them.
    pub async fn accept_request_async(&self) -> Result<ConnectionRequest, Error> {
        let subject = Subject::Listener(self.id());
        let _claim = Claim::new(self.session(), subject, asks_to_connect);
        let event =
            self.session().task_event(|events| events.take(subject, asks_to_connect)).await?;
        ConnectionRequest::from_event(self.session(), event)
            .map_err(|other| Error::protocol(format!("{other:?} asks for no connection")))
    }
}

impl ConnectionRequest {
    /// Accepts with an Idle QP and waits until the connection stands, as
    /// [`ConnectionRequest::accept`] does; [`AcceptOptions::timeout`] is of no account. Dropping
    /// the future ends the connection.
    pub async fn accept_async(self, qp: &Qp, options: &AcceptOptions) -> Result<Connected, Error> {
        let _claim = Claim::new(qp.session(), Subject::Qp(qp.id), settles_connection);
        self.start_accept(qp, options)?;
        qp.settle_async().await
    }
}

impl Context {
    /// The next connection or asynchronous event that no other call has claimed, as
    /// [`Context::next_event`] has it.
    pub async fn next_event_async(&self) -> Result<Event, Error> {
        self.of_session().task_event(|events| events.take_any()).await
    }
}

/// Waits until `take` finds something among the packets of an inbox.
///
/// The socket is registered with the runtime for the length of this wait, by a descriptor of its
/// own: a queue or context belongs to no runtime, and any number of tasks may wait for it.
pub(crate) async fn taken<S, T>(
    inbox: &Inbox<S>,
    mut take: impl FnMut(&mut S) -> Option<T>,
) -> Result<T, Error> {
    let socket = inbox.as_fd().try_clone_to_owned();
    // Deprecated for descriptors that may be closed while they are registered, in favour of an
    // `unsafe` function; this one is owned by what registers it.
    #[allow(deprecated)]
    let socket = socket.and_then(|socket| AsyncFd::with_interest(socket, Interest::READABLE));
    let socket = socket.map_err(|e| Error::io("registering with the runtime", e))?;
    poll_fn(|task| {
        loop {
            if let Poll::Ready(found) = inbox.poll_take(task.waker(), &mut take) {
                return Poll::Ready(found);
            }
            match socket.poll_read_ready(task) {
                // Something came since the runtime was last asked; what it was is seen above.
                Poll::Ready(Ok(mut ready)) => ready.clear_ready(),
                Poll::Ready(Err(e)) => {
                    return Poll::Ready(Err(Error::io("waiting for the daemon", e)));
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await
}
