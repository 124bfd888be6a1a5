//! Opening a device, and calls that concern the whole session.

use std::fmt;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rnic_abi::abi::control::*;
use rnic_abi::shm::owner::Owner;
use rnic_abi::types::{QpId, SessionId};

use crate::access;
use crate::addresses::try_each;
use crate::channel::CompletionChannel;
use crate::control::dial;
use crate::cq::{Cq, CqOptions};
use crate::error::Error;
use crate::inbox::deadline;
use crate::listener::{BindOptions, ConnectionRequest, Listener};
use crate::paths;
use crate::pd::Pd;
use crate::rows::Row;
use crate::session::{Session, unexpected};
use crate::shared_buffer::SharedBuffer;
use crate::socket::{SocketError, SocketListener};
use crate::trust;

/// An open device: one session with the daemon (compare `ibv_open_device(3)`).
///
/// Clones share the session. The session ends when the last clone and the last object created from
/// it have been dropped, or when the process ends. The daemon then destroys all its objects.
///
/// Only the process that opened a context may use it. In a forked child, requests fail with
/// [`Error::AfterFork`], and the queues are not mapped.
#[derive(Clone)]
pub struct Context {
    pub(crate) session: Arc<Session>,
}

/// Options for opening a device.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Socket of the daemon. `None` (the default) searches for it. If `RNIC_SOCKET` is set in the
    /// environment, only that path is tried. Otherwise these are tried in order:
    /// `$XDG_RUNTIME_DIR/rnicd.sock` if that directory belongs to the user, the user's own
    /// directory `rnicd-UID` in the temporary directory, and `/run/rnicd/rnicd.sock`. A daemon
    /// found by the search must run as root, as the user, or as the owner of `/run/rnicd`. A
    /// set-user-ID program (`AT_SECURE`) ignores the environment.
    pub socket: Option<PathBuf>,
    /// Maximum wait for each reply of the daemon; default 30 s. A timeout ends the session.
    pub reply_timeout: Duration,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions { socket: None, reply_timeout: Duration::from_secs(30) }
    }
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Rows of the page, at most [`PAGE_ROWS`].
    pub rows: Rows,
    /// Number of rows in the whole list.
    pub total: u32,
    /// Start of the next page; `None` on the last page.
    pub next: Option<u64>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("session", &self.session()).finish_non_exhaustive()
    }
}

impl Context {
    /// Opens the default device, see [`OpenOptions::socket`].
    ///
    /// # Errors
    ///
    /// [`Error::NoDaemon`] contains each socket that was tried, with its error;
    /// [`Error::NotAdmitted`] contains the daemon's reason for refusing the session.
    pub fn open() -> Result<Context, Error> {
        Self::open_with(OpenOptions::default())
    }

    /// Opens the device at a daemon's socket.
    pub fn open_at(socket: impl AsRef<Path>) -> Result<Context, Error> {
        let socket = Some(socket.as_ref().to_path_buf());
        Self::open_with(OpenOptions { socket, ..OpenOptions::default() })
    }

    /// Opens a device with options (`ibv_open_device(3)`). Sets the fault rules of the environment
    /// variable `RNIC_FAULTS` for the session; a set-user-ID program ignores it.
    pub fn open_with(options: OpenOptions) -> Result<Context, Error> {
        Self::open_as(options, Owner::current())
    }

    /// Opens a device for process `owner`. Only fork tests pass another process.
    pub(crate) fn open_as(options: OpenOptions, owner: Owner) -> Result<Context, Error> {
        // The check does not apply to a socket that the program itself specifies.
        let is_named = options.socket.is_some();
        let paths = options.socket.map_or_else(paths::candidates, |path| vec![path]);
        let mut tried = Vec::new();
        for path in paths {
            let dialled = dial(&path, options.reply_timeout);
            let dialled = dialled.map_err(|e| access::explain(&path, e)).and_then(|socket| {
                if !is_named {
                    trust::check(&socket, &path)?;
                }
                Ok(socket)
            });
            match dialled {
                Ok(socket) => {
                    let session = Session::open(socket, &path, options.reply_timeout, owner)?;
                    let context = Context { session: Arc::new(session) };
                    if let Some(rules) = paths::fault_rules() {
                        context.set_own_faults(&rules)?;
                    }
                    return Ok(context);
                }
                Err(e) => tried.push((path, e)),
            }
        }
        Err(Error::NoDaemon { tried })
    }

