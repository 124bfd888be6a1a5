//! Every limit there is: the one table of them.
//!
//! Reading the file, its ranges, `check-config`, warnings, rules, the worst case, what is counted
//! and what `rnicctl limits` lists follow from the table, and tests hold `config/rnicd.toml` and
//! the code to it. So who adds a limit adds a row here, and the line that charges or checks. What
//! is counted is charged by a line that names the kind alone (`account.charge(Kind::Qps, 1)`);
//! `resource/ledger.rs` (`Books::charge`) then asks the limits of session, user and device.

use rnic_core::abi::queue::doorbell;
use rnic_core::device::allocator;

/// Whose a limit is: the section of the file in which its key stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// `[limits]`: of the whole device, or a maximum of single objects.
    Device,
    /// `[limits.user]`: of all sessions of a user together.
    User,
    /// `[limits.session]`: of one session.
    Session,
    /// `[limits.peer]`: of one remote host.
    Peer,
}

impl Scope {
    /// From the outermost in.
    pub const ALL: [Scope; 4] = [Scope::Device, Scope::Peer, Scope::User, Scope::Session];

    /// Name of the section in the configuration file, without brackets.
    pub fn section(self) -> &'static str {
        match self {
            Scope::Device => "limits",
            Scope::User => "limits.user",
            Scope::Session => "limits.session",
            Scope::Peer => "limits.peer",
        }
    }

    fn whose(self) -> &'static str {
        match self {
            Scope::Device => "all sessions",
            Scope::User => "one user",
            Scope::Session => "one session",
            Scope::Peer => "one remote host (an IPv6 /64)",
        }
    }
}

/// What a value of a limit is a number of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Things, or happenings in a time that the key names.
    Count,
    /// Bytes; written with a unit.
    Bytes,
}

/// What one of a kind costs at worst in the daemon, its queues apart, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Next to nothing, or what is said elsewhere.
    Little,
    /// So many bytes for each.
    Each(u64),
    /// So much in every worker.
    EachPerWorker(u64),
}

/// One limit: its key, its defaults and its range.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The key in each of its sections.
    pub key: &'static str,
    /// What is limited, in words that `of one session` may follow.
    pub what: &'static str,
    /// What its values are numbers of.
    pub unit: Unit,
    /// Whose limit it is, with the value where the file has none.
    pub defaults: &'static [(Scope, u64)],
    /// The least and the most that may be written.
    pub range: (u64, u64),
    /// The most for one session, if that is less.
    pub most_of_session: u64,
    /// Whether a rule may leave a user none, while everybody cannot be left without.
    pub rules_may_forbid: bool,
    /// Whether there is an account of it: it is charged when it is made and credited when it is
    /// gone. Other limits bound single objects and rates, or are kept by whoever has the things.
    pub counted: bool,
    /// Memory that one of the kind costs the daemon at worst.
    pub cost: Cost,
    /// The file below `rnicd/src` that charges it or checks it.
    pub charged_in: &'static str,
}

/// What most rows have in common.
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

/// A row of what is charged.
const COUNTED: Row = Row { counted: true, ..ROW };

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $row:expr;)*) => {
        /// Kinds of objects, bytes and rates that are limited.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $($(#[$doc])* $name,)*
        }

        impl Kind {
            /// Each kind, in the order of its number.
            pub const ALL: [Kind; TABLE.len()] = [$(Kind::$name,)*];
        }

        /// The table, in the order of [`Kind`].
        const TABLE: &[Row] = &[$($row,)*];
    };
}

