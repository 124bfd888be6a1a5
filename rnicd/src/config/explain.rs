//! The effective configuration in words, for `rnicd check-config`.

use std::fmt::Write;

use super::in_force::InForce;
use super::kind::{Kind, Scope};
use super::limits::amount;
use super::rule_text::rule_text;
use super::warnings::warnings;
use super::worst_case::worst_case;
use super::{Config, Loopback, Mulpdu, Seccomp, Span, SpanOrOff, TreeAt};

/// What every value means here, and what the daemon may use at worst. `unknown` says which users
/// and groups do not exist.
pub fn explain(config: &Config, in_force: &InForce, unknown: &[String]) -> String {
    let mut out = String::new();
    for (key, value, meaning) in values(config, in_force) {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{key:<35} {value:<14} {meaning}");
    }
    let rules = rule_text(config).into_iter().map(|(_, sentence)| sentence);
    paragraph(&mut out, "Rules:", rules);
    paragraph(&mut out, "Worst case, every limit reached at once:", worst_case(config, in_force));
    paragraph(&mut out, "Warnings:", warnings(config).into_iter().chain(unknown.iter().cloned()));
    out
}

/// A heading with lines under it, if there are any.
fn paragraph(out: &mut String, heading: &str, lines: impl IntoIterator<Item = String>) {
    let mut lines = lines.into_iter().peekable();
    if lines.peek().is_some() {
        let _ = writeln!(out, "\n{heading}");
    }
    for line in lines {
        let _ = writeln!(out, "  {line}");
    }
}

/// Keys, effective values and what they mean.
pub(super) fn values(config: &Config, in_force: &InForce) -> Vec<(String, String, String)> {
    let mut rows: Vec<(String, String, String)> = Vec::new();
    let mut row = |key: &str, value: String, meaning: &str| {
        rows.push((key.to_owned(), value, meaning.to_owned()));
    };
    let Config { device, wired, control, engine, mpa, tcp, ports, limits, metrics, log, .. } =
        config;
    row("device.name", device.name.clone(), "shown to programs");
    let addresses: Vec<String> = device.addresses.iter().map(ToString::to_string).collect();
    row(
        "device.addresses",
        if addresses.is_empty() { "any".to_owned() } else { addresses.join(",") },
        "addresses that programs may bind",
    );
    row("device.vendor_id", format!("{:#x}", device.vendor_id), "who made it, as programs see it");
    row("device.vendor_part_id", device.vendor_part_id.to_string(), "which device of its maker");
    row("device.hw_ver", device.hw_ver.to_string(), "version of the hardware, likewise");
    row(
        "device.guid",
        in_force.guid.map_or("(by name and host)".to_owned(), |guid| guid.to_string()),
        match device.guid {
            Some(_) => "tells devices apart",
            None => "tells devices apart; follows from device.name and this host",
        },
    );
    row(
        "device.tree",
        match &device.tree {
            TreeAt::BesideSocket => "(by the socket)".to_owned(),
            TreeAt::Path(path) => path.display().to_string(),
            TreeAt::Nowhere => "off".to_owned(),
        },
        "folder in which the devices are shown as in /sys",
    );
    row("wired.name", wired.name.clone(), "name of the device whose queue pairs are wired by hand");
    row("wired.vendor_id", format!("{:#x}", wired.vendor_id), "who made it, as programs see it");
    row("wired.vendor_part_id", wired.vendor_part_id.to_string(), "which device of its maker");
    row("wired.port", wired.port.to_string(), "TCP and UDP port at which daemons find each other");
    row(
        "wired.compare",
        wired.compare.to_string(),
        match wired.compare {
            true => "both ends must name the same PSNs and path MTU",
            false => "PSNs and path MTUs that ends name may differ",
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
        "who may connect; 0660 for root, 0600 for others unless set",
    );
    row("control.group", control.group.clone().unwrap_or("-".to_owned()), "owns the socket");
    row(
        "control.admins",
        control.admins.to_string(),
        "see everybody's objects, drain and disconnect, as root and the daemon's user do",
    );
    row(
        "control.user",
        control.user.clone().unwrap_or("-".to_owned()),
        "whom the daemon becomes when started as root",
    );
    row(
        "control.seccomp",
        control.seccomp.name().to_owned(),
        match control.seccomp {
            Seccomp::Enforce => "system calls that a thread has no need of fail, or end the daemon",
            Seccomp::Log => "system calls that a thread has no need of are logged by the kernel",
            Seccomp::Off => "threads may make any system call",
        },
    );
    row(
        "engine.workers",
        in_force.workers.to_string(),
        match engine.workers {
            None => "threads that move data, derived from the CPUs of the affinity mask",
            Some(_) => "threads that move data",
        },
    );
    row(
        "engine.loopback",
        engine.loopback.name().to_owned(),
        match engine.loopback {
            Loopback::Direct => "QPs of this daemon copy from buffer to buffer",
            Loopback::Tcp => "QPs of this daemon talk over TCP like strangers",
        },
    );
    row("engine.spins", engine.spins.to_string(), "looks before an idle worker yields");
    row(
        "engine.yield_for",
        Span(engine.yield_for).to_string(),
        "then it yields so long, then sleeps",
    );
    row(
        "engine.terminate_deadline",
        Span(engine.terminate_deadline).to_string(),
        "for a Terminate to leave and the peer to close after it",
    );
    row(
        "engine.close_deadline",
        Span(engine.close_deadline).to_string(),
        "an orderly end that takes longer becomes a reset",
    );
    row(
        "engine.copy_deadline",
        Span(engine.copy_deadline).to_string(),
        "for a copy by a client's library; a client whose copies take longer is detached",
    );
    row(
        "mpa.crc",
        mpa.crc.to_string(),
        if mpa.crc { "checksums on every FPDU" } else { "no checksums if the peer agrees" },
    );
    row("mpa.markers", mpa.markers.to_string(), "whether peers are asked for Markers");
    row("mpa.revision", mpa.revision.to_string(), "connections start with this revision");
    row("mpa.peer_to_peer", mpa.peer_to_peer.to_string(), "the accepting side may send first");
    row("mpa.rdmac", mpa.rdmac.to_string(), "whether revision 0 peers are served");
    row(
        "mpa.mulpdu",
        match mpa.mulpdu {
            Mulpdu::Mss => "mss".to_owned(),
            Mulpdu::Max => "max".to_owned(),
        },
        match mpa.mulpdu {
            Mulpdu::Mss => "one FPDU per TCP segment",
            Mulpdu::Max => "FPDUs of up to 64 KiB: outside RFC 5044, for peers known to cope",
        },
    );
    row("mpa.connect_deadline", Span(mpa.connect_deadline).to_string(), "for the TCP connection");
    row("mpa.startup_deadline", Span(mpa.startup_deadline).to_string(), "for the start-up frame");
    row(
        "mpa.reply_deadline",
        Span(mpa.reply_deadline).to_string(),
        "for the peer to reply, its program's decision included",
    );
    row(
        "mpa.decision_deadline",
        Span(mpa.decision_deadline).to_string(),
        "for a program to accept or reject",
    );
    row(
        "mpa.first_fpdu_deadline",
        Span(mpa.first_fpdu_deadline).to_string(),
        "for the first FPDU after the reply",
    );
    row(
        "mpa.rnr_timeout",
        Span(mpa.rnr_timeout).to_string(),
        "for a receive, where a program holds messages",
    );
    row(
        "mpa.stall_deadline",
        Span(mpa.stall_deadline).to_string(),
        "for the next byte of an FPDU that has begun",
    );
    row(
        "tcp.keepalive",
        SpanOrOff(tcp.keepalive).to_string(),
        "silence after which the peer's host is asked whether it is there",
    );
    row(
        "tcp.keepalive_interval",
        Span(tcp.keepalive_interval).to_string(),
        "between two such questions",
    );
    row(
        "tcp.user_timeout",
        SpanOrOff(tcp.user_timeout).to_string(),
        "a connection ends if nothing is acknowledged, or taken by a closed window, for so long",
    );
    row("ports.map", ports.to_string(), "RDMA ports that are other ports of TCP");
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
        "figures for a collector",
    );
    row("metrics.interval", Span(metrics.interval).to_string(), "between two writings of it");
    row("log.level", log.level.clone(), "RUST_LOG overrides it");
    rows
}

