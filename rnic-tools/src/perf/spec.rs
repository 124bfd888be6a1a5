//! What is measured, in the terms that both processes understand.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::PerfError;
use super::table::bytes;

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
    /// Whether the peer's RNIC answers, and its program has nothing to do.
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

/// How messages follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Flow {
    /// As many as may be outstanding, one way.
    Stream,
    /// One at a time, there and back; a Read or an atomic operation alone is there and back.
    PingPong,
}

/// How a process waits for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wait {
    /// Looks and yields, never sleeps.
    Polled,
    /// Arms the CQ and sleeps on its channel.
    Event,
    /// `Cq::wait`: looks for some 50 us, then sleeps.
    Adaptive,
}

/// One measurement: what is transferred, how and over how many QPs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// RDMA operation that is measured.
    pub op: Op,
    /// Stream or ping-pong.
    pub flow: Flow,
    /// Payload bytes per message.
    pub size: u32,
    /// Places of `size` bytes at each end that the messages go through in turn, at both the RDMA
    /// and the TCP ends and for memcpy: together the working set.
    pub slots: u32,
    /// Send requests outstanding per QP.
    pub depth: u32,
    /// Requests per post; the last one of each is signaled.
    pub batch: u32,
    /// QPs that are connected.
    pub qps: u32,
    /// QPs of these that have traffic.
    pub active: u32,
    /// How both ends wait.
    pub wait: Wait,
    /// Whether the QPs are wired by hand instead of being connected.
    pub wired: bool,
    /// Memory regions of one byte that the peer has besides.
    pub regions: u32,
}

impl Spec {
    /// One QP and no more requests outstanding than there are places.
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
            wired: false,
            regions: 0,
        }
    }

    /// Depth, batch and the working set of a stream.
    #[must_use]
    pub fn stream(mut self, depth: u32, batch: u32, working_set: u64) -> Self {
        let slots = working_set / u64::from(self.size.max(1));
        (self.depth, self.batch) = (depth, batch);
        self.slots = u32::try_from(slots).unwrap_or(u32::MAX).max(1);
        self
    }

    /// Bytes that the messages go through at each end.
    pub fn working_set(&self) -> u64 {
        u64::from(self.size) * u64::from(self.slots)
    }

    /// Whether small messages travel in the request itself.
    pub fn inline(&self) -> bool {
        !self.op.is_answered() && self.size <= INLINE
    }

    /// Entries of a send queue. The note at the end of a round holds one until the peer has
    /// acknowledged it, which may be in the next round.
    pub fn sq_depth(&self) -> u32 {
        (self.depth + 1).max(SMALL_RECEIVES)
    }

    /// Receives posted per QP, at the end that gets the messages.
    pub fn receives(&self) -> u32 {
        match (self.op, self.flow) {
            (Op::Send, Flow::Stream) => (2 * self.depth).max(SMALL_RECEIVES),
            _ => SMALL_RECEIVES,
        }
    }

    /// Refuses what cannot be measured, in words that name the options.
    pub fn check(&self) -> Result<(), PerfError> {
        let refuse = |why: String| Err(PerfError::Arguments(why));
        if self.size == 0 || self.size > MAX_SIZE {
            return refuse(format!("--size must be from 1 to {}", bytes(MAX_SIZE.into())));
        }
        if self.op == Op::FetchAdd && self.size != 8 {
            return refuse("--op fetch-add is of words: it needs --size 8".into());
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
                    "lat --op write needs a --size that is a multiple of 8: the peer looks at the \
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

    /// Entries for all requests that can be outstanding at one end.
    pub fn cq_entries(&self) -> u64 {
        u64::from(self.active) * (u64::from(self.sq_depth()) + u64::from(self.receives()))
    }

    /// The positions of the QPs with traffic, spread evenly over all. A daemon deals its QPs out to
    /// its workers in turn: the distance between two is odd where it can be, so that those with
    /// traffic are not all the same worker's.
    pub fn active_positions(&self) -> impl Iterator<Item = usize> + use<> {
        let (qps, active) = (u64::from(self.qps), u64::from(self.active));
        let distance = qps / active;
        (0..active).map(move |i| (i * qps / active + i % distance) as usize)
    }
}

/// Bytes of inline data per request.
pub const INLINE: u32 = 64;
/// Receives for acknowledgements, credits and balls.
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
    fn what_cannot_be_measured_is_refused_by_the_name_of_its_option() {
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
        let ball = Spec::new(Op::Write, Flow::PingPong, 12);
        assert!(refusal(&ball).contains("multiple of 8"));
        let ball = Spec { size: 16, wait: Wait::Event, ..ball };
        assert!(refusal(&ball).contains("--event"));
        assert_eq!(refusal(&Spec { wait: Wait::Polled, ..ball }), "accepted");
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
