//! What can go wrong, sorted by whose fault it is.
//!
//! Every fallible call of this library returns [`Error`]. A request that was posted and failed
//! later is no `Error` but a [`Completion`](crate::Completion) with a status;
//! [`Completion::ok`](crate::Completion::ok) turns one into [`Error::Failed`].

use std::io;
use std::path::PathBuf;

use rnic_core::abi::control::{DisconnectReason, Refusal};
use rnic_core::shm;
use rnic_core::types::{
    CompletionOpcode, CompletionStatus, QpId, TerminateCode, WindowKind, codes,
};

/// Why a call failed. [`Error::fault`] says whose fault it was.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    // The application's.
    /// The process has forked since it opened the context; only the opener may use it.
    #[error("this context was opened by process {owner}; open another one after fork")]
    AfterFork {
        /// Process that opened the context.
        owner: u32,
    },
    /// The queue has no room: poll completions, then post again.
    #[error("the queue is full: its {depth} entries are all outstanding")]
    QueueFull {
        /// Requests the queue holds.
        depth: u32,
    },
    /// A request has more elements than its queue takes.
    #[error("{given} elements, but this queue takes at most {max} per request")]
    TooManySges {
        /// Elements of the request.
        given: usize,
        /// Elements per request that the queue was made for.
        max: usize,
    },
    /// A request has more inline data than its queue takes.
    #[error("{given} bytes of inline data, but this queue takes at most {max}")]
    InlineTooLong {
        /// Bytes of the request.
        given: usize,
        /// Bytes per request that the queue was made for.
        max: usize,
    },
    /// An access outside a shared buffer or region.
    #[error("offset {offset} + {length} bytes is outside of {size} bytes")]
    OutOfRange {
        /// Bytes from the start.
        offset: u64,
        /// Bytes from `offset` on that were to be accessed.
        length: u64,
        /// Bytes of the shared buffer or region.
        size: u64,
    },
    /// An atomic access whose offset in its shared buffer is no multiple of 8.
    #[error("offset {offset} is not aligned to 8 bytes")]
    Misaligned {
        /// Bytes from the start of the shared buffer.
        offset: u64,
    },
    /// A region was to be written that the process itself may not write.
    #[error("address {address:#x} is not writable, but rights to write it were asked for")]
    NotWritable {
        /// The first such address.
        address: u64,
    },
    /// More private data than MPA carries (RFC 5044 section 7.1).
    #[error("{given} bytes of private data, but MPA carries at most {max}")]
    PrivateDataTooLong {
        /// Bytes of private data that were given.
        given: usize,
        /// Most bytes of private data that the frame takes.
        max: usize,
    },
    /// A window of the other type was expected.
    #[error("a window of {kind:?} does not take this call")]
    WrongWindow {
        /// The type it has.
        kind: WindowKind,
    },
    /// Objects of two contexts were used together.
    #[error("{what} belongs to another context")]
    ForeignObject {
        /// The object, in words.
        what: &'static str,
    },

    /// A receive was posted to a QP that takes its receives from a shared queue.
    #[error("this QP takes its receives from a shared receive queue: post there")]
    SharedReceives,

    /// The QP was destroyed while a task waited for one of its requests.
    #[error("the QP was destroyed before the request completed")]
    DestroyedQp,

    /// A range of a [`LocalMr`](crate::LocalMr) is leased or posted already, or a part of it is.
    #[error("{length} bytes at {offset} are leased already, or some of them are")]
    Leased {
        /// Bytes from the region's start.
        offset: u64,
        /// Bytes from `offset` on.
        length: u64,
    },
    /// An element that was built by hand names a [`LocalMr`](crate::LocalMr), whose bytes may be
    /// somebody's slice: post a lease instead.
    #[error("STag {lkey:#010x} is of a region whose bytes are leased: post a lease")]
    LeasedMemory {
        /// The element's key.
        lkey: u32,
    },
    /// This library numbers requests that have a lease from `0x1EA0_0000_0000_0000` to
    /// `0x1EAF_FFFF_FFFF_FFFF`; a request of the program must not look like one.
    #[error("wr_id {wr_id:#x} is among those that this library uses itself")]
    ReservedWrId {
        /// `wr_id` of the request, as given.
        wr_id: u64,
    },

    // A resource or a right that the daemon refused.
    /// The daemon refused the request; the refusal names the limit, rule or field.
    #[error("refused: {refusal}{}", diagnosis_in_words(*diagnosis_id))]
    Refused {
        /// What was refused, and by which limit, rule or field.
        refusal: Refusal,
        /// Number of the daemon's diagnosis ([`Context::diagnosis`](crate::Context::diagnosis)); 0
        /// if there is none.
        diagnosis_id: u64,
    },
    /// The daemon refused the session.
    #[error("the daemon at {path} refused this session: {why}", path = path.display())]
    NotAdmitted {
        /// Socket of the daemon.
        path: PathBuf,
        /// Reason that the daemon gives in its reply to Hello.
        why: Admission,
    },

    // The peer's, or the network's.
    /// The peer rejected the connection.
    #[error("the peer rejected the connection ({} bytes of private data)", private_data.len())]
    Rejected {
        /// Private data of the rejection.
        private_data: Vec<u8>,
    },
    /// No connection came about.
    #[error("no connection: {reason}")]
    Unreachable {
        /// Why there is none, as a sentence for people.
        reason: String,
    },
    /// The connection ended before it was usable.
    #[error("the connection ended: {0}")]
    Disconnected(DisconnectReason),
    /// A posted request completed with an error.
    #[error("{opcode} {wr_id} of QP {qp} failed: {status}{}", detail_in_words(detail, *diagnosis_id))]
    Failed {
        /// The application's name for the request.
        wr_id: u64,
        /// QP it was posted to.
        qp: QpId,
        /// What kind of request it was.
        opcode: CompletionOpcode,
        /// Status of the completion, with the number of `ibv_wc_status`.
        status: CompletionStatus,
        /// The Terminate that failed it, if one did.
        detail: Option<TerminateCode>,
        /// Number of the daemon's diagnosis; 0 if there is none.
        diagnosis_id: u64,
    },
    /// The time the caller allowed is over.
    #[error("timed out waiting for {what}")]
    TimedOut {
        /// What was awaited, in words.
        what: &'static str,
    },

    // The daemon's, or the machine's.
    /// No daemon answers at any of these sockets.
    #[error("{}", tried_in_words(tried))]
    NoDaemon {
        /// Each socket that was tried, and how it failed.
        tried: Vec<(PathBuf, io::Error)>,
    },
    /// The daemon has ended the session, or has itself ended. Everything the session owned is gone.
    #[error("the RNIC daemon is gone or has ended this session")]
    DaemonGone,
    /// The daemon said something that this library does not understand; a bug of one of them.
    #[error("the daemon broke the protocol: {0}")]
    Protocol(String),
    /// The machine, or the control group of this process, has less memory left than a shared buffer
    /// takes. Nothing was taken: a kernel without memory would kill somebody.
    #[error("{wanted} more bytes of memory wanted, but only about {available} are available")]
    NotEnoughMemory {
        /// Bytes that were still wanted.
        wanted: u64,
        /// Bytes there are, swap included.
        available: u64,
    },
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed, in words.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Why a daemon does not admit a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Admission {
    /// It speaks another version of the ABI.
    #[error("it speaks ABI version {daemon}, this library version {ours}")]
    Version {
        /// The daemon's version.
        daemon: u16,
        /// This library's version.
        ours: u16,
    },
    /// Its limit on sessions is reached.
    #[error("its limit on sessions (limits.sessions) is reached")]
    SessionLimit,
    /// The daemon is stopping.
    #[error("it is stopping")]
    Stopping,
    /// It lacks memory or descriptors.
    #[error("it lacks memory or descriptors for another session")]
    Resources,
    /// This user may not use the device.
    #[error("this user may not use the device")]
    NotAllowed,
    /// Its limit on sessions of one user is reached.
    #[error("its limit on sessions of this user (limits.user.sessions) is reached")]
    UserSessions,
    /// An administrator has it refuse everything new.
    #[error("it is draining: it takes no new sessions until `rnicctl drain off`")]
    Draining,
    /// Too many clients of this user are connected that have said nothing yet.
    #[error("too many connections of this user to its socket have said nothing yet; try again")]
    Silent,
}

