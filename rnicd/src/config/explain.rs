//! The effective configuration in words, for `rnicd check-config`.

use std::fmt::Write;

use rnic_core::abi::queue::{PAGE, QueueShape};

use super::{Config, Loopback, Mulpdu, Size, Span};
use crate::resource::Capacity;

/// What every value means here, and what the daemon may use at worst.
pub fn explain(config: &Config, capacity: &Capacity) -> String {
    let mut out = String::new();
    for (key, value, meaning) in values(config, capacity) {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{key:<28} {value:<14} {meaning}");
    }
    out.push('\n');
    for line in worst_case(config, capacity) {
        out.push_str(&line);
        out.push('\n');
    }
    out
}

fn values(config: &Config, capacity: &Capacity) -> Vec<(String, String, String)> {
    let mut rows: Vec<(String, String, String)> = Vec::new();
    let mut row = |key: &str, value: String, meaning: &str| {
        rows.push((key.to_owned(), value, meaning.to_owned()));
    };
    let Config { device, control, engine, mpa, limits, log } = config;
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
    let admins = if control.admins.is_empty() { "-".to_owned() } else { control.admins.join(",") };
    row("control.admins", admins, "see everybody's objects, besides root and the daemon's user");
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
        "engine.mover_deadline",
        Span(engine.mover_deadline).to_string(),
        "for a copy of another user's attached memory",
    );
    row(
        "engine.close_deadline",
        Span(engine.close_deadline).to_string(),
        "an orderly end that takes longer becomes a reset",
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
        "mpa.decision_deadline",
        Span(mpa.decision_deadline).to_string(),
        "for a program to accept or reject",
    );
    row(
        "mpa.first_fpdu_deadline",
        Span(mpa.first_fpdu_deadline).to_string(),
        "for the first FPDU after the reply",
    );
    row("limits.sessions", limits.sessions.to_string(), "programs at once");
    row("limits.half_open", limits.half_open.to_string(), "connections in start-up");
    row("limits.movers", limits.movers.to_string(), "processes that copy attached memory");
    row("limits.cq_entries", limits.cq_entries.to_string(), "entries of one CQ, 64 octets each");
    row("limits.wr_depth", limits.wr_depth.to_string(), "requests of one queue");
    row("limits.sge", limits.sge.to_string(), "elements of one request");
    row("limits.inline", Size(u64::from(limits.inline)).to_string(), "inline data of one request");
    row("limits.ird", limits.ird.to_string(), "inbound reads of one QP");
    row("limits.ord", limits.ord.to_string(), "outbound reads of one QP");
    row("limits.backlog", limits.backlog.to_string(), "undecided requests of one listener");
    row("limits.events", limits.events.to_string(), "unread events of one session");
    let qps = if capacity.qps < limits.device.qps {
        format!("queue pairs (limits.qps = {}, lowered: {})", limits.device.qps, capacity.reason())
    } else {
        "queue pairs".to_owned()
    };
    for (prefix, totals, whose) in [
        ("limits", &limits.device, "of all sessions"),
        ("limits.session", &limits.session, "of one session"),
    ] {
        let device = prefix == "limits";
        let mut row = |name: &str, value: String, what: &str| {
            row(&format!("{prefix}.{name}"), value, &format!("{what} {whose}"));
        };
        row("pds", totals.pds.to_string(), "protection domains");
        row("segments", totals.segments.to_string(), "pieces of shared memory");
        row("segment_bytes", Size(totals.segment_bytes).to_string(), "octets of shared memory");
        row("mrs", totals.mrs.to_string(), "memory regions");
        row("channels", totals.channels.to_string(), "completion channels");
        row("cqs", totals.cqs.to_string(), "completion queues");
        match device {
            true => row("qps", capacity.qps.to_string(), &qps),
            false => row("qps", totals.qps.to_string(), "queue pairs"),
        }
        row("listeners", totals.listeners.to_string(), "bound addresses");
        row("arena_bytes", Size(totals.arena_bytes).to_string(), "octets of queues");
    }
    row("log.level", log.level.clone(), "RUST_LOG overrides it");
    rows
}

/// What the daemon may use if every limit is reached at once.
fn worst_case(config: &Config, capacity: &Capacity) -> Vec<String> {
    let limits = &config.limits;
    let stag_tables = u64::from(capacity.workers) * u64::from(limits.device.mrs) * STAG_ENTRY;
    let qps = u64::from(capacity.qps) * IDLE_QP;
    let half_open = u64::from(limits.half_open) * HALF_OPEN;
    let events = u64::from(limits.sessions) * u64::from(limits.events) * EVENT;
    let workers = u64::from(capacity.workers) * WORKER_SLABS;
    let own = stag_tables + qps + half_open + events + workers;
    let default_qp = QueueShape::send(16, 4, 64).octets() + QueueShape::receive(16, 4).octets();
    vec![
        "Worst case, every limit reached at once:".to_owned(),
        format!(
            "  queues (arenas), allocated for clients     {}",
            human(limits.device.arena_bytes)
        ),
        format!("  daemon's own memory                        {}", human(own)),
        format!("    STag tables, one per worker              {}", human(stag_tables)),
        format!("    connections                              {}", human(qps)),
        format!("    connections in start-up                  {}", human(half_open)),
        format!("    unread events                            {}", human(events)),
        format!("    receive and transmit slabs of workers    {}", human(workers)),
        format!(
            "  shared memory, charged to the clients      {}",
            human(limits.device.segment_bytes)
        ),
        format!(
            "A QP of depth 16/16 takes {} octets of arena; a session at least {}.",
            default_qp,
            human((PAGE * (1 + capacity.workers as usize)) as u64)
        ),
        format!("Descriptors: {}.", capacity.reason()),
    ]
}

fn human(octets: u64) -> String {
    let (unit, factor) = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)]
        .into_iter()
        .find(|(_, factor)| octets >= *factor)
        .unwrap_or(("B", 1));
    match factor {
        1 => format!("{octets} B"),
        _ => format!("{:.1} {unit}", octets as f64 / factor as f64),
    }
}

/// Octets of one entry in a worker's STag table.
const STAG_ENTRY: u64 = 96;
/// Octets of an idle connected QP in the daemon, queues apart.
const IDLE_QP: u64 = 8 << 10;
/// Octets of a connection in start-up: its frame and bookkeeping.
const HALF_OPEN: u64 = 2 << 10;
/// Octets of an unread event, private data included.
const EVENT: u64 = 1 << 10;
/// Octets of a worker's receive slab, transmit slab and pool.
const WORKER_SLABS: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_explained_with_its_effective_value() {
        let mut config = Config::default();
        config.engine.workers = Some(3);
        let capacity = Capacity::derive(&config, 1 << 20, 8);
        let text = explain(&config, &capacity);
        let key = |key: &str| text.lines().find(|l| l.split(' ').next() == Some(key));
        assert!(key("engine.workers").is_some_and(|l| l.contains(" 3 ")), "{text}");
        assert!(key("limits.session.qps").is_some_and(|l| l.contains("16384")), "{text}");
        assert!(text.contains("Worst case"), "{text}");
    }

    #[test]
    fn a_lowered_limit_says_why() {
        let config = Config::default();
        let capacity = Capacity::derive(&config, 1024, 2);
        let text = explain(&config, &capacity);
        assert!(text.contains("lowered: RLIMIT_NOFILE = 1024"), "{text}");
    }
}
