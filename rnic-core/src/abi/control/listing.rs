//! What `rnicctl` shows: figures of the daemon and rows of its tables.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::types::*;

/// Whole-daemon figures.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StatusInfo {
    /// Version of the daemon.
    pub version: String,
    /// Name of the device, `device.name` of the configuration.
    pub device: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Worker threads that run.
    pub workers: u32,
    /// "direct" or "tcp".
    pub loopback: String,
    /// Sessions that are open; 1 to a client that is no administrator. The counts of objects below
    /// are those of all sessions to an administrator, to others those of their own session.
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
    /// Bytes of the arenas in which queues and doorbell pages are.
    pub arena_bytes: u64,
    /// Requests refused since start.
    pub refusals: u64,
    /// Sessions ended for misbehaviour since start.
    pub sessions_ended: u64,
    /// Terminates sent since start.
    pub terminates_sent: u64,
    /// Terminates received since start.
    pub terminates_received: u64,
    /// Whether an administrator has it refuse everything new.
    pub draining: bool,
    /// Port of TCP and UDP at which daemons of other hosts reach this one (`wired.port`).
    pub wired_port: u16,
    /// Why they cannot. Empty if they can, or if the port has not been tried: a private daemon
    /// takes it with its first QP of the RoCE device.
    pub wired_port_problem: String,
    /// GIDs of the RoCE device.
    pub gids: u32,
    /// Why the addresses of the host could not be read, or empty.
    pub gids_problem: String,
    /// Packets at `wired_port` that were of no daemon.
    pub packets_dropped: u64,
}

/// Rows of one list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rows {
    /// Sessions, each with what it owns.
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
    /// Limits of device, users, sessions and named domains, with what is in use.
    Limits(Vec<LimitRow>),
    /// Diagnoses, newest first.
    Diagnoses(Vec<Diagnosis>),
    /// Notable happenings, newest first.
    Events(Vec<EventRecord>),
}

/// A session, which is what a connected client has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRow {
    /// Number of the session, which no other open session has.
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
    /// Bytes of its shared buffers, reserved ones included.
    pub shared_bytes: u64,
    /// Bytes of its arenas.
    pub arena_bytes: u64,
    /// Its requests that were refused.
    pub refusals: u64,
}

/// A queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpRow {
    /// Number of the QP, which is its handle too.
    pub qp: QpId,
    /// Session that made the QP.
    pub session: SessionId,
    /// Protection domain of the QP.
    pub pd: PdId,
    /// Shared receive queue it takes receives from.
    pub srq: Option<SrqId>,
    /// State as the worker last published it.
    pub state: QpState,
    /// "none", "direct", "tcp", or "datagrams", which have no peer.
    pub path: String,
    /// Addresses of both ends, also on the direct path; `None` without a connection.
    pub addresses: Option<AddressPair>,
    /// Worker that owns it, if bound.
    pub worker: Option<u32>,
    /// Granted inbound reads; 0 without a connection.
    pub ird: u16,
    /// Granted outbound reads; 0 without a connection.
    pub ord: u16,
    /// Counters since the QP was made.
    pub counters: QpCounters,
    /// The Terminate that ended it, if one did.
    pub terminate: Option<(TerminateOrigin, TerminateCode)>,
}

/// Counters of a queue pair since it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct QpCounters {
    /// Send queue requests completed.
    pub sends_completed: u64,
    /// Receives completed, flushes included.
    pub receives_completed: u64,
    /// Payload bytes sent (Send, Write, Read Response).
    pub bytes_sent: u64,
    /// Payload bytes placed, of Sends, Writes and Read Responses.
    pub bytes_received: u64,
    /// DDP segments of messages sent; RTR and Terminate are not counted.
    pub segments_sent: u64,
    /// DDP segments received, whatever became of them.
    pub segments_received: u64,
    /// RDMA Reads and atomic operations of the peer whose response was sent in full.
    pub reads_answered: u64,
    /// Requests that completed with an error, flushes included.
    pub errors: u64,
    /// Datagrams that came and were dropped: they had another Q_Key, found no receive, or did not
    /// fit it.
    pub dropped: u64,
}

