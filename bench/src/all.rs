//! The table of design goals, row by row, with private daemons in each configuration.

use rnic_tools::perf::PerfError;
use rnic_tools::perf::report::Figure;
use rnic_tools::perf::spec::{Flow, Measure, Op, Spec, Wait};

use crate::bench::{Bench, Subject};
use crate::calls::calls;
use crate::daemon::Setup;
use crate::footprint::{IDLE, MemoryUse, idle_cpu};
use crate::goals::{goals, subjects};
use crate::only::TitleFilter;
use crate::report::{Goal, Kind, Outcome, Row};
use crate::scale::{ACTIVE, FLAT, cost_of_qps, few_and_many};
use crate::site::{Options, Site};

/// Measures everything. A failed measurement is a row with the reason.
pub fn all(
    options: &Options<'_>,
    qps: u32,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, PerfError> {
    let mut rows = Vec::new();
    let mut only = TitleFilter::new(options.only);
    for setup in [
        Setup::TCP,
        Setup { daemons: 1, ..Setup::TCP },
        Setup { crc: false, ..Setup::TCP },
        Setup { daemons: 1, crc: false, ..Setup::TCP },
        Setup::DIRECT,
    ] {
        let title = setup.title();
        if !only.selects(&title) {
            continue;
        }
        progress(&title);
        match Site::start(options.rnicd, setup) {
            Ok(site) => {
                for (kind, spec) in measurements(setup) {
                    progress(&format!("{title}: {kind:?} of {}", spec.op));
                    rows.push(measure(options, &site, setup, kind, &spec));
                }
                if !setup.loopback_tcp {
                    progress(&format!("{title}: single calls"));
                    match calls(options) {
                        Ok(more) => rows.extend(more),
                        Err(e) => rows.push(Row::failed("Single calls", Kind::Call, setup, e)),
                    }
                }
            }
            Err(e) => rows.push(Row::failed("Everything", Kind::Of(Measure::Bw), setup, e)),
        }
    }
    for setup in [Setup::DIRECT, Setup::TCP] {
        let title = setup.title();
        if !only.selects(&title) {
            continue;
        }
        progress(&format!("{title}: {qps} QPs"));
        match many_qps(options, setup, qps) {
            Ok(more) => rows.extend(more),
            Err(e) => {
                let what = format!("RDMA Write 8 B, {qps} QPs per daemon");
                rows.push(Row::failed(what, Kind::Cost, setup, e));
            }
        }
    }
    only.check()?;
    Ok(rows)
}

/// Returns the measurements of a configuration.
fn measurements(setup: Setup) -> Vec<(Measure, Spec)> {
    let bulk = |op, working_set| {
        (Measure::Bw, Spec::new(op, Flow::Stream, 1 << 20).stream(16, 4, working_set))
    };
    let ping_pong = |wait| (Measure::Lat, Spec { wait, ..Spec::new(Op::Send, Flow::PingPong, 8) });
    let small = |op| (Measure::Rate, Spec::new(op, Flow::Stream, 8).stream(256, 32, 8 * 256));
    let rc = |(kind, spec)| (kind, Spec { rc: true, ..spec });
    let mut all = match setup {
        Setup { crc: false, .. } => return vec![bulk(Op::Write, STREAM)],
        // Working sets that fit in the caches, and that do not. Two CPUs suffice for a driver that
        // polls all the time, so that the worker need not wake it. With two workers over TCP they
        // do not suffice.
        Setup { loopback_tcp: false, .. } => {
            [(Op::Write, TWO), (Op::Write, STREAM), (Op::Read, TWO), (Op::Read, STREAM)]
                .map(|(op, working_set)| bulk(op, working_set))
                .map(|(kind, spec)| (kind, Spec { wait: Wait::Polled, ..spec }))
                .to_vec()
        }
        Setup { crc: true, .. } => vec![bulk(Op::Write, STREAM)],
    };
    all.extend([
        ping_pong(Wait::Polled),
        ping_pong(Wait::Event),
        small(Op::Write),
        small(Op::FetchAdd),
    ]);
    // RC QPs cannot connect two daemons of one host, which have the same GIDs.
    if setup.daemons == 1 {
        all.extend([rc(ping_pong(Wait::Polled)), rc(small(Op::Write))]);
    }
    all
}

fn measure(options: &Options<'_>, site: &Site, setup: Setup, kind: Measure, spec: &Spec) -> Row {
    let measured = || {
        let mut ends = site.open()?;
        let mut subjects = subjects(kind, spec);
        if setup.loopback_tcp {
            // A relay bounds the latency within one daemon, not over TCP.
            subjects.retain(|subject| !matches!(subject, Subject::Relay(_)));
        }
        let mut bench = Bench::new(&ends.context, &mut ends.peer, spec, &subjects)?;
        let all = bench.measure(options.amount, options.rounds, &mut |_, _| ())?;
        let mut goals = goals(kind, spec, bench.path());
        if !setup.crc {
            // UCX has no checksums either, so `compare` has the goals for this setup.
            goals = Vec::new();
        }
        Ok(Row::new(kind, spec, bench.path(), &setup.words(), &all, &goals))
    };
    measured().unwrap_or_else(|e: PerfError| {
        let what = format!("{kind:?} of {} {} B", spec.op, spec.size);
        Row::failed(what, Kind::Of(kind), setup, e)
    })
}

/// Measures the cost per operation with many and with few connected QPs, alternately on separate
/// daemons, and the resources that the daemon with many QPs needs.
fn many_qps(options: &Options<'_>, setup: Setup, qps: u32) -> Result<Vec<Row>, PerfError> {
    let (costs, idle) = few_and_many(options, setup, &[ACTIVE, qps.max(ACTIVE)], idle_cpu)?;
    let qps = costs.cases[0].spec.qps * (3 - setup.daemons);
    let per_qp = |bytes: u64| bytes as f64 / f64::from(qps) / 1024.0;
    let MemoryUse { anonymous, arenas } = costs.memory[0];
    let anonymous = per_qp(anonymous);
    let rings = per_qp(arenas);
    let depth = costs.cases[0].spec.depth;
    let row = |subject: String, figures: Vec<Figure>, of, value, unit, most| {
        let outcomes = vec![Outcome::new(of, value, unit, Some(Goal::AtMost(most)))];
        let spec = Some(costs.cases[0].spec.clone());
        Row { spec, outcomes, ..Row::of(subject, Kind::Daemon, &costs.path, setup, figures) }
    };
    Ok(vec![
        cost_of_qps(setup, &costs, FLAT),
        row(
            format!("daemon's anonymous memory per connected QP, {qps} QPs"),
            vec![
                Figure::single("anonymous", "KiB", anonymous),
                Figure::single(format!("rings at depth {depth}/{depth}"), "KiB", rings),
            ],
            "of rings",
            anonymous,
            "KiB",
            4.0,
        ),
        row(
            format!("CPU of an idle daemon with {qps} connected QPs, {} s", IDLE.as_secs()),
            vec![
                Figure::single("time", "ms", idle.0),
                Figure::single("thread switches", "", idle.1),
            ],
            "thread switches",
            idle.0,
            "ms",
            0.0,
        ),
    ])
}

/// Working sets of bulk transfers: two messages, which fit the caches, and a stream.
const TWO: u64 = 2 << 20;
const STREAM: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use rnic_tools::perf::measured::Amount;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_design_goal_is_measured() {
        let off = Setup { crc: false, ..Setup::TCP };
        let of = |setup| measurements(setup).into_iter().map(|(k, s)| (k, s.op, s.wait));
        let direct: Vec<_> = of(Setup::DIRECT).collect();
        for row in [
            (Measure::Bw, Op::Write, Wait::Polled),
            (Measure::Bw, Op::Read, Wait::Polled),
            (Measure::Lat, Op::Send, Wait::Polled),
            (Measure::Lat, Op::Send, Wait::Event),
            (Measure::Rate, Op::Write, Wait::Adaptive),
        ] {
            assert!(direct.contains(&row), "{row:?}");
        }
        for setup in [Setup::DIRECT, Setup::TCP, off] {
            for (_, spec) in measurements(setup) {
                spec.check().unwrap();
            }
        }
        assert_eq!(measurements(off).len(), 1);
        let rc = |daemons| {
            let all = measurements(Setup { daemons, ..Setup::TCP });
            all.iter().filter(|(_, spec)| spec.rc).count()
        };
        assert_eq!((rc(1), rc(2)), (2, 0));
    }

    #[test]
    fn a_wrong_binary_fails_every_row() {
        let options = Options {
            rnicd: Path::new("/bin/false"),
            only: "",
            amount: Amount::Messages(1),
            rounds: 1,
        };
        let rows = all(&options, 20, &mut |_| ()).unwrap();
        assert_eq!(rows.len(), 7);
        assert!(rows.iter().all(|row| row.failure.is_some()));
    }
}
