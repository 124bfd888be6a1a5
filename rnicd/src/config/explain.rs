//! Text that explains the effective configuration, for `rnicd check-config`.

use std::fmt::Write;

use super::in_force::InForce;
use super::kind::{Kind, Scope};
use super::limits::amount;
use super::rule_text::rule_text;
use super::warnings::warnings;
use super::worst_case::worst_case;
use super::{Config, Loopback, Mulpdu, Seccomp, Span, SpanOrOff, TreeAt};

/// Returns all values with their meaning, the rules, the worst-case memory and warnings. `unknown`
/// contains warnings about users and groups that do not exist.
pub fn explain(config: &Config, in_force: &InForce, unknown: &[String]) -> String {
    let mut out = String::new();
    for (key, value, meaning) in values(config, in_force) {
        // Writes to a String do not fail.
        let _ = writeln!(out, "{key:<35} {value:<14} {meaning}");
    }
    let rules = rule_text(config).into_iter().map(|(_, sentence)| sentence);
    paragraph(&mut out, "Rules:", rules);
    paragraph(&mut out, "Worst case, every limit reached at once:", worst_case(config, in_force));
    paragraph(&mut out, "Warnings:", warnings(config).into_iter().chain(unknown.iter().cloned()));
    out
}

/// Appends a heading and its lines. Appends nothing if there are no lines.
fn paragraph(out: &mut String, heading: &str, lines: impl IntoIterator<Item = String>) {
    let mut lines = lines.into_iter().peekable();
    if lines.peek().is_some() {
        let _ = writeln!(out, "\n{heading}");
    }
    for line in lines {
        let _ = writeln!(out, "  {line}");
    }
}

