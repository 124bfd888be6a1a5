//! The file as it is written: every key optional, unknown keys refused, each value with the place
//! where it stood so that a later range check can point at it.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::units::{Size, Span};

/// A value with its place, or nothing.
pub type Field<T> = Option<Spanned<T>>;

/// The whole file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct File {
    /// `[device]`
    pub device: DeviceSection,
    /// `[control]`
    pub control: ControlSection,
    /// `[engine]`
    pub engine: EngineSection,
    /// `[mpa]`
    pub mpa: MpaSection,
    /// `[limits]`
    pub limits: LimitsSection,
    /// `[log]`
    pub log: LogSection,
}

/// `[device]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceSection {
    /// Name shown to programs.
    pub name: Field<String>,
    /// Addresses programs may bind.
    pub addresses: Field<Vec<IpAddr>>,
}

/// `[control]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ControlSection {
    /// Path of the socket.
    pub socket: Field<PathBuf>,
    /// Permissions, octal.
    pub mode: Field<String>,
    /// Group that owns the socket.
    pub group: Field<String>,
    /// Users who see everybody's objects.
    pub admins: Field<Vec<String>>,
}

/// `[engine]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineSection {
    /// Worker threads.
    pub workers: Field<WorkersValue>,
    /// Path of connections inside the daemon.
    pub loopback: Field<Loopback>,
    /// Looks at the queues before the worker yields.
    pub spins: Field<u32>,
    /// How long an idle worker yields before it sleeps.
    pub yield_for: Field<Span>,
    /// How long a Terminate may take.
    pub drain_deadline: Field<Span>,
    /// How long a copy of another user's attached memory may take.
    pub mover_deadline: Field<Span>,
    /// How long an orderly end may take.
    pub close_deadline: Field<Span>,
}

/// `engine.workers`: a number or `"auto"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkersValue {
    /// Half the CPUs.
    Auto,
    /// So many.
    Count(u32),
}

impl<'de> Deserialize<'de> for WorkersValue {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = WorkersValue;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("\"auto\" or a number of threads")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<WorkersValue, E> {
                match text {
                    "auto" => Ok(WorkersValue::Auto),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
                }
            }
            fn visit_i64<E: serde::de::Error>(self, n: i64) -> Result<WorkersValue, E> {
                u32::try_from(n)
                    .map(WorkersValue::Count)
                    .map_err(|_| E::invalid_value(serde::de::Unexpected::Signed(n), &self))
            }
        }
        d.deserialize_any(Visitor)
    }
}

/// `engine.loopback`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Loopback {
    /// One copy from segment to segment.
    Direct,
    /// Over the wire, through the kernel's loopback.
    Tcp,
}

impl Loopback {
    /// The word in the file.
    pub fn name(self) -> &'static str {
        match self {
            Loopback::Direct => "direct",
            Loopback::Tcp => "tcp",
        }
    }
}

/// `mpa.mulpdu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mulpdu {
    /// From the connection's effective segment size (RFC 5044 section 5).
    Mss,
    /// The largest a length field allows; outside the RFC.
    Max,
}

/// `[mpa]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MpaSection {
    /// Checksums.
    pub crc: Field<bool>,
    /// Ask peers for Markers.
    pub markers: Field<bool>,
    /// Revision to start with.
    pub revision: Field<u8>,
    /// Ask for the peer-to-peer model.
    pub peer_to_peer: Field<bool>,
    /// Serve revision 0 peers.
    pub rdmac: Field<bool>,
    /// Largest FPDU payload.
    pub mulpdu: Field<Mulpdu>,
    /// TCP connection.
    pub connect_deadline: Field<Span>,
    /// Start-up frames.
    pub startup_deadline: Field<Span>,
    /// The application's decision.
    pub decision_deadline: Field<Span>,
    /// First FPDU after the reply.
    pub first_fpdu_deadline: Field<Span>,
}

/// `[limits]`: the whole device and single objects.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsSection {
    /// Sessions.
    pub sessions: Field<u32>,
    /// Protection domains.
    pub pds: Field<u32>,
    /// Segments.
    pub segments: Field<u32>,
    /// Octets of segments.
    pub segment_bytes: Field<Size>,
    /// Memory regions.
    pub mrs: Field<u32>,
    /// Completion channels.
    pub channels: Field<u32>,
    /// Completion queues.
    pub cqs: Field<u32>,
    /// Queue pairs.
    pub qps: Field<u32>,
    /// Bound addresses.
    pub listeners: Field<u32>,
    /// Octets of arenas.
    pub arena_bytes: Field<Size>,
    /// Connections in start-up.
    pub half_open: Field<u32>,
    /// Processes that copy attached memory.
    pub movers: Field<u32>,
    /// Entries of one CQ.
    pub cq_entries: Field<u32>,
    /// Requests of one queue.
    pub wr_depth: Field<u32>,
    /// Elements of one request.
    pub sge: Field<u8>,
    /// Inline octets of one request.
    pub inline: Field<Size>,
    /// Inbound reads of one QP.
    pub ird: Field<u16>,
    /// Outbound reads of one QP.
    pub ord: Field<u16>,
    /// Undecided connection requests of one listener.
    pub backlog: Field<u32>,
    /// Unread events of one session.
    pub events: Field<u32>,
    /// `[limits.session]`
    pub session: SessionLimitsSection,
}

/// `[limits.session]`: one session.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SessionLimitsSection {
    /// Protection domains.
    pub pds: Field<u32>,
    /// Segments.
    pub segments: Field<u32>,
    /// Octets of segments.
    pub segment_bytes: Field<Size>,
    /// Memory regions.
    pub mrs: Field<u32>,
    /// Completion channels.
    pub channels: Field<u32>,
    /// Completion queues.
    pub cqs: Field<u32>,
    /// Queue pairs.
    pub qps: Field<u32>,
    /// Bound addresses.
    pub listeners: Field<u32>,
    /// Octets of arenas.
    pub arena_bytes: Field<Size>,
}

/// `[log]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSection {
    /// Level.
    pub level: Field<String>,
}
