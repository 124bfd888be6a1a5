//! The table of all limits.
//!
//! The file's keys and ranges, `check-config`, warnings, rules, the worst case, accounting and
//! `rnicctl limits` all use this table. Tests compare it with `config/rnicd.toml` and the code. A
//! new limit needs a row here and the line that charges or checks it. Code that charges a counted
//! kind passes only the kind (`account.charge(Kind::Qps, 1)`); `resource/ledger.rs`
//! (`Books::charge`) then checks the limits of session, user and device.

use rnic_abi::abi::queue::doorbell;
use rnic_core::device::allocator;

/// Scope of a limit, and the section of the file that contains its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// `[limits]`: the whole device, or a maximum of single objects.
    Device,
    /// `[limits.user]`: all sessions of a user together.
    User,
    /// `[limits.session]`: one session.
    Session,
    /// `[limits.peer]`: one remote host.
    Peer,
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
    /// Scopes that have the limit, with the default.
    pub defaults: &'static [(Scope, u64)],
    /// Minimum and maximum in the file.
    pub range: (u64, u64),
    /// Maximum for one session, if lower.
    pub most_of_session: u64,
    /// A rule may set 0 for a user, although `[limits.user]` may not.
    pub rules_may_forbid: bool,
    /// The ledger has an account of it: each object is charged when it is created and credited when
    /// it ends. Other limits bound single objects or rates, or their owner checks them.
    pub counted: bool,
    /// Maximum memory of the daemon for one object.
    pub cost: Cost,
    /// File in `rnicd/src` that charges or checks it.
    pub charged_in: &'static str,
}

/// Values that most rows share.
const ROW: Row = Row {
    key: "",
    what: "",
    unit: Unit::Count,
    defaults: &[],
    range: (1, OBJECTS),
    most_of_session: u64::MAX,
    rules_may_forbid: false,
    counted: false,
    cost: Cost::Little,
    charged_in: "",
};