/// Returns keys, effective values and their meaning.
pub(super) fn values(config: &Config, in_force: &InForce) -> Vec<(String, String, String)> {
    let mut rows: Vec<(String, String, String)> = Vec::new();
    let mut row = |key: &str, value: String, meaning: &str| {
        rows.push((key.to_owned(), value, meaning.to_owned()));
    };
    let Config { device, wired, control, engine, mpa, tcp, ports, limits, metrics, log, .. } =
        config;
    row("device.name", device.name.clone(), "name shown to programs");
    let addresses: Vec<String> = device.addresses.iter().map(ToString::to_string).collect();
    row(
        "device.addresses",
        if addresses.is_empty() { "any".to_owned() } else { addresses.join(",") },
        "addresses that programs may bind",
    );
    row(
        "device.vendor_id",
        format!("{:#x}", device.vendor_id),
        "vendor ID (OUI) shown to programs",
    );
    row("device.vendor_part_id", device.vendor_part_id.to_string(), "part ID of the vendor");
    row("device.hw_ver", device.hw_ver.to_string(), "hardware version shown to programs");
    row(
        "device.guid",
        in_force.guid.map_or("(by name and host)".to_owned(), |guid| guid.to_string()),
        match device.guid {
            Some(_) => "identifies the device",
            None => "identifies the device; derived from device.name and this host",
        },
    );
    row(
        "device.tree",
        match &device.tree {
            TreeAt::BesideSocket => "(beside socket)".to_owned(),
            TreeAt::Path(path) => path.display().to_string(),
            TreeAt::Off => "off".to_owned(),
        },
        "folder that shows the devices as /sys does",
    );
    row("wired.name", wired.name.clone(), "name of the RoCE device shown to programs");
    row("wired.vendor_id", format!("{:#x}", wired.vendor_id), "vendor ID (OUI) shown to programs");
    row("wired.vendor_part_id", wired.vendor_part_id.to_string(), "part ID of the vendor");
    row("wired.port", wired.port.to_string(), "TCP and UDP port between the RoCE devices of hosts");
    row(
        "wired.compare",
        wired.compare.to_string(),
        if wired.compare {
            "the PSNs and path MTUs of both ends must match"
        } else {
            "PSNs and path MTUs of the two ends may differ"
        },
    );
    row(
        "control.socket",
        control.socket.as_ref().map_or("(by user)".to_owned(), |p| p.display().to_string()),
        "root: /run/rnicd/rnicd.sock; others: $XDG_RUNTIME_DIR/rnicd.sock or a folder in /tmp",
    );
    row(
        "control.mode",
        control.mode.map_or("(by user)".to_owned(), |m| format!("{m:04o}")),
        "permissions of the socket; 0660 for root, 0600 for others unless set",
    );
    row("control.group", control.group.clone().unwrap_or("-".to_owned()), "group of the socket");
    row(
        "control.admins",
        control.admins.to_string(),
        "administrators, in addition to root and the daemon's user",
    );
    row(
        "control.user",
        control.user.clone().unwrap_or("-".to_owned()),
        "user to switch to when started as root",
    );
    row(
        "control.seccomp",
        control.seccomp.name().to_owned(),
        match control.seccomp {
            Seccomp::Enforce => "system calls that a thread does not need fail or kill the daemon",
            Seccomp::Log => "the kernel logs system calls that a thread does not need",
            Seccomp::Off => "threads may make any system call",
        },
    );
    row(
        "engine.workers",
        in_force.workers.to_string(),
        match engine.workers {
            None => "worker threads, derived from the CPUs of the affinity mask",
            Some(_) => "worker threads",
        },
    );
    row(
        "engine.loopback",
        engine.loopback.name().to_owned(),
        match engine.loopback {
            Loopback::Direct => "QPs of this daemon copy from buffer to buffer",
            Loopback::Tcp => "QPs of this daemon connect over TCP, as between hosts",
        },
    );
    row("engine.spins", engine.spins.to_string(), "polls before an idle worker yields");
    row(
        "engine.yield_for",
        Span(engine.yield_for).to_string(),
        "time that an idle worker yields before it sleeps",
    );
    row(
        "engine.terminate_deadline",
        Span(engine.terminate_deadline).to_string(),
        "time limit to send a Terminate and for the peer to close after it",
    );
    row(
        "engine.close_deadline",
        Span(engine.close_deadline).to_string(),
        "time limit for a graceful close, then a reset",
    );
    row(
        "engine.copy_deadline",
        Span(engine.copy_deadline).to_string(),
        "time limit for a copy by a client's library, then the client's session ends",
    );
    row(
        "mpa.crc",
        mpa.crc.to_string(),
        if mpa.crc { "CRC32C on every FPDU" } else { "no CRC if the peer agrees" },
    );
    row("mpa.markers", mpa.markers.to_string(), "ask peers to send Markers");
    row("mpa.revision", mpa.revision.to_string(), "revision of the first attempt to connect");
    row("mpa.peer_to_peer", mpa.peer_to_peer.to_string(), "the accepting side may send first");
    row("mpa.rdmac", mpa.rdmac.to_string(), "serve revision 0 peers");
    row(
        "mpa.mulpdu",
        match mpa.mulpdu {
            Mulpdu::Mss => "mss".to_owned(),
            Mulpdu::Max => "max".to_owned(),
        },
        match mpa.mulpdu {
            Mulpdu::Mss => "one FPDU per TCP segment",
            Mulpdu::Max => "FPDUs up to 64 KiB: violates RFC 5044, only for peers that accept it",
        },
    );
    row(
        "mpa.connect_deadline",
        Span(mpa.connect_deadline).to_string(),
        "time limit for the TCP handshake",
    );
    row(
        "mpa.startup_deadline",
        Span(mpa.startup_deadline).to_string(),
        "time limit for a peer's request",
    );
    row(
        "mpa.reply_deadline",
        Span(mpa.reply_deadline).to_string(),
        "time limit for the peer's reply, including its program's decision",
    );
    row(
        "mpa.decision_deadline",
        Span(mpa.decision_deadline).to_string(),
        "time limit for a program to accept or reject",
    );
    row(
        "mpa.first_fpdu_deadline",
        Span(mpa.first_fpdu_deadline).to_string(),
        "time limit for the first FPDU after the reply",
    );
    row(
        "mpa.rnr_timeout",
        Span(mpa.rnr_timeout).to_string(),
        "time limit for a posted receive, if the program lets messages wait",
    );
    row(
        "mpa.stall_deadline",
        Span(mpa.stall_deadline).to_string(),
        "time limit for the next byte of an incomplete FPDU",
    );
    row(
        "tcp.keepalive",
        SpanOrOff(tcp.keepalive).to_string(),
        "idle time before a keepalive probe",
    );
    row(
        "tcp.keepalive_interval",
        Span(tcp.keepalive_interval).to_string(),
        "time between keepalive probes",
    );
    row(
        "tcp.user_timeout",
        SpanOrOff(tcp.user_timeout).to_string(),
        "limit for unacknowledged bytes or a closed window; then the connection ends",
    );
    row("ports.map", ports.to_string(), "RDMA ports that use a different TCP port");
    for scope in Scope::ALL {
        for (kind, value) in limits.of(scope).each() {
            let (value, meaning) = match (scope, kind) {
                (Scope::Device, Kind::Qps) => lowered(kind, value, in_force.qps, in_force),
                (Scope::Device, Kind::Startups) => {
                    lowered(kind, value, in_force.startups, in_force)
                }
                _ => (amount(kind, value), kind.sentence(scope)),
            };
            row(&format!("{}.{}", scope.section(), kind.key()), value, &meaning);
        }
    }
    row(
        "metrics.file",
        metrics.file.as_ref().map_or("-".to_owned(), |p| p.display().to_string()),
        "metrics for a collector",
    );
    row("metrics.interval", Span(metrics.interval).to_string(), "time between updates of the file");
    row("log.level", log.level.clone(), "RUST_LOG overrides it");
    rows
}

