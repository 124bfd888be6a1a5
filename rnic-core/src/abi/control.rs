//! Messages of the control socket and of the event channels.
//!
//! The socket is `SOCK_SEQPACKET`: one message per packet, at most [`MAX_MESSAGE`] octets, checked
//! before decoding. The first packet each way is a [`Hello`] / [`HelloReply`] of fixed layout; then
//! the client sends [`Request`]s and gets one [`Reply`] each, in order, both in postcard.
//! Connection and asynchronous events travel on the event channel whose descriptor came with the
//! Hello reply, one postcard [`Event`] per packet. Enums are append-only and structs never change.
//! Descriptors that belong to a message travel with it as `SCM_RIGHTS`, in the order named here.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::abi::queue::QueueShape;
use crate::types::*;

/// Largest control or event message, in octets.
pub const MAX_MESSAGE: usize = 8192;
/// Most private data MPA carries, in octets (RFC 5044 section 7.1).
pub const MAX_PRIVATE_DATA: usize = 512;
/// Rows per page of a list reply.
pub const PAGE_ROWS: usize = 32;

// ---------------------------------------------------------------------------------------------
// Hello

/// First octets of the first packet each way.
pub const HELLO_MAGIC: [u8; 8] = *b"rnicd\0\0\x01";
/// Octets of both Hello packets.
pub const HELLO_LEN: usize = 32;

bitflags::bitflags! {
    /// Optional abilities of the daemon that a client may rely on.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
    #[serde(transparent)]
    pub struct Features: u64 {
        /// Connections between QPs of one daemon may take the direct path.
        const DIRECT_PATH = 1;
    }
}

/// The client's first packet. Little-endian: magic 8, oldest ABI version 2, newest 2, spare 4,
/// wanted features 8, spare 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Oldest ABI version the client speaks.
    pub min_version: u16,
    /// Newest ABI version the client speaks.
    pub max_version: u16,
    /// [`Features`] the client would use.
    pub features: u64,
}

impl Hello {
    /// The packet.
    pub fn to_bytes(self) -> [u8; HELLO_LEN] {
        let mut b = [0; HELLO_LEN];
        b[..8].copy_from_slice(&HELLO_MAGIC);
        b[8..10].copy_from_slice(&self.min_version.to_le_bytes());
        b[10..12].copy_from_slice(&self.max_version.to_le_bytes());
        b[16..24].copy_from_slice(&self.features.to_le_bytes());
        b
    }

    /// Reads a packet; `None` if it is no Hello.
    pub fn from_bytes(b: &[u8]) -> Option<Self> {
        let b: &[u8; HELLO_LEN] = b.try_into().ok()?;
        (b[..8] == HELLO_MAGIC).then(|| Hello {
            min_version: u16::from_le_bytes([b[8], b[9]]),
            max_version: u16::from_le_bytes([b[10], b[11]]),
            features: u64::from_le_bytes(b[16..24].try_into().unwrap_or([0; 8])),
        })
    }
}

/// Why a Hello was answered as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum HelloStatus {
    /// Welcome. Descriptors: the first arena, the event channel, then one eventfd per worker.
    Ok = 0,
    /// No ABI version in common; `version` is the daemon's.
    Version = 1,
    /// The administrator's limit on sessions (`limits.sessions`) is reached.
    SessionLimit = 2,
    /// The daemon is stopping.
    Stopping = 3,
    /// The daemon lacks memory or descriptors for another session.
    Resources = 4,
    /// This user may not use this device.
    NotAllowed = 5,
}

impl HelloStatus {
    /// The status with this number, if there is one.
    pub fn from_u32(n: u32) -> Option<Self> {
        use HelloStatus::*;
        [Ok, Version, SessionLimit, Stopping, Resources, NotAllowed]
            .into_iter()
            .find(|s| *s as u32 == n)
    }
}

/// The daemon's first packet. Little-endian: magic 8, status 4, version 2, workers 2, session 4,
/// octets of the first arena 4, features 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloReply {
    /// Numeric [`HelloStatus`].
    pub status: u32,
    /// ABI version in force.
    pub version: u16,
    /// Workers, hence doorbell pages and eventfds.
    pub workers: u16,
    /// This session.
    pub session: SessionId,
    /// Octets of the first arena.
    pub arena_len: u32,
    /// [`Features`] of the daemon.
    pub features: u64,
}

