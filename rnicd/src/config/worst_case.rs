//! What may be used if every limit is reached at once.

use rnic_core::abi::queue::{PAGE, QueueShape};

use super::{Config, Totals};
use crate::resource::Capacity;

/// Memory of a session, of a user and of the whole daemon.
pub(super) fn worst_case(config: &Config, capacity: &Capacity) -> Vec<String> {
    let limits = &config.limits;
    let workers = u64::from(capacity.workers);
    let per_session = u64::from(limits.events) * EVENT + u64::from(limits.why_records) * RECORD;
    let own = |totals: &Totals, sessions: u64| {
        let table = u64::from(totals.mrs) * STAG_ENTRY + u64::from(totals.windows) * WINDOW;
        workers * table
            + u64::from(totals.srqs) * SRQ
            + u64::from(totals.qps) * IDLE_QP
            + sessions * per_session
    };
    let mut device = limits.device.clone();
    device.qps = capacity.qps;
    let user = &limits.user;
    let mut lines: Vec<String> = [
        ("one session", &limits.session, 1),
        ("one user", &user.totals, u64::from(user.sessions)),
        ("the device", &device, u64::from(limits.sessions)),
    ]
    .into_iter()
    .map(|(whose, totals, sessions)| {
        format!(
            "{whose}: {} of queues and {} of bookkeeping in the daemon, {} of memory shared by \
             clients and charged to them",
            human(totals.arena_bytes),
            human(own(totals, sessions)),
            human(totals.segment_bytes),
        )
    })
    .collect();
    let half_open = u64::from(capacity.half_open) * HALF_OPEN;
    let slabs = workers * WORKER_SLABS;
    let rings = u64::from(limits.device_why_records.saturating_add(limits.event_records)) * RECORD;
    lines.push(format!(
        "besides: {} for FPDUs that have not arrived in full, {} for bytes that TCP has not taken, {} if every connection holds a message \
         for want of a receive or of a mover, {} for connections in start-up, {} for slabs of workers, {} for records",
        human(limits.partial_bytes),
        human(limits.unsent_bytes),
        human(u64::from(capacity.qps) * HELD),
        human(half_open),
        human(slabs),
        human(rings)
    ));
    let socket = u64::from(limits.socket_send_bytes) + u64::from(limits.socket_receive_bytes);
    lines.push(format!(
        "in the kernel, for sockets whose peers or programs do not read: {} each, {} for one user and {} \
         for the device, of what net.ipv4.tcp_mem allows",
        human(socket),
        human(u64::from(user.totals.qps.min(capacity.qps)) * socket),
        human(u64::from(capacity.qps) * socket)
    ));
    let default_qp = QueueShape::send(16, 4, 64).bytes() + QueueShape::receive(16, 4).bytes();
    lines.push(format!(
        "a QP of depth 16/16 takes {default_qp} bytes of queues, a session at least {}",
        human((PAGE * (1 + capacity.workers as usize)) as u64)
    ));
    lines.push(format!("descriptors: {}", capacity.reason()));
    lines
}

fn human(bytes: u64) -> String {
    let (unit, factor) = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)]
        .into_iter()
        .find(|(_, factor)| bytes >= *factor)
        .unwrap_or(("B", 1));
    match factor {
        1 => format!("{bytes} B"),
        _ => format!("{:.1} {unit}", bytes as f64 / factor as f64),
    }
}

/// Bytes of one entry in a worker's STag table.
const STAG_ENTRY: u64 = 112;
/// Bytes kept of a connection that waits: one FPDU of the largest size.
const HELD: u64 = 64 << 10;
/// Bytes of a shared receive queue in the daemon, its ring apart: the last takings.
const SRQ: u64 = 17 << 10;
/// Bytes of a window in a worker's tables, bound, with its share of what all workers have.
const WINDOW: u64 = 320;
/// Bytes of an idle connected QP in the daemon, queues apart.
const IDLE_QP: u64 = 8 << 10;
/// Bytes of a connection in start-up: its frame and bookkeeping.
const HALF_OPEN: u64 = 2 << 10;
/// Bytes of an unread event, private data included.
const EVENT: u64 = 1 << 10;
/// Bytes of a why record or a record of a happening, with its places in the indexes.
const RECORD: u64 = 1280;
/// Bytes of a worker's receive slab, transmit slab and pool.
const WORKER_SLABS: u64 = 4 << 20;
