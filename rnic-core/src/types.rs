//! Words that every layer shares: identifiers, rights, states and results.
//!
//! Numbers follow verbs where an application sees them (`ibv_wc_status`, `ibv_access_flags`) and
//! the RFCs where the wire does. Nothing here does anything; everybody calls it.

pub mod address;
mod atomic;
pub mod codes;
mod gid;
mod numbered;

use std::fmt;
use std::net::SocketAddr;

use bitflags::bitflags;
use serde::{Deserialize, Serialize};

pub use self::atomic::{ATOMIC_LEN, AtomicOperation};
pub use self::codes::TerminateCode;
pub use self::gid::Gid;
pub(crate) use self::numbered::numbered;

/// Defines `u32` identifiers that must not be mistaken for one another.
macro_rules! id32 {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    )+};
}

id32! {
    /// One client's lease on the device: from Hello to the end of its socket or process.
    SessionId,
    /// Whose a session is: the time of a worker is shared out among users, however many sessions
    /// each of them has.
    UserId,
    /// A protection domain, private to a session or named in the configuration.
    PdId,
    /// Memory a client shares with the daemon.
    SharedBufferId,
    /// A memory region: a named range of a shared buffer or of attached memory.
    MrId,
    /// A completion queue; the number that asynchronous events name.
    CqId,
    /// A queue pair; the number applications see as `qp_num`.
    QpId,
    /// A completion or event channel.
    ChannelId,
    /// A bound address, listening or not.
    ListenerId,
    /// A connection request that waits for accept or reject.
    RequestId,
    /// A shared receive queue.
    SrqId,
    /// A memory window of either type.
    MwId,
}

/// A steering tag: names a memory region or window to the local and the remote RNIC (RFC 5041
/// section 2).
///
/// The low 8 bits are the key an application may advance; 0 and `0xFFFF_FFFF` are never issued.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Stag(pub u32);

impl fmt::Debug for Stag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stag({:#010x})", self.0)
    }
}

impl fmt::Display for Stag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

/// Message sequence number of an untagged queue, from 1, wrapping to 0 (RFC 5041 section 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Msn(pub u32);

impl Msn {
    /// The number of a queue's first message.
    //= DDP-4.3-8
    pub const FIRST: Msn = Msn(1);

    /// The number after this one.
    #[must_use]
    pub fn next(self) -> Msn {
        //= DDP-4.3-9
        Msn(self.0.wrapping_add(1))
    }
}

/// Offset in a tagged buffer, in bytes (RFC 5041 section 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TaggedOffset(pub u64);

/// Monotonic nanoseconds from an origin the caller chose; the core never reads a clock.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Time(pub u64);

impl Time {
    /// The time `d` later, at the end of time at the latest.
    #[must_use]
    pub fn after(self, d: std::time::Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// How long after `earlier` this is; zero if it is not.
    #[must_use]
    pub fn since(self, earlier: Time) -> std::time::Duration {
        std::time::Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

bitflags! {
    /// Rights to a memory region, with the numbers of `ibv_access_flags`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(transparent)]
    pub struct Access: u32 {
        /// Local receives and read responses may write.
        const LOCAL_WRITE = 1;
        /// The peer may RDMA Write.
        const REMOTE_WRITE = 2;
        /// The peer may RDMA Read.
        const REMOTE_READ = 4;
        /// The peer may use atomic operations.
        const REMOTE_ATOMIC = 8;
        /// Memory windows may be bound to it.
        const MW_BIND = 16;
        /// Remote offsets count from 0 instead of from the region's address.
        const ZERO_BASED = 32;
    }
}

/// Who may use a memory region's STag from the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
//= DDP-8.2-4
pub enum Scope {
    /// Every QP of the region's protection domain.
    Pd,
    /// One QP; only such an STag can be invalidated by its peer (RFC 5040 section 8.1.1).
    Qp(QpId),
}

/// What a memory window may be bound by and who may use it then (the two types of
/// `ibv_alloc_mw(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WindowKind {
    /// Bound by any QP of its domain, used by every QP of its domain.
    Type1,
    /// Bound by one QP with a key of the application's choice, used by that QP only; its peer may
    /// invalidate it.
    Type2,
}

/// How a queue pair comes by its peer, and what its completions say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum QpType {
    /// By connecting or accepting. A request is done when the lower layer has taken it, as RFC 5040
    /// section 5.5 has it.
    #[default]
    Connected,
    /// Wired by hand: the program says which GID and number its peer has (`IBV_QPT_RC` of a RoCE
    /// adapter). A request is done when the peer has acknowledged it.
    Wired,
    /// Wired by hand, and without acknowledgements (`IBV_QPT_UC` of a RoCE adapter): Sends and RDMA
    /// Writes only. A request is done when the lower layer has taken it; what the peer cannot take
    /// in is lost, and neither end is told.
    WiredUnreliable,
    /// Datagrams (`IBV_QPT_UD` of a RoCE adapter): Sends only, each of one packet, to the queue
    /// pair that the request names. A request is done when the packet is sent; one that nobody
    /// takes in is lost, and neither end is told.
    Datagrams,
}

impl QpType {
    /// Whether its program says who its peer is, once or with each request.
    pub fn is_wired(self) -> bool {
        matches!(self, QpType::Wired | QpType::WiredUnreliable | QpType::Datagrams)
    }
}

/// What becomes of a Send that finds no receive posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RnrPolicy {
    /// The stream is terminated with DDP code 1/2/02, as RFC 5041 section 7.1 has it.
    Terminate,
    /// The stream is held until a receive is posted, but at most so many milliseconds.
    Wait {
        /// Longest wait; 0 for the device's default.
        timeout_ms: u32,
    },
}