    /// Returns true if the session still exists in the daemon. Makes a system call.
    pub fn is_alive(&self) -> bool {
        self.session.check_thoroughly().is_ok()
    }

    /// Returns the daemon's number for this session, as `rnicctl clients` shows it.
    pub fn session(&self) -> SessionId {
        self.session.id()
    }

    /// Returns the optional features of the daemon.
    pub fn features(&self) -> Features {
        self.session.features()
    }

    /// Queries identity and limits of the device (compare `ibv_query_device(3)`).
    pub fn device(&self) -> Result<DeviceAttributes, Error> {
        self.admit(Function::QueryDevice.call())?;
        self.device_unruled()
    }

    /// Same as [`device`](Self::device), without fault rules: for a library that answers the
    /// queries of its program from the result.
    pub fn device_unruled(&self) -> Result<DeviceAttributes, Error> {
        match self.session.request(RequestBody::QueryDevice)? {
            ReplyBody::Device(attributes) => Ok(attributes),
            other => Err(unexpected(&other)),
        }
    }

    /// Queries the daemon's status and statistics.
    pub fn status(&self) -> Result<StatusInfo, Error> {
        match self.session.request(RequestBody::Status)? {
            ReplyBody::Status(status) => Ok(status),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns one page, at most [`PAGE_ROWS`] objects, of this session's objects or, for
    /// administrators, of the objects of all sessions. The first page starts at `from` 0, each
    /// later page at the [`next`](Page::next) of the previous page. A page may be empty without
    /// being the last.
    pub fn list(&self, what: ListKind, from: u64) -> Result<Page, Error> {
        match self.session.request(RequestBody::List { what, from })? {
            ReplyBody::Rows { rows, total, next } => {
                Ok(Page { rows, total, next: (next != 0).then_some(next) })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Returns all rows of a list. Objects may change between its pages, so the result is not a
    /// snapshot.
    pub fn rows<R: Row>(&self) -> Result<Vec<R>, Error> {
        let mut all = Vec::new();
        let mut next = Some(0);
        while let Some(from) = next {
            let page = self.list(R::KIND, from)?;
            // The daemon answered with rows of another kind. Stop here.
            let Some(rows) = R::of(page.rows) else { break };
            all.extend(rows);
            next = page.next;
        }
        Ok(all)
    }

    /// Returns a diagnosis: the explanation of a refusal ([`Error::Refused`]) or of a failed
    /// completion ([`Completion::diagnosis_id`](crate::Completion::diagnosis_id)).
    ///
    /// # Errors
    ///
    /// [`Refusal::NoSuchObject`] if the diagnosis belongs to another user or was displaced by newer
    /// diagnoses.
    pub fn diagnosis(&self, id: u64) -> Result<Diagnosis, Error> {
        match self.session.request(RequestBody::Diagnosis { id })? {
            ReplyBody::Rows { rows: Rows::Diagnoses(rows), .. } => {
                let record = rows.into_iter().find(|record| record.id == id);
                record.ok_or_else(|| Error::protocol(format!("no diagnosis {id} in its reply")))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Ends the connection of a QP of any session. For administrators.
    pub fn admin_disconnect(&self, qp: QpId) -> Result<(), Error> {
        self.session.command(RequestBody::AdminDisconnect { qp })
    }

    /// Starts or stops draining. A draining daemon refuses new sessions, objects and connections,
    /// and keeps existing ones. For administrators.
    pub fn drain(&self, on: bool) -> Result<(), Error> {
        self.session.command(RequestBody::Drain { on })
    }

    /// Adds a RoCE device whose GIDs are the addresses of `interface`, or of all interfaces. An
    /// `interface` of addresses, separated by commas, means these addresses. For administrators.
    pub fn add_device(&self, name: &str, interface: Option<&str>) -> Result<(), Error> {
        let name = name.to_owned();
        let interface = interface.unwrap_or_default().to_owned();
        self.session.command(RequestBody::AddDevice { name, interface })
    }

    /// Removes a RoCE device from the list of devices. Programs that use it are not affected. For
    /// administrators.
    pub fn remove_device(&self, name: &str) -> Result<(), Error> {
        self.session.command(RequestBody::RemoveDevice { name: name.to_owned() })
    }

    /// Sets fault rules for all sessions of this user, until they are cleared or the daemon ends:
    /// `do=complete status=retry-exc-err opcode=send nth=3`. `;` or a line break separates rules.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if a rule is not valid, if its name is taken, if `limits.user.faults` is
    /// reached, or if a rule selects other users and this user is not an administrator.
    pub fn set_faults(&self, rules: &str) -> Result<(), Error> {
        let rules = rules.to_owned();
        self.session.command(RequestBody::SetFaults { rules, own: false })
    }

    /// Like [`set_faults`](Self::set_faults), for this session alone. The rules end with it.
    pub fn set_own_faults(&self, rules: &str) -> Result<(), Error> {
        let rules = rules.to_owned();
        self.session.command(RequestBody::SetFaults { rules, own: true })
    }

    /// Clears a fault rule, or all rules. Affects the rules of this user, and for administrators
    /// the rules of all users.
    pub fn clear_faults(&self, name: Option<&str>) -> Result<(), Error> {
        let name = name.map(str::to_owned);
        self.session.command(RequestBody::ClearFaults { name })
    }

    /// Evaluates the fault rules of a call that the caller carries out itself. Returns false if a
    /// rule carries out the call: [`Event::ResolutionFailed`] follows.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if a rule fails the call.
    pub fn admit(&self, call: LibraryCall) -> Result<bool, Error> {
        // In a forked child the arena is not mapped, and the library carries out the call.
        if self.session.check_owner().is_err() {
            Ok(true)
        } else {
            self.session.admit_of_owner(call)
        }
    }

    /// Returns the number of times, 0 to 2, that librdmacm queues an event
    /// ([`LibraryCall::CmEvent`]) for its program: 1 unless a fault rule repeats or drops the
    /// event.
    pub fn times_queued(&self, event: LibraryCall) -> u8 {
        if self.session.check_owner().is_err() { 1 } else { self.session.times_queued(event) }
    }

    /// Opens a protection domain (`ibv_alloc_pd(3)`). Without a name it is private. A name selects
    /// a `[[pd]]` of the daemon's configuration: QPs of the same domain in other sessions may then
    /// use its regions.
    pub fn open_pd(&self, name: Option<&str>) -> Result<Pd, Error> {
        Pd::open(&self.session, name)
    }

    /// Allocates memory for regions: zeroed, populated and shared with the daemon.
    ///
    /// `len` is in bytes and is rounded up to whole pages. The pages belong to this process and
    /// count against the daemon's `limits.shared_bytes`, which is checked before any page is
    /// allocated.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with the limit; [`Error::NotEnoughMemory`] if the machine, or the control
    /// group of this process, lacks the memory, which is checked during allocation.
    pub fn create_shared_buffer(&self, len: u64) -> Result<SharedBuffer, Error> {
        SharedBuffer::create(&self.session, len)
    }

    /// Creates a completion channel (compare `ibv_create_comp_channel(3)`).
    pub fn create_completion_channel(&self) -> Result<CompletionChannel, Error> {
        CompletionChannel::create(&self.session)
    }

    /// Creates a completion queue of at least `entries` entries (compare `ibv_create_cq(3)`).
    /// Without a channel the CQ gets its own, so [`Cq::wait`] works in both cases.
    pub fn create_cq(
        &self,
        entries: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<Cq, Error> {
        Cq::create(&self.session, &CqOptions { entries, channel, ..CqOptions::default() })
    }

    /// Creates a completion queue with options.
    pub fn create_cq_with(&self, options: &CqOptions<'_>) -> Result<Cq, Error> {
        Cq::create(&self.session, options)
    }

    /// Binds an address without listening (compare `rdma_bind_addr(3)`). `address` may be a name
    /// with a port, as in `"localhost:7471"`: the first of its addresses that can be bound is used.
    /// With port 0 the kernel chooses the port; [`Listener::local_addr`] returns it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the name has no address; [`Error::Refused`] if the address does not belong
    /// to this host or is in use, or if a limit or an administrator's rule forbids it.
    pub fn bind(&self, address: impl ToSocketAddrs) -> Result<Listener, Error> {
        self.bind_with(address, BindOptions::default())
    }

    /// Binds an address with options, otherwise as [`bind`](Context::bind).
    pub fn bind_with(
        &self,
        address: impl ToSocketAddrs,
        options: BindOptions,
    ) -> Result<Listener, Error> {
        try_each(address, |address| Listener::bind(&self.session, address, options))
    }

    /// Binds an address as [`bind`](Context::bind) does and listens on it (compare
    /// `rdma_listen(3)`). At most `backlog` connection requests may be pending; the daemon rejects
    /// further requests.
    pub fn listen(&self, address: impl ToSocketAddrs, backlog: u32) -> Result<Listener, Error> {
        let listener = self.bind(address)?;
        listener.listen(backlog)?;
        Ok(listener)
    }

    /// Passes a TCP connection of this program to the daemon, which waits for an MPA Request on it.
    /// The connection may have carried other traffic before. From this call on, only the daemon may
    /// read from it.
    pub fn serve_over(&self, stream: TcpStream) -> Result<SocketListener, SocketError> {
        SocketListener::serve(&self.session, stream)
    }

    /// Returns the next connection event or asynchronous event that no blocking call has claimed,
    /// or `None` after `timeout` (`None`: no timeout). Unlike `rdma_get_cm_event(3)` and
    /// `ibv_get_async_event(3)`, one stream carries both kinds.
    ///
    /// A call that blocks for an object ([`Qp::connect`](crate::Qp::connect),
    /// [`Qp::wait_connected`](crate::Qp::wait_connected),
    /// [`Qp::wait_disconnected`](crate::Qp::wait_disconnected), [`Listener::accept_request`],
    /// [`ConnectionRequest::accept`]) takes the events it waits for. This function returns all
    /// others, each once, in the order in which the daemon sent them.
    pub fn next_event(&self, timeout: Option<Duration>) -> Result<Option<Event>, Error> {
        self.session.await_event(deadline(timeout), |events| events.take_any())
    }

    /// Ends the event stream of this session for all threads. Waiting threads get
    /// [`Error::DaemonGone`] after all events that have arrived are taken, and so does every later
    /// call of the session.
    pub fn end_events(&self) {
        self.session.events.end();
    }

    /// Converts an [`Event::ConnectionRequest`] from [`Context::next_event`] to an object to accept
    /// or reject. Returns any other event unchanged as the error.
    #[expect(clippy::result_large_err, reason = "the caller gets its own event back")]
    pub fn connection_request(&self, event: Event) -> Result<ConnectionRequest, Event> {
        ConnectionRequest::from_event(&self.session, event)
    }
}

/// A descriptor for `poll(2)`, readable while events wait in the kernel.
///
/// Do not read from it. When it is readable, call [`Context::next_event`] with a timeout of zero
/// until it returns `None`. A program that sleeps on it should make no blocking connection calls in
/// other threads: they also read the events of other objects, which `next_event` then returns
/// although the descriptor is not readable.
impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.session.events.as_fd()
    }
}

/// Same as the descriptor of [`AsFd`].
impl AsRawFd for Context {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
