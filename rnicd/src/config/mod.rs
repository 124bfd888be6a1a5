//! The configuration: TOML in, a validated [`Config`] out.
//!
//! [`file`] is what may be written, this module what the rest of the daemon sees: every value in
//! range, every default filled in. It refuses to know sockets, users and the engine; [`explain`]
//! puts it in words for `rnicd check-config`. The binaries and the tests call it.

mod error;
mod explain;
mod file;
mod units;

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rnic_core::abi::queue::doorbell;

pub use error::ConfigError;
pub use explain::explain;
use file::{Field, File, WorkersValue};
pub use file::{Loopback, Mulpdu};
pub use units::{Size, Span};

/// `config/rnicd.toml`: every key, its default and what it costs.
pub const ANNOTATED_DEFAULT: &str = include_str!("../../../config/rnicd.toml");

/// A validated configuration.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Config {
    /// Identity of the device.
    pub device: Device,
    /// The control socket.
    pub control: Control,
    /// Workers and paths.
    pub engine: Engine,
    /// Connection start-up and framing.
    pub mpa: Mpa,
    /// Limits.
    pub limits: Limits,
    /// Logging.
    pub log: Log,
}

/// `[device]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name shown to programs; default `rnicd0`.
    pub name: String,
    /// Addresses programs may bind; empty (the default) for any.
    pub addresses: Vec<IpAddr>,
}

/// `[control]`
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Control {
    /// Path of the socket; by default chosen by who runs the daemon.
    pub socket: Option<PathBuf>,
    /// Permissions of the socket; by default 0660 for root and 0600 otherwise.
    pub mode: Option<u32>,
    /// Group that owns the socket; by default the daemon's own.
    pub group: Option<String>,
    /// Users, by name or number, who see everybody's objects, as root and the daemon's user do.
    pub admins: Vec<String>,
}

/// `[engine]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Worker threads; `None` (the default) derives them from the CPUs.
    pub workers: Option<u32>,
    /// How QPs of this daemon talk to each other; default direct.
    pub loopback: Loopback,
    /// Looks at the queues before an idle worker yields; default 100.
    pub spins: u32,
    /// How long an idle worker yields before it sleeps; default 50 us.
    pub yield_for: Duration,
    /// How long a Terminate may take to leave and the peer to close after it; default 5 s.
    pub drain_deadline: Duration,
    /// How long a copy of another user's attached memory may take; default 5 s.
    pub mover_deadline: Duration,
    /// How long an orderly end of a connection may take; default 60 s.
    pub close_deadline: Duration,
}

/// `[mpa]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mpa {
    /// Checksums; off only if the peer agrees. Default on.
    pub crc: bool,
    /// Ask peers to send Markers; default off.
    pub markers: bool,
    /// Revision to start with, 1 or 2; default 2.
    pub revision: u8,
    /// Ask for the peer-to-peer model (RFC 6581); default on.
    pub peer_to_peer: bool,
    /// Serve revision 0 peers instead of turning them away; default off.
    pub rdmac: bool,
    /// Largest FPDU payload; default from the segment size.
    pub mulpdu: Mulpdu,
    /// For the TCP connection; default 10 s.
    pub connect_deadline: Duration,
    /// For the start-up frame of a peer; default 10 s.
    pub startup_deadline: Duration,
    /// For an application's decision on a connection request; default 60 s.
    pub decision_deadline: Duration,
    /// For the initiator's first FPDU after the reply; default 10 s.
    pub first_fpdu_deadline: Duration,
}

/// `[limits]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sessions at once.
    pub sessions: u32,
    /// Totals over all sessions.
    pub device: Totals,
    /// Totals of one session.
    pub session: Totals,
    /// Connections in start-up.
    pub half_open: u32,
    /// Processes that copy attached memory, one per session that needs it.
    pub movers: u32,
    /// Entries of one CQ.
    pub cq_entries: u32,
    /// Requests of one queue.
    pub wr_depth: u32,
    /// Elements of one request.
    pub sge: u8,
    /// Inline octets of one request.
    pub inline: u16,
    /// Inbound reads of one QP.
    pub ird: u16,
    /// Outbound reads of one QP.
    pub ord: u16,
    /// Undecided connection requests of one listener.
    pub backlog: u32,
    /// Unread events of one session.
    pub events: u32,
}