impl HelloReply {
    /// The packet.
    pub fn to_bytes(self) -> [u8; HELLO_LEN] {
        let mut b = [0; HELLO_LEN];
        b[..8].copy_from_slice(&HELLO_MAGIC);
        b[8..12].copy_from_slice(&self.status.to_le_bytes());
        b[12..14].copy_from_slice(&self.version.to_le_bytes());
        b[14..16].copy_from_slice(&self.workers.to_le_bytes());
        b[16..20].copy_from_slice(&self.session.0.to_le_bytes());
        b[20..24].copy_from_slice(&self.arena_len.to_le_bytes());
        b[24..].copy_from_slice(&self.features.to_le_bytes());
        b
    }

    /// Reads a packet; `None` if it is no Hello reply.
    pub fn from_bytes(b: &[u8]) -> Option<Self> {
        let b: &[u8; HELLO_LEN] = b.try_into().ok()?;
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        (b[..8] == HELLO_MAGIC).then(|| HelloReply {
            status: u32_at(8),
            version: u16::from_le_bytes([b[12], b[13]]),
            workers: u16::from_le_bytes([b[14], b[15]]),
            session: SessionId(u32_at(16)),
            arena_len: u32_at(20),
            features: u64::from(u32_at(24)) | u64::from(u32_at(28)) << 32,
        })
    }
}

// ---------------------------------------------------------------------------------------------
// Requests

/// One request. Ids are the client's; the reply repeats them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Echoed in the reply.
    pub id: u32,
    /// What is asked.
    pub body: RequestBody,
}

/// What a client may ask. Every handle is looked up among that session's own objects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RequestBody {
    /// Identity and limits of the device. Answer: [`ReplyBody::Device`].
    QueryDevice,
    /// Opens a protection domain, private or named by the administrator. Answer: `Pd`.
    OpenPd {
        /// A `[[pd]]` of the configuration; `None` for a private one.
        name: Option<String>,
    },
    /// Closes a protection domain that nothing uses any more. Answer: `Done`.
    ClosePd {
        /// Which.
        pd: PdId,
    },
    /// Shares memory. Descriptor: a populated memfd without `F_SEAL_SEAL`. Answer: `Segment`.
    AddSegment {
        /// Octets; must equal the memfd's size and be a multiple of the page size.
        length: u64,
        /// Where the client mapped it (for addresses in its own terms).
        client_address: u64,
    },
    /// Withdraws shared memory that no region names any more. Answer: `Done`.
    RemoveSegment {
        /// Which.
        segment: SegmentId,
    },
    /// Registers a memory region; answered when every worker knows it. Answer: `Mr`.
    RegMr {
        /// Domain the region belongs to.
        pd: PdId,
        /// Memory the region names.
        source: MrSource,
        /// Octets, at least 1.
        length: u64,
        /// Address that local elements and remote offsets count from; 0 if zero-based.
        iova: u64,
        /// Rights.
        access: Access,
        /// Who may use its STag from the wire.
        scope: Scope,
    },
    /// Deregisters; when answered, nothing more will be read from or written to it. Answer: `Done`.
    DeregMr {
        /// Which.
        mr: MrId,
    },
    /// Makes a completion channel. Answer: `Channel`, with its descriptor.
    CreateChannel,
    /// Destroys a completion channel that no CQ uses. Answer: `Done`.
    DestroyChannel {
        /// Which.
        channel: ChannelId,
    },
    /// Makes a completion queue. Answer: `Cq`.
    CreateCq {
        /// Entries wanted, at least 1; rounded up to a power of two.
        entries: u32,
        /// Channel its events go to.
        channel: Option<ChannelId>,
        /// The application's context, returned in asynchronous events.
        context: u64,
    },
    /// Destroys a completion queue that no QP uses. Answer: `Done`.
    DestroyCq {
        /// Which.
        cq: CqId,
    },
    /// Makes a queue pair in state Idle. Answer: `Qp`.
    CreateQp(QpRequest),
    /// Moves a QP to Error: everything posted is flushed. Answer: `Done`.
    QpToError {
        /// Which.
        qp: QpId,
    },
    /// Destroys a QP, ending its connection; nothing posted completes any more. Answer: `Done`.
    DestroyQp {
        /// Which.
        qp: QpId,
    },
    /// State and counters of a QP. Answer: `QpInfo`.
    QueryQp {
        /// Which.
        qp: QpId,
    },
    /// Binds an address without listening. Answer: `Listener`.
    Bind {
        /// Address; port 0 lets the kernel choose.
        address: SocketAddr,
        /// The application's context, returned in events.
        context: u64,
    },
    /// Listens on a bound address. Answer: `Done`.
    Listen {
        /// Which.
        listener: ListenerId,
        /// Connection requests that may wait unread or undecided.
        backlog: u32,
    },
    /// Closes a bound address; undecided requests are rejected on the wire. Answer: `Done`.
    CloseListener {
        /// Which.
        listener: ListenerId,
    },
    /// Accepts a connection request with an Idle QP. Answer: `Done`, then events.
    Accept {
        /// Which.
        request: RequestId,
        /// The QP to connect.
        qp: QpId,
        /// Inbound reads to offer; `None` for as many as requested, within limits.
        ird: Option<u16>,
        /// Outbound reads wanted; `None` for as many as the peer offers, within limits.
        ord: Option<u16>,
        /// At most [`MAX_PRIVATE_DATA`] octets, 4 fewer with RFC 6581.
        private_data: Vec<u8>,
    },
    /// Rejects a connection request. Answer: `Done`.
    Reject {
        /// Which.
        request: RequestId,
        /// At most [`MAX_PRIVATE_DATA`] octets, 4 fewer with RFC 6581.
        private_data: Vec<u8>,
    },
    /// Connects an Idle QP. Answer: `Done`, then events.
    Connect {
        /// The QP to connect.
        qp: QpId,
        /// Where to.
        peer: SocketAddr,
        /// Source address, if it matters.
        local: Option<SocketAddr>,
        /// Inbound reads to offer; `None` for the device's default.
        ird: Option<u16>,
        /// Outbound reads wanted; `None` for the device's default.
        ord: Option<u16>,
        /// At most [`MAX_PRIVATE_DATA`] octets; more than 508 selects MPA revision 1.
        private_data: Vec<u8>,
    },
    /// Ends a QP's connection: in order, or at once with a reset. Answer: `Done`, then events.
    Disconnect {
        /// Which.
        qp: QpId,
        /// Reset instead of finishing what was posted.
        abort: bool,
    },
    /// Changes the context that events of an object carry. Answer: `Done`.
    SetContext {
        /// Which.
        object: ObjectRef,
        /// The new context.
        context: u64,
    },
    /// Whole-daemon figures. Answer: `Status`.
    Status,
    /// A page of objects, of this session or, for administrators, of all. Answer: `Rows`.
    List {
        /// What to list.
        what: ListKind,
        /// Rows to skip.
        from: u32,
    },
}