kinds! {
    /// Sessions, which is programs that are connected at once.
    Sessions = Row {
        key: "sessions",
        what: "programs at once",
        defaults: &[(Scope::Device, 256), (Scope::User, 128)],
        range: (1, 65_535),
        rules_may_forbid: true,
        charged_in: "resource/session/open.rs",
        ..COUNTED
    };
    /// Protection domains that are open.
    Pds = Row {
        key: "pds",
        what: "protection domains",
        defaults: &[(Scope::Device, 16_384), (Scope::User, 8_192), (Scope::Session, 1_024)],
        charged_in: "resource/domain/requests.rs",
        ..COUNTED
    };
    /// Shared buffers, reserved ones included.
    SharedBuffers = Row {
        key: "shared_buffers",
        what: "pieces of shared memory",
        defaults: &[(Scope::Device, 4_096), (Scope::User, 2_048), (Scope::Session, 1_024)],
        range: (0, MAPPINGS),
        charged_in: "resource/memory/shared_buffers.rs",
        ..COUNTED
    };
    /// Bytes of shared buffers.
    SharedBytes = Row {
        key: "shared_bytes",
        what: "bytes of shared memory",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 64 << 30), (Scope::User, 32 << 30), (Scope::Session, 16 << 30)],
        range: (0, MEMORY),
        charged_in: "resource/memory/shared_buffers.rs",
        ..COUNTED
    };
    /// Memory regions that are registered.
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
        // Bound, in a worker's tables, with its share of what all workers have.
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
    /// Completion queues; their entries are limited on their own.
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
        // Connected and idle.
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
        // The last takings.
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
    /// Bytes of the arenas in which queues and doorbell pages are.
    ArenaBytes = Row {
        key: "arena_bytes",
        what: "bytes of queues",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 1 << 30), (Scope::User, 512 << 20), (Scope::Session, 256 << 20)],
        // A session's first arena must fit whatever the number of workers.
        range: (1 << 20, MEMORY),
        charged_in: "resource/queue/arena.rs",
        ..COUNTED
    };
    /// Inbound reads granted to connections.
    IrdTotal = Row {
        key: "ird_total",
        what: "inbound reads of all connections",
        defaults: &[(Scope::User, 1 << 21)],
        range: (0, 1 << 30),
        charged_in: "resource/qp/reads.rs",
        ..COUNTED
    };
    /// Outbound reads granted to connections.
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
        what: "connections in start-up, undecided requests included,",
        defaults: &[(Scope::Device, 2_048), (Scope::User, 1_024)],
        charged_in: "resource/capacity.rs",
        ..ROW
    };
    /// Descriptors of clients that wait to be closed.
    Closing = Row {
        key: "closing",
        what: "descriptors, passed and not closed yet,",
        defaults: &[(Scope::Device, 512), (Scope::User, 128)],
        charged_in: "resource/listener/passed.rs",
        ..ROW
    };
    /// Connections that are taken from the kernel for listeners, per second.
    AcceptsPerSecond = Row {
        key: "accepts_per_second",
        what: "connections taken for the listeners",
        defaults: &[(Scope::User, 5_000)],
        range: (1, RATE),
        charged_in: "resource/capacity.rs",
        ..ROW
    };
    /// Connections that are begun, per second.
    ConnectionsPerSecond = Row {
        key: "connections_per_second",
        what: "connections begun",
        defaults: &[(Scope::User, 10_000), (Scope::Peer, 10_000)],
        range: (1, RATE),
        charged_in: "resource/qp/connect.rs",
        ..ROW
    };
    /// Wrong STags named, per minute.
    StagGuessesPerMinute = Row {
        key: "stag_guesses_per_minute",
        what: "wrong STags named",
        defaults: &[(Scope::Peer, 600)],
        range: (1, RATE),
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// Diagnoses: those of one session, and of sessions that have ended.
    Diagnoses = Row {
        key: "diagnoses",
        what: "diagnoses",
        defaults: &[(Scope::Device, 4_096), (Scope::Session, 256)],
        range: (0, RECORDS),
        charged_in: "resource/session/open.rs",
        ..ROW
    };
    /// Records of notable happenings.
    EventRecords = Row {
        key: "event_records",
        what: "records of happenings",
        defaults: &[(Scope::Device, 1_024)],
        range: (16, RECORDS),
        charged_in: "resource/mod.rs",
        ..ROW
    };
    /// Bytes of FPDUs that have not arrived in full.
    PartialBytes = Row {
        key: "partial_bytes",
        what: "bytes of FPDUs that have not arrived in full",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 256 << 20)],
        range: HELD,
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// The same of one session.
    SessionPartialBytes = Row {
        key: "session_partial_bytes",
        what: "the same, of one session",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 64 << 20)],
        range: HELD,
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// Bytes that TCP has not taken.
    UnsentBytes = Row {
        key: "unsent_bytes",
        what: "bytes that TCP has not taken",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 256 << 20)],
        range: HELD,
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// The same of one session.
    SessionUnsentBytes = Row {
        key: "session_unsent_bytes",
        what: "the same, of one session",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 64 << 20)],
        range: HELD,
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// Bytes of kernel memory for what one connection has to send.
    SocketSendBytes = Row {
        key: "socket_send_bytes",
        what: "kernel memory of one connection for what it has to send, at most net.core.wmem_max twice",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 512 << 10)],
        range: SOCKET,
        charged_in: "resource/options.rs",
        ..ROW
    };
    /// The same for what it has received.
    SocketReceiveBytes = Row {
        key: "socket_receive_bytes",
        what: "kernel memory of one connection for what it has received, at most net.core.rmem_max twice",
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
    /// Requests of one queue.
    QueueDepth = Row {
        key: "queue_depth",
        what: "requests of one queue",
        defaults: &[(Scope::Device, 16_384)],
        range: (1, 1 << 16),
        charged_in: "resource/qp/requests.rs",
        ..ROW
    };
    /// Elements of one request.
    Sges = Row {
        key: "sge",
        what: "elements of one request",
        defaults: &[(Scope::Device, 16)],
        // As many as a work request can hold.
        range: (1, 16),
        charged_in: "resource/qp/requests.rs",
        ..ROW
    };
    /// Inline bytes of one request.
    InlineBytes = Row {
        key: "inline",
        what: "inline data of one request",
        unit: Unit::Bytes,
        defaults: &[(Scope::Device, 1_024)],
        range: (0, 4_096),
        charged_in: "resource/qp/requests.rs",
        ..ROW
    };
    /// Inbound reads of one QP.
    Ird = Row {
        key: "ird",
        what: "inbound reads of one QP",
        defaults: &[(Scope::Device, 128)],
        range: (0, READS),
        charged_in: "resource/qp/connect.rs",
        ..ROW
    };
    /// Outbound reads of one QP.
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
    /// How many there are.
    pub const COUNT: usize = TABLE.len();

    /// What the table says.
    pub fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// The key in each of its sections.
    pub fn key(self) -> &'static str {
        self.row().key
    }

    /// The limit with this key in this section.
    pub fn with_key(scope: Scope, key: &str) -> Option<Kind> {
        Kind::of_scope(scope).find(|kind| kind.key() == key)
    }

    /// The limits of one section, in the order of the table.
    pub fn of_scope(scope: Scope) -> impl Iterator<Item = Kind> {
        Kind::ALL.into_iter().filter(move |kind| kind.default(scope).is_some())
    }

    /// What is charged and credited.
    pub fn counted() -> impl Iterator<Item = Kind> {
        Kind::ALL.into_iter().filter(|kind| kind.row().counted)
    }

    /// The value where the file has none; none if there is no such limit.
    pub fn default(self, scope: Scope) -> Option<u64> {
        self.row().defaults.iter().find(|(of, _)| *of == scope).map(|(_, value)| *value)
    }

    /// The least and the most that may be written in a section.
    pub fn range(self, scope: Scope) -> (u64, u64) {
        let Row { range: (least, most), most_of_session, .. } = *self.row();
        match scope {
            Scope::Session => (least, most.min(most_of_session)),
            _ => (least, most),
        }
    }

    /// What a limit of this section limits.
    pub fn sentence(self, scope: Scope) -> String {
        match self.row().what {
            // Of one object, which the words name.
            what if what.contains(" of one ") => what.to_owned(),
            what => format!("{what} of {}", scope.whose()),
        }
    }
}

