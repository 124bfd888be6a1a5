//! Status of the daemon and rows of its tables, for `rnicctl`.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::types::*;

/// Status of the whole daemon.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StatusInfo {
    /// Version of the daemon.
    pub version: String,
    /// Name of the device, `device.name` of the configuration.
    pub device: String,
    /// Process ID of the daemon.
    pub pid: u32,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// Number of worker threads.
    pub workers: u32,
    /// "direct" or "tcp": path between QPs of this daemon.
    pub loopback: String,
    /// Open sessions; 1 for a client that is not an administrator. The object counts below cover
    /// all sessions for an administrator, otherwise only the client's own.
    pub sessions: u32,
    /// Protection domains.
    pub pds: u32,
    /// Shared buffers, reserved ones included.
    pub shared_buffers: u32,
    /// Bytes of shared buffers.
    pub shared_bytes: u64,
    /// Memory regions.
    pub mrs: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Memory windows.
    pub windows: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// Bound addresses.
    pub listeners: u32,
    /// Connections in MPA start-up.
    pub startups: u32,
    /// Size of all arenas, which hold queues and doorbell pages, in bytes.
    pub arena_bytes: u64,
    /// Requests refused since start.
    pub refusals: u64,
    /// Sessions ended for misbehaviour since start.
    pub sessions_ended: u64,
    /// Terminates sent since start.
    pub terminates_sent: u64,
    /// Terminates received since start.
    pub terminates_received: u64,
    /// True if an administrator is draining the daemon: it refuses new sessions, objects and
    /// connections.
    pub draining: bool,
    /// TCP and UDP port at which daemons of other hosts reach this one (`wired.port`).
    pub wired_port: u16,
    /// Error that keeps other hosts from connecting. Empty if there is none, or while the port is
    /// not open yet: a private daemon opens it for its first QP of the RoCE device.
    pub wired_port_problem: String,
    /// GIDs of the RoCE device.
    pub gids: u32,
    /// Error from reading the addresses of the host, or empty.
    pub gids_problem: String,
    /// Packets received at `wired_port` and dropped because no daemon sent them.
    pub packets_dropped: u64,
    /// Fault rules in force: those that the session's user has set or that apply to this user, or
    /// all rules for an administrator.
    pub faults: u32,
}

/// A page of rows of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rows {
    /// Sessions, with the number of objects of each.
    Clients(Vec<ClientRow>),
    /// Queue pairs.
    Qps(Vec<QpRow>),
    /// Completion queues.
    Cqs(Vec<CqRow>),
    /// Memory regions.
    Mrs(Vec<MrRow>),
    /// Bound addresses, listening or not.
    Listeners(Vec<ListenerRow>),
    /// Shared receive queues.
    Srqs(Vec<SrqRow>),
    /// Memory windows.
    Windows(Vec<WindowRow>),
    /// Protection domains.
    Pds(Vec<PdRow>),
    /// Limits of the device, users, sessions and named domains, with their current use.
    Limits(Vec<LimitRow>),
    /// Diagnoses, newest first.
    Diagnoses(Vec<Diagnosis>),
    /// Notable events, newest first.
    Events(Vec<EventRecord>),
    /// Fault rules.
    Faults(Vec<FaultRow>),
}

/// A session of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRow {
    /// Session number, unique among open sessions.
    pub session: SessionId,
    /// Process ID at connect.
    pub pid: i32,
    /// User ID at connect.
    pub uid: u32,
    /// Command name at connect.
    pub command: String,
    /// Queue pairs it owns.
    pub qps: u32,
    /// Completion queues it owns.
    pub cqs: u32,
    /// Memory regions it owns.
    pub mrs: u32,
    /// Bytes of its shared buffers, reserved ones included.
    pub shared_bytes: u64,
    /// Size of its arenas in bytes.
    pub arena_bytes: u64,
    /// Refused requests of the session.
    pub refusals: u64,
}

