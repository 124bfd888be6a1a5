//! What `rnicctl` shows: figures of the daemon and rows of its tables.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::types::*;

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
    /// Objects that exist: sessions, PDs, shared buffers, bytes of shared buffers, MRs, CQs, QPs,
    /// listeners.
    pub sessions: u32,
    /// Protection domains.
    pub pds: u32,
    /// Shared buffers.
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
    pub half_open: u32,
    /// Bytes of arenas.
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
    /// Shared receive queues.
    Srqs(Vec<SrqRow>),
    /// Memory windows.
    Windows(Vec<WindowRow>),
    /// Protection domains.
    Pds(Vec<PdRow>),
    /// Limits.
    Limits(Vec<LimitRow>),
    /// Diagnoses.
    Diagnoses(Vec<Diagnosis>),
    /// Notable happenings.
    Events(Vec<EventRecord>),
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
    /// Bytes it shares.
    pub shared_bytes: u64,
    /// Bytes of its arenas.
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
    /// Shared receive queue it takes receives from.
    pub srq: Option<SrqId>,
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
    /// Payload bytes sent (Send, Write, Read Response).
    pub bytes_sent: u64,
    /// Payload bytes placed.
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
    /// Its shared buffer; none if it names the client's own address space.
    pub buffer: Option<SharedBufferId>,
    /// First address.
    pub iova: u64,
    /// Bytes.
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
    /// Its handle.
    pub srq: SrqId,
    /// Its owner.
    pub session: SessionId,
    /// Its domain.
    pub pd: PdId,
    /// Entries.
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
    /// Its handle.
    pub window: MwId,
    /// Its owner.
    pub session: SessionId,
    /// Its domain.
    pub pd: PdId,
    /// Its type.
    pub kind: WindowKind,
    /// Its STag as it was last bound, or as it was made.
    pub stag: Stag,
    /// The region it is bound to.
    pub mr: Option<MrId>,
}

/// A protection domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PdRow {
    /// Its handle.
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
    /// Effective value.
    pub limit: u64,
    /// In use.
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
    /// What happened.
    pub what: DiagnosisKind,
    /// The rule that decided: a configuration key, or an RFC section with its words.
    pub rule: String,
    /// A sentence for people, with the numbers.
    pub text: String,
    /// The QP concerned.
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
        /// Its status.
        status: CompletionStatus,
    },
    /// A stream was ended by a Terminate.
    Terminate {
        /// Who sent it.
        origin: TerminateOrigin,
        /// What it said.
        code: TerminateCode,
    },
    /// A stream ended otherwise: a reset, a lost connection, a failed start-up.
    Lost,
    /// A session was ended for misbehaviour.
    Ended,
}

/// A notable happening in the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRecord {
    /// Counts from 1.
    pub sequence: u64,
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
    /// The session concerned.
    pub session: Option<SessionId>,
    /// What kind: "session_opened", "session_ended", "limit_reached", "srq_unfair", "reloaded", ...
    pub kind: String,
    /// A sentence for people.
    pub text: String,
}
