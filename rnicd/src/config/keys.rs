//! All keys except limits (`kind.rs`) and rules (`rules.rs`), by section.
//!
//! The file format, `check-config`, the log of a reload and the configuration itself use these
//! declarations. A new key needs a declaration here and its lines in `config/rnicd.toml`, which a
//! test compares with the declarations.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::MapAccess;
use serde::{Deserialize, Deserializer};
use toml::Spanned;

use super::guid::Guid;
use super::log;
use super::ports::PortMap;
use super::profile::Profile;
use super::roce_devices::{RoceDevices, Written, check_device};
use super::section::{
    Key, Row, SECOND, Section, deadline, flag, in_range, number, optional, read, section, span,
    span_or_off, word,
};
use super::subjects::Subjects;
use super::values::{
    Loopback, Mulpdu, Seccomp, TreeAt, Workers, check_absolute, check_not_empty, check_socket,
    parse_mode,
};

section! {
    /// `[device]`: identity and addresses.
    "device" Device

    name: String = name().at_start(), "name shown to programs";
    addresses: Vec<IpAddr> = Key::new(Vec::new(), Ok, |all| show_addresses(all)),
        "addresses that programs may bind";
    /// `None` means that of the profile.
    vendor_id: Option<u32> = vendor_id().at_start(), "vendor ID (OUI) shown to programs";
    /// `None` means that of the profile.
    vendor_part_id: Option<u32> = by_profile().at_start(), "part ID of the vendor";
    /// `None` means that of the profile.
    hw_ver: Option<u32> = by_profile().at_start(), "hardware version shown to programs";
    guid: Option<Guid> = optional("(by name and host)", |_| Ok(()), Guid::to_string)
        .at_start()
        .explained(|guid| match guid {
            Some(_) => "identifies the device",
            None => "identifies the device; derived from device.name and this host",
        }),
        "identifies the device";
    tree: TreeAt = Key::new(TreeAt::BesideSocket, TreeAt::parse, TreeAt::to_string).at_start(),
        "folder that shows the devices as /sys does";
}

section! {
    /// `[wired]`: the RoCE devices.
    "wired" Wired

    // At start only, because devices can also be added and removed at run time.
    profile: Profile = profile().at_start(),
        "adapter or driver whose names, GID tables and limits the devices have";
    /// `None` means the devices of the profile.
    devices: Option<RoceDevices> = devices().at_start(),
        "RoCE devices, each with its addresses or an interface whose addresses are its GIDs";
    /// `None` means that of the profile.
    vendor_id: Option<u32> = vendor_id().at_start(), "vendor ID (OUI) shown to programs";
    /// `None` means that of the profile.
    vendor_part_id: Option<u32> = by_profile().at_start(), "part ID of the vendor";
    // UDP port of RoCE v2.
    port: u16 = number(4791, 1..=u16::MAX).at_start(),
        "TCP and UDP port between the RoCE devices of hosts";
    compare: bool = flag(true).at_start().explained(|compare| if *compare {
            "the PSNs and path MTUs of both ends must match"
        } else {
            "PSNs and path MTUs of the two ends may differ"
        }),
        "the PSNs and path MTUs of both ends must match";
}

section! {
    /// `[control]`: the control socket, administrators, and the daemon's user.
    "control" Control

    socket: Option<PathBuf> = path("(by user)", check_socket).at_start(),
        "root: /run/rnicd/rnicd.sock; others: $XDG_RUNTIME_DIR/rnicd.sock or a folder in /tmp";
    mode: Option<u32> = Key::new(None, |text: String| parse_mode(&text).map(Some), show_mode)
        .at_start(),
        "permissions of the socket; 0660 for root, 0600 for others unless set";
    group: Option<String> = name_or_number().at_start(), "group of the socket";
    /// They see the objects of all users, end connections and drain the daemon.
    admins: Subjects = Key::new(Subjects::default(), Subjects::not_everyone, Subjects::to_string),
        "administrators, in addition to root and the daemon's user";
    user: Option<String> = name_or_number().at_start(), "user to switch to when started as root";
    seccomp: Seccomp = word(Seccomp::Enforce, Seccomp::ALL, Seccomp::name)
        .at_start()
        .explained(|seccomp| match seccomp {
            Seccomp::Enforce => "system calls that a thread does not need fail or kill the daemon",
            Seccomp::Log => "the kernel logs system calls that a thread does not need",
            Seccomp::Off => "threads may make any system call",
        }),
        "treatment of system calls that a thread does not need";
}

