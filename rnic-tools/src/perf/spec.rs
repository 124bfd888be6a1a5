//! Parameters of a measurement, shared by both processes.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::PerfError;
use crate::text::bytes;

/// The operation that carries the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Send into the peer's receives.
    Send,
    /// RDMA Write into the peer's memory.
    Write,
    /// RDMA Read from the peer's memory.
    Read,
    /// Atomic FetchAdd on words of the peer's memory.
    #[value(name = "fetch-add")]
    FetchAdd,
}

impl Op {
    /// Returns true if the peer's RNIC responds without the peer's program.
    pub fn is_answered(self) -> bool {
        matches!(self, Op::Read | Op::FetchAdd)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Send => "Send",
            Op::Write => "RDMA Write",
            Op::Read => "RDMA Read",
            Op::FetchAdd => "Atomic FetchAdd",
        })
    }
}

/// Order of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Flow {
    /// Messages in one direction, several of them outstanding.
    Stream,
    /// One message at a time, back and forth. A Read or an atomic is a round trip by itself.
    PingPong,
}

/// How a process waits for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wait {
    /// Polls and yields, never sleeps.
    Polled,
    /// Arms the CQ and sleeps on its channel.
    Event,
    /// `Cq::wait`: polls for about 50 us, then sleeps.
    Adaptive,
}

/// Kind of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Measure {
    /// Payload bytes per second, in GB/s.
    Bw,
    /// Time per message of a ping-pong, in microseconds.
    Lat,
    /// Messages per second, in millions.
    Rate,
}

/// Parameters of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Measured operation.
    pub op: Op,
    /// Stream or ping-pong.
    pub flow: Flow,
    /// Payload bytes per message.
    pub size: u32,
    /// Number of buffers of `size` bytes at each end, which the messages use in rotation (RDMA, TCP
    /// and memcpy). Together they are the working set.
    pub slots: u32,
    /// Outstanding send requests per QP.
    pub depth: u32,
    /// Requests per post; the last is signaled.
    pub batch: u32,
    /// Connected QPs.
    pub qps: u32,
    /// Connected QPs with traffic.
    pub active: u32,
    /// How both ends wait.
    pub wait: Wait,
    /// Uses RC QPs of the RoCE device instead of iWARP QPs.
    pub rc: bool,
    /// Additional memory regions of the peer, one byte each.
    pub regions: u32,
}

impl Spec {
    /// Creates parameters with one QP and one outstanding request.
    pub fn new(op: Op, flow: Flow, size: u32) -> Self {
        Spec {
            op,
            flow,
            size,
            slots: 1,
            depth: 1,
            batch: 1,
            qps: 1,
            active: 1,
            wait: Wait::Adaptive,
            rc: false,
            regions: 0,
        }
    }

    /// Sets depth, batch and working set of a stream.
    #[must_use]
    pub fn stream(mut self, depth: u32, batch: u32, working_set: u64) -> Self {
        let slots = working_set / u64::from(self.size.max(1));
        self.depth = depth;
        self.batch = batch;
        self.slots = u32::try_from(slots).unwrap_or(u32::MAX).max(1);
        self
    }

    /// Returns the bytes used by the messages at each end.
    pub fn working_set(&self) -> u64 {
        u64::from(self.size) * u64::from(self.slots)
    }

    /// Returns true if the messages are sent inline.
    pub fn inline(&self) -> bool {
        !self.op.is_answered() && self.size <= INLINE
    }

    /// Returns the depth of a send queue. The note at the end of a round takes an entry until the
    /// peer has acknowledged it, which may be in the next round.
    pub fn sq_depth(&self) -> u32 {
        (self.depth + 1).max(SMALL_RECEIVES)
    }

    /// Returns the number of receives posted per QP at the end that receives the messages.
    pub fn receives(&self) -> u32 {
        match (self.op, self.flow) {
            (Op::Send, Flow::Stream) => (2 * self.depth).max(SMALL_RECEIVES),
            _ => SMALL_RECEIVES,
        }
    }

