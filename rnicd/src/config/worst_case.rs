//! Maximum memory and descriptors, with every limit reached at once.

use rnic_abi::abi::queue::{PAGE, QueueShape};

use super::in_force::InForce;
use super::kind::{Cost, Kind};
use super::{Config, Values};

/// Returns lines about the memory of a session, of a user and of the whole daemon.
pub(super) fn worst_case(config: &Config, in_force: &InForce) -> Vec<String> {
    let limits = &config.limits;
    let device = &limits.device;
    let workers = u64::from(in_force.workers);
    let per_session = device.of(Kind::Events) * EVENT + limits.session.of(Kind::Diagnoses) * RECORD;
    let own = |limits: &Values, sessions: u64| {
        let costs = limits.each().map(|(kind, value)| match kind.row().cost {
            Cost::Little => 0,
            Cost::Each(bytes) => value * bytes,
            Cost::EachPerWorker(bytes) => workers * value * bytes,
        });
        costs.sum::<u64>() + sessions * per_session
    };
    let mut effective = device.clone();
    effective.put(Kind::Qps, in_force.qps.into());
    let mut lines: Vec<String> = [
        ("one session", &limits.session, 1),
        ("one user", &limits.user, limits.user.of(Kind::Sessions)),
        ("the device", &effective, device.of(Kind::Sessions)),
    ]
    .into_iter()
    .map(|(whose, totals, sessions)| {
        format!(
            "{whose}: {} of queues and {} of bookkeeping in the daemon, {} of memory shared by \
             clients and charged to them",
            human(totals.of(Kind::ArenaBytes)),
            human(own(totals, sessions)),
            human(totals.of(Kind::SharedBytes)),
        )
    })
    .collect();
    let startups = u64::from(in_force.startups) * HALF_OPEN;
    let slabs = workers * WORKER_SLABS;
    let rings = (device.of(Kind::Diagnoses) + device.of(Kind::EventRecords)) * RECORD;
    lines.push(format!(
        "also: {} for incomplete FPDUs, {} for unsent FPDUs, {} if every connection holds a \
         message that waits for a receive or for a copy by its client's library, {} for \
         connections in start-up, {} for buffers of workers, {} for records",
        human(device.of(Kind::PartialBytes)),
        human(device.of(Kind::UnsentBytes)),
        human(u64::from(in_force.qps) * HELD),
        human(startups),
        human(slabs),
        human(rings)
    ));
    let socket = device.of(Kind::SocketSendBytes) + device.of(Kind::SocketReceiveBytes);
    lines.push(format!(
        "in the kernel, for sockets whose peers or programs do not read: {} each, {} for one user \
         and {} for the device, limited by net.ipv4.tcp_mem",
        human(socket),
        human(limits.user.of(Kind::Qps).min(in_force.qps.into()) * socket),
        human(u64::from(in_force.qps) * socket)
    ));
    let default_qp = QueueShape::send(16, 4, 64).bytes() + QueueShape::receive(16, 4).bytes();
    lines.push(format!(
        "a QP of depth 16/16 takes {default_qp} bytes of queues, a session at least {}",
        human((PAGE * (1 + in_force.workers as usize)) as u64)
    ));
    lines.push(format!("descriptors: {}", in_force.reason));
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

/// Bytes kept for a connection with a waiting message: one FPDU of maximum size.
const HELD: u64 = 64 << 10;
/// Bytes of a connection in start-up: its frame and state.
const HALF_OPEN: u64 = 2 << 10;
/// Bytes of an unread event, with private data.
const EVENT: u64 = 1 << 10;
/// Bytes of a diagnosis or event record, with its index entries.
const RECORD: u64 = 1280;
/// Bytes of a worker's receive slab, transmit slab and pool.
const WORKER_SLABS: u64 = 4 << 20;
