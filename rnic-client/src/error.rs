//! Errors of this library, grouped by the party at fault.
//!
//! Fallible calls return [`Error`]; posting a batch returns [`PostError`], which contains one. A
//! posted request that fails later writes a [`Completion`](crate::Completion) with an error status;
//! [`Completion::ok`](crate::Completion::ok) converts it to [`Error::Failed`].

use std::io;
use std::path::PathBuf;

use rnic_abi::abi::control::{DisconnectReason, Refusal};
use rnic_abi::shm;
use rnic_abi::types::{CompletionOpcode, CompletionStatus, QpId, TerminateCode, WindowKind, codes};

/// Error of a call. [`Error::fault`] returns the party at fault.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    // The application's fault.
    /// The context was opened before `fork`, by an ancestor of this process. Only the process that
    /// opened a context may use it.
    #[error("this context belongs to process {owner}; open a new context after fork")]
    AfterFork {
        /// Process that opened the context.
        owner: u32,
    },
    /// The queue is full. Poll completions, then post again.
    #[error("the queue is full: all {depth} entries are outstanding")]
    QueueFull {
        /// Capacity of the queue, in requests.
        depth: u32,
    },
    /// A request has more SGEs than its queue allows.
    #[error("{given} SGEs, but this queue allows at most {max} per request")]
    TooManySges {
        /// SGEs of the request.
        given: usize,
        /// Maximum SGEs per request of this queue.
        max: usize,
    },
    /// A request has more inline data than its queue allows.
    #[error("{given} bytes of inline data, but this queue allows at most {max}")]
    InlineTooLong {
        /// Inline bytes of the request.
        given: usize,
        /// Maximum inline bytes per request of this queue.
        max: usize,
    },
    /// An access outside a shared buffer or region.
    #[error("offset {offset} + {length} bytes is outside the {size} bytes of the memory")]
    OutOfRange {
        /// Offset from the start, in bytes.
        offset: u64,
        /// Length of the access from `offset`, in bytes.
        length: u64,
        /// Size of the shared buffer or region, in bytes.
        size: u64,
    },
    /// An atomic access at an offset in its shared buffer that is not a multiple of 8.
    #[error("offset {offset} is not aligned to 8 bytes")]
    Misaligned {
        /// Offset from the start of the shared buffer, in bytes.
        offset: u64,
    },
    /// More private data than MPA carries (RFC 5044 section 7.1).
    #[error("{given} bytes of private data, but MPA carries at most {max}")]
    PrivateDataTooLong {
        /// Bytes of private data given.
        given: usize,
        /// Maximum bytes of private data in the frame.
        max: usize,
    },
    /// The call requires a window of the other type.
    #[error("this call does not support a window of {kind:?}")]
    WrongWindow {
        /// Type of the window.
        kind: WindowKind,
    },
    /// The call mixes objects of two contexts.
    #[error("{what} belongs to another context")]
    ForeignObject {
        /// The object, for display.
        what: &'static str,
    },

    /// A receive was posted to a QP that uses a shared receive queue.
    #[error("this QP uses a shared receive queue: post receives there")]
    SharedReceives,

    /// The QP was destroyed while a task waited for one of its requests.
    #[error("the QP was destroyed before the request completed")]
    DestroyedQp,

    /// A range of a [`LocalMr`](crate::LocalMr), or part of it, is already leased or posted.
    #[error("some or all of the {length} bytes at offset {offset} are already leased")]
    Leased {
        /// Offset from the start of the region, in bytes.
        offset: u64,
        /// Length of the range from `offset`, in bytes.
        length: u64,
    },
    /// An SGE that is not from a lease has the lkey of a [`LocalMr`](crate::LocalMr). Its bytes may
    /// be in use as a slice, so post a lease instead.
    #[error("lkey {lkey:#010x} belongs to a LocalMr: post a lease of it, not an SGE")]
    LeasedMemory {
        /// The SGE's lkey.
        lkey: u32,
    },
    /// The library reserves the `wr_id` values `0x1EA0_0000_0000_0000` to `0x1EAF_FFFF_FFFF_FFFF`
    /// for requests with a lease. Other requests must not use them.
    #[error("wr_id {wr_id:#x} is reserved for requests with a lease")]
    ReservedWrId {
        /// `wr_id` of the request, as given.
        wr_id: u64,
    },

    // The daemon refused a resource or a right.
    /// The daemon refused the request. The refusal contains the limit, rule or field.
    #[error("refused: {refusal}{}", format_diagnosis(*diagnosis_id))]
    Refused {
        /// The refusal, with its limit, rule or field.
        refusal: Refusal,
        /// Number of the daemon's diagnosis ([`Context::diagnosis`](crate::Context::diagnosis)); 0
        /// if it has none.
        diagnosis_id: u64,
    },
    /// The daemon refused the session.
    #[error("the daemon at {path} refused this session: {why}", path = path.display())]
    NotAdmitted {
        /// Socket of the daemon.
        path: PathBuf,
        /// Reason from the daemon's Hello reply.
        why: AdmissionError,
    },

    // The peer's or the network's fault.
    /// The peer rejected the connection.
    #[error("the peer rejected the connection ({} bytes of private data)", private_data.len())]
    Rejected {
        /// Private data of the rejection.
        private_data: Vec<u8>,
    },
    /// The connection could not be established.
    #[error("no connection: {reason}")]
    Unreachable {
        /// Reason, as text for display.
        reason: String,
    },
    /// The connection ended before or during the call, other than by a graceful close.
    #[error("the connection ended: {0}")]
    Disconnected(DisconnectReason),
    /// A posted request completed with an error.
    #[error("{opcode} {wr_id} of QP {qp} failed: {status}{}", format_detail(detail, *diagnosis_id))]
    Failed {
        /// `wr_id` of the request.
        wr_id: u64,
        /// QP of the request.
        qp: QpId,
        /// Type of the request.
        opcode: CompletionOpcode,
        /// Status of the completion, numbered as in `ibv_wc_status`.
        status: CompletionStatus,
        /// Terminate message that caused the failure, if any.
        detail: Option<TerminateCode>,
        /// Number of the daemon's diagnosis; 0 if it has none.
        diagnosis_id: u64,
    },
    /// The timeout of the call expired.
    #[error("timed out waiting for {what}")]
    TimedOut {
        /// The awaited event, for display.
        what: &'static str,
    },

    // The daemon's or the machine's fault.
    /// None of these sockets belongs to a daemon that this process may use.
    #[error("{}", format_no_daemon(tried))]
    NoDaemon {
        /// Each socket that was tried, and its error.
        tried: Vec<(PathBuf, io::Error)>,
    },
    /// The daemon has ended the session or has exited. All objects of the session are gone.
    #[error("the RNIC daemon is gone or has ended this session")]
    DaemonGone,
    /// The daemon sent a message that this library cannot parse: a bug in one of them.
    #[error("protocol error between this library and the daemon: {0}")]
    Protocol(String),
    /// The machine, or the control group of this process, has less free memory than the shared
    /// buffer needs. The buffer is not allocated, because the OOM killer might kill a process.
    #[error("not enough memory: {wanted} more bytes needed, but only about {available} available")]
    NotEnoughMemory {
        /// Bytes that were still needed.
        wanted: u64,
        /// Bytes available, including swap.
        available: u64,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed, for display.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Reason why a daemon does not admit a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// The daemon uses another version of the ABI.
    #[error("it uses ABI version {daemon}, but this library uses version {ours}")]
    Version {
        /// The daemon's version.
        daemon: u16,
        /// This library's version.
        ours: u16,
    },
    /// The daemon has reached its limit on sessions (`limits.sessions`).
    #[error("its limit on sessions (limits.sessions) is reached")]
    SessionLimit,
    /// The daemon is stopping.
    #[error("it is stopping")]
    Stopping,
    /// The daemon lacks memory or descriptors.
    #[error("it lacks memory or descriptors for another session")]
    Resources,
    /// This user may not use the device.
    #[error("this user may not use the device")]
    NotAllowed,
    /// The user has reached the limit on its sessions (`limits.user.sessions`).
    #[error("its limit on sessions of this user (limits.user.sessions) is reached")]
    UserSessions,
    /// An administrator is draining the daemon (`rnicctl drain`).
    #[error("it is draining: it accepts no new sessions until `rnicctl drain off`")]
    Draining,
    /// Too many connections of this user have not sent their Hello yet.
    #[error("too many unauthenticated connections from this user; try again")]
    TooManyUnauthenticated,
}