section! {
    /// `[engine]`: worker threads, the loopback path and deadlines.
    "engine" Engine

    /// `None` derives the number from the CPUs.
    workers: Option<u32> = Key::new(None, Workers::check, show_workers)
        .at_start()
        .explained(|workers| match workers {
            None => "worker threads, derived from the CPUs of the affinity mask",
            Some(_) => "worker threads",
        }),
        "worker threads";
    loopback: Loopback = word(Loopback::Direct, Loopback::ALL, Loopback::name)
        .at_start()
        .explained(|loopback| match loopback {
            Loopback::Direct => "QPs of this daemon copy from buffer to buffer",
            Loopback::Tcp => "QPs of this daemon connect over TCP, as between hosts",
        }),
        "path between two QPs of this daemon";
    spins: u32 = number(100, 0..=100_000).at_start(), "polls before an idle worker yields";
    yield_for: Duration = span(Duration::from_micros(50), Duration::ZERO..=SECOND).at_start(),
        "time that an idle worker yields before it sleeps";
    terminate_deadline: Duration = deadline(5 * SECOND),
        "time limit to send a Terminate and for the peer to close after it";
    close_deadline: Duration = deadline(60 * SECOND),
        "time limit for a graceful close, then a reset";
    error_deadline: Duration = span(Duration::from_millis(500), Duration::ZERO..=60 * SECOND),
        "time in which an RC or UC QP that moves to ERR sends posted requests";
    copy_deadline: Duration = deadline(10 * SECOND),
        "time limit for a copy by a client's library, then the client's session ends";
}

section! {
    /// `[mpa]`: connection start-up and framing.
    "mpa" Mpa

    //= MPA-1.2-2, MPA-4.4-2, MPA-4.4-3, MPA-4.4-4
    /// `false` takes effect only if the peer agrees.
    crc: bool = flag(true).explained(|crc| if *crc {
            "CRC32C on every FPDU"
        } else {
            "no CRC if the peer agrees"
        }),
        "CRC32C on every FPDU";
    markers: bool = flag(false), "ask peers to send Markers";
    revision: u8 = number(2, 1..=2), "revision of the first attempt to connect";
    /// Asks for the peer-to-peer model (RFC 6581).
    peer_to_peer: bool = flag(true), "the accepting side may send first";
    rdmac: bool = flag(false), "serve revision 0 peers";
    mulpdu: Mulpdu = word(Mulpdu::Mss, Mulpdu::ALL, Mulpdu::name).explained(|mulpdu| match mulpdu {
            Mulpdu::Mss => "one FPDU per TCP segment",
            Mulpdu::Max => "FPDUs up to 64 KiB: violates RFC 5044, only for peers that accept it",
        }),
        "maximum payload of an FPDU";
    connect_deadline: Duration = deadline(10 * SECOND), "time limit for the TCP handshake";
    startup_deadline: Duration = deadline(10 * SECOND), "time limit for a peer's request";
    reply_deadline: Duration = deadline(20 * SECOND),
        "time limit for the peer's reply, including its program's decision";
    decision_deadline: Duration = deadline(60 * SECOND),
        "time limit for a program to accept or reject";
    first_fpdu_deadline: Duration = deadline(10 * SECOND),
        "time limit for the first FPDU after the reply";
    rnr_timeout: Duration = deadline(10 * SECOND),
        "time limit for a posted receive, if the program lets messages wait";
    stall_deadline: Duration = deadline(120 * SECOND),
        "time limit for the next byte of an incomplete FPDU";
}

