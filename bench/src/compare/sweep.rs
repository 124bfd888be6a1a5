//! The comparisons: our operations, the foreign measurements to compare with, and the goals.

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

/// One of our operations over one path, compared with other projects; one row for each size.
pub struct Compared {
    /// Operation, path and kind of measurement.
    pub sweep: Sweep,
    /// Rows by size, and failed measurements without results.
    pub rows: Vec<Row>,
}

/// The path of our connections.
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

    /// Returns the corresponding transport of foreign programs.
    fn transport(self) -> Transport {
        match self {
            Path::Direct => Transport::Shared,
            Path::Tcp | Path::TcpWithoutCrc => Transport::Tcp,
        }
    }
}

/// All comparisons. Those with the same daemons are adjacent.
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
            _ => "bandwidth out of one buffer",
        };
        format!("{}: {}, {what}", self.path.words(), self.op)
    }

    /// Returns our parameters. As in the other programs, all messages use one buffer.
    pub fn spec(self, size: u32) -> Spec {
        match self.kind {
            Measure::Lat => Spec { wait: Wait::Polled, ..Spec::new(self.op, Flow::PingPong, size) },
            _ if size <= SMALL => Spec::new(self.op, Flow::Stream, size).stream(256, 32, 0),
            _ => Spec::new(self.op, Flow::Stream, size).stream(16, 4, 0),
        }
    }

    /// Returns true if this size is measured. Rates are measured for 8-byte messages only.
    pub fn has(self, size: u32) -> bool {
        self.kind != Measure::Rate || size == 8
    }

    /// Returns the foreign measurements to compare with.
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

    /// Returns the goal for the ratio of our result to a foreign one.
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
    fn goals_are_about_small_messages_and_a_mebibyte() {
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
    fn each_path_has_its_foreign_transport() {
        for sweep in ALL {
            let shared = sweep.foreign().iter().all(|f| f.transport == Transport::Shared);
            assert_eq!(shared, sweep.path == Path::Direct, "{}", sweep.title());
        }
        let titles: std::collections::BTreeSet<_> = ALL.iter().map(|s| s.title()).collect();
        assert_eq!(titles.len(), ALL.len());
    }
}