/// Most objects of a kind.
const OBJECTS: u64 = 1 << 20;
/// `vm.max_map_count` is 65,530 unless the administrator raised it.
const MAPPINGS: u64 = 60_000;
/// More than any machine has.
const MEMORY: u64 = 1 << 50;
/// Regions and windows together: each has an STag.
pub const STAGS: u64 = allocator::MOST as u64;
/// Maximum number of queues of a session. The other doorbells are those of its queues of copy jobs,
/// one for each of 64 workers.
pub const DOORBELLS: u64 = doorbell::INDICES as u64 - 64;
/// Connections per second; more cannot be told apart from no limit.
const RATE: u64 = 10_000_000;
/// Records of a ring.
const RECORDS: u64 = 1 << 20;
/// IRD and ORD are 14-bit fields (RFC 6581 section 9).
const READS: u64 = (1 << 14) - 2;
/// Every worker's share should hold a few FPDUs of 64 KiB.
const HELD: (u64, u64) = (1 << 20, 1 << 50);
/// A few FPDUs of 64 KiB, and what the kernel can name twice.
const SOCKET: (u64, u64) = (256 << 10, 1 << 30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_unique_and_defaults_in_range_and_counts_fit_32_bits() {
        for (n, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, n);
            let Row { defaults, unit, .. } = kind.row();
            assert!(!defaults.is_empty(), "{kind:?} is nobody's limit");
            for (scope, default) in *defaults {
                let (least, most) = kind.range(*scope);
                assert!((least..=most).contains(default), "{kind:?} in {scope:?}");
                assert_eq!(Kind::with_key(*scope, kind.key()), Some(kind), "{scope:?}");
                assert!(*unit == Unit::Bytes || most <= u64::from(u32::MAX), "{kind:?}");
            }
        }
    }

    /// What nobody checks is no limit.
    #[test]
    fn every_limit_is_checked_where_the_table_says() {
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