/// Party at fault for an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The program's: the call is wrong.
    Application,
    /// No fault: the daemon refused the call because of a limit, a rule or its own state.
    Refusal,
    /// The peer's or the network's.
    Peer,
    /// The daemon's or the machine's.
    Daemon,
}

impl Error {
    /// Returns the party at fault.
    pub fn fault(&self) -> Fault {
        match self {
            Error::AfterFork { .. }
            | Error::QueueFull { .. }
            | Error::TooManySges { .. }
            | Error::InlineTooLong { .. }
            | Error::OutOfRange { .. }
            | Error::Misaligned { .. }
            | Error::PrivateDataTooLong { .. }
            | Error::WrongWindow { .. }
            | Error::ForeignObject { .. }
            | Error::Leased { .. }
            | Error::LeasedMemory { .. }
            | Error::ReservedWrId { .. }
            | Error::DestroyedQp
            | Error::SharedReceives => Fault::Application,
            Error::Refused { .. } | Error::NotAdmitted { .. } => Fault::Refusal,
            Error::Rejected { .. }
            | Error::Unreachable { .. }
            | Error::Disconnected(_)
            | Error::TimedOut { .. } => Fault::Peer,
            Error::Failed { status, .. } => match status {
                CompletionStatus::LocalLength
                | CompletionStatus::LocalQpOperation
                | CompletionStatus::LocalProtection
                | CompletionStatus::LocalAccess
                | CompletionStatus::MwBind => Fault::Application,
                CompletionStatus::Fatal => Fault::Daemon,
                _ => Fault::Peer,
            },
            Error::NoDaemon { .. }
            | Error::DaemonGone
            | Error::Protocol(_)
            | Error::NotEnoughMemory { .. }
            | Error::Io { .. } => Fault::Daemon,
        }
    }