/// Returns the effective value and the meaning of a limit that this machine may have lowered.
fn lowered(kind: Kind, written: u64, effective: u32, in_force: &InForce) -> (String, String) {
    let meaning = kind.sentence(Scope::Device);
    let meaning = if u64::from(effective) < written {
        format!("{meaning} (limits.{} = {written}, lowered: {})", kind.key(), in_force.reason)
    } else {
        meaning
    };
    (effective.to_string(), meaning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explanations_show_effective_values() {
        let mut config = Config::default();
        config.engine.workers = Some(3);
        let text = explain(&config, &InForce::as_written(&config), &[]);
        let key = |key: &str| text.lines().find(|l| l.split(' ').next() == Some(key));
        assert!(key("engine.workers").is_some_and(|l| l.contains(" 3 ")), "{text}");
        assert!(key("limits.session.qps").is_some_and(|l| l.contains("16384")), "{text}");
        assert!(text.contains("Worst case"), "{text}");
        assert!(text.contains("256.0 MiB for unsent FPDUs"), "{text}");
        assert!(text.contains("do not read: 1.5 MiB each, 24.0 GiB for one user"), "{text}");
    }

    #[test]
    fn rules_and_warnings_are_explained() {
        let text = "[limits.session]\nqps = 30000\ncqs = 1\n[[user]]\nwho = \"alice\"\n\
                    session = { qps = 4 }\ntrusted = true\n[[listen]]\nwho = \"@rdma\"\n\
                    address = \"10.0.0.0/8\"\nports = 7\n";
        let config = Config::parse(std::path::Path::new("t"), text);
        let config = config.unwrap_or_else(|e| panic!("{e}"));
        let said = explain(&config, &InForce::as_written(&config), &[]);
        for sentence in [
            "Sessions of user alice may have qps = 4 (instead of 30000).",
            "User alice is trusted: the daemon itself copies from and to attached memory.",
            "@rdma may listen on 10.0.0.0/8, port 7.",
            "limits.session.qps = 30000 is above limits.user.qps = 16384",
        ] {
            assert!(said.contains(sentence), "{sentence}\n{said}");
        }
    }

    #[test]
    fn lowered_limit_shows_the_reason() {
        let config = Config::default();
        let reason = "RLIMIT_NOFILE = 1024 leaves 600 for connections".to_owned();
        let in_force = InForce { workers: 1, qps: 600, startups: 120, reason, guid: None };
        let text = explain(&config, &in_force, &[]);
        assert!(text.contains("lowered: RLIMIT_NOFILE = 1024"), "{text}");
    }
}