/// A completion queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CqRow {
    /// Handle of the CQ.
    pub cq: CqId,
    /// Session that made the CQ.
    pub session: SessionId,
    /// Entries that the ring has, a power of two.
    pub capacity: u32,
    /// Entries published and not yet given back.
    pub unread: u32,
    /// Entries reserved for requests under way.
    pub reserved: u32,
    /// QPs that use it.
    pub qps: u32,
    /// Entries written since it was made.
    pub completions: u64,
    /// Whether it is in error: it has overflowed, or was scribbled over.
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
    /// Its shared buffer; none if it names the client's own address space.
    pub buffer: Option<SharedBufferId>,
    /// Address that elements and remote offsets give the first byte; 0 if zero-based.
    pub iova: u64,
    /// Bytes of the region, at least 1.
    pub length: u64,
    /// Rights of local requests and of peers.
    pub access: Access,
    /// Who may use it from the wire.
    pub scope: Scope,
}

/// A bound address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerRow {
    /// Handle of the bound address.
    pub listener: ListenerId,
    /// Session that bound it.
    pub session: SessionId,
    /// Address with the port, also one that the kernel chose.
    #[serde(with = "address")]
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

/// A shared receive queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SrqRow {
    /// Handle of the SRQ.
    pub srq: SrqId,
    /// Session that made the SRQ.
    pub session: SessionId,
    /// Protection domain of the SRQ.
    pub pd: PdId,
    /// Entries that the ring has, a power of two.
    pub capacity: u32,
    /// Receives posted and not yet taken.
    pub posted: u32,
    /// Receives taken since it was made.
    pub taken: u64,
    /// Armed limit; 0 if none.
    pub limit: u32,
    /// QPs that use it.
    pub qps: u32,
    /// Of them, those with a message that waits for a receive.
    pub waiting: u32,
    /// How often one of them was found to take more than its fair share.
    pub unfair: u64,
}

/// A memory window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowRow {
    /// Handle of the window.
    pub window: MwId,
    /// Session that made the window.
    pub session: SessionId,
    /// Protection domain of the window.
    pub pd: PdId,
    /// Type 1, of a domain, or type 2, of a QP.
    pub kind: WindowKind,
    /// Its STag as it was last bound, or as it was made.
    pub stag: Stag,
    /// The region it is bound to.
    pub mr: Option<MrId>,
}

/// A protection domain, private to a session or named in the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PdRow {
    /// Handle of the domain.
    pub pd: PdId,
    /// Its name in the configuration; none for a private one.
    pub name: Option<String>,
    /// Its owner, if it is private.
    pub session: Option<SessionId>,
    /// Sessions that have it open.
    pub sessions: u32,
    /// Memory regions in it.
    pub mrs: u32,
    /// Queue pairs in it.
    pub qps: u32,
}

/// A limit and how much of it is in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitRow {
    /// Configuration key, for instance `limits.user.qps`.
    pub key: String,
    /// Whose use is counted: "device", "user 1000", "session 7", "pd shared".
    pub scope: String,
    /// Effective value: a number of objects, or of bytes for keys that say so.
    pub limit: u64,
    /// How much of the limit is in use, in the same unit.
    pub used: u64,
}

/// Why something was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// Its number, never used twice by one daemon.
    pub id: u64,
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
    /// Whose request, completion or stream it was.
    pub session: SessionId,
    /// What the record explains: a refusal, a completion or the end of a stream or session.
    pub what: DiagnosisKind,
    /// The rule that decided: a configuration key, or an RFC section with its words.
    pub rule: String,
    /// A sentence for people, with the numbers.
    pub text: String,
    /// The QP concerned; `None` if the record is about no QP.
    pub qp: Option<QpId>,
    /// The domain it acted for.
    pub pd: Option<PdId>,
    /// The STag or local key concerned.
    pub stag: Option<Stag>,
    /// Tagged offset or address that was asked for.
    pub offset: Option<u64>,
    /// Bytes that were asked for.
    pub length: Option<u64>,
    /// Addresses of the connection.
    pub addresses: Option<AddressPair>,
}

impl Diagnosis {
    /// A record that names no object but the session, before it has its number and time.
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

/// What a diagnosis explains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiagnosisKind {
    /// A request on the control socket was refused.
    Refused,
    /// A completion with an error; flushes name the record of what caused them.
    Completion {
        /// The application's name for the request.
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
    /// A stream ended otherwise: a reset, a lost connection, a failed start-up.
    Lost,
    /// A session was ended for misbehaviour.
    Ended,
    /// A datagram was dropped, the first one of its queue pair for that reason.
    Dropped,
}

/// A notable happening in the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRecord {
    /// Number of the record, one higher for each; the first of a daemon has 1.
    pub sequence: u64,
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
    /// The session concerned; `None` if the happening is the daemon's own.
    pub session: Option<SessionId>,
    /// What kind: "session_opened", "session_ended", "limit_reached", "srq_unfair", "reloaded", ...
    pub kind: String,
    /// A sentence for people.
    pub text: String,
}
