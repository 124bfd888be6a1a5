//! The comparisons: our operations, the corresponding benchmarks of other projects, and the goals.

use rnic_tools::perf::spec::{Flow, Measure, Op, Spec, Wait};

use super::foreign::{Foreign, Test, Transport};
use crate::daemon::Setup;
use crate::report::{Goal, Row};

/// One of our operations over one path, measured by message size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// Direct path, or TCP between two daemons with or without checksums.
    pub path: Path,
    /// Latency, bandwidth or rate.
    pub kind: Measure,
    /// Our operation.
    pub op: Op,
}

/// A sweep compared with other projects' benchmarks.
pub struct Compared {
    /// Operation, path and kind of measurement.
    pub sweep: Sweep,
    /// A row for each size. The row of a failed measurement has no results.
    pub rows: Vec<Row>,
}

/// Data path between the two QPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Direct path inside one daemon.
    Direct,
    /// TCP between two daemons, with checksums.
    Tcp,
    /// TCP between two daemons without checksums, as in the other projects.
    TcpWithoutCrc,
}

impl Path {
    /// Returns the daemons and their setup.
    pub fn setup(self) -> Setup {
        match self {
            Path::Direct => Setup::DIRECT,
            Path::Tcp => Setup::TCP,
            Path::TcpWithoutCrc => Setup { crc: false, ..Setup::TCP },
        }
    }

    /// Returns the name used in tables.
    pub fn words(self) -> &'static str {
        match self {
            Path::Direct => "direct path",
            Path::Tcp => "TCP path",
            Path::TcpWithoutCrc => "TCP path, CRC off",
        }
    }

    /// Returns the corresponding transport of the other projects' programs.
    fn transport(self) -> Transport {
        match self {
            Path::Direct => Transport::Shared,
            Path::Tcp | Path::TcpWithoutCrc => Transport::Tcp,
        }
    }
}

/// All sweeps. Sweeps of the same path are adjacent, so that they share daemons.
pub const ALL: [Sweep; 9] = [
    Sweep { path: Path::Direct, kind: Measure::Lat, op: Op::Send },
    Sweep { path: Path::Direct, kind: Measure::Lat, op: Op::Write },
    Sweep { path: Path::Direct, kind: Measure::Bw, op: Op::Write },
    Sweep { path: Path::Direct, kind: Measure::Rate, op: Op::Write },
    Sweep { path: Path::Tcp, kind: Measure::Lat, op: Op::Send },
    Sweep { path: Path::Tcp, kind: Measure::Lat, op: Op::Write },
    Sweep { path: Path::Tcp, kind: Measure::Bw, op: Op::Write },
    Sweep { path: Path::Tcp, kind: Measure::Rate, op: Op::Write },
    Sweep { path: Path::TcpWithoutCrc, kind: Measure::Bw, op: Op::Write },
];

impl Sweep {
    /// Returns the title, which `--only` searches.
    pub fn title(self) -> String {
        let what = match self.kind {
            Measure::Lat => "half round trip, polled",
            Measure::Rate => "rate in batches of 32",
            _ => "bandwidth from one buffer",
        };
        format!("{}: {}, {what}", self.path.words(), self.op)
    }

    /// Returns the parameters of our measurement. As in the other programs, all messages use one
    /// buffer.
    pub fn spec(self, size: u32) -> Spec {
        match self.kind {
            Measure::Lat => Spec { wait: Wait::Polled, ..Spec::new(self.op, Flow::PingPong, size) },
            _ if size <= SMALL => Spec::new(self.op, Flow::Stream, size).stream(256, 32, 0),
            _ => Spec::new(self.op, Flow::Stream, size).stream(16, 4, 0),
        }
    }

    /// Returns true if the sweep includes this size. Rates are measured for 8-byte messages only.
    pub fn has(self, size: u32) -> bool {
        self.kind != Measure::Rate || size == 8
    }

    /// Returns the other projects' measurements to compare with.
    pub fn foreign(self) -> Vec<Foreign> {
        let tests: &[Test] = match (self.kind, self.op) {
            (Measure::Lat, Op::Send) => &[Test::TagLat, Test::PingPong],
            (Measure::Lat, _) => &[Test::PutLat],
            (Measure::Rate, _) => &[Test::PutBw],
            _ => &[Test::TagBw, Test::PutBw],
        };
        let transport = self.path.transport();
        tests.iter().map(|&test| Foreign { transport, test }).collect()
    }

    /// Returns the goal for the ratio of our result to the `foreign` result.
    pub fn goal(self, size: u32, foreign: Foreign) -> Option<Goal> {
        match (self.path, self.kind, foreign.test, size) {
            (Path::Direct, Measure::Rate, Test::PutBw, 8) => Some(Goal::AtLeast(0.35)),
            (Path::Direct, Measure::Bw, Test::TagBw, BULK) => Some(Goal::AtLeast(1.0)),
            (Path::Tcp, Measure::Lat, Test::TagLat, 8) => Some(Goal::AtMost(1.4)),
            (Path::Tcp, Measure::Rate, Test::PutBw, 8) => Some(Goal::AtLeast(8.0)),
            (Path::TcpWithoutCrc, Measure::Bw, Test::TagBw, BULK) => Some(Goal::AtLeast(0.9)),
            _ => None,
        }
    }
}

/// Default sizes.
pub const SIZES: [u32; 10] =
    [8, 32, 128, 512, 2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, BULK];
/// Message size of the bandwidth goals.
const BULK: u32 = 1 << 20;
/// Messages up to this size are streamed in batches of 32, larger ones in batches of 4.
const SMALL: u32 = 4 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sweep_can_be_measured_at_every_size() {
        for sweep in ALL {
            for size in SIZES {
                let spec = sweep.spec(size);
                spec.check().unwrap();
                assert_eq!(spec.slots, 1, "{}", sweep.title());
            }
            assert!(!sweep.foreign().is_empty());
        }
    }

    #[test]
    fn goals_exist_for_8_bytes_and_1_mebibyte() {
        let with_goal = |size| {
            let of = |sweep: &Sweep| {
                let goals = sweep.foreign().into_iter().filter_map(|f| sweep.goal(size, f));
                goals.count()
            };
            ALL.iter().map(of).sum::<usize>()
        };
        assert_eq!((with_goal(8), with_goal(1 << 20), with_goal(512)), (3, 2, 0));
    }

    #[test]
    fn only_the_direct_path_uses_shared_memory() {
        for sweep in ALL {
            let shared = sweep.foreign().iter().all(|f| f.transport == Transport::Shared);
            assert_eq!(shared, sweep.path == Path::Direct, "{}", sweep.title());
        }
        let titles: std::collections::BTreeSet<_> = ALL.iter().map(|s| s.title()).collect();
        assert_eq!(titles.len(), ALL.len());
    }
}