/// Parameters of a queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpRequest {
    /// Domain whose regions it may use.
    pub pd: PdId,
    /// Where send queue completions go.
    pub send_cq: CqId,
    /// Where receive completions go.
    pub recv_cq: CqId,
    /// Shared receive queue (refused until built).
    pub srq: Option<SrqId>,
    /// Send requests outstanding, rounded up to a power of two.
    pub sq_depth: u32,
    /// Receives outstanding, rounded up to a power of two.
    pub rq_depth: u32,
    /// Elements per send request.
    pub max_send_sge: u8,
    /// Elements per receive.
    pub max_recv_sge: u8,
    /// Octets of inline data per send request.
    pub max_inline: u16,
    /// Signal every send request.
    pub signal_all: bool,
    /// The application's context, returned in events.
    pub context: u64,
}

/// Memory a region names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MrSource {
    /// A range of a segment.
    Segment {
        /// Which.
        segment: SegmentId,
        /// Octets from its start.
        offset: u64,
    },
    /// The client's own address space (refused until built).
    Attached {
        /// Address in the client.
        address: u64,
    },
}

/// An object with a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectRef {
    /// A queue pair.
    Qp(QpId),
    /// A completion queue.
    Cq(CqId),
    /// A bound address.
    Listener(ListenerId),
}

/// What `List` lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ListKind {
    /// Sessions.
    Clients,
    /// Queue pairs.
    Qps,
    /// Completion queues.
    Cqs,
    /// Memory regions.
    Mrs,
    /// Bound addresses.
    Listeners,
}

// ---------------------------------------------------------------------------------------------
// Replies

/// Answer to one request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// Id of the request.
    pub id: u32,
    /// What was done, or why not.
    pub result: Result<ReplyBody, Refusal>,
}

