//! Counters of destroyed objects, so that no total ever decreases.

use std::collections::BTreeMap;

use rnic_abi::abi::control::QpCounters;
use rnic_abi::types::{QpType, TerminateOrigin};
use rnic_core::device::QpShared;

/// Maximum number of users with their own counters. All others are counted together.
pub const USERS: usize = 1024;

/// Counters of one user or of all others, since the start.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    counters: QpCounters,
    terminates_sent: u64,
    terminates_received: u64,
    refusals: u64,
}

impl Counters {
    pub fn add_qp(&mut self, qp: &QpShared) {
        let sum = &mut self.counters;
        let c = qp.counters();
        sum.sends_completed += c.sends_completed;
        sum.receives_completed += c.receives_completed;
        sum.bytes_sent += c.bytes_sent;
        sum.bytes_received += c.bytes_received;
        sum.segments_sent += c.segments_sent;
        sum.segments_received += c.segments_received;
        sum.reads_answered += c.reads_answered;
        sum.errors += c.errors;
        sum.dropped += c.dropped;
        match qp.terminate() {
            Some((TerminateOrigin::Local, _)) => self.terminates_sent += 1,
            Some((TerminateOrigin::Peer, _)) => self.terminates_received += 1,
            None => {}
        }
    }

    /// Returns the sums of QP counters.
    pub fn counters(&self) -> QpCounters {
        self.counters
    }

    pub fn values(&self) -> [u64; METRICS.len()] {
        let c = &self.counters;
        [
            c.sends_completed,
            c.receives_completed,
            c.errors,
            c.bytes_sent,
            c.bytes_received,
            c.segments_sent,
            c.segments_received,
            c.reads_answered,
            c.dropped,
            self.terminates_sent,
            self.terminates_received,
            self.refusals,
        ]
    }
}

/// Names and help texts of [`Counters::values`], in the same order.
pub const METRICS: [(&str, &str); 12] = [
    ("send_completions_total", "Send queue requests completed."),
    ("receive_completions_total", "Receives completed."),
    ("completion_errors_total", "Requests that completed with an error, flushes included."),
    ("sent_bytes_total", "Payload bytes sent."),
    ("placed_bytes_total", "Payload bytes placed."),
    ("sent_segments_total", "DDP segments sent."),
    ("received_segments_total", "DDP segments received."),
    ("reads_answered_total", "RDMA Reads and atomic operations answered."),
    ("dropped_datagrams_total", "Datagrams received and dropped."),
    ("terminates_sent_total", "Connections ended by a Terminate of this side."),
    ("terminates_received_total", "Connections ended by a Terminate of the peer."),
    ("refusals_total", "Requests refused."),
];

/// Counters of destroyed objects.
#[derive(Debug, Default)]
pub struct Totals {
    pub users: BTreeMap<u32, Counters>,
    pub others: Counters,
    /// By device: the iWARP device and the RoCE device.
    pub devices: [Counters; 2],
}

impl Totals {
    fn of(&mut self, uid: u32) -> &mut Counters {
        if self.users.len() >= USERS && !self.users.contains_key(&uid) {
            return &mut self.others;
        }
        self.users.entry(uid).or_default()
    }

    /// Adds the counters of a QP of this user.
    pub fn add_qp(&mut self, uid: u32, kind: QpType, qp: &QpShared) {
        self.devices[usize::from(kind != QpType::Iwarp)].add_qp(qp);
        self.of(uid).add_qp(qp);
    }

    /// Counts a refused request of this user.
    pub fn add_refusal(&mut self, uid: u32) {
        self.of(uid).refusals += 1;
    }
}

/// Terminates of destroyed QPs.
#[derive(Debug, Default)]
pub struct Terminates {
    pub sent: u64,
    pub received: u64,
}

impl Terminates {
    /// Counts the Terminate of a QP, if any.
    pub fn count(&mut self, qp: &QpShared) {
        match qp.terminate() {
            Some((TerminateOrigin::Local, _)) => self.sent += 1,
            Some((TerminateOrigin::Peer, _)) => self.received += 1,
            None => {}
        }
    }
}
