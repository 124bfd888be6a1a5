//! `[limits]`: how much of everything there may be.

use rnic_core::abi::queue::doorbell;

use super::checker::Checker;
use super::error::ConfigError;
use super::file_limits::{LimitsSection, TotalsFields};
use super::overrides::{SessionPatch, UserPatch};

/// `[limits]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sessions at once.
    pub sessions: u32,
    /// Totals over all sessions.
    pub device: Totals,
    /// The sum of a user's sessions.
    pub user: UserLimits,
    /// Totals of one session.
    pub session: Totals,
    /// Connections that one remote host begins per second.
    pub peer_connections_per_second: u32,
    /// Wrong STags that one remote host names per minute.
    pub peer_stag_guesses_per_minute: u32,
    /// Connections in start-up that hold a descriptor and no QP.
    pub half_open: u32,
    /// Entries of one CQ.
    pub cq_entries: u32,
    /// Requests of one queue.
    pub wr_depth: u32,
    /// Elements of one request.
    pub sge: u8,
    /// Inline bytes of one request.
    pub inline: u16,
    /// Inbound reads of one QP.
    pub ird: u16,
    /// Outbound reads of one QP.
    pub ord: u16,
    /// Undecided connection requests of one listener.
    pub backlog: u32,
    /// Unread events of one session.
    pub events: u32,
    /// *Why* records of one session (`limits.session.why`).
    pub why_records: u32,
    /// *Why* records of the device (`limits.why`).
    pub device_why_records: u32,
    /// Records of notable happenings.
    pub event_records: u32,
    /// Mover processes, which copy for clients whose address space is attached.
    pub movers: u32,
    /// Descriptors of clients that wait to be closed.
    pub closing: u32,
    /// Bytes of FPDUs that have not arrived in full.
    pub partial_bytes: u64,
    /// The same of one session.
    pub session_partial_bytes: u64,
    /// Bytes that TCP has not taken.
    pub unsent_bytes: u64,
    /// The same of one session.
    pub session_unsent_bytes: u64,
    /// Bytes of kernel memory for what one connection has to send.
    pub socket_send_bytes: u32,
    /// The same for what it has received.
    pub socket_receive_bytes: u32,
}

/// Limits that exist for the device, for a user and for a session alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Totals {
    /// Protection domains.
    pub pds: u32,
    /// Segments.
    pub segments: u32,
    /// Bytes of segments.
    pub segment_bytes: u64,
    /// Memory regions.
    pub mrs: u32,
    /// Memory windows.
    pub windows: u32,
    /// Completion channels.
    pub channels: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Entries of all completion queues together.
    pub cq_entries_total: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// Bound addresses.
    pub listeners: u32,
    /// Bytes of arenas.
    pub arena_bytes: u64,
}

/// `[limits.user]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserLimits {
    /// Totals over the user's sessions.
    pub totals: Totals,
    /// Sessions.
    pub sessions: u32,
    /// Those of the user's listeners and programs.
    pub half_open: u32,
    /// Connections that are taken from the kernel for the user's listeners, per second.
    pub accepts_per_second: u32,
    /// Connections that the user begins per second.
    pub connections_per_second: u32,
    /// Inbound reads of all QPs together.
    pub ird: u32,
    /// Outbound reads of all QPs together.
    pub ord: u32,
    /// Processes that copy for the user's attached clients, from their start to their end.
    pub movers: u32,
    /// Times per second that the user's clients ask for such a process.
    pub attachments_per_second: u32,
    /// Descriptors of the user's clients that wait to be closed.
    pub closing: u32,
}

/// Some of the [`Totals`].
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "as of Totals")]
pub struct TotalsPatch {
    pub pds: Option<u32>,
    pub segments: Option<u32>,
    pub segment_bytes: Option<u64>,
    pub mrs: Option<u32>,
    pub windows: Option<u32>,
    pub channels: Option<u32>,
    pub cqs: Option<u32>,
    pub cq_entries_total: Option<u32>,
    pub qps: Option<u32>,
    pub srqs: Option<u32>,
    pub listeners: Option<u32>,
    pub arena_bytes: Option<u64>,
}

