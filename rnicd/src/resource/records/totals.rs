//! Counters of destroyed objects, so that no total ever decreases.

use std::collections::BTreeMap;

use rnic_abi::abi::control::QpCounters;
use rnic_abi::types::TerminateOrigin;
use rnic_core::device::QpShared;

/// Maximum number of users with their own counters. All others are counted together.
pub const USERS: usize = 1024;

/// Counters of one user or of all others, since the start.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Sums of QP counters.
    pub counters: QpCounters,
    pub terminates_sent: u64,
    pub terminates_received: u64,
    refusals: u64,
}

impl Counters {
    pub fn add_qp(&mut self, qp: &QpShared) {
        self.add_counters(&qp.counters());
        match qp.terminate() {
            Some((TerminateOrigin::Local, _)) => self.terminates_sent += 1,
            Some((TerminateOrigin::Peer, _)) => self.terminates_received += 1,
            None => {}
        }
    }

    fn add(&mut self, other: &Counters) {
        self.add_counters(&other.counters);
        self.terminates_sent += other.terminates_sent;
        self.terminates_received += other.terminates_received;
        self.refusals += other.refusals;
    }

    fn add_counters(&mut self, c: &QpCounters) {
        let sum = &mut self.counters;
        sum.sends_completed += c.sends_completed;
        sum.receives_completed += c.receives_completed;
        sum.bytes_sent += c.bytes_sent;
        sum.bytes_received += c.bytes_received;
        sum.segments_sent += c.segments_sent;
        sum.segments_received += c.segments_received;
        sum.reads_answered += c.reads_answered;
        sum.errors += c.errors;
        sum.dropped += c.dropped;
    }
}

/// Name, help text and value of a metric.
type Metric = (&'static str, &'static str, fn(&Counters) -> u64);

/// The metrics of [`Counters`].
pub const METRICS: [Metric; 12] = [
    ("send_completions_total", "Send queue requests completed.", |c| c.counters.sends_completed),
    ("receive_completions_total", "Receives completed.", |c| c.counters.receives_completed),
    ("completion_errors_total", "Requests that completed with an error, flushes included.", |c| {
        c.counters.errors
    }),
    ("sent_bytes_total", "Payload bytes sent.", |c| c.counters.bytes_sent),
    ("placed_bytes_total", "Payload bytes placed.", |c| c.counters.bytes_received),
    ("sent_segments_total", "DDP segments sent.", |c| c.counters.segments_sent),
    ("received_segments_total", "DDP segments received.", |c| c.counters.segments_received),
    ("reads_answered_total", "RDMA Reads and atomic operations answered.", |c| {
        c.counters.reads_answered
    }),
    ("dropped_datagrams_total", "Datagrams received and dropped.", |c| c.counters.dropped),
    ("terminates_sent_total", "Connections ended by sending a Terminate.", |c| c.terminates_sent),
    ("terminates_received_total", "Connections ended by receiving a Terminate.", |c| {
        c.terminates_received
    }),
    ("refusals_total", "Requests refused.", |c| c.refusals),
];

/// Counters of destroyed objects.
#[derive(Debug, Default)]
pub struct Totals {
    pub users: BTreeMap<u32, Counters>,
    pub others: Counters,
    /// By name of the device. The empty name is for QPs of removed devices.
    pub devices: BTreeMap<String, Counters>,
}

impl Totals {
    fn of(&mut self, uid: u32) -> &mut Counters {
        if self.users.len() >= USERS && !self.users.contains_key(&uid) {
            return &mut self.others;
        }
        self.users.entry(uid).or_default()
    }

    /// Adds the counters of a QP of this user and device.
    pub fn add_qp(&mut self, uid: u32, device: &str, qp: &QpShared) {
        self.devices.entry(device.to_owned()).or_default().add_qp(qp);
        self.of(uid).add_qp(qp);
    }

    /// Forgets the names of devices that do not exist. A later device of such a name starts at 0.
    pub fn retain_devices(&mut self, exists: impl Fn(&str) -> bool) {
        let mut gone = Counters::default();
        for (_, counters) in self.devices.extract_if(.., |name, _| !exists(name)) {
            gone.add(&counters);
        }
        self.devices.insert(String::new(), gone);
    }

    /// Counts a refused request of this user.
    pub fn add_refusal(&mut self, uid: u32) {
        self.of(uid).refusals += 1;
    }
}