/// Where a queue stands. With `new_arena` set, the reply carries that arena's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueLocation {
    /// Arena number; the one that came with Hello is 0.
    pub arena: u32,
    /// Octets from its start to the queue header.
    pub offset: u32,
    /// Shape as granted.
    pub shape: QueueShape,
}

/// An arena that the client has not mapped yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewArena {
    /// Its number.
    pub arena: u32,
    /// Its octets.
    pub length: u32,
}

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplyBody {
    /// Nothing to say.
    Done,
    /// The device.
    Device(DeviceAttributes),
    /// A protection domain was opened.
    Pd {
        /// Its handle.
        pd: PdId,
    },
    /// A segment was mapped.
    Segment {
        /// Its handle.
        segment: SegmentId,
    },
    /// A region was registered.
    Mr {
        /// Its handle.
        mr: MrId,
        /// Its STag: local and remote key alike.
        stag: Stag,
    },
    /// A completion channel was made; its descriptor is with this reply.
    Channel {
        /// Its handle.
        channel: ChannelId,
    },
    /// A completion queue was made.
    Cq {
        /// Its handle.
        cq: CqId,
        /// Where it is.
        queue: QueueLocation,
        /// The descriptor with this reply, if there is one.
        new_arena: Option<NewArena>,
    },
    /// A queue pair was made.
    Qp {
        /// Its handle and number.
        qp: QpId,
        /// Its send queue.
        sq: QueueLocation,
        /// Its receive queue.
        rq: QueueLocation,
        /// The descriptor with this reply, if there is one.
        new_arena: Option<NewArena>,
    },
    /// State and counters of a QP.
    QpInfo(QpRow),
    /// An address was bound.
    Listener {
        /// Its handle.
        listener: ListenerId,
        /// The address with the port that was chosen.
        address: SocketAddr,
    },
    /// Whole-daemon figures.
    Status(StatusInfo),
    /// A page of objects.
    Rows {
        /// The rows.
        rows: Rows,
        /// How many there are in all.
        total: u32,
    },
}

/// What the device is and allows this session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceAttributes {
    /// Name from the configuration.
    pub name: String,
    /// Version of the daemon.
    pub version: String,
    /// Most queue pairs.
    pub max_qps: u32,
    /// Most outstanding requests per queue.
    pub max_wr_depth: u32,
    /// Most elements per request.
    pub max_sge: u8,
    /// Most inline octets per request.
    pub max_inline: u16,
    /// Most completion queues.
    pub max_cqs: u32,
    /// Most entries per completion queue.
    pub max_cq_entries: u32,
    /// Most memory regions.
    pub max_mrs: u32,
    /// Most shared memory, in octets.
    pub max_segment_bytes: u64,
    /// Most protection domains.
    pub max_pds: u32,
    /// Most inbound reads per QP.
    pub max_ird: u16,
    /// Most outbound reads per QP.
    pub max_ord: u16,
    /// Whether connections inside this daemon take the direct path.
    pub direct_path: bool,
}

/// Whole-daemon figures.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StatusInfo {
    /// Version of the daemon.
    pub version: String,
    /// Device name.
    pub device: String,
    /// Its process id.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Workers.
    pub workers: u32,
    /// "direct" or "tcp".
    pub loopback: String,
    /// Objects that exist: sessions, PDs, segments, octets of segments, MRs, CQs, QPs, listeners.
    pub sessions: u32,
    /// Protection domains.
    pub pds: u32,
    /// Segments.
    pub segments: u32,
    /// Octets of segments.
    pub segment_bytes: u64,
    /// Memory regions.
    pub mrs: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Bound addresses.
    pub listeners: u32,
    /// Connections in MPA start-up.
    pub half_open: u32,
    /// Octets of arenas.
    pub arena_bytes: u64,
    /// Requests refused since start.
    pub refusals: u64,
    /// Sessions ended for misbehaviour since start.
    pub sessions_ended: u64,
    /// Terminates sent since start.
    pub terminates_sent: u64,
    /// Terminates received since start.
    pub terminates_received: u64,
}

/// Rows of one list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rows {
    /// Sessions.
    Clients(Vec<ClientRow>),
    /// Queue pairs.
    Qps(Vec<QpRow>),
    /// Completion queues.
    Cqs(Vec<CqRow>),
    /// Memory regions.
    Mrs(Vec<MrRow>),
    /// Bound addresses.
    Listeners(Vec<ListenerRow>),
}