    /// Checks the parameters. Errors contain the command-line option.
    pub fn check(&self) -> Result<(), PerfError> {
        let refuse = |why: String| Err(PerfError::Arguments(why));
        if self.size == 0 || self.size > MAX_SIZE {
            return refuse(format!("--size must be from 1 to {}", bytes(MAX_SIZE.into())));
        }
        if self.op == Op::FetchAdd && self.size != 8 {
            return refuse("--op fetch-add is for 8-byte words: it needs --size 8".into());
        }
        if self.working_set() > MAX_WORKING_SET {
            return refuse(format!("--working-set must be up to {}", bytes(MAX_WORKING_SET)));
        }
        if self.slots > MAX_SLOTS {
            return refuse(format!(
                "--working-set {} is more than {MAX_SLOTS} messages of {}",
                bytes(self.working_set()),
                bytes(self.size.into())
            ));
        }
        if self.depth == 0 || self.depth > MAX_DEPTH {
            return refuse(format!("--depth must be from 1 to {MAX_DEPTH}"));
        }
        if self.batch == 0 || self.batch > self.depth {
            return refuse(format!("--batch must be from 1 to --depth, {}", self.depth));
        }
        if self.active == 0 || self.active > self.qps {
            return refuse(format!("--active must be from 1 to --qps, {}", self.qps));
        }
        if self.cq_entries() > MAX_CQ_ENTRIES {
            return refuse(format!(
                "{} active QPs of depth {} need {} completion queue entries, more than \
                 {MAX_CQ_ENTRIES}: lower --active or --depth",
                self.active,
                self.depth,
                self.cq_entries()
            ));
        }
        if self.qps > 1 && self.op == Op::Send {
            return refuse("--op send is measured on one QP; use write or read with --qps".into());
        }
        if self.flow == Flow::PingPong && self.op == Op::Write {
            if !self.size.is_multiple_of(8) {
                return refuse(
                    "lat --op write needs a --size that is a multiple of 8: the peer polls the \
                     last 8 bytes"
                        .into(),
                );
            }
            if self.wait == Wait::Event {
                return refuse(
                    "lat --op write has no --event: the peer of a Write gets no completion".into(),
                );
            }
        }
        Ok(())
    }

    /// Returns the factor from a round trip to the reported latency: 0.5 for a ping-pong, 1 for an
    /// operation that the peer's RNIC answers.
    pub fn one_way(&self) -> f64 {
        if self.op.is_answered() { 1.0 } else { 0.5 }
    }

    /// Describes the operation.
    pub fn title(&self, kind: Measure) -> String {
        let rc = if self.rc { ", RC" } else { "" };
        let message = format!("{} {}{rc}", self.op, bytes(u64::from(self.size)));
        let waits = match self.wait {
            Wait::Polled => ", polled",
            Wait::Event => ", event-driven",
            Wait::Adaptive => "",
        };
        match kind {
            Measure::Lat if self.op.is_answered() => format!("{message}, round trip{waits}"),
            Measure::Lat => format!("{message}, half round trip{waits}"),
            Measure::Bw => message + waits,
            Measure::Rate => format!("{message} in batches of {}", self.batch),
        }
    }

    /// Describes depth, working set and QPs, as a suffix of the title.
    pub fn manner(&self, kind: Measure) -> String {
        let Spec { depth, qps, active, .. } = self;
        let many = match qps {
            1 => String::new(),
            _ => format!(", {qps} QPs of which {active} active"),
        };
        match kind {
            Measure::Lat => String::new(),
            Measure::Rate => format!(", depth {depth}{many}"),
            Measure::Bw => {
                format!(", depth {depth}, working set {}{many}", bytes(self.working_set()))
            }
        }
    }

