//! Opening the device, and what belongs to the whole session.

use std::fmt;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rnic_core::abi::control::*;
use rnic_core::shm::owner::Owner;
use rnic_core::types::{QpId, SessionId};

use crate::access;
use crate::addresses::try_each;
use crate::adopt::{SocketError, SocketListener};
use crate::channel::CompletionChannel;
use crate::control::dial;
use crate::cq::{Cq, CqOptions};
use crate::error::Error;
use crate::inbox::deadline;
use crate::listener::{BindOptions, ConnectionRequest, Listener};
use crate::paths;
use crate::pd::Pd;
use crate::session::{Session, unexpected};
use crate::shared_buffer::SharedBuffer;
use crate::trust;

/// An open device: one session with the daemon (compare `ibv_open_device(3)`).
///
/// Clones are the same session. It ends, and the daemon takes back everything made with it, when
/// the last clone and the last object made with it have been dropped, or when the process ends.
///
/// Only the process that opened a context may use it: requests of a forked child fail with
/// [`Error::AfterFork`], and the queues do not exist in the child's memory at all.
#[derive(Clone)]
pub struct Context {
    pub(crate) session: Arc<Session>,
}

/// How to open a device.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The daemon's socket. `None` (the default) looks for it: `RNIC_SOCKET` of the environment
    /// alone if it is set; else, in this order, `$XDG_RUNTIME_DIR/rnicd.sock` if that folder is
    /// the user's, the user's own folder `rnicd-UID` under the temporary directory, and
    /// `/run/rnicd/rnicd.sock`. A daemon found this way must be root's, the user's own, or of the
    /// owner of `/run/rnicd`; a set-user-ID program (`AT_SECURE`) ignores the environment.
    pub socket: Option<PathBuf>,
    /// How long the daemon may take for one reply; default 30 s. A later reply costs the session.
    pub reply_timeout: Duration,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions { socket: None, reply_timeout: Duration::from_secs(30) }
    }
}

/// A page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Its rows, at most [`PAGE_ROWS`].
    pub rows: Rows,
    /// How many rows there are in all.
    pub total: u32,
    /// Where the next page begins; none if this is the last.
    pub next: Option<u64>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("session", &self.session()).finish_non_exhaustive()
    }
}

impl Context {
    /// Opens the device that the environment names, see [`OpenOptions::socket`].
    ///
    /// # Errors
    ///
    /// [`Error::NoDaemon`] has each socket that was tried and how it failed; [`Error::NotAdmitted`]
    /// says why the daemon takes no session of this process.
    pub fn open() -> Result<Context, Error> {
        Self::open_with(OpenOptions::default())
    }

    /// Opens the device behind this socket.
    pub fn open_at(socket: impl AsRef<Path>) -> Result<Context, Error> {
        let socket = Some(socket.as_ref().to_path_buf());
        Self::open_with(OpenOptions { socket, ..OpenOptions::default() })
    }

    /// Opens the device that the options name (`ibv_open_device(3)`).
    pub fn open_with(options: OpenOptions) -> Result<Context, Error> {
        Self::open_as(options, Owner::current())
    }

