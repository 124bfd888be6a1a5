//! Detects large slowdowns in half a minute, even on a machine with other load.
//!
//! Measures a few ratios within one run. The bounds are so far from the usual values that noise
//! does not reach them. A ratio that misses its bound is measured again: noise does not explain
//! three misses in a row.

use std::path::Path;

use super::bench::{Amount, Bench, Subject};
use super::daemon::Setup;
use super::error::PerfError;
use super::footprint::{IDLE, idle_cpu};
use super::goals::Yardstick;
use super::machine::tick;
use super::placement::Placement;
use super::raw::TcpMode;
use super::relay::RelayPlacement;
use super::report::{Figure, Goal, Measure, Outcome, Row};
use super::scale::{Place, few_and_many};
use super::site::{Site, words};
use super::spec::{Flow, Op, Spec, Wait};

/// Options of `rnic-perf smoke`.
pub struct SmokeOptions<'a> {
    /// The daemon's binary.
    pub rnicd: &'a Path,
    /// Length of a round of each subject.
    pub amount: Amount,
    /// Number of rounds; the result is the median.
    pub rounds: u32,
}

/// Measures every ratio, up to three times if it misses its bound.
pub fn smoke(options: &SmokeOptions<'_>, progress: &mut dyn FnMut(&str)) -> Vec<Row> {
    let direct = Place::DIRECT;
    let tcp = Place::TCP;
    let ping_pong = Spec { wait: Wait::Polled, ..Spec::new(Op::Send, Flow::PingPong, 8) };
    let bulk = Spec::new(Op::Write, Flow::Stream, 1 << 20).stream(16, 4, 64 << 20);
    let small = Spec::new(Op::Write, Flow::Stream, 8).stream(256, 32, 8 * 256);
    let stream = |placement| Subject::Tcp(TcpMode { polled: false, placement });
    let streams = [Placement::Free, Placement::Together, Placement::Apart].map(stream);
    let best_tcp = |least| (Yardstick::BestTcp, Goal::AtLeast(least));
    let memcpy = (Yardstick::Of(Subject::Memcpy), Goal::AtLeast(0.3));
    let relay = (Yardstick::BestRelay, Goal::AtMost(6.0));
    let ratio = |place, kind, spec: &Spec, yardsticks: &[Subject], goal| {
        ratio(options, place, kind, spec, yardsticks, goal)
    };
    let mut again = |what: &str, measure: &dyn Fn() -> Result<Row, PerfError>| {
        judged(what, |attempt| {
            progress(&format!("{what}, attempt {attempt}"));
            measure()
        })
    };
    vec![
        again("bandwidth, direct", &|| {
            ratio(direct, Measure::Bw, &bulk, &[Subject::Memcpy], memcpy)
        }),
        again("rate, direct", &|| ratio(direct, Measure::Rate, &small, &streams, best_tcp(4.0))),
        again("latency, direct", &|| {
            ratio(direct, Measure::Lat, &ping_pong, &RelayPlacement::ALL.map(Subject::Relay), relay)
        }),
        again("bandwidth, tcp", &|| ratio(tcp, Measure::Bw, &bulk, &streams, best_tcp(0.3))),
        again("rate, tcp", &|| ratio(tcp, Measure::Rate, &small, &streams, best_tcp(4.0))),
        again("many QPs, direct", &|| {
            let amount = options.amount;
            let rounds = options.rounds;
            few_and_many(options.rnicd, direct, &[10, 1000], Goal::AtMost(2.0), amount, rounds)
        }),
        again("idle daemon", &|| idle(options, direct)),
    ]
}

/// Returns an error message for a row that has failed or missed its bound, or `None`.
pub fn failure_message(row: &Row) -> Option<String> {
    let what = format!("{}{}: {} path", row.subject, row.manner, row.path);
    if let Some(why) = &row.failure {
        return Some(format!("{}: not measured: {why}", row.subject));
    }
    let missed = row.outcomes.iter().find(|outcome| outcome.met == Some(false))?;
    let goal = missed.goal?;
    let by = match goal {
        Goal::AtLeast(bound) if missed.value > 0.0 => bound / missed.value,
        Goal::AtMost(bound) if bound > 0.0 => missed.value / bound,
        _ => f64::INFINITY,
    };
    let Outcome { of, value, unit, .. } = missed;
    let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
    Some(format!("{what}: {value:.3}{unit} ({of}), must be {goal}: missed by a factor of {by:.2}"))
}