    /// Returns the CQ entries for all requests that can be outstanding at one end.
    pub fn cq_entries(&self) -> u64 {
        u64::from(self.active) * (u64::from(self.sq_depth()) + u64::from(self.receives()))
    }

    /// Returns the indices of the QPs with traffic, spread evenly over all. A daemon assigns its
    /// QPs to its workers round robin, so an even distance between two indices would give all
    /// traffic to one of two workers. The offset makes most distances odd.
    pub fn active_positions(&self) -> impl Iterator<Item = usize> + use<> {
        let qps = u64::from(self.qps);
        let active = u64::from(self.active);
        let distance = qps / active;
        (0..active).map(move |i| (i * qps / active + i % distance) as usize)
    }
}

/// Maximum inline bytes per request.
pub const INLINE: u32 = 64;
/// Receives for acknowledgements, credits and ping-pong messages.
pub const SMALL_RECEIVES: u32 = 16;
const MAX_SIZE: u32 = 1 << 30;
const MAX_WORKING_SET: u64 = 4 << 30;
const MAX_SLOTS: u32 = 1 << 16;
const MAX_DEPTH: u32 = 1 << 13;
const MAX_CQ_ENTRIES: u64 = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(spec: &Spec) -> String {
        spec.check().map_or_else(|e| e.to_string(), |()| "accepted".to_owned())
    }

    #[test]
    fn invalid_parameters_name_their_option() {
        let good = Spec::new(Op::Write, Flow::Stream, 8).stream(16, 4, 8 * 16);
        assert_eq!((good.slots, refusal(&good).as_str()), (16, "accepted"));
        let cases: [(Spec, &str); 8] = [
            (Spec { size: 0, ..good.clone() }, "--size"),
            (Spec { depth: 0, ..good.clone() }, "--depth"),
            (Spec { batch: 17, ..good.clone() }, "--batch"),
            (Spec { slots: 1 << 20, ..good.clone() }, "--working-set"),
            (Spec { active: 2, ..good.clone() }, "--active"),
            (Spec { qps: 9000, active: 9000, ..good.clone() }, "--active"),
            (Spec { op: Op::Send, qps: 2, ..good.clone() }, "--op send"),
            (Spec { size: 1 << 20, slots: 1 << 13, ..good.clone() }, "--working-set"),
        ];
        for (spec, option) in cases {
            assert!(refusal(&spec).contains(option), "{option}: {}", refusal(&spec));
        }
    }

    #[test]
    fn a_write_ping_pong_needs_a_word_to_look_at() {
        let ping_pong = Spec::new(Op::Write, Flow::PingPong, 12);
        assert!(refusal(&ping_pong).contains("multiple of 8"));
        let ping_pong = Spec { size: 16, wait: Wait::Event, ..ping_pong };
        assert!(refusal(&ping_pong).contains("--event"));
        assert_eq!(refusal(&Spec { wait: Wait::Polled, ..ping_pong }), "accepted");
    }

    #[test]
    fn active_qps_are_spread_over_all() {
        let spec = Spec { qps: 10_000, active: 10, ..Spec::new(Op::Write, Flow::Stream, 8) };
        let positions: Vec<_> = spec.active_positions().collect();
        assert_eq!(positions.len(), 10);
        assert_eq!((positions[0], positions[1], positions[9]), (0, 1001, 9009));
        let one: Vec<_> = Spec::new(Op::Write, Flow::Stream, 8).active_positions().collect();
        assert_eq!(one, [0]);
        for qps in [10, 11, 20, 99, 100, 1000, 10_000] {
            let positions: Vec<_> = Spec { qps, ..spec.clone() }.active_positions().collect();
            assert!(positions.is_sorted_by(|a, b| a < b), "{positions:?}");
            assert!(positions[9] < qps as usize, "{positions:?}");
            let even = positions.iter().filter(|at| *at % 2 == 0).count();
            assert!((4..=6).contains(&even), "{positions:?}");
        }
    }
}