/// A session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRow {
    /// Its number.
    pub session: SessionId,
    /// Process id at connect.
    pub pid: i32,
    /// User id at connect.
    pub uid: u32,
    /// Command name at connect.
    pub command: String,
    /// Queue pairs it owns.
    pub qps: u32,
    /// Completion queues it owns.
    pub cqs: u32,
    /// Memory regions it owns.
    pub mrs: u32,
    /// Octets it shares.
    pub segment_bytes: u64,
    /// Octets of its arenas.
    pub arena_bytes: u64,
    /// Its requests that were refused.
    pub refusals: u64,
}

/// A queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpRow {
    /// Its number.
    pub qp: QpId,
    /// Its owner.
    pub session: SessionId,
    /// Its domain.
    pub pd: PdId,
    /// Its state.
    pub state: QpState,
    /// "none", "direct" or "tcp".
    pub path: String,
    /// Addresses while connected.
    pub addresses: Option<AddressPair>,
    /// Worker that owns it, if bound.
    pub worker: Option<u32>,
    /// Granted inbound and outbound reads.
    pub ird: u16,
    /// Granted outbound reads.
    pub ord: u16,
    /// Counters.
    pub counters: QpCounters,
    /// The Terminate that ended it, if one did.
    pub terminate: Option<(TerminateOrigin, TerminateCode)>,
}

/// Counters of a queue pair since it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct QpCounters {
    /// Send queue requests completed.
    pub sends_completed: u64,
    /// Receives completed.
    pub receives_completed: u64,
    /// Payload octets sent (Send, Write, Read Response).
    pub bytes_sent: u64,
    /// Payload octets placed.
    pub bytes_received: u64,
    /// DDP segments sent.
    pub segments_sent: u64,
    /// DDP segments received.
    pub segments_received: u64,
    /// RDMA Reads answered.
    pub reads_answered: u64,
    /// Requests that completed with an error, flushes included.
    pub errors: u64,
}

/// A completion queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CqRow {
    /// Its handle.
    pub cq: CqId,
    /// Its owner.
    pub session: SessionId,
    /// Entries.
    pub capacity: u32,
    /// Entries published and not yet given back.
    pub unread: u32,
    /// Entries reserved for requests under way.
    pub reserved: u32,
    /// QPs that use it.
    pub qps: u32,
    /// Entries written since it was made.
    pub completions: u64,
    /// Whether it has overflowed.
    pub overflowed: bool,
}

/// A memory region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MrRow {
    /// Its handle.
    pub mr: MrId,
    /// Its owner.
    pub session: SessionId,
    /// Its domain.
    pub pd: PdId,
    /// Its segment.
    pub segment: Option<SegmentId>,
    /// First address.
    pub iova: u64,
    /// Octets.
    pub length: u64,
    /// Rights.
    pub access: Access,
    /// Who may use it from the wire.
    pub scope: Scope,
}

/// A bound address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerRow {
    /// Its handle.
    pub listener: ListenerId,
    /// Its owner.
    pub session: SessionId,
    /// Address.
    pub address: SocketAddr,
    /// Backlog; 0 if bound only.
    pub backlog: u32,
    /// Requests that wait for a decision.
    pub pending: u32,
    /// Requests accepted so far.
    pub accepted: u64,
    /// Requests rejected so far.
    pub rejected: u64,
}

// ---------------------------------------------------------------------------------------------
// Refusals

