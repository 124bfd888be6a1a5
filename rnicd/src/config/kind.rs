//! The table of all limits.
//!
//! The file's keys and ranges, `check-config`, reloads, warnings, rules, the worst case, accounting
//! and `rnicctl limits` all use this table. Tests compare it with `config/rnicd.toml` and the code.
//! A new limit needs a row here and the line that charges or checks it. Code that charges a counted
//! kind passes only the kind (`account.charge(Kind::Qps, 1)`); `resource/ledger.rs`
//! (`Books::charge`) then checks the limits of session, user and device.

use rnic_abi::abi::queue::doorbell;
use rnic_core::device::allocator;

/// Scope of a limit, and the section of the file that contains its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// `[limits]`: the whole device, or a maximum of individual objects.
    Device,
    /// `[limits.peer]`: one remote host.
    Peer,
    /// `[limits.user]`: all sessions of a user together.
    User,
    /// `[limits.session]`: one session.
    Session,
}

impl Scope {
    /// All scopes, outermost first.
    pub const ALL: [Scope; 4] = [Scope::Device, Scope::Peer, Scope::User, Scope::Session];

    /// Returns the name of the section in the configuration file, without brackets.
    pub fn section(self) -> &'static str {
        match self {
            Scope::Device => "limits",
            Scope::User => "limits.user",
            Scope::Session => "limits.session",
            Scope::Peer => "limits.peer",
        }
    }

    /// Returns the name of the section inside `[limits]`.
    pub(super) fn name(self) -> &'static str {
        self.section().trim_start_matches("limits.")
    }

    fn owner(self) -> &'static str {
        match self {
            Scope::Device => "the device",
            Scope::User => "one user",
            Scope::Session => "one session",
            Scope::Peer => "one remote host (an IPv6 /64)",
        }
    }
}

/// Unit of a limit's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Objects, or events per second or minute, as the key states.
    Count,
    /// Bytes, written with a unit.
    Bytes,
}

/// Maximum memory of the daemon for one object of a kind, without its queues, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Negligible, or counted elsewhere.
    Little,
    /// This many bytes for each.
    Each(u64),
    /// This many bytes for each, in every worker.
    EachPerWorker(u64),
}

/// One limit: its key, its defaults and its range.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The key in each of its sections.
    pub key: &'static str,
    /// The limited objects, as a noun phrase that can precede `of one session`.
    pub what: &'static str,
    /// Unit of its values.
    pub unit: Unit,
    /// Default of each scope that has the limit, in the order of [`Scope`].
    defaults: [Option<u64>; 4],
    /// Minimum and maximum in the file.
    range: (u64, u64),
    /// Maximum for one session, if lower.
    most_of_session: u64,
    /// A rule may set 0 for a user, although `[limits.user]` may not.
    pub rules_may_forbid: bool,
    /// A reload does not change the device's limit.
    pub at_start: bool,
    /// The ledger has an account of it: each object is charged when it is created and credited when
    /// it ends. Other limits bound individual objects or rates, or their owner checks them.
    pub counted: bool,
    /// Each object has a descriptor that is not set aside for connections.
    pub has_descriptor: bool,
    /// Maximum memory of the daemon for one object.
    pub cost: Cost,
    /// File in `rnicd/src` that charges or checks it.
    pub charged_in: &'static str,
}

/// Declares a limit that the ledger counts.
const fn counted(key: &'static str, what: &'static str) -> Row {
    Row { counted: true, ..checked(key, what) }
}

/// Declares any other limit: of individual objects, of a rate, or checked by its owner.
const fn checked(key: &'static str, what: &'static str) -> Row {
    Row {
        key,
        what,
        unit: Unit::Count,
        defaults: [None; 4],
        range: (1, OBJECTS),
        most_of_session: u64::MAX,
        rules_may_forbid: false,
        at_start: false,
        counted: false,
        has_descriptor: false,
        cost: Cost::Little,
        charged_in: "",
    }
}

impl Row {
    const fn default(mut self, scope: Scope, value: u64) -> Self {
        self.defaults[scope as usize] = Some(value);
        self
    }

    const fn device(self, default: u64) -> Self {
        self.default(Scope::Device, default)
    }

    const fn user(self, default: u64) -> Self {
        self.default(Scope::User, default)
    }

    const fn session(self, default: u64) -> Self {
        self.default(Scope::Session, default)
    }

    const fn peer(self, default: u64) -> Self {
        self.default(Scope::Peer, default)
    }

    const fn bytes(self) -> Self {
        Row { unit: Unit::Bytes, ..self }
    }

    const fn range(self, least: u64, most: u64) -> Self {
        Row { range: (least, most), ..self }
    }

    const fn most_of_session(self, most_of_session: u64) -> Self {
        Row { most_of_session, ..self }
    }