numbered! {
    /// QP states as in the RDMA verbs for iWARP.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub enum QpState: u8, from_u8 {
        /// Not connected; receives may be posted.
        Idle = 0,
        /// Connected and ready to send.
        Rts = 1,
        /// Disconnecting in order: the send queue runs dry, then the peer's FIN is awaited.
        Closing = 2,
        /// A Terminate was sent or received; everything posted has been or is being flushed.
        Terminate = 3,
        /// Dead; everything posted is flushed.
        Error = 4,
        /// Wired by hand and ready to receive; what is posted to send waits.
        Rtr = 5,
        /// Wired by hand, and begins no request that is posted to send.
        Sqd = 6,
        /// A send request of a UC or UD QP has failed: later ones are flushed, receives go on.
        Sqe = 7,
    }
}

numbered! {
    /// Outcome of one request, with the numbers of `ibv_wc_status`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub enum CompletionStatus: u8, from_u8 {
        /// The request was carried out (`IBV_WC_SUCCESS`).
        Success = 0,
        /// A local buffer is too short for the message.
        LocalLength = 1,
        /// The request was malformed or not allowed in this QP.
        LocalQpOperation = 2,
        /// A local key did not cover the range with the right needed.
        LocalProtection = 4,
        /// Flushed: the QP left the connected states before this request was done.
        WrFlush = 5,
        /// Binding a window failed.
        MwBind = 6,
        /// The peer answered a read with something that was not its response.
        BadResponse = 7,
        /// A local region was revoked while the request was under way.
        LocalAccess = 8,
        /// The peer called the request malformed.
        RemoteInvalidRequest = 9,
        /// The peer refused access to its memory.
        RemoteAccess = 10,
        /// The peer could not carry the request out.
        RemoteOperation = 11,
        /// The connection was lost.
        TransportRetryExceeded = 12,
        /// The peer had no receive posted.
        ReceiverNotReady = 13,
        /// The peer has sent its FIN and answers no request any more (`IBV_WC_REM_ABORT_ERR`).
        RemoteAborted = 16,
        /// The device failed (`IBV_WC_FATAL_ERR`).
        Fatal = 19,
        /// An outcome that has no number of its own (`IBV_WC_GENERAL_ERR`).
        General = 21,
    }
}

/// What happened, in words.
impl fmt::Display for CompletionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use CompletionStatus::*;
        f.write_str(match self {
            Success => "done",
            LocalLength => "the local buffer is too short for the message",
            LocalQpOperation => "the request is malformed or not allowed in this QP",
            LocalProtection => "a local key does not cover the range with the right needed",
            WrFlush => "flushed: the connection ended before it was done",
            MwBind => "the window could not be bound",
            BadResponse => "the peer answered with something that was not the response",
            LocalAccess => "a local region was revoked while it was under way",
            RemoteInvalidRequest => "the peer calls the request malformed",
            RemoteAccess => "the peer refuses access to its memory",
            RemoteOperation => "the peer could not carry it out",
            TransportRetryExceeded => "the connection was lost",
            ReceiverNotReady => "the peer had no receive posted",
            RemoteAborted => "the peer aborted",
            Fatal => "the device failed",
            General => "it failed",
        })
    }
}

numbered! {
    /// What a completion completed, with the numbers of `ibv_wc_opcode`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub enum CompletionOpcode: u8, from_u8 {
        /// A Send of any kind.
        Send = 0,
        /// An RDMA Write that this side requested.
        RdmaWrite = 1,
        /// An RDMA Read that this side requested, with or without invalidation of the sink STag.
        RdmaRead = 2,
        /// An atomic compare and swap that this side requested.
        CompareSwap = 3,
        /// An atomic fetch and add that this side requested.
        FetchAdd = 4,
        /// A bind of a memory window (`IBV_WR_BIND_MW`).
        BindMw = 5,
        /// The invalidation of a local STag (`IBV_WR_LOCAL_INV`).
        LocalInvalidate = 6,
        /// A receive, of a QP's own queue or of a shared one.
        Receive = 128,
    }
}

impl fmt::Display for CompletionOpcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use CompletionOpcode::*;
        f.write_str(match self {
            Send => "Send",
            RdmaWrite => "RDMA Write",
            RdmaRead => "RDMA Read",
            CompareSwap => "compare and swap",
            FetchAdd => "fetch and add",
            BindMw => "bind of a window",
            LocalInvalidate => "local invalidate",
            Receive => "receive",
        })
    }
}

/// Which side sent a Terminate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TerminateOrigin {
    /// We found the fault.
    Local,
    /// The peer found the fault; its Terminate arrived here.
    Peer,
}

/// The two addresses of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AddressPair {
    /// Address and port of this end.
    #[serde(with = "address")]
    pub local: SocketAddr,
    /// Address and port of the other end.
    #[serde(with = "address")]
    pub peer: SocketAddr,
}