/// Measures until every goal is met, at most three times. A failed measurement counts as a miss.
fn judged(what: &str, mut measure: impl FnMut(u32) -> Result<Row, PerfError>) -> Row {
    let mut attempt = 1;
    loop {
        let mut row = measure(attempt)
            .unwrap_or_else(|e| Row::failed(what.to_owned(), Measure::Daemon, "", e.to_string()));
        if failure_message(&row).is_none() || attempt == ATTEMPTS {
            if attempt > 1 {
                row.manner += &format!(", attempt {attempt} of {ATTEMPTS}");
            }
            return row;
        }
        attempt += 1;
    }
}

/// Compares an operation with its yardsticks, of which one has a bound.
fn ratio(
    options: &SmokeOptions<'_>,
    Place { setup, daemons }: Place,
    kind: Measure,
    spec: &Spec,
    yardsticks: &[Subject],
    goal: (Yardstick, Goal),
) -> Result<Row, PerfError> {
    let site = Site::start(options.rnicd, setup, daemons)?;
    let mut ends = site.open()?;
    let subjects = [&[Subject::Rdma], yardsticks].concat();
    let mut bench = Bench::new(&ends.context, &mut ends.peer, spec, &subjects)?;
    let all = bench.measure(options.amount, options.rounds, &mut |_, _| ())?;
    Ok(Row::new(kind, spec, bench.path(), &words(setup, daemons), &all, &[goal]))
}

/// Measures a daemon with two connected idle clients.
fn idle(options: &SmokeOptions<'_>, Place { setup, daemons }: Place) -> Result<Row, PerfError> {
    let site = Site::start(options.rnicd, Setup { qps: 128, ..setup }, daemons)?;
    let mut ends = site.open()?;
    let spec = Spec::new(Op::Write, Flow::Stream, 8).stream(16, 1, 128);
    let bench = Bench::new(&ends.context, &mut ends.peer, &spec, &[Subject::Rdma])?;
    let path = bench.path().to_owned();
    let (time, switches) = idle_cpu(&ends.context)?;
    // A tick of other work may be charged to the daemon.
    let most = Goal::AtMost(2.0 * tick().as_secs_f64() * 1e3);
    Ok(Row {
        subject: format!("CPU of an idle daemon, {} s", IDLE.as_secs()),
        manner: String::new(),
        kind: Measure::Daemon,
        path,
        daemons: words(setup, daemons),
        spec: Some(spec),
        figures: vec![
            Figure::single("time", "ms", time),
            Figure::single("thread switches", "", switches),
        ],
        outcomes: vec![Outcome::new("thread switches", time, "ms", Some(most))],
        failure: None,
    })
}

/// Maximum number of measurements of a ratio.
const ATTEMPTS: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn row(value: f64, goal: Goal) -> Row {
        Row {
            path: "direct".to_owned(),
            outcomes: vec![
                Outcome::new("relay", 9.0, "", None),
                Outcome::new("memcpy", value, "", Some(goal)),
            ],
            failure: None,
            ..Row::failed("RDMA Write 1 MiB".to_owned(), Measure::Bw, "one daemon", String::new())
        }
    }

    #[test]
    fn a_ratio_that_misses_once_passes() {
        let values = [0.1, 0.7];
        let passed = judged("", |n| Ok(row(values[n as usize - 1], Goal::AtLeast(0.3))));
        assert_eq!(failure_message(&passed), None);
        assert_eq!(passed.manner, ", attempt 2 of 3");
        let at_once = judged("", |_| Ok(row(0.3, Goal::AtLeast(0.3))));
        assert_eq!((failure_message(&at_once), at_once.manner.as_str()), (None, ""));
    }

    #[test]
    fn a_ratio_that_always_misses_fails() {
        let mut attempts = 0;
        let failed = judged("", |_| {
            attempts += 1;
            Ok(row(0.1, Goal::AtLeast(0.3)))
        });
        assert_eq!(attempts, ATTEMPTS);
        assert_eq!(
            failure_message(&failed).unwrap(),
            "RDMA Write 1 MiB, attempt 3 of 3: direct path: 0.100 (memcpy), must be ≥ 0.3: missed \
             by a factor of 3.00"
        );
        let slow = failure_message(&row(12.0, Goal::AtMost(6.0))).unwrap();
        assert!(slow.contains("≤ 6") && slow.contains("factor of 2.00"), "{slow}");
    }

    #[test]
    fn a_failed_measurement_is_a_failure() {
        let options =
            SmokeOptions { rnicd: Path::new("/bin/false"), amount: Amount::Messages(1), rounds: 1 };
        let rows = smoke(&options, &mut |_| ());
        assert_eq!(rows.len(), 7);
        for row in &rows {
            assert!(failure_message(row).unwrap().contains("not measured"), "{row:?}");
        }
    }
}
