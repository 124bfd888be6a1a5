//! A connection as a byte stream, for tasks of a tokio runtime.
//!
//! Each write is one Send of at most 16 KiB; message boundaries have no meaning. Both ends must be
//! a [`Stream`]. A sender that is faster than its peer waits: the peer's QP holds messages until a
//! receive is posted ([`RnrPolicy::Wait`]).

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll, ready};

use rnic_abi::abi::control::DisconnectReason;
use rnic_abi::types::{CompletionStatus, RnrPolicy};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::ToSocketAddrs;

use crate::completion::Completion;
use crate::connect::{Claim, ConnectOptions};
use crate::context::Context;
use crate::cq::Cq;
use crate::error::Error;
use crate::events::{Ending, Subject, concerns_end};
use crate::lease::{Lease, LocalMr, Posted};
use crate::listener::{AcceptOptions, ConnectionRequest};
use crate::pd::Pd;
use crate::qp::{Qp, QpOptions};

/// A connection that carries bytes in both directions, like a [`tokio::net::TcpStream`].
///
/// Reads return 0 bytes after the peer has shut down. `shutdown` ends this direction only. Dropping
/// a stream before both directions have ended resets the connection, and bytes that the peer has
/// not read are lost. To avoid this, shut down, then read to the end.
///
/// A stream has its own protection domain, two completion queues, a QP and 512 KiB of registered
/// memory. For other configurations use [`Qp::send`] and [`Qp::recv`].
///
/// ```no_run
/// use rnic_client::{Context, Stream};
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
///
/// # async fn ask() -> Result<(), Box<dyn std::error::Error>> {
/// let mut stream = Stream::connect(&Context::open()?, "localhost:7471").await?;
/// stream.write_all(b"question").await?;
/// stream.shutdown().await?;
/// let mut answer = Vec::new();
/// stream.read_to_end(&mut answer).await?;
/// # Ok(())
/// # }
/// ```
pub struct Stream {
    // Must be dropped before the QP, because a destroyed QP loses its leases.
    reader: Reader,
    writer: Writer,
    qp: Arc<Qp>,
}

impl Stream {
    /// Connects to a peer that accepts with [`Stream::accept`]. All addresses of a name are tried.
    ///
    /// # Errors
    ///
    /// Same as [`Qp::connect_async`].
    pub async fn connect(context: &Context, peer: impl ToSocketAddrs) -> Result<Stream, Error> {
        let stream = Stream::new(context)?;
        stream.qp.connect_async(peer, &ConnectOptions::default()).await?;
        Ok(stream)
    }

    /// Accepts a connection request of [`Listener::accept_request_async`].
    ///
    /// # Errors
    ///
    /// Same as [`ConnectionRequest::accept_async`].
    ///
    /// [`Listener::accept_request_async`]: crate::Listener::accept_request_async
    pub async fn accept(context: &Context, request: ConnectionRequest) -> Result<Stream, Error> {
        let stream = Stream::new(context)?;
        request.accept_async(&stream.qp, &AcceptOptions::default()).await?;
        Ok(stream)
    }

    /// Returns the QP, for queries of its state, addresses and counters.
    pub fn qp(&self) -> &Qp {
        &self.qp
    }