/// A limit that this machine may have lowered, and what it says of that.
fn lowered(kind: Kind, written: u64, effective: u32, in_force: &InForce) -> (String, String) {
    let meaning = kind.sentence(Scope::Device);
    let meaning = match u64::from(effective) < written {
        true => {
            format!("{meaning} (limits.{} = {written}, lowered: {})", kind.key(), in_force.reason)
        }
        false => meaning,
    };
    (effective.to_string(), meaning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_explained_with_its_effective_value() {
        let mut config = Config::default();
        config.engine.workers = Some(3);
        let text = explain(&config, &InForce::as_written(&config), &[]);
        let key = |key: &str| text.lines().find(|l| l.split(' ').next() == Some(key));
        assert!(key("engine.workers").is_some_and(|l| l.contains(" 3 ")), "{text}");
        assert!(key("limits.session.qps").is_some_and(|l| l.contains("16384")), "{text}");
        assert!(text.contains("Worst case"), "{text}");
        assert!(text.contains("256.0 MiB for bytes that TCP has not taken"), "{text}");
        assert!(text.contains("do not read: 1.5 MiB each, 24.0 GiB for one user"), "{text}");
    }

    #[test]
    fn rules_and_contradictions_are_told_in_sentences() {
        let text = "[limits.session]\nqps = 30000\ncqs = 1\n[[user]]\nwho = \"alice\"\n\
                    session = { qps = 4 }\ntrusted = true\n[[listen]]\nwho = \"@rdma\"\n\
                    address = \"10.0.0.0/8\"\nports = 7\n";
        let config = Config::parse(std::path::Path::new("t"), text);
        let config = config.unwrap_or_else(|e| panic!("{e}"));
        let said = explain(&config, &InForce::as_written(&config), &[]);
        for sentence in [
            "Sessions of user alice may have qps = 4 (instead of 30000).",
            "User alice is trusted: the daemon itself copies in attached memory.",
            "@rdma may listen on 10.0.0.0/8, port 7.",
            "limits.session.qps = 30000 is above limits.user.qps = 16384",
        ] {
            assert!(said.contains(sentence), "{sentence}\n{said}");
        }
    }

    #[test]
    fn a_lowered_limit_says_why() {
        let config = Config::default();
        let reason = "RLIMIT_NOFILE = 1024 leaves 600 for connections".to_owned();
        let in_force = InForce { workers: 1, qps: 600, startups: 120, reason, guid: None };
        let text = explain(&config, &in_force, &[]);
        assert!(text.contains("lowered: RLIMIT_NOFILE = 1024"), "{text}");
    }
}