    /// Returns the daemon's refusal if the error is [`Error::Refused`].
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Error::Refused { refusal, .. } => Some(refusal),
            _ => None,
        }
    }

    /// Returns true if a request failed in the system or by a fault rule, and changed nothing.
    pub fn has_no_effect(&self) -> bool {
        matches!(self.refusal(), Some(Refusal::System { .. }))
    }

    /// Returns the number of the daemon's diagnosis, if it has one.
    pub fn diagnosis_id(&self) -> Option<u64> {
        match self {
            Error::Refused { diagnosis_id, .. } | Error::Failed { diagnosis_id, .. } => {
                (*diagnosis_id != 0).then_some(*diagnosis_id)
            }
            _ => None,
        }
    }

    pub(crate) fn io(what: &'static str, source: impl Into<io::Error>) -> Self {
        Error::Io { what, source: source.into() }
    }

    pub(crate) fn protocol(why: impl Into<String>) -> Self {
        Error::Protocol(why.into())
    }
}

impl From<PostError> for Error {
    fn from(e: PostError) -> Self {
        e.source
    }
}

/// Error of a batch of which only the first requests, or none, were posted.
///
/// The first `posted` requests are in the queue and will complete. The next request failed with
/// `source`. Neither it nor any later request was posted (compare `bad_wr` of `ibv_post_send(3)`).
#[derive(Debug, thiserror::Error)]
#[error("request {posted} of the batch was not posted: {source}")]
pub struct PostError {
    /// Number of requests posted, which is also the index of the request that failed.
    pub posted: usize,
    /// Error of the request that failed.
    pub source: Error,
}

/// Converts a copy fault to an error for the caller's region: `offset` counts from its start.
pub(crate) fn copy_error(e: shm::CopyFault, offset: u64, length: usize, size: u64) -> Error {
    match e {
        shm::CopyFault::OutOfRange => Error::OutOfRange { offset, length: length as u64, size },
        shm::CopyFault::Misaligned => Error::Misaligned { offset },
        shm::CopyFault::Poisoned => Error::DaemonGone,
    }
}

fn format_detail(detail: &Option<TerminateCode>, diagnosis_id: u64) -> String {
    let mut s = String::new();
    if let Some(code) = detail {
        s += &format!(", Terminate {code}");
        if *code == codes::UNTAGGED_NO_BUFFER {
            s += "; the receiver must post receives before the sender sends, or let messages wait \
                  for a receive (QpOptions::rnr_policy)";
        }
    }
    s + &format_diagnosis(diagnosis_id)
}

fn format_diagnosis(diagnosis_id: u64) -> String {
    if diagnosis_id == 0 {
        String::new()
    } else {
        format!(" (details: `rnicctl why {diagnosis_id}`)")
    }
}

fn format_no_daemon(tried: &[(PathBuf, io::Error)]) -> String {
    let each = |which: &dyn Fn(&io::Error) -> bool| -> Vec<_> {
        let some = tried.iter().filter(|(_, e)| which(e));
        some.map(|(p, e)| format!("{}: {e}", p.display())).collect()
    };
    let denied = each(&|e| e.kind() == io::ErrorKind::PermissionDenied);
    if denied.is_empty() {
        let all = each(&|_| true).join(", ");
        format!("no RNIC daemon: {all}; start `rnicd run` or set RNIC_SOCKET")
    } else {
        // A daemon may be running, so do not advise starting one.
        format!("no access to the RNIC daemon: {}", denied.join(", "))
    }
}