/// Limits that exist for the device and for one session alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Totals {
    /// Protection domains.
    pub pds: u32,
    /// Segments.
    pub segments: u32,
    /// Octets of segments.
    pub segment_bytes: u64,
    /// Memory regions.
    pub mrs: u32,
    /// Completion channels.
    pub channels: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Bound addresses.
    pub listeners: u32,
    /// Octets of arenas.
    pub arena_bytes: u64,
}

/// `[log]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// Filter of `tracing`; default `info`. `RUST_LOG` overrides it.
    pub level: String,
}

impl Config {
    /// Reads and validates a file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::Read { file: path.to_owned(), error })?;
        Config::parse(path, &text)
    }

    /// The configuration of `path` if there is one, else the built-in default.
    pub fn load_or_default(path: Option<&Path>) -> Result<Self, ConfigError> {
        path.map_or_else(|| Ok(Config::default()), Config::load)
    }

    /// Validates `text`, which came from `file`.
    pub fn parse(file: &Path, text: &str) -> Result<Self, ConfigError> {
        let parsed: File = toml::from_str(text).map_err(|error| {
            ConfigError::at(file, text, error.span().map_or(0, |s| s.start), error.message())
        })?;
        let check = Checker { file, text };
        Ok(Config {
            device: check.device(parsed.device)?,
            control: check.control(parsed.control)?,
            engine: check.engine(parsed.engine)?,
            mpa: check.mpa(parsed.mpa)?,
            limits: check.limits(parsed.limits)?,
            log: check.log(parsed.log)?,
        })
    }
}

impl Default for Device {
    fn default() -> Self {
        Device { name: "rnicd0".to_owned(), addresses: Vec::new() }
    }
}

impl Default for Engine {
    fn default() -> Self {
        Engine {
            workers: None,
            loopback: Loopback::Direct,
            spins: 100,
            yield_for: Duration::from_micros(50),
            drain_deadline: Duration::from_secs(5),
            mover_deadline: Duration::from_secs(5),
            close_deadline: Duration::from_secs(60),
        }
    }
}

impl Default for Mpa {
    fn default() -> Self {
        Mpa {
            crc: true,
            markers: false,
            revision: 2,
            peer_to_peer: true,
            rdmac: false,
            mulpdu: Mulpdu::Mss,
            connect_deadline: Duration::from_secs(10),
            startup_deadline: Duration::from_secs(10),
            decision_deadline: Duration::from_secs(60),
            first_fpdu_deadline: Duration::from_secs(10),
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
                channels: 4_096,
                cqs: 32_768,
                qps: 32_768,
                listeners: 1_024,
                arena_bytes: 1 << 30,
            },
            session: Totals {
                pds: 1_024,
                segments: 1_024,
                segment_bytes: 16 << 30,
                mrs: 131_072,
                channels: 1_024,
                cqs: 12_288,
                qps: 16_384,
                listeners: 256,
                arena_bytes: 256 << 20,
            },
            half_open: 1_024,
            movers: 64,
            cq_entries: 65_536,
            wr_depth: 16_384,
            sge: 16,
            inline: 1_024,
            ird: 128,
            ord: 128,
            backlog: 1_024,
            events: 1_024,
        }
    }
}

impl Default for Log {
    fn default() -> Self {
        Log { level: "info".to_owned() }
    }
}

/// Turns fields into values and complaints into errors with their place.
struct Checker<'a> {
    file: &'a Path,
    text: &'a str,
}