section! {
    /// `[tcp]`: keepalive and timeouts, for every connection of a QP. The kernel takes whole
    /// seconds, at most 32767.
    #[derive(Copy)]
    "tcp" Tcp

    /// `None` sends no probes, or leaves a passed socket as it is.
    keepalive: Option<Duration> = span_or_off(20 * SECOND, SECOND..=SECOND * 3600),
        "idle time before a keepalive probe";
    keepalive_interval: Duration = span(10 * SECOND, SECOND..=SECOND * 3600),
        "time between keepalive probes";
    /// `None` leaves the limit to the kernel.
    user_timeout: Option<Duration> = span_or_off(60 * SECOND, SECOND..=SECOND * 3600),
        "limit for unacknowledged bytes or a closed window; then the connection ends";
}

section! {
    /// `[ports]`: RDMA ports that use a different TCP port.
    "ports" MappedPorts

    // At start only, because listeners are identified by their requested ports.
    map: PortMap = Key::new(PortMap::default(), PortMap::new, PortMap::to_string).at_start(),
        "RDMA ports that use a different TCP port";
}

section! {
    /// `[metrics]`: metrics in a file, for a collector.
    "metrics" Metrics

    file: Option<PathBuf> = path("-", check_absolute), "metrics for a collector";
    interval: Duration = span(15 * SECOND, SECOND..=SECOND * 86_400),
        "time between updates of the file";
}

section! {
    /// `[log]`: the log filter.
    "log" Log

    /// Filter of `tracing`.
    level: String = Key::new("info".to_owned(), log::check, String::clone),
        "RUST_LOG overrides it";
}

impl Device {
    /// Returns the GUID of this device on this host. Reads the host name, which the seccomp filter
    /// denies to confined threads.
    pub fn effective_guid(&self) -> Guid {
        self.guid.unwrap_or_else(|| Guid::of_this_host(&self.name))
    }
}

fn name() -> Key<String> {
    let check = |name: String| check_device(&name).map(|()| name);
    Key::new("rnicd0".to_owned(), check, String::clone)
}

impl Wired {
    /// Returns the RoCE devices.
    pub fn roce_devices(&self) -> RoceDevices {
        self.devices.clone().unwrap_or_else(|| {
            RoceDevices::one(self.profile.keys.device.as_deref().unwrap_or("rnicd1"))
        })
    }
}

fn devices() -> Key<Option<RoceDevices>, Spanned<BTreeMap<String, Written>>> {
    let show = |devices: &Option<RoceDevices>| {
        devices.as_ref().map_or("(by profile)".to_owned(), RoceDevices::to_string)
    };
    Key::new(None, |written| RoceDevices::new(written).map(Some), show)
}

fn profile() -> Key<Profile, String> {
    let load = |name: String| Profile::load(&name);
    Key::new(Profile::default(), load, |profile| profile.name().to_owned())
}

fn vendor_id() -> Key<Option<u32>, u32> {
    let check = |id: &u32| in_range(id, &(0..=(1 << 24) - 1));
    optional("(by profile)", check, |id| format!("{id:#x}"))
}

fn by_profile() -> Key<Option<u32>, u32> {
    optional("(by profile)", |_| Ok(()), u32::to_string)
}

fn show_addresses(addresses: &[IpAddr]) -> String {
    let all: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    if all.is_empty() { "any".to_owned() } else { all.join(",") }
}

fn path(
    unset: &'static str,
    check: fn(&Path) -> Result<(), String>,
) -> Key<Option<PathBuf>, PathBuf> {
    optional(unset, move |path: &PathBuf| check(path), |path| path.display().to_string())
}

fn name_or_number() -> Key<Option<String>, String> {
    optional("-", |name: &String| check_not_empty(name), String::clone)
}

fn show_mode(mode: &Option<u32>) -> String {
    mode.map_or("(by user)".to_owned(), |mode| format!("{mode:04o}"))
}

fn show_workers(workers: &Option<u32>) -> String {
    workers.map_or("auto".to_owned(), |workers| workers.to_string())
}
