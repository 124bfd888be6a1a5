//! The file format: every key is optional, unknown keys are errors, and each value has its position
//! for errors of later checks.

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
    /// Addresses that programs may bind.
    pub addresses: Field<Vec<IpAddr>>,
    /// Vendor ID of the device.
    pub vendor_id: Field<u32>,
    /// Part ID of the vendor.
    pub vendor_part_id: Field<u32>,
    /// Hardware version.
    pub hw_ver: Field<u32>,
    /// GUID of the device.
    pub guid: Field<Guid>,
    /// Path of the folder that shows the devices, or `"off"`.
    pub tree: Field<String>,
}

/// `[wired]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WiredSection {
    /// Name shown to programs.
    pub name: Field<String>,
    /// Vendor ID of the device.
    pub vendor_id: Field<u32>,
    /// Part ID of the vendor.
    pub vendor_part_id: Field<u32>,
    /// TCP and UDP port for other daemons.
    pub port: Field<u16>,
    /// Compare PSNs and path MTUs of both ends.
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
    /// Administrators: users and groups.
    pub admins: Field<Subjects>,
    /// User to switch to when started as root.
    pub user: Field<String>,
    /// Treatment of system calls that a thread does not need.
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
    /// Polls of its queues before an idle worker yields.
    pub spins: Field<u32>,
    /// Time that an idle worker yields before it sleeps.
    pub yield_for: Field<Span>,
    /// Time limit for a Terminate.
    pub terminate_deadline: Field<Span>,
    /// Time limit for a graceful close.
    pub close_deadline: Field<Span>,
    /// Time limit for a copy by a client's library.
    pub copy_deadline: Field<Span>,
}

/// `engine.workers`: a number or `"auto"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkersValue {
    /// Half as many threads as CPUs, but at least as many as the loopback path needs.
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
    /// They fail. Calls that only an attacker would make kill the daemon.
    #[default]
    Enforce,
    /// They succeed, and the kernel logs them.
    Log,
    /// System calls are not filtered.
    Off,
}

impl Seccomp {
    /// Returns the name in the file.
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
    /// Over TCP, through the kernel's loopback.
    Tcp,
}

impl Loopback {
    /// Returns the name in the file.
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
    /// From the connection's effective maximum segment size (RFC 5044 section 5).
    Mss,
    /// The largest that the length field allows, which violates the RFC.
    Max,
}

/// `[mpa]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MpaSection {
    /// Ask for CRCs with the C bit of start-up (RFC 5044 section 7.1).
    pub crc: Field<bool>,
    /// Ask peers for Markers.
    pub markers: Field<bool>,
    /// Revision to start with.
    pub revision: Field<u8>,
    /// Ask for the peer-to-peer model.
    pub peer_to_peer: Field<bool>,
    /// Serve revision 0 peers.
    pub rdmac: Field<bool>,
    /// Source of MULPDU: the connection's MSS, or the maximum.
    pub mulpdu: Field<Mulpdu>,
    /// Time limit for the TCP handshake.
    pub connect_deadline: Field<Span>,
    /// Time limit for a peer's request.
    pub startup_deadline: Field<Span>,
    /// Time limit for the peer's reply.
    pub reply_deadline: Field<Span>,
    /// Time limit for the application's decision.
    pub decision_deadline: Field<Span>,
    /// Time limit for the first FPDU after the reply.
    pub first_fpdu_deadline: Field<Span>,
    /// Time limit for a message without a receive.
    pub rnr_timeout: Field<Span>,
    /// Time limit for a pause inside an FPDU.
    pub stall_deadline: Field<Span>,
}

/// `[tcp]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TcpSection {
    /// Idle time before a keepalive probe.
    pub keepalive: Field<SpanOrOff>,
    /// Time between two probes.
    pub keepalive_interval: Field<Span>,
    /// Time limit for unacknowledged bytes.
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
    /// Log filter: a level, or directives of `tracing`.
    pub level: Field<String>,
}

/// `[metrics]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsSection {
    /// File that is replaced at each update.
    pub file: Field<PathBuf>,
    /// Time between two updates.
    pub interval: Field<Span>,
}