/// Base of the counted rows.
const COUNTED: Row = Row { counted: true, ..ROW };

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
    Sessions = Row {
        key: "sessions",
        what: "sessions",
        defaults: &[(Scope::Device, 256), (Scope::User, 128)],
        range: (1, 65_535),
        rules_may_forbid: true,
        charged_in: "resource/session/open.rs",
        ..COUNTED
    };
    /// Open protection domains.
    Pds = Row {
        key: "pds",
        what: "protection domains",
        defaults: &[(Scope::Device, 16_384), (Scope::User, 8_192), (Scope::Session, 1_024)],
        charged_in: "resource/domain/requests.rs",
        ..COUNTED
    };
    /// Shared buffers, including reserved ones.
    SharedBuffers = Row {
        key: "shared_buffers",
        what: "shared buffers",
        defaults: &[(Scope::Device, 4_096), (Scope::User, 2_048), (Scope::Session, 1_024)],
        range: (0, MAPPINGS),
        charged_in: "resource/memory/shared_buffers.rs",
        ..COUNTED
    };
    /// Bytes of shared buffers.
    SharedBytes = Row {
        key: "shared_bytes",
        what: "bytes of shared buffers",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 64 << 30), (Scope::User, 32 << 30), (Scope::Session, 16 << 30)],
        range: (0, MEMORY),
        charged_in: "resource/memory/shared_buffers.rs",
        ..COUNTED
    };
    /// Registered memory regions.
    Mrs = Row {
        key: "mrs",
        what: "memory regions",
        defaults: &[(Scope::Device, 262_144), (Scope::User, 131_072), (Scope::Session, 131_072)],
        range: (0, STAGS),
        // An entry in a worker's STag table.
        cost: Cost::EachPerWorker(112),
        charged_in: "resource/memory/regions.rs",
        ..COUNTED
    };
    /// Memory windows, bound or not.
    Windows = Row {
        key: "windows",
        what: "memory windows",
        defaults: &[(Scope::Device, 65_536), (Scope::User, 32_768), (Scope::Session, 32_768)],
        range: (0, STAGS),
        // Bound windows: entries in a worker's tables, and a share of the tables of all workers.
        cost: Cost::EachPerWorker(320),
        charged_in: "resource/memory/windows.rs",
        ..COUNTED
    };
    /// Completion channels, each with a socket.
    Channels = Row {
        key: "channels",
        what: "completion channels",
        defaults: &[(Scope::Device, 4_096), (Scope::User, 2_048), (Scope::Session, 1_024)],
        range: (0, OBJECTS),
        charged_in: "resource/queue/channels.rs",
        ..COUNTED
    };
    /// Completion queues. Their entries have a limit of their own.
    Cqs = Row {
        key: "cqs",
        what: "completion queues",
        defaults: &[(Scope::Device, 32_768), (Scope::User, 16_384), (Scope::Session, 12_288)],
        range: (0, OBJECTS),
        most_of_session: DOORBELLS,
        charged_in: "resource/queue/cqs.rs",
        ..COUNTED
    };
    /// Entries of completion queues.
    CqEntries = Row {
        key: "cq_entries_total",
        what: "entries of all completion queues",
        defaults: &[(Scope::Device, 1 << 24), (Scope::User, 1 << 23), (Scope::Session, 1 << 22)],
        range: (0, 1 << 31),
        charged_in: "resource/queue/cqs.rs",
        ..COUNTED
    };
    /// Queue pairs in any state.
    Qps = Row {
        key: "qps",
        what: "queue pairs",
        defaults: &[(Scope::Device, 32_768), (Scope::User, 16_384), (Scope::Session, 16_384)],
        range: (0, OBJECTS),
        most_of_session: DOORBELLS,
        // A connected, idle QP.
        cost: Cost::Each(8 << 10),
        charged_in: "resource/qp/requests.rs",
        ..COUNTED
    };
    /// Shared receive queues, with or without QPs.
    Srqs = Row {
        key: "srqs",
        what: "shared receive queues",
        defaults: &[(Scope::Device, 4_096), (Scope::User, 2_048), (Scope::Session, 1_024)],
        range: (0, OBJECTS),
        most_of_session: DOORBELLS,
        // The record of the receives taken last.
        cost: Cost::Each(17 << 10),
        charged_in: "resource/queue/srqs.rs",
        ..COUNTED
    };
    /// Bound addresses, listening or not.
    Listeners = Row {
        key: "listeners",
        what: "bound addresses",
        defaults: &[(Scope::Device, 1_024), (Scope::User, 512), (Scope::Session, 256)],
        range: (0, 65_535),
        charged_in: "resource/listener/requests.rs",
        ..COUNTED
    };
    /// Bytes of the arenas that hold queues and doorbell pages.
    ArenaBytes = Row {
        key: "arena_bytes",
        what: "bytes of queue memory",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 1 << 30), (Scope::User, 512 << 20), (Scope::Session, 256 << 20)],
        // A session's first arena must fit for any number of workers.
        range: (1 << 20, MEMORY),
        charged_in: "resource/queue/arena.rs",
        ..COUNTED
    };
    /// IRD of all connections together.
    IrdTotal = Row {
        key: "ird_total",
        what: "inbound reads of all connections",
        defaults: &[(Scope::User, 1 << 21)],
        range: (0, 1 << 30),
        charged_in: "resource/qp/reads.rs",
        ..COUNTED
    };
    /// ORD of all connections together.
    OrdTotal = Row {
        key: "ord_total",
        what: "outbound reads of all connections",
        defaults: &[(Scope::User, 1 << 21)],
        range: (0, 1 << 30),
        charged_in: "resource/qp/reads.rs",
        ..COUNTED
    };
    /// Connections in start-up that hold a descriptor and no QP.
    Startups = Row {
        key: "startups",
        what: "connections in start-up (including undecided requests)",
        defaults: &[(Scope::Device, 2_048), (Scope::User, 1_024)],
        charged_in: "resource/capacity.rs",
        ..ROW
    };
    /// Descriptors that clients passed and that wait to be closed.
    Closing = Row {
        key: "closing",
        what: "passed descriptors that wait to be closed",
        defaults: &[(Scope::Device, 512), (Scope::User, 128)],
        charged_in: "resource/listener/passed.rs",
        ..ROW
    };
    /// Accepted connections per second.
    AcceptsPerSecond = Row {
        key: "accepts_per_second",
        what: "connections accepted for the listeners",
        defaults: &[(Scope::User, 5_000)],
        range: (1, RATE),
        charged_in: "resource/capacity.rs",
        ..ROW
    };
    /// Connects per second.
    ConnectionsPerSecond = Row {
        key: "connections_per_second",
        what: "connections started",
        defaults: &[(Scope::User, 10_000), (Scope::Peer, 10_000)],
        range: (1, RATE),
        charged_in: "resource/qp/connect.rs",
        ..ROW
    };
    /// Invalid STags per minute.
    StagGuessesPerMinute = Row {
        key: "stag_guesses_per_minute",
        what: "invalid STags used",
        defaults: &[(Scope::Peer, 600)],
        range: (1, RATE),
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// Diagnoses: of one session, and of ended sessions.
    Diagnoses = Row {
        key: "diagnoses",
        what: "diagnoses",
        defaults: &[(Scope::Device, 4_096), (Scope::Session, 256)],
        range: (0, RECORDS),
        charged_in: "resource/session/open.rs",
        ..ROW
    };
    /// Records of notable events.
    EventRecords = Row {
        key: "event_records",
        what: "event records",
        defaults: &[(Scope::Device, 1_024)],
        range: (16, RECORDS),
        charged_in: "resource/mod.rs",
        ..ROW
    };
    /// Bytes of incomplete FPDUs.
    PartialBytes = Row {
        key: "partial_bytes",
        what: "bytes of incomplete FPDUs",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 256 << 20)],
        range: BUFFER_RANGE,
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// Bytes of incomplete FPDUs of one session.
    SessionPartialBytes = Row {
        key: "session_partial_bytes",
        what: "bytes of incomplete FPDUs of one session",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 64 << 20)],
        range: BUFFER_RANGE,
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// Bytes of FPDUs that do not fit TCP's send buffer.
    UnsentBytes = Row {
        key: "unsent_bytes",
        what: "bytes of unsent FPDUs",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 256 << 20)],
        range: BUFFER_RANGE,
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// Bytes of unsent FPDUs of one session.
    SessionUnsentBytes = Row {
        key: "session_unsent_bytes",
        what: "bytes of unsent FPDUs of one session",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 64 << 20)],
        range: BUFFER_RANGE,
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// Bytes of kernel memory for the send buffer of one connection.
    SocketSendBytes = Row {
        key: "socket_send_bytes",
        what: "kernel memory for sends of one connection, at most twice net.core.wmem_max",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 512 << 10)],
        range: SOCKET,
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// Bytes of kernel memory for the receive buffer of one connection.
    SocketReceiveBytes = Row {
        key: "socket_receive_bytes",
        what: "kernel memory for receives of one connection, at most twice net.core.rmem_max",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 1 << 20)],
        range: SOCKET,
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// Entries of one CQ.
    EntriesOfCq = Row {
        key: "cq_entries",
        what: "entries, 64 bytes each, of one CQ",
        defaults: &[(Scope::Device, 1 << 18)],
        range: (1, 1 << 20),
        charged_in: "resource/queue/cqs.rs",
        ..ROW
    };
    /// Work requests of one queue.
    QueueDepth = Row {
        key: "queue_depth",
        what: "work requests of one queue",
        defaults: &[(Scope::Device, 16_384)],
        range: (1, 1 << 16),
        charged_in: "resource/qp/requests.rs",
        ..ROW
    };
    /// SGEs of one work request.
    Sges = Row {
        key: "sge",
        what: "scatter/gather elements of one work request",
        defaults: &[(Scope::Device, 16)],
        // As many as a work request holds.
        range: (1, 16),
        charged_in: "resource/qp/requests.rs",
        ..ROW
    };
    /// Inline bytes of one work request.
    InlineBytes = Row {
        key: "inline",
        what: "inline data of one work request",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 1_024)],
        range: (0, 4_096),
        charged_in: "resource/qp/requests.rs",
        ..ROW
    };
    /// IRD of one QP.
    Ird = Row {
        key: "ird",
        what: "inbound reads of one QP",
        defaults: &[(Scope::Device, 128)],
        range: (0, READS),
        charged_in: "resource/qp/connect.rs",
        ..ROW
    };
    /// ORD of one QP.
    Ord = Row {
        key: "ord",
        what: "outbound reads of one QP",
        defaults: &[(Scope::Device, 128)],
        range: (0, READS),
        charged_in: "resource/qp/connect.rs",
        ..ROW
    };
    /// Undecided connection requests of one listener.
    Backlog = Row {
        key: "backlog",
        what: "undecided requests of one listener",
        defaults: &[(Scope::Device, 1_024)],
        range: (1, 65_535),
        charged_in: "resource/listener/requests.rs",
        ..ROW
    };
    /// Unread events of one session.
    Events = Row {
        key: "events",
        what: "unread events of one session",
        defaults: &[(Scope::Device, 1_024)],
        range: (16, 1 << 20),
        charged_in: "resource/session/open.rs",
        ..ROW
    };
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
        self.row().defaults.iter().find(|(of, _)| *of == scope).map(|(_, value)| *value)
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
            // The text already mentions the single object.
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
const BUFFER_RANGE: (u64, u64) = (1 << 20, 1 << 50);
/// From a few FPDUs of 64 KiB to the largest size that the kernel can double.
const SOCKET: (u64, u64) = (256 << 10, 1 << 30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_limits_is_consistent() {
        for (n, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, n);
            let Row { defaults, unit, .. } = kind.row();
            assert!(!defaults.is_empty(), "{kind:?} has no scope");
            for (scope, default) in *defaults {
                let (least, most) = kind.range(*scope);
                assert!((least..=most).contains(default), "{kind:?} in {scope:?}");
                assert_eq!(Kind::with_key(*scope, kind.key()), Some(kind), "{scope:?}");
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