impl Checker<'_> {
    fn device(&self, s: file::DeviceSection) -> Result<Device, ConfigError> {
        let default = Device::default();
        let name = self.checked(s.name, default.name, |name| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if (1..=64).contains(&name.len()) && name.chars().all(plain) {
                Ok(())
            } else {
                Err("must be 1 to 64 letters, digits, '-', '_' or '.'".to_owned())
            }
        })?;
        let addresses = s.addresses.map_or(default.addresses, toml::Spanned::into_inner);
        Ok(Device { name, addresses })
    }

    fn control(&self, s: file::ControlSection) -> Result<Control, ConfigError> {
        let socket = self.optional(s.socket, |path| match path.is_absolute() {
            // The kernel holds 108 octets of a Unix socket's path, the last one a zero.
            true if path.as_os_str().len() < 104 => Ok(()),
            true => Err("is too long for a Unix socket (103 octets)".to_owned()),
            false => Err("must be an absolute path".to_owned()),
        })?;
        let parse_mode = |text: &String| {
            u32::from_str_radix(text, 8).ok().filter(|m| m & !0o777 == 0 && m & 0o600 == 0o600)
        };
        let mode = self.optional(s.mode, |text| match parse_mode(text) {
            Some(_) => Ok(()),
            None => Err("must be octal and let the owner read and write, like \"0660\"".to_owned()),
        })?;
        let not_empty = |text: &String| match text.is_empty() {
            true => Err("must not be empty".to_owned()),
            false => Ok(()),
        };
        let group = self.optional(s.group, not_empty)?;
        let admins =
            self.checked(s.admins, Vec::new(), |list| list.iter().try_for_each(not_empty))?;
        Ok(Control { socket, mode: mode.as_ref().and_then(parse_mode), group, admins })
    }

    fn engine(&self, s: file::EngineSection) -> Result<Engine, ConfigError> {
        let default = Engine::default();
        let workers = self.checked(s.workers, WorkersValue::Auto, |value| match value {
            WorkersValue::Count(n) if !(1..=MAX_WORKERS).contains(n) => {
                Err(format!("must be \"auto\" or from 1 to {MAX_WORKERS}"))
            }
            _ => Ok(()),
        })?;
        Ok(Engine {
            workers: match workers {
                WorkersValue::Auto => None,
                WorkersValue::Count(n) => Some(n),
            },
            loopback: s.loopback.map_or(default.loopback, toml::Spanned::into_inner),
            spins: self.number(s.spins, default.spins, 0..=100_000)?,
            yield_for: self.span(s.yield_for, default.yield_for, Duration::ZERO..=SECOND)?,
            drain_deadline: self.deadline(s.drain_deadline, default.drain_deadline)?,
            mover_deadline: self.deadline(s.mover_deadline, default.mover_deadline)?,
            close_deadline: self.deadline(s.close_deadline, default.close_deadline)?,
        })
    }

    fn mpa(&self, s: file::MpaSection) -> Result<Mpa, ConfigError> {
        let default = Mpa::default();
        let flag = |field: Field<bool>, default| field.map_or(default, toml::Spanned::into_inner);
        Ok(Mpa {
            crc: flag(s.crc, default.crc),
            markers: flag(s.markers, default.markers),
            revision: self.number(s.revision, default.revision, 1..=2)?,
            peer_to_peer: flag(s.peer_to_peer, default.peer_to_peer),
            rdmac: flag(s.rdmac, default.rdmac),
            mulpdu: s.mulpdu.map_or(default.mulpdu, toml::Spanned::into_inner),
            connect_deadline: self.deadline(s.connect_deadline, default.connect_deadline)?,
            startup_deadline: self.deadline(s.startup_deadline, default.startup_deadline)?,
            decision_deadline: self.deadline(s.decision_deadline, default.decision_deadline)?,
            first_fpdu_deadline: self
                .deadline(s.first_fpdu_deadline, default.first_fpdu_deadline)?,
        })
    }

    fn limits(&self, s: file::LimitsSection) -> Result<Limits, ConfigError> {
        let Limits { device: d, session: p, .. } = Limits::default();
        let default = Limits::default();
        let c = s.session;
        let session_place = c.qps.as_ref().or(c.cqs.as_ref()).map(|f| f.span().start);
        let session = Totals {
            pds: self.number(c.pds, p.pds, 1..=MAX_OBJECTS)?,
            segments: self.number(c.segments, p.segments, 0..=MAX_MAPPINGS)?,
            segment_bytes: self.size(c.segment_bytes, p.segment_bytes, 0..=MAX_BYTES)?,
            mrs: self.number(c.mrs, p.mrs, 0..=MAX_MRS)?,
            channels: self.number(c.channels, p.channels, 0..=MAX_OBJECTS)?,
            cqs: self.number(c.cqs, p.cqs, 0..=doorbell::INDICES)?,
            qps: self.number(c.qps, p.qps, 0..=doorbell::INDICES)?,
            listeners: self.number(c.listeners, p.listeners, 0..=65_535)?,
            arena_bytes: self.size(c.arena_bytes, p.arena_bytes, MIN_ARENA..=MAX_BYTES)?,
        };
        if session.qps + session.cqs > doorbell::INDICES {
            let why = format!(
                "limits.session.qps + limits.session.cqs = {} is above {}, the doorbells of a page",
                session.qps + session.cqs,
                doorbell::INDICES
            );
            return Err(ConfigError::at(self.file, self.text, session_place.unwrap_or(0), why));
        }
        Ok(Limits {
            sessions: self.number(s.sessions, default.sessions, 1..=65_535)?,
            device: Totals {
                pds: self.number(s.pds, d.pds, 1..=MAX_OBJECTS)?,
                segments: self.number(s.segments, d.segments, 0..=MAX_MAPPINGS)?,
                segment_bytes: self.size(s.segment_bytes, d.segment_bytes, 0..=MAX_BYTES)?,
                mrs: self.number(s.mrs, d.mrs, 0..=MAX_MRS)?,
                channels: self.number(s.channels, d.channels, 0..=MAX_OBJECTS)?,
                cqs: self.number(s.cqs, d.cqs, 0..=MAX_OBJECTS)?,
                qps: self.number(s.qps, d.qps, 0..=MAX_OBJECTS)?,
                listeners: self.number(s.listeners, d.listeners, 0..=65_535)?,
                arena_bytes: self.size(s.arena_bytes, d.arena_bytes, MIN_ARENA..=MAX_BYTES)?,
            },
            session,
            half_open: self.number(s.half_open, default.half_open, 1..=MAX_OBJECTS)?,
            movers: self.number(s.movers, default.movers, 0..=MAX_OBJECTS)?,
            cq_entries: self.number(s.cq_entries, default.cq_entries, 1..=1 << 20)?,
            wr_depth: self.number(s.wr_depth, default.wr_depth, 1..=1 << 16)?,
            sge: self.number(s.sge, default.sge, 1..=MAX_SGE)?,
            // In range of u16 because the range ends at 4 KiB.
            inline: self.size(s.inline, u64::from(default.inline), 0..=4096)? as u16,
            ird: self.number(s.ird, default.ird, 0..=MAX_READS)?,
            ord: self.number(s.ord, default.ord, 0..=MAX_READS)?,
            backlog: self.number(s.backlog, default.backlog, 1..=65_535)?,
            events: self.number(s.events, default.events, 16..=1 << 20)?,
        })
    }

    fn log(&self, s: file::LogSection) -> Result<Log, ConfigError> {
        let level = self.checked(s.level, Log::default().level, |level| {
            tracing_subscriber::EnvFilter::try_new(level)
                .map(|_| ())
                .map_err(|e| format!("is no log filter like \"info\" or \"rnicd=debug\": {e}"))
        })?;
        Ok(Log { level })
    }

    /// A field's value if `check` has nothing against it, or the default.
    fn checked<T>(
        &self,
        field: Field<T>,
        default: T,
        check: impl Fn(&T) -> Result<(), String>,
    ) -> Result<T, ConfigError> {
        Ok(self.optional(field, check)?.unwrap_or(default))
    }

    fn optional<T>(
        &self,
        field: Field<T>,
        check: impl Fn(&T) -> Result<(), String>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(field) = field else { return Ok(None) };
        check(field.get_ref())
            .map_err(|why| ConfigError::at(self.file, self.text, field.span().start, why))?;
        Ok(Some(field.into_inner()))
    }

    fn number<T: PartialOrd + std::fmt::Display>(
        &self,
        field: Field<T>,
        default: T,
        range: RangeInclusive<T>,
    ) -> Result<T, ConfigError> {
        self.checked(field, default, |value| match range.contains(value) {
            true => Ok(()),
            false => Err(format!("must be from {} to {}", range.start(), range.end())),
        })
    }

    fn size(
        &self,
        field: Field<Size>,
        default: u64,
        range: RangeInclusive<u64>,
    ) -> Result<u64, ConfigError> {
        let range = Size(*range.start())..=Size(*range.end());
        Ok(self.number(field, Size(default), range)?.0)
    }

    fn span(
        &self,
        field: Field<Span>,
        default: Duration,
        range: RangeInclusive<Duration>,
    ) -> Result<Duration, ConfigError> {
        let range = Span(*range.start())..=Span(*range.end());
        Ok(self.number(field, Span(default), range)?.0)
    }

    fn deadline(&self, field: Field<Span>, default: Duration) -> Result<Duration, ConfigError> {
        self.span(field, default, Duration::from_millis(10)..=SECOND * 3600)
    }
}

