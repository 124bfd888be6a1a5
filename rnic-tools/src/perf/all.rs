//! The table of design goals, row by row, with private daemons in each configuration.

use std::path::Path;

use super::bench::{Amount, Bench, Measured, Subject};
use super::calls::calls;
use super::daemon::Setup;
use super::error::PerfError;
use super::footprint::{IDLE, MemoryUse, idle_cpu};
use super::goals::{goals, subjects};
use super::only::TitleFilter;
use super::report::{Figure, Goal, Measure, Outcome, Row};
use super::site::{Site, words};
use super::spec::{Flow, Op, Spec, Wait};

/// Options of `rnic-perf all`.
pub struct AllOptions<'a> {
    /// The daemon's binary.
    pub rnicd: &'a Path,
    /// QPs of each daemon in the rows about many QPs.
    pub qps: u32,
    /// Selects daemons by a part of their title.
    pub only: &'a str,
    /// Length of a round of each subject.
    pub amount: Amount,
    /// Number of rounds; the result is the median.
    pub rounds: u32,
}

/// Measures everything. A failed measurement is a row with the reason.
pub fn all(
    options: &AllOptions<'_>,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, PerfError> {
    let mut rows = Vec::new();
    let mut only = TitleFilter::new(options.only);
    for (setup, daemons) in [
        (Setup::TCP, 2),
        (Setup::TCP, 1),
        (Setup { crc: false, ..Setup::TCP }, 2),
        (Setup { crc: false, ..Setup::TCP }, 1),
        (Setup::DIRECT, 1),
    ] {
        let words = words(setup, daemons);
        if !only.selects(&title(setup, &words)) {
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
        if !only.selects(&title(setup, &words)) {
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

/// Returns the title of a configuration, for `--only`.
fn title(setup: Setup, words: &str) -> String {
    let path = if setup.loopback_tcp { "tcp" } else { "direct" };
    format!("{path}: {words}")
}

/// Returns the measurements of a configuration.
fn measurements(setup: Setup, daemons: u32) -> Vec<(Measure, Spec)> {
    let bulk = |op, working_set| {
        (Measure::Bw, Spec::new(op, Flow::Stream, 1 << 20).stream(16, 4, working_set))
    };
    let ping_pong = |wait| (Measure::Lat, Spec { wait, ..Spec::new(Op::Send, Flow::PingPong, 8) });
    let small = |op| (Measure::Rate, Spec::new(op, Flow::Stream, 8).stream(256, 32, 8 * 256));
    let rc = |(kind, spec)| (kind, Spec { rc: true, ..spec });
    let mut all = match setup {
        Setup { crc: false, .. } => return vec![bulk(Op::Write, STREAM)],
        // Inside the caches and outside. Two CPUs have room for a driver that polls all the time,
        // so that the worker need not wake it; two workers over TCP leave no such room.
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
    // Not between two daemons of one host, which have the same GIDs.
    if daemons == 1 {
        all.extend([rc(ping_pong(Wait::Polled)), rc(small(Op::Write))]);
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
        Ok(Row::new(kind, spec, bench.path(), words, &all, &goals))
    };
    measured().unwrap_or_else(|e: PerfError| {
        failed(&format!("{kind:?} of {} {} B", spec.op, spec.size), kind, words, &e)
    })
}

/// Measures the cost per operation with many and with few connected QPs, in turn on separate
/// daemons, and the resources that the daemon with many QPs needs.
fn many_qps(
    options: &AllOptions<'_>,
    setup: Setup,
    daemons: u32,
    words: &str,
) -> Result<Vec<Row>, PerfError> {
    // With one daemon, both ends of a connection are in it.
    let per_connection = 3 - daemons;
    let connections = |qps: u32| (qps / per_connection).max(1);
    let setup = Setup { qps: options.qps.max(FEW) + 16, ..setup };
    let ping_pong = Spec::new(Op::Write, Flow::Stream, 8).stream(DEPTH, 1, 8 * u64::from(DEPTH));
    let active = connections(FEW);
    let spec = |qps| Spec { qps: connections(qps).max(active), active, ..ping_pong.clone() };

    let few_site = Site::start(options.rnicd, setup, daemons)?;
    let many_site = Site::start(options.rnicd, setup, daemons)?;
    let mut few_ends = few_site.open()?;
    let mut many_ends = many_site.open()?;
    let before = MemoryUse::of(&many_ends.context)?;
    let subjects = [Subject::Rdma];
    let many_spec = spec(options.qps);
    let mut few = Bench::new(&few_ends.context, &mut few_ends.peer, &spec(FEW), &subjects)?;
    let mut many = Bench::new(&many_ends.context, &mut many_ends.peer, &many_spec, &subjects)?;
    let after = MemoryUse::of(&many_ends.context)?;
    let path = many.path().to_owned();

    let warm = |bench: &mut Bench<'_>| bench.prepare(Subject::Rdma, options.amount);
    let mut of_few = warm(&mut few)?;
    let mut of_many = warm(&mut many)?;
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

/// Working sets of bulk transfers: two messages, which fit the caches, and a stream.
const TWO: u64 = 2 << 20;
const STREAM: u64 = 64 << 20;
/// QPs with traffic, in the rows about many QPs.
const FEW: u32 = 10;
/// Depth of all queues, in the rows about many QPs.
const DEPTH: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_design_goal_is_measured() {
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
        let rc =
            |daemons| measurements(Setup::TCP, daemons).iter().filter(|(_, spec)| spec.rc).count();
        assert_eq!((rc(1), rc(2)), (2, 0));
    }

    #[test]
    fn a_wrong_binary_fails_every_row() {
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