impl Totals {
    /// Each with its key.
    pub fn each(&self) -> [(&'static str, u64); 12] {
        [
            ("pds", self.pds.into()),
            ("segments", self.segments.into()),
            ("segment_bytes", self.segment_bytes),
            ("mrs", self.mrs.into()),
            ("windows", self.windows.into()),
            ("channels", self.channels.into()),
            ("cqs", self.cqs.into()),
            ("cq_entries_total", self.cq_entries_total.into()),
            ("qps", self.qps.into()),
            ("srqs", self.srqs.into()),
            ("listeners", self.listeners.into()),
            ("arena_bytes", self.arena_bytes),
        ]
    }

    /// These, with what a rule sets.
    pub fn with(&self, patch: &TotalsPatch) -> Totals {
        Totals {
            pds: patch.pds.unwrap_or(self.pds),
            segments: patch.segments.unwrap_or(self.segments),
            segment_bytes: patch.segment_bytes.unwrap_or(self.segment_bytes),
            mrs: patch.mrs.unwrap_or(self.mrs),
            windows: patch.windows.unwrap_or(self.windows),
            channels: patch.channels.unwrap_or(self.channels),
            cqs: patch.cqs.unwrap_or(self.cqs),
            cq_entries_total: patch.cq_entries_total.unwrap_or(self.cq_entries_total),
            qps: patch.qps.unwrap_or(self.qps),
            srqs: patch.srqs.unwrap_or(self.srqs),
            listeners: patch.listeners.unwrap_or(self.listeners),
            arena_bytes: patch.arena_bytes.unwrap_or(self.arena_bytes),
        }
    }
}

impl UserLimits {
    /// Those that are no totals, each with its key.
    pub fn each_of_its_own(&self) -> [(&'static str, u64); 9] {
        [
            ("sessions", self.sessions.into()),
            ("half_open", self.half_open.into()),
            ("accepts_per_second", self.accepts_per_second.into()),
            ("connections_per_second", self.connections_per_second.into()),
            ("ird", self.ird.into()),
            ("ord", self.ord.into()),
            ("movers", self.movers.into()),
            ("attachments_per_second", self.attachments_per_second.into()),
            ("closing", self.closing.into()),
        ]
    }

    /// These, with what a rule sets.
    pub fn with(&self, patch: &UserPatch) -> UserLimits {
        UserLimits {
            totals: self.totals.with(&patch.totals),
            sessions: patch.sessions.unwrap_or(self.sessions),
            half_open: patch.half_open.unwrap_or(self.half_open),
            accepts_per_second: patch.accepts_per_second.unwrap_or(self.accepts_per_second),
            connections_per_second: patch
                .connections_per_second
                .unwrap_or(self.connections_per_second),
            ird: patch.ird.unwrap_or(self.ird),
            ord: patch.ord.unwrap_or(self.ord),
            movers: patch.movers.unwrap_or(self.movers),
            attachments_per_second: patch
                .attachments_per_second
                .unwrap_or(self.attachments_per_second),
            closing: patch.closing.unwrap_or(self.closing),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            sessions: 256,
            device: Totals {
                pds: 16_384,
                segments: 4_096,
                segment_bytes: 64 << 30,
                mrs: 262_144,
                windows: 65_536,
                channels: 4_096,
                cqs: 32_768,
                cq_entries_total: 1 << 24,
                qps: 32_768,
                srqs: 4_096,
                listeners: 1_024,
                arena_bytes: 1 << 30,
            },
            // Half of the device: no user can take all of it.
            user: UserLimits {
                totals: Totals {
                    pds: 8_192,
                    segments: 2_048,
                    segment_bytes: 32 << 30,
                    mrs: 131_072,
                    windows: 32_768,
                    channels: 2_048,
                    cqs: 16_384,
                    cq_entries_total: 1 << 23,
                    qps: 16_384,
                    srqs: 2_048,
                    listeners: 512,
                    arena_bytes: 512 << 20,
                },
                sessions: 128,
                half_open: 1_024,
                accepts_per_second: 5_000,
                connections_per_second: 10_000,
                ird: 1 << 21,
                ord: 1 << 21,
                movers: 8,
                attachments_per_second: 16,
                closing: 128,
            },
            session: Totals {
                pds: 1_024,
                segments: 1_024,
                segment_bytes: 16 << 30,
                mrs: 131_072,
                windows: 32_768,
                channels: 1_024,
                cqs: 12_288,
                cq_entries_total: 1 << 22,
                qps: 16_384,
                srqs: 1_024,
                listeners: 256,
                arena_bytes: 256 << 20,
            },
            peer_connections_per_second: 10_000,
            peer_stag_guesses_per_minute: 600,
            half_open: 2_048,
            cq_entries: 65_536,
            wr_depth: 16_384,
            sge: 16,
            inline: 1_024,
            ird: 128,
            ord: 128,
            backlog: 1_024,
            events: 1_024,
            why_records: 256,
            device_why_records: 4_096,
            event_records: 1_024,
            movers: 16,
            closing: 512,
            partial_bytes: 256 << 20,
            session_partial_bytes: 64 << 20,
            unsent_bytes: 256 << 20,
            session_unsent_bytes: 64 << 20,
            socket_send_bytes: 512 << 10,
            socket_receive_bytes: 1 << 20,
        }
    }
}

impl Checker<'_> {
    /// Validates the section.
    pub(super) fn limits(&self, mut s: LimitsSection) -> Result<Limits, ConfigError> {
        let default = Limits::default();
        let (mut u, mut c) = (std::mem::take(&mut s.user), std::mem::take(&mut s.session));
        let session_place = c.qps.as_ref().or(c.cqs.as_ref()).map(|f| f.span().start);
        let of_session = SessionPatch {
            totals: self.totals(c.totals(), true)?,
            why: self.optional_number(c.why, 0..=MAX_WHY)?,
        };
        let session = default.session.with(&of_session.totals);
        // Each at most as many as a page has, so the sum is far below 2^32.
        let doorbells = session.qps + session.cqs + session.srqs;
        if doorbells > doorbell::INDICES {
            let why = format!(
                "limits.session.qps + cqs + srqs = {doorbells} is above {}, the doorbells of a page",
                doorbell::INDICES
            );
            return Err(self.wrong(session_place.unwrap_or(0), why));
        }
        let of_user = UserPatch {
            totals: self.totals(u.totals(), false)?,
            sessions: self.optional_number(u.sessions, 1..=MAX_SESSIONS)?,
            half_open: self.optional_number(u.half_open, 1..=MAX_OBJECTS)?,
            accepts_per_second: self.optional_number(u.accepts_per_second, 1..=MAX_RATE)?,
            connections_per_second: self.optional_number(u.connections_per_second, 1..=MAX_RATE)?,
            ird: self.optional_number(u.ird, 0..=MAX_READS_TOTAL)?,
            ord: self.optional_number(u.ord, 0..=MAX_READS_TOTAL)?,
            movers: self.optional_number(u.movers, 0..=MAX_MOVERS)?,
            attachments_per_second: self.optional_number(u.attachments_per_second, 1..=MAX_RATE)?,
            closing: self.optional_number(u.closing, 1..=MAX_CLOSING)?,
        };
        let device_place = s.windows.as_ref().or(s.mrs.as_ref()).map(|f| f.span().start);
        let device = default.device.with(&self.totals(s.totals(), false)?);
        // Each is at most 2^23, so the sum is far below 2^32.
        let stags = device.mrs + device.windows;
        if stags > MAX_MRS {
            let why = format!(
                "limits.mrs + windows = {stags} is above {MAX_MRS}, half of the STags there are; the \
                 other half keeps them from being guessed"
            );
            return Err(self.wrong(device_place.unwrap_or(0), why));
        }
        Ok(Limits {
            sessions: self.number(s.sessions, default.sessions, 1..=MAX_SESSIONS)?,
            device,
            user: default.user.with(&of_user),
            session,
            peer_connections_per_second: self.number(
                s.peer.connections_per_second,
                default.peer_connections_per_second,
                1..=MAX_RATE,
            )?,
            peer_stag_guesses_per_minute: self.number(
                s.peer.stag_guesses_per_minute,
                default.peer_stag_guesses_per_minute,
                1..=MAX_RATE,
            )?,
            half_open: self.number(s.half_open, default.half_open, 1..=MAX_OBJECTS)?,
            cq_entries: self.number(s.cq_entries, default.cq_entries, 1..=1 << 20)?,
            wr_depth: self.number(s.wr_depth, default.wr_depth, 1..=1 << 16)?,
            sge: self.number(s.sge, default.sge, 1..=MAX_SGE)?,
            // In range of u16 because the range ends at 4 KiB.
            inline: self.size(s.inline, u64::from(default.inline), 0..=4096)? as u16,
            ird: self.number(s.ird, default.ird, 0..=MAX_READS)?,
            ord: self.number(s.ord, default.ord, 0..=MAX_READS)?,
            backlog: self.number(s.backlog, default.backlog, 1..=65_535)?,
            events: self.number(s.events, default.events, 16..=1 << 20)?,
            why_records: of_session.why.unwrap_or(default.why_records),
            device_why_records: self.number(s.why, default.device_why_records, 0..=MAX_WHY)?,
            event_records: self.number(s.event_records, default.event_records, 16..=MAX_WHY)?,
            movers: self.number(s.movers, default.movers, 0..=MAX_MOVERS)?,
            closing: self.number(s.closing, default.closing, 1..=MAX_CLOSING)?,
            partial_bytes: self.size(s.partial_bytes, default.partial_bytes, PARTIAL)?,
            session_partial_bytes: self.size(
                s.session_partial_bytes,
                default.session_partial_bytes,
                PARTIAL,
            )?,
            unsent_bytes: self.size(s.unsent_bytes, default.unsent_bytes, PARTIAL)?,
            session_unsent_bytes: self.size(
                s.session_unsent_bytes,
                default.session_unsent_bytes,
                PARTIAL,
            )?,
            // In range of u32 because the range ends at 1 GiB.
            socket_send_bytes: self.size(
                s.socket_send_bytes,
                default.socket_send_bytes.into(),
                SOCKET,
            )? as u32,
            socket_receive_bytes: self.size(
                s.socket_receive_bytes,
                default.socket_receive_bytes.into(),
                SOCKET,
            )? as u32,
        })
    }