    const fn rules_may_forbid(self) -> Self {
        Row { rules_may_forbid: true, ..self }
    }

    const fn at_start(self) -> Self {
        Row { at_start: true, ..self }
    }

    const fn has_descriptor(self) -> Self {
        Row { has_descriptor: true, ..self }
    }

    const fn cost(self, cost: Cost) -> Self {
        Row { cost, ..self }
    }

    const fn charged_in(self, charged_in: &'static str) -> Self {
        Row { charged_in, ..self }
    }
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $row:expr;)*) => {
        /// Kinds of objects, bytes and rates that are limited.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $($(#[$doc])* $name,)*
        }

        impl Kind {
            /// All kinds, in the order of their numbers.
            pub const ALL: [Kind; TABLE.len()] = [$(Kind::$name,)*];
        }

        /// The table, in the order of [`Kind`].
        const TABLE: &[Row] = &[$($row,)*];
    };
}

kinds! {
    /// Sessions: connected programs.
    Sessions = counted("sessions", "sessions")
        .device(256).user(128).range(1, 65_535).rules_may_forbid()
        .charged_in("resource/session/open.rs");
    /// Open protection domains.
    Pds = counted("pds", "protection domains")
        .device(16_384).user(8_192).session(1_024)
        .charged_in("resource/domain/requests.rs");
    /// Shared buffers, including reserved ones.
    SharedBuffers = counted("shared_buffers", "shared buffers")
        .device(4_096).user(2_048).session(1_024).range(0, MAPPINGS)
        .charged_in("resource/memory/shared_buffers.rs");
    /// Bytes of shared buffers.
    SharedBytes = counted("shared_bytes", "bytes of shared buffers")
        .device(64 << 30).user(32 << 30).session(16 << 30).bytes().range(0, MEMORY)
        .charged_in("resource/memory/shared_buffers.rs");
    /// Registered memory regions.
    Mrs = counted("mrs", "memory regions")
        .device(262_144).user(131_072).session(131_072).range(0, STAGS)
        // An entry in a worker's STag table.
        .cost(Cost::EachPerWorker(112))
        .charged_in("resource/memory/regions.rs");
    /// Memory windows, bound or not.
    Windows = counted("windows", "memory windows")
        .device(65_536).user(32_768).session(32_768).range(0, STAGS)
        // Bound windows: entries in a worker's tables, and a share of the tables of all workers.
        .cost(Cost::EachPerWorker(320))
        .charged_in("resource/memory/windows.rs");
    /// Completion channels, each with a socket.
    Channels = counted("channels", "completion channels")
        // As many as a session has CQs: programs often create one for each.
        .device(16_384).user(12_288).session(12_288).range(0, OBJECTS).has_descriptor()
        .charged_in("resource/queue/channels.rs");
    /// Completion queues. Their entries have a limit of their own.
    Cqs = counted("cqs", "completion queues")
        .device(32_768).user(16_384).session(12_288).range(0, OBJECTS).most_of_session(DOORBELLS)
        .charged_in("resource/queue/cqs.rs");
    /// Entries of completion queues.
    CqEntries = counted("cq_entries_total", "entries of all completion queues")
        .device(1 << 24).user(1 << 23).session(1 << 22).range(0, 1 << 31)
        .charged_in("resource/queue/cqs.rs");
    /// Queue pairs in any state.
    Qps = counted("qps", "queue pairs")
        .device(32_768).user(16_384).session(16_384).range(0, OBJECTS).most_of_session(DOORBELLS)
        // A connected, idle QP.
        .cost(Cost::Each(8 << 10))
        .charged_in("resource/qp/requests.rs");
    /// Shared receive queues, with or without QPs.
    Srqs = counted("srqs", "shared receive queues")
        .device(4_096).user(2_048).session(1_024).range(0, OBJECTS).most_of_session(DOORBELLS)
        // The record of the receives taken last.
        .cost(Cost::Each(17 << 10))
        .charged_in("resource/queue/srqs.rs");
    /// Bound addresses, listening or not.
    Listeners = counted("listeners", "bound addresses")
        .device(1_024).user(512).session(256).range(0, 65_535).has_descriptor()
        .charged_in("resource/listener/requests.rs");
    /// Fault rules.
    Faults = counted("faults", "fault rules")
        .device(1_024).user(128).range(0, OBJECTS).rules_may_forbid()
        .charged_in("resource/faults/requests.rs");
    /// Bytes of the arenas that hold queues and doorbell pages.
    ArenaBytes = counted("arena_bytes", "bytes of queue memory")
        .device(1 << 30).user(512 << 20).session(256 << 20).bytes()
        // A session's first arena must fit for any number of workers.
        .range(1 << 20, MEMORY)
        .charged_in("resource/queue/arena.rs");
    /// IRD of all connections together.
    IrdTotal = counted("ird_total", "inbound reads of all connections")
        .user(1 << 21).range(0, 1 << 30)
        .charged_in("resource/qp/reads.rs");
    /// ORD of all connections together.
    OrdTotal = counted("ord_total", "outbound reads of all connections")
        .user(1 << 21).range(0, 1 << 30)
        .charged_in("resource/qp/reads.rs");
    /// Connections in start-up that hold a descriptor and no QP.
    Startups = checked("startups", "connections in start-up (including undecided requests)")
        .device(2_048).user(1_024)
        .charged_in("resource/capacity.rs");
    /// Descriptors that clients passed and that wait to be closed.
    Closing = checked("closing", "passed descriptors that wait to be closed")
        .device(512).user(128)
        .charged_in("resource/listener/passed.rs");
    /// Accepted connections per second.
    AcceptsPerSecond = checked("accepts_per_second", "connections accepted for the listeners")
        .user(5_000).range(1, RATE)
        .charged_in("resource/capacity.rs");
    /// Connects per second.
    ConnectionsPerSecond = checked("connections_per_second", "connections started")
        .user(10_000).peer(10_000).range(1, RATE)
        .charged_in("resource/qp/connect.rs");
    /// Invalid STags per minute.
    StagGuessesPerMinute = checked("stag_guesses_per_minute", "invalid STags used")
        .peer(600).range(1, RATE)
        .charged_in("resource/options.rs");
    /// Diagnoses: of one session, and of ended sessions.
    Diagnoses = checked("diagnoses", "diagnoses")
        .device(4_096).session(256).range(0, RECORDS).at_start()
        .charged_in("resource/session/open.rs");
    /// Records of notable events.
    EventRecords = checked("event_records", "event records")
        .device(1_024).range(16, RECORDS).at_start()
        .charged_in("resource/mod.rs");
    /// Bytes of incomplete FPDUs.
    PartialBytes = checked("partial_bytes", "bytes of incomplete FPDUs")
        .device(256 << 20).bytes().range(BUFFER, MEMORY)
        .charged_in("resource/options.rs");
    /// Bytes of incomplete FPDUs of one session.
    SessionPartialBytes = checked(
            "session_partial_bytes",
            "bytes of incomplete FPDUs of one session",
        )
        .device(64 << 20).bytes().range(BUFFER, MEMORY)
        .charged_in("resource/options.rs");
    /// Bytes of FPDUs that do not fit TCP's send buffer.
    UnsentBytes = checked("unsent_bytes", "bytes of unsent FPDUs")
        .device(256 << 20).bytes().range(BUFFER, MEMORY)
        .charged_in("resource/options.rs");
    /// Bytes of unsent FPDUs of one session.
    SessionUnsentBytes = checked("session_unsent_bytes", "bytes of unsent FPDUs of one session")
        .device(64 << 20).bytes().range(BUFFER, MEMORY)
        .charged_in("resource/options.rs");
    /// Bytes of kernel memory for the send buffer of one connection.
    SocketSendBytes = checked(
            "socket_send_bytes",
            "kernel memory for sends of one connection, at most twice net.core.wmem_max",
        )
        .device(512 << 10).bytes().range(LEAST_SOCKET, MOST_SOCKET)
        .charged_in("resource/options.rs");
    /// Bytes of kernel memory for the receive buffer of one connection.
    SocketReceiveBytes = checked(
            "socket_receive_bytes",
            "kernel memory for receives of one connection, at most twice net.core.rmem_max",
        )
        .device(1 << 20).bytes().range(LEAST_SOCKET, MOST_SOCKET)
        .charged_in("resource/options.rs");
    /// Entries of one CQ.
    EntriesOfCq = checked("cq_entries", "entries, 64 bytes each, of one CQ")
        .device(1 << 18).range(1, 1 << 20)
        .charged_in("resource/queue/cqs.rs");
    /// Work requests of one queue.
    QueueDepth = checked("queue_depth", "work requests of one queue")
        .device(16_384).range(1, 1 << 16)
        .charged_in("resource/qp/requests.rs");
    /// SGEs of one work request.
    Sges = checked("sge", "scatter/gather elements of one work request")
        .device(16)
        // As many as a work request holds.
        .range(1, 16)
        .charged_in("resource/qp/requests.rs");
    /// Inline bytes of one work request.
    InlineBytes = checked("inline", "inline data of one work request")
        .device(1_024).bytes().range(0, 4_096)
        .charged_in("resource/qp/requests.rs");
    /// IRD of one QP.
    Ird = checked("ird", "inbound reads of one QP")
        .device(128).range(0, READS)
        .charged_in("resource/qp/connect.rs");
    /// ORD of one QP.
    Ord = checked("ord", "outbound reads of one QP")
        .device(128).range(0, READS)
        .charged_in("resource/qp/connect.rs");
    /// Undecided connection requests of one listener.
    Backlog = checked("backlog", "undecided requests of one listener")
        .device(1_024).range(1, 65_535)
        .charged_in("resource/listener/requests.rs");
    /// Unread events of one session.
    Events = checked("events", "unread events of one session")
        .device(1_024).range(16, 1 << 20)
        .charged_in("resource/session/open.rs");
}