/// Why a request was refused. Each says what, and which limit, value and key or field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// A configured limit is reached.
    #[error("{key} = {limit} reached (asked for {wanted} more, {used} in use)")]
    Limit {
        /// The configuration key.
        key: String,
        /// Its effective value.
        limit: u64,
        /// How much is in use.
        used: u64,
        /// How much more was asked for.
        wanted: u64,
    },
    /// A value is above what the device allows for one object.
    #[error("{field} = {value} is above {key} = {limit}")]
    AboveMaximum {
        /// The field of the request.
        field: String,
        /// Its value.
        value: u64,
        /// The configuration key or device maximum.
        key: String,
        /// Its effective value.
        limit: u64,
    },
    /// A field makes no sense.
    #[error("{field}: {why}")]
    Invalid {
        /// The field of the request.
        field: String,
        /// What is wrong with it.
        why: String,
    },
    /// No such object in this session.
    #[error("no {kind} {handle} in this session")]
    NoSuchObject {
        /// "QP", "CQ", "MR", ...
        kind: String,
        /// The handle as given.
        handle: u32,
    },
    /// Something still uses the object.
    #[error("{kind} {handle} is in use by {by}")]
    InUse {
        /// "PD", "CQ", ...
        kind: String,
        /// The handle.
        handle: u32,
        /// What uses it.
        by: String,
    },
    /// The object is in the wrong state.
    #[error("{kind} {handle} is in state {state}, needs {needs}")]
    WrongState {
        /// "QP", "listener", ...
        kind: String,
        /// The handle.
        handle: u32,
        /// Its state.
        state: String,
        /// The state needed.
        needs: String,
    },
    /// The administrator's rules do not allow it.
    #[error("not allowed by {rule}: {what}")]
    NotAllowed {
        /// The configuration key of the rule.
        rule: String,
        /// What was refused.
        what: String,
    },
    /// This daemon does not do that.
    #[error("{what} is not supported by this daemon")]
    Unsupported {
        /// What was asked for.
        what: String,
    },
    /// The operating system refused.
    #[error("{what}: {error}")]
    System {
        /// What was tried.
        what: String,
        /// The system's error in words.
        error: String,
    },
    /// The message did not decode, or lacked or had a descriptor it should not; the session ends.
    #[error("malformed request: {why}")]
    Malformed {
        /// What is wrong.
        why: String,
    },
}

// ---------------------------------------------------------------------------------------------
// Events

/// A connection or asynchronous event. `context` is the one last set for the object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A peer asks to connect.
    ConnectionRequest {
        /// The listener it came to.
        listener: ListenerId,
        /// The listener's context.
        context: u64,
        /// To be accepted or rejected.
        request: RequestId,
        /// Addresses.
        addresses: AddressPair,
        /// Inbound reads the peer offers: the most our ORD may be; `None` if not negotiated.
        peer_ird: Option<u16>,
        /// Outbound reads the peer wants: what our IRD should be; `None` if not negotiated.
        peer_ord: Option<u16>,
        /// MPA revision of the request.
        revision: u8,
        /// Whether the peer asked for the peer-to-peer model.
        peer_to_peer: bool,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// A connection request is gone: the peer gave up before it was decided.
    RequestWithdrawn {
        /// The listener it came to.
        listener: ListenerId,
        /// The listener's context.
        context: u64,
        /// The request, no longer valid.
        request: RequestId,
        /// Why.
        reason: String,
    },
    /// The connection stands; precedes its first completion.
    Established {
        /// Which.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Addresses.
        addresses: AddressPair,
        /// Inbound reads in force.
        ird: u16,
        /// Outbound reads in force.
        ord: u16,
        /// Private data of the peer's reply; empty on the accepting side.
        private_data: Vec<u8>,
    },
    /// The peer rejected the connection. The QP is Idle again.
    Rejected {
        /// Which.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Private data of the rejection.
        private_data: Vec<u8>,
    },
    /// No connection came about. The QP is Idle again if it connected, in Error if it accepted.
    Unreachable {
        /// Which.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Why, in words.
        reason: String,
    },
    /// The connection has ended; follows its flush completions.
    Disconnected {
        /// Which.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// How.
        reason: DisconnectReason,
    },
    /// A completion queue is dead: it overflowed, or its memory was scribbled over.
    CqError {
        /// Which.
        cq: CqId,
        /// The CQ's context.
        context: u64,
    },
    /// A QP went to Error for a reason other than its connection.
    QpFatal {
        /// Which.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Why, in words.
        reason: String,
    },
    /// Events were dropped because nobody read them.
    EventsLost {
        /// How many.
        count: u64,
    },
    /// The peer has finished sending (FIN between two messages). Receives are flushed; sends go on
    /// until this side disconnects, and `Disconnected` follows then.
    PeerClosed {
        /// Which.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
}

/// How a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DisconnectReason {
    /// In order, after a FIN each way.
    Orderly,
    /// By a Terminate, ours or the peer's.
    Terminate {
        /// Who sent it.
        origin: TerminateOrigin,
        /// What it said.
        code: TerminateCode,
        /// The headers it enclosed, as on the wire (at most 48 octets).
        headers: Vec<u8>,
    },
    /// The TCP connection was lost.
    Lost {
        /// Why, in words.
        why: String,
    },
    /// This side aborted it.
    Aborted,
}