    /// Validates the totals that a section sets. Those of one session are bounded by its doorbells.
    pub(super) fn totals(
        &self,
        t: TotalsFields,
        of_session: bool,
    ) -> Result<TotalsPatch, ConfigError> {
        let queues = if of_session { doorbell::INDICES } else { MAX_OBJECTS };
        Ok(TotalsPatch {
            pds: self.optional_number(t.pds, 1..=MAX_OBJECTS)?,
            segments: self.optional_number(t.segments, 0..=MAX_MAPPINGS)?,
            segment_bytes: self.optional_size(t.segment_bytes, 0..=MAX_BYTES)?,
            mrs: self.optional_number(t.mrs, 0..=MAX_MRS)?,
            windows: self.optional_number(t.windows, 0..=MAX_MRS)?,
            channels: self.optional_number(t.channels, 0..=MAX_OBJECTS)?,
            cqs: self.optional_number(t.cqs, 0..=queues)?,
            cq_entries_total: self.optional_number(t.cq_entries_total, 0..=MAX_ENTRIES)?,
            qps: self.optional_number(t.qps, 0..=queues)?,
            srqs: self.optional_number(t.srqs, 0..=queues)?,
            listeners: self.optional_number(t.listeners, 0..=65_535)?,
            arena_bytes: self.optional_size(t.arena_bytes, MIN_ARENA..=MAX_BYTES)?,
        })
    }
}

/// Most objects of a kind: handles are 24-bit numbers.
pub(super) const MAX_OBJECTS: u32 = 1 << 20;
/// Regions and windows together: each has an STag.
pub(super) const MAX_MRS: u32 = rnic_core::device::allocator::MOST;
/// Sessions of the device.
pub(super) const MAX_SESSIONS: u32 = 65_535;
/// Reads of all QPs of a user.
pub(super) const MAX_READS_TOTAL: u32 = 1 << 30;
/// Connections per second; more cannot be told apart from no limit.
pub(super) const MAX_RATE: u32 = 10_000_000;
/// Records of a ring.
pub(super) const MAX_WHY: u32 = 1 << 20;
/// `vm.max_map_count` is 65,530 unless the administrator raised it.
const MAX_MAPPINGS: u32 = 60_000;
/// More than any machine has.
const MAX_BYTES: u64 = 1 << 50;
/// Entries of all CQs.
const MAX_ENTRIES: u32 = 1 << 31;
/// A session's first arena must fit whatever the number of workers.
const MIN_ARENA: u64 = 1 << 20;
/// Elements that a work request can hold.
const MAX_SGE: u8 = 16;
/// IRD and ORD are 14-bit fields (RFC 6581 section 9).
const MAX_READS: u16 = (1 << 14) - 2;
/// Every worker's share should hold a few FPDUs of 64 KiB.
const PARTIAL: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 50;
/// A few FPDUs of 64 KiB, and what the kernel can name twice.
const SOCKET: std::ops::RangeInclusive<u64> = 256 << 10..=1 << 30;
/// Processes.
pub(super) const MAX_MOVERS: u32 = 1_024;
/// Descriptors.
pub(super) const MAX_CLOSING: u32 = 1 << 20;