    /// Opens a device for process `owner`, which is this one except in tests of fork.
    pub(crate) fn open_as(options: OpenOptions, owner: Owner) -> Result<Context, Error> {
        // A socket that the program itself names is the program's own decision.
        let is_named = options.socket.is_some();
        let paths = options.socket.map_or_else(paths::candidates, |path| vec![path]);
        let mut tried = Vec::new();
        for path in paths {
            let dialled = dial(&path, options.reply_timeout);
            let dialled = dialled.map_err(|e| access::explained(&path, e)).and_then(|socket| {
                if !is_named {
                    trust::check(&socket, &path)?;
                }
                Ok(socket)
            });
            match dialled {
                Ok(socket) => {
                    let session = Session::open(socket, &path, options.reply_timeout, owner)?;
                    return Ok(Context { session: Arc::new(session) });
                }
                Err(e) => tried.push((path, e)),
            }
        }
        Err(Error::NoDaemon { tried })
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn of_session(&self) -> &Session {
        &self.session
    }

    /// Whether the daemon is known to hold this session still: asks the kernel.
    pub fn is_alive(&self) -> bool {
        self.session.check_thoroughly().is_ok()
    }

    /// The daemon's number for this session, as `rnicctl clients` shows it.
    pub fn session(&self) -> SessionId {
        self.session.id()
    }

    /// Optional abilities of the daemon.
    pub fn features(&self) -> Features {
        self.session.features()
    }

    /// Identity and limits of the device (compare `ibv_query_device(3)`).
    pub fn device(&self) -> Result<DeviceAttributes, Error> {
        match self.session.request(RequestBody::QueryDevice)? {
            ReplyBody::Device(attributes) => Ok(attributes),
            other => Err(unexpected(&other)),
        }
    }

    /// Figures of the whole daemon.
    pub fn status(&self) -> Result<StatusInfo, Error> {
        match self.session.request(RequestBody::Status)? {
            ReplyBody::Status(status) => Ok(status),
            other => Err(unexpected(&other)),
        }
    }

    /// One page of at most [`PAGE_ROWS`] objects: those of this session or, for administrators, of
    /// all sessions. The first page is the one from 0 on, the following are each from
    /// [`next`](Page::next) of the page before on. A page may be empty and not the last.
    pub fn list(&self, what: ListKind, from: u64) -> Result<Page, Error> {
        match self.session.request(RequestBody::List { what, from })? {
            ReplyBody::Rows { rows, total, next } => {
                Ok(Page { rows, total, next: (next != 0).then_some(next) })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// The diagnosis with this number: what explains a refusal ([`Error::Refused`]) or a
    /// completion ([`Completion::diagnosis_id`](crate::Completion::diagnosis_id)).
    ///
    /// # Errors
    ///
    /// [`Refusal::NoSuchObject`] if it is another user's, or was displaced by newer ones.
    pub fn diagnosis(&self, id: u64) -> Result<Diagnosis, Error> {
        match self.session.request(RequestBody::Diagnosis { id })? {
            ReplyBody::Rows { rows: Rows::Diagnoses(rows), .. } => {
                let record = rows.into_iter().find(|record| record.id == id);
                record.ok_or_else(|| Error::protocol(format!("no record {id} in its answer")))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Ends a queue pair's connection, whoever owns it. For administrators.
    pub fn admin_disconnect(&self, qp: QpId) -> Result<(), Error> {
        self.session.command(RequestBody::AdminDisconnect { qp })
    }

    /// Has the daemon refuse new sessions, objects and connections, or take them again; what exists
    /// goes on. For administrators.
    pub fn drain(&self, on: bool) -> Result<(), Error> {
        self.session.command(RequestBody::Drain { on })
    }

    /// Opens a protection domain: a private one, or with a name one of the administrator's
    /// `[[pd]]`, whose regions other sessions' QPs of the same domain may use (`ibv_alloc_pd(3)`).
    pub fn open_pd(&self, name: Option<&str>) -> Result<Pd, Error> {
        Pd::open(&self.session, name)
    }

    /// Makes memory that regions can name: zeroed, populated and shared with the daemon.
    ///
    /// `len` is in bytes, rounded up to whole pages. The pages are this process's own and count
    /// against the daemon's `limits.shared_bytes`, which is asked before any of them is taken.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] names the limit; [`Error::NotEnoughMemory`] if the machine, or the
    /// control group of this process, has less left, which is looked at while the pages are taken.
    pub fn create_shared_buffer(&self, len: u64) -> Result<SharedBuffer, Error> {
        SharedBuffer::create(&self.session, len)
    }

    /// Attaches this process's own memory, so that regions can name any range of it
    /// ([`Pd::reg_mr_attached`]). Further calls have no effect.
    ///
    /// A daemon of this process's own user, or one that trusts that user, receives the address
    /// space (`/proc/self/mem`) and copies itself. After `exec` it reaches nothing of the new
    /// program, and a child made by `fork` has memory of its own. For any other daemon the library
    /// makes the copies, in one thread per worker with all signals blocked and in threads that poll
    /// a [`Cq`]. A thread that serves page faults of registered memory (userfaultfd, a FUSE file
    /// system) must not poll a [`Cq`] then, because it may wait for itself. A copy costs a system
    /// call; a [`SharedBuffer`] is faster.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the queues of copy jobs exceed a limit (`arena_bytes`). [`Error::Io`]
    /// if a thread cannot be started, or if the system forbids `process_vm_readv(2)` on this
    /// process.
    pub fn attach_memory(&self) -> Result<(), Error> {
        self.session.attach_memory()
    }

    /// Makes a completion channel (compare `ibv_create_comp_channel(3)`).
    pub fn create_completion_channel(&self) -> Result<CompletionChannel, Error> {
        CompletionChannel::create(&self.session)
    }

    /// Makes a completion queue of at least `entries` entries (compare `ibv_create_cq(3)`). Without
    /// a channel it gets one of its own, so that [`Cq::wait`] works either way.
    pub fn create_cq(
        &self,
        entries: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<Cq, Error> {
        Cq::create(&self.session, &CqOptions { entries, channel, ..CqOptions::default() })
    }

    /// Makes a completion queue.
    pub fn create_cq_with(&self, options: &CqOptions<'_>) -> Result<Cq, Error> {
        Cq::create(&self.session, options)
    }

    /// Binds an address without listening (compare `rdma_bind_addr(3)`): an address, or a name with
    /// a port as in `"localhost:7471"`, of which the first address that can be bound is taken. Port
    /// 0 lets the kernel choose; [`Listener::local_addr`] tells.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the name has no address; [`Error::Refused`] if the address is none of this
    /// host's or in use, or if a limit or a rule of the administrator is against it.
    pub fn bind(&self, address: impl ToSocketAddrs) -> Result<Listener, Error> {
        self.bind_with(address, BindOptions::default())
    }

    /// As [`bind`](Context::bind), with options.
    pub fn bind_with(
        &self,
        address: impl ToSocketAddrs,
        options: BindOptions,
    ) -> Result<Listener, Error> {
        try_each(address, |address| Listener::bind(&self.session, address, options))
    }

    /// Binds an address as [`bind`](Context::bind) does and listens on it (compare
    /// `rdma_listen(3)`). At most `backlog` connection requests wait unread or undecided; the
    /// daemon rejects more on the wire.
    pub fn listen(&self, address: impl ToSocketAddrs, backlog: u32) -> Result<Listener, Error> {
        let listener = self.bind(address)?;
        listener.listen(backlog)?;
        Ok(listener)
    }

    /// Awaits an MPA Request on a TCP connection of this program, which may have carried other
    /// traffic before; the daemon reads from it what the peer sends next.
    pub fn serve_over(&self, stream: TcpStream) -> Result<SocketListener, SocketError> {
        SocketListener::serve(&self.session, stream)
    }

    /// The next connection or asynchronous event that no blocking call has claimed, or `None` when
    /// `timeout` is over (`None` waits as long as it takes). Compare `rdma_get_cm_event(3)` and
    /// `ibv_get_async_event(3)`, whose events come on one stream here.
    ///
    /// A call that blocks for an object ([`Qp::connect`](crate::Qp::connect),
    /// [`Qp::wait_connected`](crate::Qp::wait_connected),
    /// [`Qp::wait_disconnected`](crate::Qp::wait_disconnected), [`Listener::accept_request`],
    /// [`ConnectionRequest::accept`]) takes the events it waits for. All others come here, each
    /// once, in the order in which the daemon sent them.
    pub fn next_event(&self, timeout: Option<Duration>) -> Result<Option<Event>, Error> {
        self.session.await_event(deadline(timeout), |events| events.take_any())
    }

    /// Ends the stream of events of this session, for all: whoever waits for one finds
    /// [`Error::DaemonGone`], once those that have arrived are taken.
    pub fn end_events(&self) {
        self.session.events.end();
    }

    /// Makes an [`Event::ConnectionRequest`] from [`Context::next_event`] into an object to accept
    /// or reject; gives any other event back.
    pub fn connection_request(&self, event: Event) -> Result<ConnectionRequest, Event> {
        ConnectionRequest::from_event(&self.session, event)
    }

    /// A descriptor that is readable while events wait in the kernel, for `poll(2)` and its kin.
    ///
    /// Never read from it. When it is readable, call [`Context::next_event`] with a timeout of zero
    /// until it returns `None`. A program that sleeps on it should make no blocking connection
    /// calls in other threads: those read events for everybody, and what they leave for
    /// `next_event` no longer shows here.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.session.events.as_fd()
    }
}

/// The descriptor of [`Context::event_fd`], with what is said there.
impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event_fd()
    }
}

/// The descriptor of [`Context::event_fd`], with what is said there.
impl AsRawFd for Context {
    fn as_raw_fd(&self) -> RawFd {
        self.event_fd().as_raw_fd()
    }
}
