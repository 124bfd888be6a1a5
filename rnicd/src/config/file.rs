//! The file as it is written: every key optional, unknown keys refused, each value with the place
//! where it stood so that a later range check can point at it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::Deserialize;

use super::field::Field;
use super::file_limits::{self, LimitsSection};
use super::file_rules::{ConnectTable, ListenTable, OverrideTable, PdTable};
use super::guid::Guid;
use super::subjects::Subjects;
use super::units::{Span, SpanOrOff};

/// A whole configuration file, before it is checked.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct File {
    /// `[device]`
    pub device: DeviceSection,
    /// `[wired]`
    pub wired: WiredSection,
    /// `[control]`
    pub control: ControlSection,
    /// `[engine]`
    pub engine: EngineSection,
    /// `[mpa]`
    pub mpa: MpaSection,
    /// `[tcp]`
    pub tcp: TcpSection,
    /// `[ports]`
    pub ports: PortsSection,
    /// `[limits]`
    #[serde(deserialize_with = "file_limits::limits")]
    pub limits: LimitsSection,
    /// `[metrics]`
    pub metrics: MetricsSection,
    /// `[log]`
    pub log: LogSection,
    /// `[[user]]`
    pub user: Vec<OverrideTable>,
    /// `[[group]]`
    pub group: Vec<OverrideTable>,
    /// `[[pd]]`
    pub pd: Vec<PdTable>,
    /// `[[listen]]`
    pub listen: Vec<ListenTable>,
    /// `[[connect]]`
    pub connect: Vec<ConnectTable>,
}

/// `[device]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceSection {
    /// Name shown to programs.
    pub name: Field<String>,
    /// Addresses programs may bind.
    pub addresses: Field<Vec<IpAddr>>,
    /// Who is said to have made the device.
    pub vendor_id: Field<u32>,
    /// Which device of its maker it is said to be.
    pub vendor_part_id: Field<u32>,
    /// Its version.
    pub hw_ver: Field<u32>,
    /// Its GUID.
    pub guid: Field<Guid>,
    /// Where the devices are shown in files.
    pub tree: Field<String>,
}

/// `[wired]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WiredSection {
    /// Name shown to programs.
    pub name: Field<String>,
    /// Who is said to have made the device.
    pub vendor_id: Field<u32>,
    /// Which device of its maker it is said to be.
    pub vendor_part_id: Field<u32>,
    /// Where daemons find each other.
    pub port: Field<u16>,
    /// Whether PSNs and path MTUs are compared.
    pub compare: Field<bool>,
}

/// `[control]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ControlSection {
    /// Path of the socket.
    pub socket: Field<PathBuf>,
    /// Permission bits of the control socket, in octal digits.
    pub mode: Field<String>,
    /// Group that owns the socket.
    pub group: Field<String>,
    /// Users and groups who see everybody's objects and may drain and disconnect.
    pub admins: Field<Subjects>,
    /// Whom to become when started as root.
    pub user: Field<String>,
    /// What happens to system calls that a thread has no need of.
    pub seccomp: Field<Seccomp>,
}

/// `[engine]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineSection {
    /// Worker threads: a number or `"auto"`.
    pub workers: Field<WorkersValue>,
    /// Path of connections inside the daemon.
    pub loopback: Field<Loopback>,
    /// Looks at the queues before the worker yields.
    pub spins: Field<u32>,
    /// How long an idle worker yields before it sleeps.
    pub yield_for: Field<Span>,
    /// How long a Terminate may take.
    pub terminate_deadline: Field<Span>,
    /// How long an orderly end may take.
    pub close_deadline: Field<Span>,
    /// How long a copy by a client's library may take.
    pub copy_deadline: Field<Span>,
}

/// `engine.workers`: a number or `"auto"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkersValue {
    /// As many threads as half the CPUs, but at least as many as the loopback path needs.
    Auto,
    /// This many threads.
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

/// `control.seccomp`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Seccomp {
    /// Refused, or the end of the daemon for those that only an attacker makes.
    #[default]
    Enforce,
    /// Carried out, and noted in the kernel's log.
    Log,
    /// System calls are not filtered.
    Off,
}

impl Seccomp {
    /// As it is written in the file.
    pub fn name(self) -> &'static str {
        match self {
            Seccomp::Enforce => "enforce",
            Seccomp::Log => "log",
            Seccomp::Off => "off",
        }
    }
}

/// `engine.loopback`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Loopback {
    /// One copy from buffer to buffer.
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
    /// Whether CRCs are asked for, by the C bit of start-up (RFC 5044 section 7.1).
    pub crc: Field<bool>,
    /// Ask peers for Markers.
    pub markers: Field<bool>,
    /// Revision to start with.
    pub revision: Field<u8>,
    /// Ask for the peer-to-peer model.
    pub peer_to_peer: Field<bool>,
    /// Serve revision 0 peers.
    pub rdmac: Field<bool>,
    /// Where MULPDU comes from: the connection's MSS, or the largest there is.
    pub mulpdu: Field<Mulpdu>,
    /// How long a TCP connection may take to be established.
    pub connect_deadline: Field<Span>,
    /// Start-up frames.
    pub startup_deadline: Field<Span>,
    /// The peer's reply.
    pub reply_deadline: Field<Span>,
    /// The application's decision.
    pub decision_deadline: Field<Span>,
    /// First FPDU after the reply.
    pub first_fpdu_deadline: Field<Span>,
    /// A message without a receive.
    pub rnr_timeout: Field<Span>,
    /// A pause inside an FPDU.
    pub stall_deadline: Field<Span>,
}

/// `[tcp]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TcpSection {
    /// Silence before a probe.
    pub keepalive: Field<SpanOrOff>,
    /// Time between two probes.
    pub keepalive_interval: Field<Span>,
    /// How long sent bytes may go without an acknowledgement.
    pub user_timeout: Field<SpanOrOff>,
}

/// `[ports]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PortsSection {
    /// TCP ports by RDMA port.
    pub map: Field<BTreeMap<String, u16>>,
}

/// `[log]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSection {
    /// What is logged: a level, or directives of `tracing`.
    pub level: Field<String>,
}

/// `[metrics]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsSection {
    /// File that is written anew each time.
    pub file: Field<PathBuf>,
    /// Time between two writings.
    pub interval: Field<Span>,
}
