//! Types shared by all layers: identifiers, access rights, states and results.
//!
//! Numbers that applications see are those of verbs (`ibv_wc_status`, `ibv_access_flags`); numbers
//! in packets are those of the RFCs.

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

/// Defines distinct types for `u32` identifiers.
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
    /// A session of a client, from its Hello until its socket is closed or its process ends.
    SessionId,
    /// User of a session. A worker divides its time among users, not among sessions.
    UserId,
    /// A protection domain, private to a session or named in the configuration.
    PdId,
    /// Memory that a client shares with the daemon.
    SharedBufferId,
    /// A memory region: a range of a shared buffer or of attached memory.
    MrId,
    /// A completion queue.
    CqId,
    /// A queue pair, `qp_num` for applications.
    QpId,
    /// A completion or event channel.
    ChannelId,
    /// A bound address, listening or not.
    ListenerId,
    /// A connection request, to accept or reject.
    RequestId,
    /// A shared receive queue.
    SrqId,
    /// A memory window of either type.
    MwId,
}

/// Steering tag: identifies a memory region or window to the local and the remote RNIC (RFC 5041
/// section 2).
///
/// The low 8 bits are the key, which an application may increment. 0 and `0xFFFF_FFFF` are never
/// issued.
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

/// Message sequence number of an untagged queue. Starts at 1 and wraps to 0 (RFC 5041 section 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Msn(pub u32);

impl Msn {
    /// Number of a queue's first message.
    //= DDP-4.3-8
    pub const FIRST: Msn = Msn(1);

    /// Returns the next number.
    #[must_use]
    pub fn next(self) -> Msn {
        //= DDP-4.3-9
        Msn(self.0.wrapping_add(1))
    }
}

/// Offset in a tagged buffer, in bytes (RFC 5041 section 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TaggedOffset(pub u64);

/// Monotonic nanoseconds from an origin that the caller chooses. This crate reads no clock.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Time(pub u64);

impl Time {
    /// Returns the time `d` later, saturating.
    #[must_use]
    pub fn after(self, d: std::time::Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Returns the duration since `earlier`; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Time) -> std::time::Duration {
        std::time::Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

bitflags! {
    /// Access rights to a memory region, with the bits of `ibv_access_flags`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(transparent)]
    pub struct Access: u32 {
        /// Local requests may write: receives, RDMA Reads and results of atomic operations.
        const LOCAL_WRITE = 1;
        /// The peer may RDMA Write.
        const REMOTE_WRITE = 2;
        /// The peer may RDMA Read.
        const REMOTE_READ = 4;
        /// The peer may use atomic operations.
        const REMOTE_ATOMIC = 8;
        /// Memory windows may be bound to the region.
        const MW_BIND = 16;
        /// Remote offsets count from 0 instead of from the region's address.
        const ZERO_BASED = 32;
    }
}

/// QPs that may use a memory region, for themselves and for their peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
//= DDP-8.2-4
pub enum Scope {
    /// Every QP of the region's protection domain.
    Pd,
    /// One QP, whose peer can also invalidate the STag (RFC 5040 section 8.1.1).
    Qp(QpId),
}

/// Type of a memory window (`ibv_alloc_mw(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WindowKind {
    /// Any QP of its domain may bind and use it.
    Type1,
    /// One QP binds it with a key that the application chooses, and only this QP may use it. The
    /// peer may invalidate it.
    Type2,
}

/// QP type (`ibv_qp_type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum QpType {
    /// iWARP. The QP connects or accepts. A request completes when the lower layer has accepted
    /// its data (RFC 5040 section 5.5).
    #[default]
    Iwarp,
    /// RC of the RoCE device (`IBV_QPT_RC`). The program sets the peer's GID and QP number. A
    /// request completes when the peer has acknowledged it.
    Rc,
    /// UC of the RoCE device (`IBV_QPT_UC`): Sends and RDMA Writes without acknowledgements. A
    /// request completes when the lower layer has accepted its data. A message that the peer
    /// cannot receive is lost, and neither end is notified.
    Uc,
    /// UD of the RoCE device (`IBV_QPT_UD`): Sends of one packet each, to the QP in the request. A
    /// request completes when the packet is sent. A packet that no QP receives is lost, and neither
    /// end is notified.
    Ud,
}

impl QpType {
    /// Returns true for the types of the RoCE device: RC, UC and UD.
    pub fn is_roce(self) -> bool {
        matches!(self, QpType::Rc | QpType::Uc | QpType::Ud)
    }
}

