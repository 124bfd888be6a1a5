//! The table of design goals, row by row, with private daemons in each configuration.

use std::path::Path;

use super::bench::{Amount, Bench, Measured, Subject};
use super::calls::calls;
use super::daemon::Setup;
use super::error::PerfError;
use super::footprint::{IDLE, UseOfMemory, idle_cpu};
use super::goals::{goals, subjects};
use super::only::Only;
use super::report::{Figure, Goal, Measure, Outcome, Row};
use super::site::{Site, words};
use super::spec::{Flow, Op, Spec, Wait};

/// Which daemon is measured with how many QPs, and how long.
pub struct AllOptions<'a> {
    /// The daemon's binary.
    pub rnicd: &'a Path,
    /// QPs of each daemon in the rows about many.
    pub qps: u32,
    /// Only with daemons of which this is said.
    pub only: &'a str,
    /// Per round and subject.
    pub amount: Amount,
    /// Rounds; the median counts.
    pub rounds: u32,
}

/// Measures everything. What cannot be measured is a row that says why.
pub fn all(
    options: &AllOptions<'_>,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, PerfError> {
    let (mut rows, mut only) = (Vec::new(), Only::new(options.only));
    for (setup, daemons) in [
        (Setup::TCP, 2),
        (Setup::TCP, 1),
        (Setup { crc: false, ..Setup::TCP }, 2),
        (Setup { crc: false, ..Setup::TCP }, 1),
        (Setup::DIRECT, 1),
    ] {
        let words = words(setup, daemons);
        if !only.takes(&title(setup, &words)) {
            continue;
        }
        progress(&words);
        match Site::start(options.rnicd, setup, daemons) {
            Ok(site) => {
                for (kind, spec) in measurements(setup, daemons) {
                    progress(&format!("{words}: {kind:?} of {}", spec.op));
                    rows.push(measure(options, &site, setup, kind, &spec, &words));
                }
                if !setup.loopback_tcp {
                    progress(&format!("{words}: single calls"));
                    match calls(options.rnicd, options.amount, options.rounds, &words) {
                        Ok(more) => rows.extend(more),
                        Err(e) => rows.push(failed("Single calls", Measure::Call, &words, &e)),
                    }
                }
            }
            Err(e) => rows.push(failed("Everything", Measure::Bw, &words, &e)),
        }
    }
    for (setup, daemons) in [(Setup::DIRECT, 1), (Setup::TCP, 2)] {
        let words = words(setup, daemons);
        if !only.takes(&title(setup, &words)) {
            continue;
        }
        progress(&format!("{words}: {} QPs", options.qps));
        match many_qps(options, setup, daemons, &words) {
            Ok(more) => rows.extend(more),
            Err(e) => {
                let what = format!("RDMA Write 8 B, {} QPs per daemon", options.qps);
                rows.push(failed(&what, Measure::Cost, &words, &e));
            }
        }
    }
    only.check()?;
    Ok(rows)
}

/// What daemons of this kind are called.
fn title(setup: Setup, words: &str) -> String {
    let path = if setup.loopback_tcp { "tcp" } else { "direct" };
    format!("{path}: {words}")
}

/// What is measured with daemons of one kind.
fn measurements(setup: Setup, daemons: u32) -> Vec<(Measure, Spec)> {
    let bulk = |op, working_set| {
        (Measure::Bw, Spec::new(op, Flow::Stream, 1 << 20).stream(16, 4, working_set))
    };
    let ball = |wait| (Measure::Lat, Spec { wait, ..Spec::new(Op::Send, Flow::PingPong, 8) });
    let small = |op| (Measure::Rate, Spec::new(op, Flow::Stream, 8).stream(256, 32, 8 * 256));
    let by_hand = |(kind, spec)| (kind, Spec { wired: true, ..spec });
    let mut all = match setup {
        Setup { crc: false, .. } => return vec![bulk(Op::Write, STREAM)],
        // In caches as well as out of them. Two CPUs have room for a driver that looks all the
        // time, which the worker need not wake; two workers over TCP leave none.
        Setup { loopback_tcp: false, .. } => {
            [(Op::Write, TWO), (Op::Write, STREAM), (Op::Read, TWO), (Op::Read, STREAM)]
                .map(|(op, working_set)| bulk(op, working_set))
                .map(|(kind, spec)| (kind, Spec { wait: Wait::Polled, ..spec }))
                .to_vec()
        }
        Setup { crc: true, .. } => vec![bulk(Op::Write, STREAM)],
    };
    all.extend([ball(Wait::Polled), ball(Wait::Event), small(Op::Write), small(Op::FetchAdd)]);
    // Two daemons of one host have the same GIDs.
    if daemons == 1 {
        all.extend([by_hand(ball(Wait::Polled)), by_hand(small(Op::Write))]);
    }
    all
}

fn measure(
    options: &AllOptions<'_>,
    site: &Site,
    setup: Setup,
    kind: Measure,
    spec: &Spec,
    words: &str,
) -> Row {
    let measured = || {
        let mut ends = site.open()?;
        let mut subjects = subjects(kind, spec);
        if setup.loopback_tcp {
            // The limit of what goes through one daemon, not of the wire.
            subjects.retain(|subject| !matches!(subject, Subject::Relay(_)));
        }
        let mut bench = Bench::new(&ends.context, &mut ends.peer, spec, &subjects)?;
        let all = bench.measure(options.amount, options.rounds, &mut |_, _| ())?;
        let mut goals = goals(kind, spec, bench.path());
        if !setup.crc {
            // Against UCX, which has no checksums either: in `compare`.
            goals = Vec::new();
        }
        Ok(Row::new(kind, spec, bench.path(), words, &all, &goals))
    };
    measured().unwrap_or_else(|e: PerfError| {
        failed(&format!("{kind:?} of {} {} B", spec.op, spec.size), kind, words, &e)
    })
}

