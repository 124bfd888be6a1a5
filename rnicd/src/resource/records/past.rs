//! What objects that are gone had counted, so that no sum ever goes down.

use std::collections::BTreeMap;

use rnic_core::abi::control::QpCounters;
use rnic_core::device::QpShared;
use rnic_core::types::{QpType, TerminateOrigin};

/// Users that are counted each for themselves; all others are counted together.
pub const USERS: usize = 1024;

/// What a user, or everybody, has done since the start.
#[derive(Clone, Debug, Default)]
pub struct Done {
    counters: QpCounters,
    terminates_sent: u64,
    terminates_received: u64,
    refusals: u64,
}

impl Done {
    pub fn add_qp(&mut self, qp: &QpShared) {
        let (sum, c) = (&mut self.counters, qp.counters());
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

    /// What queue pairs have counted.
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

/// StagKind of [`Done::values`], in that order.
pub const METRICS: [(&str, &str); 12] = [
    ("send_completions_total", "Send queue requests completed."),
    ("receive_completions_total", "Receives completed."),
    ("completion_errors_total", "Requests that completed with an error, flushes included."),
    ("sent_bytes_total", "Payload bytes sent."),
    ("placed_bytes_total", "Payload bytes placed."),
    ("sent_segments_total", "DDP segments sent."),
    ("received_segments_total", "DDP segments received."),
    ("reads_answered_total", "RDMA Reads and atomic operations answered."),
    ("dropped_datagrams_total", "Datagrams that came and were dropped."),
    ("terminates_sent_total", "Connections ended by a Terminate of this side."),
    ("terminates_received_total", "Connections ended by a Terminate of the peer."),
    ("refusals_total", "Requests refused."),
];

/// What users have done with objects that are gone.
#[derive(Debug, Default)]
pub struct Past {
    pub users: BTreeMap<u32, Done>,
    pub others: Done,
    /// The same by device: of queue pairs that connect, and of those that are wired by hand.
    pub devices: [Done; 2],
}

impl Past {
    fn of(&mut self, uid: u32) -> &mut Done {
        if self.users.len() >= USERS && !self.users.contains_key(&uid) {
            return &mut self.others;
        }
        self.users.entry(uid).or_default()
    }

    /// Adds what a QP of this user had counted.
    pub fn add_qp(&mut self, uid: u32, kind: QpType, qp: &QpShared) {
        self.devices[usize::from(kind != QpType::Connected)].add_qp(qp);
        self.of(uid).add_qp(qp);
    }

    /// Counts a refused request of this user.
    pub fn add_refusal(&mut self, uid: u32) {
        self.of(uid).refusals += 1;
    }
}

/// Terminates of QPs that are gone.
#[derive(Debug, Default)]
pub struct Terminates {
    pub sent: u64,
    pub received: u64,
}

impl Terminates {
    /// Counts how a QP ended.
    pub fn count(&mut self, qp: &QpShared) {
        match qp.terminate() {
            Some((TerminateOrigin::Local, _)) => self.sent += 1,
            Some((TerminateOrigin::Peer, _)) => self.received += 1,
            None => {}
        }
    }
}