/// Whose fault an [`Error`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The program's: the call was wrong, and will be wrong again.
    Application,
    /// Nobody's: a limit or a rule of the administrator.
    Refusal,
    /// The peer's or the network's.
    Peer,
    /// The daemon's or the machine's.
    Daemon,
}

impl Error {
    /// Whose fault it was.
    pub fn fault(&self) -> Fault {
        match self {
            Error::AfterFork { .. }
            | Error::QueueFull { .. }
            | Error::TooManySges { .. }
            | Error::InlineTooLong { .. }
            | Error::OutOfRange { .. }
            | Error::Misaligned { .. }
            | Error::NotWritable { .. }
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

    /// What the daemon refused, if it is that.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Error::Refused { refusal, .. } => Some(refusal),
            _ => None,
        }
    }

    /// Number of the daemon's diagnosis, if there is one.
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

/// A batch of which only the first part was posted.
///
/// The first `posted` requests stand in the queue and will complete; the next one failed with
/// `source`, and neither it nor any after it was posted (compare `bad_wr` of `ibv_post_send(3)`).
#[derive(Debug, thiserror::Error)]
#[error("request {posted} of the batch was not posted: {source}")]
pub struct PostError {
    /// Requests that were posted; also the place of the first one that was not.
    pub posted: usize,
    /// What was wrong with the first one that was not.
    pub source: Error,
}

/// A copy fault in the terms of the caller's region: `offset` counts from its start.
pub(crate) fn copy_error(e: shm::CopyFault, offset: u64, length: usize, size: u64) -> Error {
    match e {
        shm::CopyFault::OutOfRange => Error::OutOfRange { offset, length: length as u64, size },
        shm::CopyFault::Misaligned => Error::Misaligned { offset },
        shm::CopyFault::Poisoned => Error::DaemonGone,
    }
}

fn detail_in_words(detail: &Option<TerminateCode>, diagnosis_id: u64) -> String {
    let mut s = String::new();
    if let Some(code) = detail {
        s += &format!(", Terminate {code}");
        if *code == codes::UNTAGGED_NO_BUFFER {
            s += "; post receives before the peer sends, or have its messages wait for them \
                  (QpOptions::rnr_policy)";
        }
    }
    s + &diagnosis_in_words(diagnosis_id)
}

fn diagnosis_in_words(diagnosis_id: u64) -> String {
    if diagnosis_id == 0 { String::new() } else { format!(" (why {diagnosis_id})") }
}

fn tried_in_words(tried: &[(PathBuf, io::Error)]) -> String {
    let each = |which: &dyn Fn(&io::Error) -> bool| -> Vec<_> {
        let some = tried.iter().filter(|(_, e)| which(e));
        some.map(|(p, e)| format!("{}: {e}", p.display())).collect()
    };
    let denied = each(&|e| e.kind() == io::ErrorKind::PermissionDenied);
    match denied.is_empty() {
        true => {
            let all = each(&|_| true).join(", ");
            format!("no RNIC daemon: {all}; start `rnicd run` or set RNIC_SOCKET")
        }
        // There is one; to start another would be the wrong advice.
        false => format!("no access to the RNIC daemon: {}", denied.join(", ")),
    }
}
