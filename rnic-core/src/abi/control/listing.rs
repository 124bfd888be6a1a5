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