/// Cost per operation with many connected QPs against few, measured in turn on daemons of their
/// own, and what the daemon with many needs for them.
fn many_qps(
    options: &AllOptions<'_>,
    setup: Setup,
    daemons: u32,
    words: &str,
) -> Result<Vec<Row>, PerfError> {
    // Both ends of a connection may be in one daemon.
    let per_connection = 3 - daemons;
    let connections = |qps: u32| (qps / per_connection).max(1);
    let setup = Setup { qps: options.qps.max(FEW) + 16, ..setup };
    let ball = Spec::new(Op::Write, Flow::Stream, 8).stream(DEPTH, 1, 8 * u64::from(DEPTH));
    let active = connections(FEW);
    let spec = |qps| Spec { qps: connections(qps).max(active), active, ..ball.clone() };

    let few_site = Site::start(options.rnicd, setup, daemons)?;
    let many_site = Site::start(options.rnicd, setup, daemons)?;
    let (mut few_ends, mut many_ends) = (few_site.open()?, many_site.open()?);
    let before = UseOfMemory::of(&many_ends.context)?;
    let subjects = [Subject::Rdma];
    let many_spec = spec(options.qps);
    let mut few = Bench::new(&few_ends.context, &mut few_ends.peer, &spec(FEW), &subjects)?;
    let mut many = Bench::new(&many_ends.context, &mut many_ends.peer, &many_spec, &subjects)?;
    let after = UseOfMemory::of(&many_ends.context)?;
    let path = many.path().to_owned();

    let warm = |bench: &mut Bench<'_>| bench.prepare(Subject::Rdma, options.amount);
    let (mut of_few, mut of_many) = (warm(&mut few)?, warm(&mut many)?);
    for _ in 0..options.rounds {
        few.round(&mut of_few)?;
        many.round(&mut of_many)?;
    }
    let idle = idle_cpu(&many_ends.context)?;

    let cost = |what: String, measured: &Measured| {
        let mut series = measured.rates.clone();
        series.rounds.iter_mut().for_each(|rate| *rate = 1e9 / *rate);
        Figure::new(what, "ns", measured.count, series)
    };
    let qps = many_spec.qps * per_connection;
    let row = |subject: String, kind, figures, outcome| Row {
        subject,
        manner: String::new(),
        kind,
        path: path.clone(),
        daemons: words.to_owned(),
        spec: Some(many_spec.clone()),
        figures,
        outcomes: vec![outcome],
        failure: None,
    };
    let figures = vec![cost(format!("{qps} QPs"), &of_many), cost(format!("{FEW} QPs"), &of_few)];
    let ratio = figures[0].median / figures[1].median;
    let per_qp = |bytes: u64| bytes as f64 / f64::from(qps) / 1024.0;
    let anonymous = per_qp(after.anonymous.saturating_sub(before.anonymous));
    let rings = per_qp(after.arenas.saturating_sub(before.arenas));
    Ok(vec![
        row(
            format!("cost per RDMA Write of 8 B, {qps} QPs per daemon of which {FEW} active"),
            Measure::Cost,
            figures,
            Outcome::new(format!("with {FEW} QPs"), ratio, "", Some(Goal::AtMost(1.1))),
        ),
        row(
            format!("daemon's anonymous memory per connected QP, {qps} QPs"),
            Measure::Daemon,
            vec![
                Figure::single("anonymous", "KiB", anonymous),
                Figure::single(format!("rings at depth {DEPTH}/{DEPTH}"), "KiB", rings),
            ],
            Outcome::new("of rings", anonymous, "KiB", Some(Goal::AtMost(4.0))),
        ),
        row(
            format!("CPU of an idle daemon with {qps} connected QPs, {} s", IDLE.as_secs()),
            Measure::Daemon,
            vec![
                Figure::single("time", "ms", idle.0),
                Figure::single("thread switches", "", idle.1),
            ],
            Outcome::new("thread switches", idle.0, "ms", Some(Goal::AtMost(0.0))),
        ),
    ])
}

fn failed(title: &str, kind: Measure, words: &str, e: &PerfError) -> Row {
    Row::failed(title.to_owned(), kind, words, e.to_string())
}

/// Working sets of bulk transfers: two messages, which caches hold, and a stream.
const TWO: u64 = 2 << 20;
const STREAM: u64 = 64 << 20;
/// QPs with traffic in the rows about many QPs.
const FEW: u32 = 10;
/// Depth of all queues in the rows about many QPs.
const DEPTH: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_the_design_is_measured_and_makes_sense() {
        let off = Setup { crc: false, ..Setup::TCP };
        let of = |setup| measurements(setup, 1).into_iter().map(|(k, s)| (k, s.op, s.wait));
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
            for (_, spec) in measurements(setup, 1) {
                spec.check().unwrap();
            }
        }
        assert_eq!(measurements(off, 2).len(), 1);
        let by_hand = |daemons| {
            measurements(Setup::TCP, daemons).iter().filter(|(_, spec)| spec.wired).count()
        };
        assert_eq!((by_hand(1), by_hand(2)), (2, 0));
    }

    #[test]
    fn a_binary_that_is_no_daemon_is_a_failed_row_and_no_panic() {
        let options = AllOptions {
            rnicd: Path::new("/bin/false"),
            qps: 20,
            only: "",
            amount: Amount::Messages(1),
            rounds: 1,
        };
        let rows = all(&options, &mut |_| ()).unwrap();
        assert_eq!(rows.len(), 7);
        assert!(rows.iter().all(|row| row.failure.is_some()));
    }
}