/// Handling of a Send for which no receive is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RnrPolicy {
    /// Terminates the stream with DDP code 1/2/02 (RFC 5041 section 7.1).
    Terminate,
    /// Holds the stream until a receive is posted, up to a time limit.
    Wait {
        /// Time limit in milliseconds; 0 for the device's default.
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
        /// Graceful close: sends all posted requests, then waits for the peer's FIN.
        Closing = 2,
        /// A Terminate was sent or received. All requests are flushed.
        Terminate = 3,
        /// Closed or failed. All requests are flushed.
        Error = 4,
        /// QP of the RoCE device, ready to receive. Posted sends wait.
        Rtr = 5,
        /// QP of the RoCE device whose send queue drains: it starts no more send requests.
        Sqd = 6,
        /// A send request of a UC or UD QP has failed. Later ones are flushed, receives continue.
        Sqe = 7,
    }
}

numbered! {
    /// Result of a request, with the numbers of `ibv_wc_status`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub enum CompletionStatus: u8, from_u8 {
        /// The request was carried out (`IBV_WC_SUCCESS`).
        Success = 0,
        /// A local buffer is too short for the message.
        LocalLength = 1,
        /// The request was malformed or not allowed on this QP.
        LocalQpOperation = 2,
        /// A local key did not cover the range or lacked the required right.
        LocalProtection = 4,
        /// Flushed: the QP went to an error state before the request completed.
        WrFlush = 5,
        /// Binding a window failed.
        MwBind = 6,
        /// The peer answered a read with an invalid response.
        BadResponse = 7,
        /// A local region was revoked during the request.
        LocalAccess = 8,
        /// The peer rejected the request as malformed.
        RemoteInvalidRequest = 9,
        /// The peer refused access to its memory.
        RemoteAccess = 10,
        /// The peer could not carry out the request.
        RemoteOperation = 11,
        /// The connection was lost.
        TransportRetryExceeded = 12,
        /// The peer had no receive posted.
        ReceiverNotReady = 13,
        /// The peer has sent its FIN and answers no further requests (`IBV_WC_REM_ABORT_ERR`).
        RemoteAborted = 16,
        /// The device failed (`IBV_WC_FATAL_ERR`).
        Fatal = 19,
        /// Any other failure (`IBV_WC_GENERAL_ERR`).
        General = 21,
    }
}

/// Describes the result, without a leading capital.
impl fmt::Display for CompletionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use CompletionStatus::*;
        f.write_str(match self {
            Success => "done",
            LocalLength => "the local buffer is too short for the message",
            LocalQpOperation => "the request is malformed or not allowed on this QP",
            LocalProtection => "a local key does not cover the range or lacks the required right",
            WrFlush => "flushed: the QP failed or was closed before the request completed",
            MwBind => "the window could not be bound",
            BadResponse => "the peer sent an invalid response",
            LocalAccess => "a local region was revoked during the request",
            RemoteInvalidRequest => "the peer rejected the request as malformed",
            RemoteAccess => "the peer refuses access to its memory",
            RemoteOperation => "the peer could not carry out the request",
            TransportRetryExceeded => "the connection was lost",
            ReceiverNotReady => "the peer had no receive posted",
            RemoteAborted => "the peer has closed the connection and answers no more requests",
            Fatal => "the device failed",
            General => "unspecified failure",
        })
    }
}

numbered! {
    /// Operation of a completed request, with the numbers of `ibv_wc_opcode`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub enum CompletionOpcode: u8, from_u8 {
        /// A Send of any kind.
        Send = 0,
        /// An RDMA Write.
        RdmaWrite = 1,
        /// An RDMA Read, with or without invalidation of the sink STag.
        RdmaRead = 2,
        /// An atomic compare and swap.
        CompareSwap = 3,
        /// An atomic fetch and add.
        FetchAdd = 4,
        /// A bind of a memory window (`IBV_WR_BIND_MW`).
        BindMw = 5,
        /// The invalidation of a local STag (`IBV_WR_LOCAL_INV`).
        LocalInvalidate = 6,
        /// A receive, from a QP's own queue or a shared one.
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

/// End that sent a Terminate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TerminateOrigin {
    /// This end, which found the fault.
    Local,
    /// The peer, which found the fault.
    Peer,
}

/// Addresses of both ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AddressPair {
    /// Address and port of this end.
    #[serde(with = "address")]
    pub local: SocketAddr,
    /// Address and port of the other end.
    #[serde(with = "address")]
    pub peer: SocketAddr,
}