/// A queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpRow {
    /// Number and handle of the QP.
    pub qp: QpId,
    /// Type of the QP, which determines the device.
    pub kind: QpType,
    /// Session that created the QP.
    pub session: SessionId,
    /// Protection domain of the QP.
    pub pd: PdId,
    /// Shared receive queue from which the QP takes receives.
    pub srq: Option<SrqId>,
    /// State last published by the worker.
    pub state: QpState,
    /// "none", "direct", "tcp", or "datagrams" for a UD QP.
    pub path: String,
    /// Addresses of both ends, even on the direct path; `None` without a connection.
    pub addresses: Option<AddressPair>,
    /// Worker that owns the QP; `None` if it is not bound.
    pub worker: Option<u32>,
    /// Granted inbound reads; 0 without a connection.
    pub ird: u16,
    /// Granted outbound reads; 0 without a connection.
    pub ord: u16,
    /// Counters since the QP was created.
    pub counters: QpCounters,
    /// The Terminate that ended the connection, if any.
    pub terminate: Option<(TerminateOrigin, TerminateCode)>,
    /// The peer of an RC or UC QP in Rtr or later.
    pub remote_qp: Option<QpId>,
    /// Expected PSN of the peer's first packet; 0 before Rtr.
    pub rq_psn: u32,
    /// PSN of the first packet of an RC or UC QP; 0 before Rts.
    pub sq_psn: u32,
}

/// Counters of a queue pair since its creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct QpCounters {
    /// Send queue requests completed.
    pub sends_completed: u64,
    /// Receives completed, flushes included.
    pub receives_completed: u64,
    /// Payload bytes sent (Send, Write, Read Response).
    pub bytes_sent: u64,
    /// Payload bytes of Sends, Writes and Read Responses placed in memory.
    pub bytes_received: u64,
    /// DDP segments of messages sent; RTR and Terminate are not counted.
    pub segments_sent: u64,
    /// DDP segments received, including dropped ones.
    pub segments_received: u64,
    /// RDMA Reads and atomic operations of the peer whose response was sent completely.
    pub reads_answered: u64,
    /// Requests that completed with an error, flushes included.
    pub errors: u64,
    /// Datagrams dropped on arrival: wrong Q_Key, no receive posted, or too long for the receive.
    pub dropped: u64,
}

/// A completion queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CqRow {
    /// Handle of the CQ.
    pub cq: CqId,
    /// Session that created the CQ.
    pub session: SessionId,
    /// Entries of the ring, a power of two.
    pub capacity: u32,
    /// Entries published and not yet read.
    pub unread: u32,
    /// Entries reserved for outstanding requests.
    pub reserved: u32,
    /// QPs that use it.
    pub qps: u32,
    /// Entries written since its creation.
    pub completions: u64,
    /// True after an overflow or if the client corrupted the ring.
    pub in_error: bool,
}

/// A memory region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MrRow {
    /// Handle of the region.
    pub mr: MrId,
    /// Session that registered the region.
    pub session: SessionId,
    /// Protection domain of the region.
    pub pd: PdId,
    /// Its shared buffer; `None` if it is in the client's own address space.
    pub buffer: Option<SharedBufferId>,
    /// Address of the first byte in SGEs and remote offsets; 0 if zero-based.
    pub iova: u64,
    /// Length of the region in bytes.
    pub length: u64,
    /// Access rights of local requests and of peers.
    pub access: Access,
    /// QPs that may use it, for themselves and for their peers.
    pub scope: Scope,
}

/// A bound address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerRow {
    /// Handle of the bound address.
    pub listener: ListenerId,
    /// Session that bound it.
    pub session: SessionId,
    /// Bound address; the kernel may have chosen the port.
    #[serde(with = "address")]
    pub address: SocketAddr,
    /// Backlog; 0 if bound without listening.
    pub backlog: u32,
    /// Pending connection requests.
    pub pending: u32,
    /// Requests accepted since it was bound.
    pub accepted: u64,
    /// Requests rejected since it was bound.
    pub rejected: u64,
}

/// A shared receive queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SrqRow {
    /// Handle of the SRQ.
    pub srq: SrqId,
    /// Session that created the SRQ.
    pub session: SessionId,
    /// Protection domain of the SRQ.
    pub pd: PdId,
    /// Entries of the ring, a power of two.
    pub capacity: u32,
    /// Receives posted and not yet taken.
    pub posted: u32,
    /// Receives taken since its creation.
    pub taken: u64,
    /// Armed limit; 0 if none.
    pub limit: u32,
    /// QPs that use it.
    pub qps: u32,
    /// Number of these QPs with a message that waits for a receive.
    pub waiting: u32,
    /// Number of reports of a QP that took more than its fair share.
    pub unfair: u64,
}

/// A memory window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowRow {
    /// Handle of the window.
    pub window: MwId,
    /// Session that allocated the window.
    pub session: SessionId,
    /// Protection domain of the window.
    pub pd: PdId,
    /// Type 1, for a domain, or type 2, for a QP.
    pub kind: WindowKind,
    /// STag of the last bind, or of the allocation if the window was never bound.
    pub stag: Stag,
    /// Region to which the window is bound; `None` if unbound.
    pub mr: Option<MrId>,
}

