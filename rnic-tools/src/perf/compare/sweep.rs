//! What of ours is compared with which measurement of others, and what should come of it.

use super::foreign::{Foreign, Test, Transport};
use crate::perf::daemon::Setup;
use crate::perf::report::{Goal, Measure};
use crate::perf::spec::{Flow, Op, Spec, Wait};

/// One operation of ours over one path, by size of message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// Direct path, or TCP between two daemons with or without checksums.
    pub path: Path,
    /// Latency, bandwidth or rate.
    pub kind: Measure,
    /// What of ours.
    pub op: Op,
}

/// The path of our connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// From memory to memory, inside one daemon.
    Direct,
    /// TCP between two daemons, with checksums.
    Tcp,
    /// The same without: others have none.
    TcpWithoutCrc,
}

impl Path {
    /// The daemons, and how many.
    pub fn setup(self) -> (Setup, u32) {
        match self {
            Path::Direct => (Setup::DIRECT, 1),
            Path::Tcp => (Setup::TCP, 2),
            Path::TcpWithoutCrc => (Setup { crc: false, ..Setup::TCP }, 2),
        }
    }

    /// Its name in tables.
    pub fn words(self) -> &'static str {
        match self {
            Path::Direct => "direct path",
            Path::Tcp => "TCP path",
            Path::TcpWithoutCrc => "TCP path, CRC off",
        }
    }

    /// Over what others do the same.
    fn transport(self) -> Transport {
        match self {
            Path::Direct => Transport::Shared,
            Path::Tcp | Path::TcpWithoutCrc => Transport::Tcp,
        }
    }
}

/// Everything that is compared, those with the same daemons one after the other.
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
    /// Its name, which `--only` looks in.
    pub fn title(self) -> String {
        let what = match self.kind {
            Measure::Lat => "half round trip, polled",
            Measure::Rate => "rate in batches of 32",
            _ => "bandwidth out of one buffer",
        };
        format!("{}: {}, {what}", self.path.words(), self.op)
    }

    /// What is measured of ours. As the others do, out of one buffer of one message.
    pub fn spec(self, size: u32) -> Spec {
        match self.kind {
            Measure::Lat => Spec { wait: Wait::Polled, ..Spec::new(self.op, Flow::PingPong, size) },
            _ if size <= SMALL => Spec::new(self.op, Flow::Stream, size).stream(256, 32, 0),
            _ => Spec::new(self.op, Flow::Stream, size).stream(16, 4, 0),
        }
    }

    /// Whether it is measured at this size: a rate of large messages says nothing.
    pub fn has(self, size: u32) -> bool {
        self.kind != Measure::Rate || size == 8
    }

    /// What it is compared with.
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

    /// What the ratio of ours to a measurement of others should be.
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

/// Sizes that are compared if none are named.
pub const SIZES: [u32; 10] =
    [8, 32, 128, 512, 2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, BULK];
/// The size of the goals about bandwidth.
const BULK: u32 = 1 << 20;
/// Messages up to here are streamed in batches of 32, larger ones of 4.
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
    fn each_path_is_compared_with_the_same_of_others() {
        for sweep in ALL {
            let shared = sweep.foreign().iter().all(|f| f.transport == Transport::Shared);
            assert_eq!(shared, sweep.path == Path::Direct, "{}", sweep.title());
        }
        let titles: std::collections::BTreeSet<_> = ALL.iter().map(|s| s.title()).collect();
        assert_eq!(titles.len(), ALL.len());
    }
}