impl Kind {
    /// Number of kinds.
    pub const COUNT: usize = TABLE.len();

    /// Returns the row of the kind.
    pub fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// Returns the key, which is the same in all of its sections.
    pub fn key(self) -> &'static str {
        self.row().key
    }

    /// Returns the kind with this key in this section.
    pub fn with_key(scope: Scope, key: &str) -> Option<Kind> {
        Kind::of_scope(scope).find(|kind| kind.key() == key)
    }

    /// Returns the kinds that a section limits, in the order of the table.
    pub fn of_scope(scope: Scope) -> impl Iterator<Item = Kind> {
        Kind::ALL.into_iter().filter(move |kind| kind.default(scope).is_some())
    }

    /// Returns the kinds that the ledger charges and credits.
    pub fn counted() -> impl Iterator<Item = Kind> {
        Kind::ALL.into_iter().filter(|kind| kind.row().counted)
    }

    /// Returns the default of a section, or `None` if the section has no such limit.
    pub fn default(self, scope: Scope) -> Option<u64> {
        self.row().defaults[scope as usize]
    }

    /// Returns the minimum and maximum that a section accepts.
    pub fn range(self, scope: Scope) -> (u64, u64) {
        let Row { range: (least, most), most_of_session, .. } = *self.row();
        match scope {
            Scope::Session => (least, most.min(most_of_session)),
            _ => (least, most),
        }
    }

    /// Returns the text that explains a limit of this section.
    pub fn sentence(self, scope: Scope) -> String {
        match self.row().what {
            // The text already names the individual object.
            what if what.contains(" of one ") => what.to_owned(),
            what => format!("{what} of {}", scope.owner()),
        }
    }
}