    /// Creates an unconnected stream with all receives posted.
    fn new(context: &Context) -> Result<Stream, Error> {
        let pd = context.open_pd(None)?;
        let send_cq = context.create_cq(SLOTS, None)?;
        let recv_cq = context.create_cq(SLOTS, None)?;
        let qp = pd.create_qp(&QpOptions {
            recv_cq: &recv_cq,
            sq_depth: SLOTS,
            rq_depth: SLOTS,
            rnr_policy: RnrPolicy::Wait { timeout_ms: RNR_TIMEOUT_MS },
            ..QpOptions::new(&send_cq)
        })?;
        let qp = Arc::new(qp);
        let reader = Reader::new(&pd, &qp)?;
        let writer = Writer::new(&pd, &qp)?;
        Ok(Stream { reader, writer, qp })
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("qp", &self.qp).finish_non_exhaustive()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        task: &mut Task<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.reader.poll_read(task, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        task: &mut Task<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.writer.poll_write(task, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        self.writer.poll_flush(task)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        ready!(self.writer.poll_flush(task))?;
        self.writer.is_shut_down = true;
        Poll::Ready(self.qp.finish_sending().map_err(io::Error::other))
    }
}

/// The incoming direction: receives of one slot each, in posting order.
struct Reader {
    qp: Arc<Qp>,
    posted: VecDeque<Posted>,
    completed: VecDeque<Completion>,
    /// Oldest message, and the range of it that has not been read.
    current: Option<(Lease, Range<usize>)>,
    more: Waiting<Vec<Completion>>,
    end: Waiting<Ending>,
    /// The peer has finished sending.
    is_at_end: bool,
}

impl Reader {
    fn new(pd: &Pd, qp: &Arc<Qp>) -> Result<Self, Error> {
        let region = pd.reg_local(u64::from(SLOTS) * SLOT)?;
        let receives = (0..u64::from(SLOTS)).map(|n| {
            let lease = region.lease(n * SLOT..(n + 1) * SLOT)?;
            Ok(qp.post_recv_leased(0, lease)?)
        });
        Ok(Reader {
            qp: qp.clone(),
            posted: receives.collect::<Result<_, Error>>()?,
            completed: VecDeque::new(),
            current: None,
            more: None,
            end: None,
            is_at_end: false,
        })
    }

    fn poll_read(&mut self, task: &mut Task<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        while buffer.remaining() > 0 {
            if let Some((lease, unread)) = self.current.take() {
                return Poll::Ready(self.copy(lease, unread, buffer));
            }
            if let Some(completion) = self.completed.pop_front() {
                self.take(completion)?;
                continue;
            }
            if self.is_at_end {
                break;
            }
            let cq = self.qp.recv_cq();
            if let Poll::Ready(more) = poll_waiting(&mut self.more, task, || completions(cq)) {
                self.completed.extend(more?);
                continue;
            }
            let qp = &self.qp;
            let ending = ready!(poll_waiting(&mut self.end, task, || Box::pin(ending(qp.clone()))));
            self.end_with(ending?)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Copies as much as fits into `buffer`. Posts the slot again once its message is read
    /// completely.
    fn copy(
        &mut self,
        lease: Lease,
        mut unread: Range<usize>,
        buffer: &mut ReadBuf<'_>,
    ) -> io::Result<()> {
        let length = unread.len().min(buffer.remaining());
        buffer.put_slice(&lease[unread.start..unread.start + length]);
        unread.start += length;
        if unread.is_empty() {
            return self.post(lease);
        }
        self.current = Some((lease, unread));
        Ok(())
    }

    fn post(&mut self, lease: Lease) -> io::Result<()> {
        let posted = self.qp.post_recv_leased(0, lease).map_err(io::Error::other)?;
        self.posted.push_back(posted);
        Ok(())
    }

    /// Takes the message of the oldest receive. A flushed receive has no message, and an event
    /// reports the end of the connection.
    fn take(&mut self, completion: Completion) -> io::Result<()> {
        let posted = self.posted.pop_front().and_then(|posted| posted.take().ok());
        let Some(lease) = posted else { return Err(io::Error::other(Error::DestroyedQp)) };
        match completion.status {
            CompletionStatus::Success if completion.byte_len > 0 => {
                self.current = Some((lease, 0..completion.byte_len as usize));
                Ok(())
            }
            CompletionStatus::Success => self.post(lease),
            CompletionStatus::WrFlush => Ok(()),
            _ => completion.ok().map(drop).map_err(io::Error::other),
        }
    }

    /// Polls the messages that arrived before the end. The daemon writes their completions before
    /// it sends the event.
    fn end_with(&mut self, ending: Ending) -> io::Result<()> {
        match ending {
            Ending::PeerClosed | Ending::Ended(DisconnectReason::Orderly) => {}
            Ending::Ended(reason) => {
                let error = Error::Disconnected(reason);
                return Err(io::Error::new(io::ErrorKind::ConnectionReset, error));
            }
        }
        self.is_at_end = true;
        let mut some = [Completion::default(); SLOTS as usize];
        let n = self.qp.recv_cq().poll(&mut some).map_err(io::Error::other)?;
        self.completed.extend(&some[..n]);
        Ok(())
    }
}

/// The outgoing direction: Sends of at most one slot each, which complete in order.
struct Writer {
    qp: Arc<Qp>,
    region: LocalMr,
    /// Free slots, by offset in bytes from the region's start.
    free: Vec<u64>,
    posted: VecDeque<(u64, Posted)>,
    more: Waiting<Vec<Completion>>,
    is_shut_down: bool,
}

impl Writer {
    fn new(pd: &Pd, qp: &Arc<Qp>) -> Result<Self, Error> {
        Ok(Writer {
            qp: qp.clone(),
            region: pd.reg_local(u64::from(SLOTS) * SLOT)?,
            free: (0..u64::from(SLOTS)).map(|n| n * SLOT).collect(),
            posted: VecDeque::new(),
            more: None,
            is_shut_down: false,
        })
    }

    fn poll_write(&mut self, task: &mut Task<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.is_shut_down {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let slot = loop {
            if let Some(slot) = self.free.pop() {
                break slot;
            }
            ready!(self.poll_completions(task))?;
        };
        let length = bytes.len().min(SLOT as usize);
        let mut lease = self.region.lease(slot..slot + length as u64).map_err(io::Error::other)?;
        lease.copy_from_slice(&bytes[..length]);
        let posted = self.qp.post_send_leased(lease.send(0)).map_err(io::Error::other)?;
        self.posted.push_back((slot, posted));
        Poll::Ready(Ok(length))
    }

    fn poll_flush(&mut self, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        while !self.posted.is_empty() {
            ready!(self.poll_completions(task))?;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_completions(&mut self, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        let cq = self.qp.send_cq();
        for completion in ready!(poll_waiting(&mut self.more, task, || completions(cq)))? {
            let Some((slot, _)) = self.posted.pop_front() else { continue };
            if let Err(error) = completion.ok() {
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::BrokenPipe, error)));
            }
            self.free.push(slot);
        }
        Poll::Ready(Ok(()))
    }
}

/// An asynchronous wait that is kept between polls.
type Waiting<T> = Option<Pin<Box<dyn Future<Output = Result<T, Error>> + Send + Sync>>>;

/// Polls a wait. Starts it if none is in progress.
fn poll_waiting<T>(
    waiting: &mut Waiting<T>,
    task: &mut Task<'_>,
    begin: impl FnOnce() -> Pin<Box<dyn Future<Output = Result<T, Error>> + Send + Sync>>,
) -> Poll<io::Result<T>> {
    let done = ready!(waiting.get_or_insert_with(begin).as_mut().poll(task));
    *waiting = None;
    Poll::Ready(done.map_err(io::Error::other))
}

fn completions(
    cq: &Cq,
) -> Pin<Box<dyn Future<Output = Result<Vec<Completion>, Error>> + Send + Sync>> {
    let cq = cq.clone();
    Box::pin(async move { cq.completions().await })
}

/// Waits until the peer has finished sending or the connection has ended.
async fn ending(qp: Arc<Qp>) -> Result<Ending, Error> {
    let _claim = Claim::new(qp.session(), Subject::Qp(qp.id()), concerns_end);
    qp.session().task_event(|events| events.ending(qp.id())).await
}

/// Maximum outstanding messages in each direction.
const SLOTS: u32 = 16;
/// Maximum length of a message, in bytes.
const SLOT: u64 = 16 << 10;
/// Time for which a message waits for its reader, in milliseconds: one hour, the maximum.
const RNR_TIMEOUT_MS: u32 = 3_600_000;
