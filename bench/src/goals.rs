//! The yardsticks of each measurement, and its design goals.

use rnic_tools::perf::spec::{Measure, Op, Spec, Wait};

use crate::bench::Subject;
use crate::placement::Placement;
use crate::relay::RelayPlacement;
use crate::report::{Goal, Yardstick};

/// Returns the subjects of a measurement, the measured one first.
pub fn subjects(kind: Measure, spec: &Spec) -> Vec<Subject> {
    use Subject::{Crc, Memcpy, Placed, Rc, Rdma, Reads, Relay, Tcp};
    let tcp = |polled, placements: &[Placement]| {
        placements.iter().map(|&placement| Tcp { polled, placement }).collect::<Vec<_>>()
    };
    let all = [Placement::Free, Placement::Together, Placement::Apart];
    let pinned = &all[1..];
    let placed = [Placement::Together, Placement::Apart, Placement::WithWorkers];
    let placed = placed.map(Placed).to_vec();
    match (kind, spec.op, spec.wait) {
        _ if spec.rc => vec![Rc, Rdma],
        (Measure::Bw, ..) => [vec![Rdma], tcp(false, &all), vec![Memcpy, Crc]].concat(),
        (Measure::Lat, _, Wait::Event) => [vec![Rdma], placed, tcp(false, pinned)].concat(),
        (Measure::Lat, ..) => {
            let relays = RelayPlacement::ALL.map(Relay).to_vec();
            [vec![Rdma], placed, tcp(true, pinned), tcp(false, pinned), relays].concat()
        }
        (_, Op::FetchAdd, _) => vec![Rdma, Reads, Subject::TCP],
        _ => [vec![Rdma], tcp(false, &all)].concat(),
    }
}

/// Returns the subjects that two hosts can measure: without a process in the middle, and without
/// CPUs shared by both.
pub fn between_hosts(subjects: &[Subject]) -> Vec<Subject> {
    let mut all = Vec::new();
    for subject in subjects {
        let subject = match *subject {
            Subject::Relay(_) | Subject::Placed(_) => continue,
            Subject::Tcp { polled, .. } => Subject::Tcp { polled, placement: Placement::Free },
            other => other,
        };
        if !all.contains(&subject) {
            all.push(subject);
        }
    }
    all
}

/// Returns the design goals of a measurement with checksums. `compare` has the goals relative to
/// other programs.
pub fn goals(kind: Measure, spec: &Spec, path: &str) -> Vec<(Yardstick, Goal)> {
    use Yardstick::{BestBlocking, BestRelay, BestTcp, Of};
    let direct = path == "direct";
    let bulk = spec.size == 1 << 20;
    let small = spec.size == 8;
    match (kind, spec.op) {
        // On RC QPs, acknowledged completions may cost 1.3 times as much, and 1.1 times in a
        // ping-pong.
        (Measure::Rate, _) if spec.rc && small => {
            vec![(Of(Subject::Rdma), Goal::AtLeast(0.77))]
        }
        (Measure::Lat, _) if spec.rc && small => vec![(Of(Subject::Rdma), Goal::AtMost(1.1))],
        _ if spec.rc => Vec::new(),
        (Measure::Rate, Op::FetchAdd) => vec![(Of(Subject::Reads), Goal::AtLeast(0.6))],
        (Measure::Bw, Op::Write | Op::Read) if direct && bulk => {
            vec![(Of(Subject::Memcpy), Goal::AtLeast(0.95))]
        }
        (Measure::Bw, Op::Write) if bulk => vec![(BestTcp, Goal::AtLeast(0.85))],
        (Measure::Lat, Op::Send) if small && direct => match spec.wait {
            Wait::Event => vec![(BestBlocking, Goal::AtMost(1.2))],
            Wait::Polled | Wait::Adaptive => vec![(BestRelay, Goal::AtMost(1.2))],
        },
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use rnic_tools::perf::spec::Flow;

    use super::*;

    fn tcp(polled: bool, placement: Placement) -> Subject {
        Subject::Tcp { polled, placement }
    }

    #[test]
    fn hosts_share_no_relay_and_no_cpu() {
        let spec = Spec { wait: Wait::Polled, ..Spec::new(Op::Send, Flow::PingPong, 8) };
        let all = between_hosts(&subjects(Measure::Lat, &spec));
        let free = [true, false].map(|polled| tcp(polled, Placement::Free));
        assert_eq!(all, [Subject::Rdma, free[0], free[1]]);
    }

    #[test]
    fn every_goal_has_its_yardstick_in_the_same_run() {
        let bulk = |op| Spec::new(op, Flow::Stream, 1 << 20).stream(16, 4, 2 << 20);
        let ping_pong = |wait| Spec { wait, ..Spec::new(Op::Send, Flow::PingPong, 8) };
        let small = |op| Spec::new(op, Flow::Stream, 8).stream(256, 32, 8 * 256);
        let mut with_goals = 0;
        for (kind, spec) in [
            (Measure::Bw, bulk(Op::Write)),
            (Measure::Bw, bulk(Op::Read)),
            (Measure::Lat, ping_pong(Wait::Polled)),
            (Measure::Lat, ping_pong(Wait::Event)),
            (Measure::Rate, small(Op::Write)),
            (Measure::Rate, small(Op::FetchAdd)),
            (Measure::Lat, Spec { rc: true, ..ping_pong(Wait::Polled) }),
            (Measure::Rate, Spec { rc: true, ..small(Op::Write) }),
        ] {
            let subjects = subjects(kind, &spec);
            for path in ["direct", "tcp"] {
                for (yardstick, _) in goals(kind, &spec, path) {
                    with_goals += 1;
                    let found = subjects[1..].iter().any(|s| yardstick.includes(*s));
                    assert!(found, "{kind:?} {spec:?} {yardstick:?}");
                }
            }
        }
        assert_eq!(with_goals, 11);
    }

    #[test]
    fn a_polled_ping_pong_has_four_tcp_subjects() {
        let ping_pong = |wait| Spec { wait, ..Spec::new(Op::Send, Flow::PingPong, 8) };
        let count = |wait| {
            let of = subjects(Measure::Lat, &ping_pong(wait));
            of.iter().filter(|s| Yardstick::BestTcp.includes(**s)).count()
        };
        assert_eq!((count(Wait::Polled), count(Wait::Event)), (4, 2));
    }
}