const SECOND: Duration = Duration::from_secs(1);
/// Doorbell pages and eventfds per session bound the workers.
const MAX_WORKERS: u32 = 64;
/// Most objects of a kind: handles are 24-bit numbers.
const MAX_OBJECTS: u32 = 1 << 20;
/// STag slots are 24-bit numbers; half of them keeps reuse late.
const MAX_MRS: u32 = 1 << 23;
/// `vm.max_map_count` is 65,530 unless the administrator raised it.
const MAX_MAPPINGS: u32 = 60_000;
/// More than any machine has.
const MAX_BYTES: u64 = 1 << 50;
/// A session's first arena must fit whatever the number of workers.
const MIN_ARENA: u64 = 1 << 20;
/// Elements that a work request can hold.
const MAX_SGE: u8 = 16;
/// IRD and ORD are 14-bit fields (RFC 6581 section 9).
const MAX_READS: u16 = (1 << 14) - 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        match Config::parse(Path::new("test.toml"), text) {
            Ok(config) => panic!("accepted {text:?} as {config:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn the_annotated_file_says_exactly_the_defaults() {
        let parsed = Config::parse(Path::new("config/rnicd.toml"), ANNOTATED_DEFAULT);
        assert_eq!(parsed.map_err(|e| e.to_string()), Ok(Config::default()));
    }

    #[test]
    fn the_annotated_file_shows_every_key() {
        // Each commented or live assignment of the annotated file, uncommented, must be a known
        // key; and every field of the file format must occur.
        let mut live = String::new();
        for line in ANNOTATED_DEFAULT.lines() {
            let bare = line.strip_prefix("#: ").unwrap_or(line);
            live.push_str(bare);
            live.push('\n');
        }
        let file: File = toml::from_str(&live).unwrap_or_else(|e| panic!("{e}"));
        let printed = format!("{file:?}");
        assert!(!printed.contains("None"), "a key is missing: {printed}");
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let e = refused("[device]\nname = \"a\"\n\n[limits]\nqp = 5\n");
        assert!(e.starts_with("test.toml:5: limits.qp = 5: unknown field"), "{e}");
        let e = refused("[[user]]\nwho = \"alice\"\n");
        assert!(e.starts_with("test.toml:1: unknown field `user`"), "{e}");
    }

    #[test]
    fn a_bad_unit_is_named_with_its_line() {
        let e = refused("[limits]\nsegment_bytes = \"64MB\"\n");
        assert!(e.starts_with("test.toml:2: limits.segment_bytes = \"64MB\": "), "{e}");
        assert!(e.contains("MiB"), "{e}");
        let e = refused("[limits]\n\nsegment_bytes = 64\n");
        assert!(e.starts_with("test.toml:3: limits.segment_bytes = 64: "), "{e}");
        let e = refused("[mpa]\nstartup_deadline = \"5\"\n");
        assert!(e.starts_with("test.toml:2: mpa.startup_deadline = \"5\": "), "{e}");
    }

    #[test]
    fn values_out_of_range_are_named_with_the_range() {
        let e = refused("[limits]\nsge = 17\n");
        assert_eq!(e, "test.toml:2: limits.sge = 17: must be from 1 to 16");
        let e = refused("[mpa]\nrevision = 0 # old\n");
        assert_eq!(e, "test.toml:2: mpa.revision = 0: must be from 1 to 2");
        let e = refused("[engine]\nworkers = 65\n");
        assert!(e.starts_with("test.toml:2: engine.workers = 65: must be \"auto\""), "{e}");
        let e = refused("[limits]\nqps = -1\n");
        assert!(e.starts_with("test.toml:2: limits.qps = -1: "), "{e}");
        let e = refused("[engine]\nyield_for = \"2s\"\n");
        assert_eq!(e, "test.toml:2: engine.yield_for = \"2s\": must be from 0us to 1s");
    }

    #[test]
    fn queues_of_a_session_must_fit_its_doorbell_page() {
        let e = refused("[limits.session]\nqps = 31744\ncqs = 1\n");
        assert!(e.starts_with("test.toml:2: limits.session.qps = 31744: "), "{e}");
        assert!(e.contains("31744"), "{e}");
    }

    #[test]
    fn wrong_words_and_paths_are_refused() {
        for (text, start) in [
            ("[engine]\nloopback = \"udp\"\n", "test.toml:2: engine.loopback = \"udp\": "),
            ("[engine]\nworkers = \"many\"\n", "test.toml:2: engine.workers = \"many\": "),
            ("[control]\nsocket = \"x.sock\"\n", "test.toml:2: control.socket = \"x.sock\": must"),
            ("[control]\nmode = \"066\"\n", "test.toml:2: control.mode = \"066\": must be octal"),
            ("[device]\nname = \"\"\n", "test.toml:2: device.name = \"\": must be 1 to 64"),
            ("[device]\naddresses = [\"x\"]\n", "test.toml:2: device.addresses = [\"x\"]: "),
            ("[log]\nlevel = \"a=b=c\"\n", "test.toml:2: log.level = \"a=b=c\": is no log filter"),
            ("[device\n", "test.toml:1: "),
            ("[mpa]\ncrc = 1\n", "test.toml:2: mpa.crc = 1: "),
        ] {
            let e = refused(text);
            assert!(e.starts_with(start), "{e}");
        }
    }

    #[test]
    fn keys_change_what_they_say() {
        let text = "[engine]\nworkers = 3\nloopback = \"tcp\"\n[mpa]\ncrc = false\n\
                    [limits]\nqps = 7\n[limits.session]\nqps = 3\n[control]\nmode = \"0660\"\n";
        let config = Config::parse(Path::new("t"), text).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(config.engine.workers, Some(3));
        assert_eq!(config.engine.loopback, Loopback::Tcp);
        assert!(!config.mpa.crc);
        assert_eq!((config.limits.device.qps, config.limits.session.qps), (7, 3));
        assert_eq!(config.control.mode, Some(0o660));
    }

    #[test]
    fn a_missing_file_is_named() {
        let e = Config::load(Path::new("/nonexistent/rnicd.toml"));
        assert!(e.is_err_and(|e| e.to_string().contains("/nonexistent/rnicd.toml")));
    }
}