/// A protection domain, private to a session or named in the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PdRow {
    /// Handle of the domain.
    pub pd: PdId,
    /// Its name in the configuration; `None` for a private domain.
    pub name: Option<String>,
    /// Owner of a private domain.
    pub session: Option<SessionId>,
    /// Number of sessions that have opened it.
    pub sessions: u32,
    /// Memory regions in it.
    pub mrs: u32,
    /// Queue pairs in it.
    pub qps: u32,
}

/// A limit and its current use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitRow {
    /// Configuration key, for instance `limits.user.qps`.
    pub key: String,
    /// Owner of the counted objects: "device", "user 1000", "session 7", "pd shared".
    pub scope: String,
    /// Effective limit: a number of objects, or bytes if the key is a size.
    pub limit: u64,
    /// Current use, in the same unit.
    pub used: u64,
}

/// Cause of a refusal or failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// Number of the record, never reused while the daemon runs.
    pub id: u64,
    /// Time in milliseconds since 1970.
    pub time_ms: u64,
    /// Session of the request, completion or stream.
    pub session: SessionId,
    /// Kind of failure.
    pub what: DiagnosisKind,
    /// The rule that decided: a configuration key, or an RFC section with a quotation.
    pub rule: String,
    /// Human-readable explanation, with numbers.
    pub text: String,
    /// The QP concerned, if any.
    pub qp: Option<QpId>,
    /// Protection domain of the operation.
    pub pd: Option<PdId>,
    /// The STag or local key concerned.
    pub stag: Option<Stag>,
    /// Requested tagged offset or address.
    pub offset: Option<u64>,
    /// Requested length in bytes.
    pub length: Option<u64>,
    /// Addresses of the connection.
    pub addresses: Option<AddressPair>,
}

impl Diagnosis {
    /// Creates a record that names no object except the session. Its number and time are 0.
    pub fn new(
        session: SessionId,
        what: DiagnosisKind,
        rule: impl Into<String>,
        text: impl Into<String>,
    ) -> Self {
        Diagnosis {
            id: 0,
            time_ms: 0,
            session,
            what,
            rule: rule.into(),
            text: text.into(),
            qp: None,
            pd: None,
            stag: None,
            offset: None,
            length: None,
            addresses: None,
        }
    }
}

/// Kind of failure that a diagnosis explains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiagnosisKind {
    /// A request on the control socket was refused.
    Refused,
    /// A completion with an error. Flushed completions refer to the diagnosis of their cause.
    Completion {
        /// Work request id chosen by the application.
        wr_id: u64,
        /// Status of the CQE.
        status: CompletionStatus,
    },
    /// A stream was ended by a Terminate.
    Terminate {
        /// The end that sent the Terminate.
        origin: TerminateOrigin,
        /// Layer, error type and error code of the Terminate (RFC 5040 section 4.8).
        code: TerminateCode,
    },
    /// A stream ended without a Terminate: a reset, a lost connection, a failed start-up.
    Lost,
    /// A session was ended for misbehaviour.
    Ended,
    /// The QP dropped a datagram, the first for this reason.
    Dropped,
    /// A fault rule had an effect other than a failed request, a refusal or a Terminate.
    Injected,
}

/// A notable event in the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRecord {
    /// Sequence number of the record, from 1.
    pub sequence: u64,
    /// Time in milliseconds since 1970.
    pub time_ms: u64,
    /// The session concerned; `None` if the event concerns the whole daemon.
    pub session: Option<SessionId>,
    /// Kind: "session_opened", "session_ended", "limit_reached", "srq_unfair", "reloaded", ...
    pub kind: String,
    /// Human-readable description.
    pub text: String,
}

/// A fault rule in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultRow {
    /// Name, unique among the rules of its owner.
    pub name: String,
    /// User who set the rule.
    pub owner: u32,
    /// The session to which the rule applies and with which it ends; `None` for all sessions.
    pub session: Option<SessionId>,
    /// Number of occasions selected so far.
    pub seen: u64,
    /// Number of faults so far.
    pub injected: u64,
    /// True while the rule has a lasting effect, such as a stopped QP or a port that is down.
    pub in_effect: bool,
    /// The rule, as text.
    pub rule: String,
}
