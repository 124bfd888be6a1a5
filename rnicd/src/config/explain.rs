//! The effective configuration in words, for `rnicd check-config`.

use std::fmt::Write;

use super::sentences::sentences;
use super::warnings::warnings;
use super::worst_case::worst_case;
use super::{Config, Loopback, Mulpdu, Seccomp, Size, Span, SpanOrOff};
use crate::resource::Capacity;

/// What every value means here, and what the daemon may use at worst. `unknown` says which users
/// and groups do not exist.
pub fn explain(config: &Config, capacity: &Capacity, unknown: &[String]) -> String {
    let mut out = String::new();
    for (key, value, meaning) in values(config, capacity) {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{key:<35} {value:<14} {meaning}");
    }
    let rules = sentences(config).into_iter().map(|(_, sentence)| sentence);
    paragraph(&mut out, "Rules:", rules);
    paragraph(&mut out, "Worst case, every limit reached at once:", worst_case(config, capacity));
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
pub(super) fn values(config: &Config, capacity: &Capacity) -> Vec<(String, String, String)> {
    let mut rows: Vec<(String, String, String)> = Vec::new();
    let mut row = |key: &str, value: String, meaning: &str| {
        rows.push((key.to_owned(), value, meaning.to_owned()));
    };
    let Config { device, control, engine, mpa, tcp, limits, metrics, log, .. } = config;
    row("device.name", device.name.clone(), "shown to programs");
    let addresses: Vec<String> = device.addresses.iter().map(ToString::to_string).collect();
    row(
        "device.addresses",
        if addresses.is_empty() { "any".to_owned() } else { addresses.join(",") },
        "addresses that programs may bind",
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
        capacity.workers.to_string(),
        match engine.workers {
            None => "threads that move data, derived from the CPUs of the affinity mask",
            Some(_) => "threads that move data",
        },
    );
    row(
        "engine.loopback",
        engine.loopback.name().to_owned(),
        match engine.loopback {
            Loopback::Direct => "QPs of this daemon copy from segment to segment",
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
        "engine.drain_deadline",
        Span(engine.drain_deadline).to_string(),
        "for a Terminate to leave and the peer to close after it",
    );
    row(
        "engine.close_deadline",
        Span(engine.close_deadline).to_string(),
        "an orderly end that takes longer becomes a reset",
    );
    row(
        "engine.mover_deadline",
        Span(engine.mover_deadline).to_string(),
        "for a mover's copy; a client whose copies take longer is detached",
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
        "mpa.hold_deadline",
        Span(mpa.hold_deadline).to_string(),
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
    row("limits.sessions", limits.sessions.to_string(), "programs at once");
    let half_open = match capacity.half_open < limits.half_open {
        true => format!(
            "connections in start-up, undecided requests included (limits.half_open = {}, lowered: {})",
            limits.half_open,
            capacity.reason()
        ),
        false => "connections in start-up, undecided requests included".to_owned(),
    };
    row("limits.half_open", capacity.half_open.to_string(), &half_open);
    row("limits.cq_entries", limits.cq_entries.to_string(), "entries of one CQ, 64 bytes each");
    row("limits.wr_depth", limits.wr_depth.to_string(), "requests of one queue");
    row("limits.sge", limits.sge.to_string(), "elements of one request");
    row("limits.inline", Size(u64::from(limits.inline)).to_string(), "inline data of one request");
    row("limits.ird", limits.ird.to_string(), "inbound reads of one QP");
    row("limits.ord", limits.ord.to_string(), "outbound reads of one QP");
    row("limits.backlog", limits.backlog.to_string(), "undecided requests of one listener");
    row("limits.events", limits.events.to_string(), "unread events of one session");
    row("limits.why", limits.device_why_records.to_string(), "why records of the device");
    row("limits.event_records", limits.event_records.to_string(), "records of happenings");
    row("limits.movers", limits.movers.to_string(), "processes that copy for attached clients");
    row("limits.closing", limits.closing.to_string(), "descriptors of clients yet to be closed");
    row(
        "limits.peer.connections_per_second",
        limits.peer_connections_per_second.to_string(),
        "that one remote host (an IPv6 /64) begins",
    );
    row(
        "limits.peer.stag_guesses_per_minute",
        limits.peer_stag_guesses_per_minute.to_string(),
        "wrong STags that one remote host names",
    );
    row(
        "limits.partial_bytes",
        Size(limits.partial_bytes).to_string(),
        "bytes of FPDUs that have not arrived in full",
    );
    row(
        "limits.session_partial_bytes",
        Size(limits.session_partial_bytes).to_string(),
        "the same, of one session",
    );
    for (name, value, meaning) in [
        ("unsent_bytes", limits.unsent_bytes, "bytes that TCP has not taken"),
        ("session_unsent_bytes", limits.session_unsent_bytes, "the same, of one session"),
        (
            "socket_send_bytes",
            limits.socket_send_bytes.into(),
            "kernel memory for what one connection has to send, at most net.core.wmem_max twice",
        ),
        (
            "socket_receive_bytes",
            limits.socket_receive_bytes.into(),
            "kernel memory for what it has received, at most net.core.rmem_max twice",
        ),
    ] {
        row(&format!("limits.{name}"), Size(value).to_string(), meaning);
    }
    let user = &limits.user;
    for (name, value, meaning) in [
        ("sessions", user.sessions, "programs of one user at once"),
        (
            "half_open",
            user.half_open,
            "connections in start-up of one user, undecided requests included",
        ),
        ("accepts_per_second", user.accepts_per_second, "connections to one user's listeners"),
        ("connections_per_second", user.connections_per_second, "that one user begins"),
        ("ird", user.ird, "inbound reads of all connections of one user"),
        ("ord", user.ord, "outbound reads of all connections of one user"),
        ("movers", user.movers, "processes that copy for attached clients of one user"),
        ("attachments_per_second", user.attachments_per_second, "that one user asks for"),
        ("closing", user.closing, "descriptors of one user's clients yet to be closed"),
    ] {
        row(&format!("limits.user.{name}"), value.to_string(), meaning);
    }
    row("limits.session.why", limits.why_records.to_string(), "why records of one session");
    let lowered = format!("limits.qps = {}, lowered: {}", limits.device.qps, capacity.reason());
    for (prefix, totals, whose) in [
        ("limits", &limits.device, "of all sessions"),
        ("limits.user", &limits.user.totals, "of one user's sessions"),
        ("limits.session", &limits.session, "of one session"),
    ] {
        for (name, value) in totals.each() {
            let what = what_is_counted(name);
            let value = match name {
                "qps" if prefix == "limits" => capacity.qps.to_string(),
                _ => amount(name, value),
            };
            let meaning = match name {
                "qps" if prefix == "limits" && capacity.qps < limits.device.qps => {
                    format!("{what} {whose} ({lowered})")
                }
                _ => format!("{what} {whose}"),
            };
            row(&format!("{prefix}.{name}"), value, &meaning);
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

/// What a total counts.
fn what_is_counted(name: &str) -> &'static str {
    match name {
        "pds" => "protection domains",
        "segments" => "pieces of shared memory",
        "segment_bytes" => "bytes of shared memory",
        "mrs" => "memory regions",
        "windows" => "memory windows",
        "channels" => "completion channels",
        "cqs" => "completion queues",
        "cq_entries_total" => "entries of all completion queues",
        "qps" => "queue pairs",
        "srqs" => "shared receive queues",
        "listeners" => "bound addresses",
        _ => "bytes of queues",
    }
}

/// A value of a total, with its unit if it counts bytes.
pub(super) fn amount(name: &str, value: u64) -> String {
    match name.ends_with("_bytes") {
        true => Size(value).to_string(),
        false => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_explained_with_its_effective_value() {
        let mut config = Config::default();
        config.engine.workers = Some(3);
        let capacity = Capacity::derive(&config, 1 << 20, 8);
        let text = explain(&config, &capacity, &[]);
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
        let said = explain(&config, &Capacity::derive(&config, 1 << 20, 8), &[]);
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
        let capacity = Capacity::derive(&config, 1024, 2);
        let text = explain(&config, &capacity, &[]);
        assert!(text.contains("lowered: RLIMIT_NOFILE = 1024"), "{text}");
    }
}