/// Maximum objects of a kind.
const OBJECTS: u64 = 1 << 20;
/// `vm.max_map_count` is 65,530 unless the administrator raised it.
const MAPPINGS: u64 = 60_000;
/// More memory than any machine has.
const MEMORY: u64 = 1 << 50;
/// Maximum regions and windows together: each has an STag.
pub const STAGS: u64 = allocator::MOST as u64;
/// Maximum queues of a session. The remaining doorbells are for its copy queues, one for each of up
/// to 64 workers.
pub const DOORBELLS: u64 = doorbell::INDICES as u64 - 64;
/// Connections per second. A higher rate has the same effect as no limit.
const RATE: u64 = 10_000_000;
/// Maximum records of a ring.
const RECORDS: u64 = 1 << 20;
/// IRD and ORD are 14-bit fields, in which 0x3FFF is reserved (RFC 6581 section 9).
const READS: u64 = (1 << 14) - 2;
/// Every worker's share must hold a few FPDUs of 64 KiB.
const BUFFER: u64 = 1 << 20;
/// A few FPDUs of 64 KiB.
const LEAST_SOCKET: u64 = 256 << 10;
/// The largest size that the kernel can double.
const MOST_SOCKET: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_limits_is_consistent() {
        for (n, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, n);
            let Row { defaults, unit, .. } = kind.row();
            assert_ne!(*defaults, [None; 4], "{kind:?} has no scope");
            for (scope, default) in Scope::ALL.into_iter().zip(*defaults) {
                let Some(default) = default else { continue };
                let (least, most) = kind.range(scope);
                assert!((least..=most).contains(&default), "{kind:?} in {scope:?}");
                assert_eq!(Kind::with_key(scope, kind.key()), Some(kind), "{scope:?}");
                assert!(*unit == Unit::Bytes || most <= u64::from(u32::MAX), "{kind:?}");
            }
        }
    }

    /// A limit that no code checks has no effect.
    #[test]
    fn every_limit_is_checked_in_the_named_file() {
        for kind in Kind::ALL {
            let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
            let file = file.join(kind.row().charged_in);
            let text = std::fs::read_to_string(&file);
            let text = text.unwrap_or_else(|e| panic!("{kind:?} in {}: {e}", file.display()));
            let name = format!("Kind::{kind:?}");
            let uses = text.match_indices(&name).any(|(at, _)| {
                let next = text[at + name.len()..].chars().next();
                !next.is_some_and(|c| c.is_ascii_alphanumeric())
            });
            assert!(uses, "{} does not name {name}", file.display());
        }
    }
}
