//! Detects large slowdowns in half a minute, even on a machine with other load.
//!
//! Measures a few ratios within one run. The bounds are far from the usual values, so that noise
//! does not reach them. A ratio that misses its bound is measured again, because noise does not
//! cause three misses in a row.

use rnic_tools::perf::PerfError;
use rnic_tools::perf::driver::Driver;
use rnic_tools::perf::report::Figure;
use rnic_tools::perf::spec::{Flow, Measure, Op, Spec, Wait};

use crate::bench::{Bench, Subject};
use crate::daemon::Setup;
use crate::footprint::{IDLE, idle_cpu};
use crate::machine::tick;
use crate::placement::Placement;
use crate::relay::RelayPlacement;
use crate::report::{Goal, Kind, Outcome, Row, Yardstick};
use crate::scale::{ACTIVE, cost_of_qps, few_and_many};
use crate::site::{Options, Site};

/// Measures every ratio, up to three times if it misses its bound.
pub fn smoke(options: &Options<'_>, progress: &mut dyn FnMut(&str)) -> Vec<Row> {
    let direct = Setup::DIRECT;
    let tcp = Setup::TCP;
    let ping_pong = Spec { wait: Wait::Polled, ..Spec::new(Op::Send, Flow::PingPong, 8) };
    let bulk = Spec::new(Op::Write, Flow::Stream, 1 << 20).stream(16, 4, 64 << 20);
    let small = Spec::new(Op::Write, Flow::Stream, 8).stream(256, 32, 8 * 256);
    let stream = |placement| Subject::Tcp { polled: false, placement };
    let streams = [Placement::Free, Placement::Together, Placement::Apart].map(stream);
    let best_tcp = |least| (Yardstick::BestTcp, Goal::AtLeast(least));
    let memcpy = (Yardstick::Of(Subject::Memcpy), Goal::AtLeast(0.3));
    let relay = (Yardstick::BestRelay, Goal::AtMost(6.0));
    let ratio = |setup, kind, spec: &Spec, yardsticks: &[Subject], goal| {
        ratio(options, setup, kind, spec, yardsticks, goal)
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
            let (costs, ()) = few_and_many(options, direct, &[ACTIVE, 1000], |_| Ok(()))?;
            Ok(cost_of_qps(direct, &costs, Goal::AtMost(2.0)))
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
        let mut row =
            measure(attempt).unwrap_or_else(|e| Row::failed(what, Kind::Daemon, Setup::DIRECT, e));
        if failure_message(&row).is_none() || attempt == ATTEMPTS {
            if attempt > 1 {
                row.manner += &format!(", attempt {attempt} of {ATTEMPTS}");
            }
            return row;
        }
        attempt += 1;
    }
}

/// Compares an operation with its yardsticks, one of which has a bound.
fn ratio(
    options: &Options<'_>,
    setup: Setup,
    kind: Measure,
    spec: &Spec,
    yardsticks: &[Subject],
    goal: (Yardstick, Goal),
) -> Result<Row, PerfError> {
    let site = Site::start(options.rnicd, setup)?;
    let mut ends = site.open()?;
    let subjects = [&[Subject::Rdma], yardsticks].concat();
    let mut bench = Bench::new(&ends.context, &mut ends.peer, spec, &subjects)?;
    let all = bench.measure(options.amount, options.rounds, &mut |_, _| ())?;
    Ok(Row::new(kind, spec, bench.path(), &setup.words(), &all, &[goal]))
}

/// Measures a daemon with two connected idle clients.
fn idle(options: &Options<'_>, setup: Setup) -> Result<Row, PerfError> {
    let site = Site::start(options.rnicd, Setup { qps: 128, ..setup })?;
    let mut ends = site.open()?;
    let spec = Spec::new(Op::Write, Flow::Stream, 8).stream(16, 1, 128);
    let driver = Driver::new(&ends.context, &mut ends.peer, &spec)?;
    let path = driver.path().to_owned();
    let (time, switches) = idle_cpu(&ends.context)?;
    // A tick of other work may be charged to the daemon.
    let most = Goal::AtMost(2.0 * tick().as_secs_f64() * 1e3);
    let figures =
        vec![Figure::single("time", "ms", time), Figure::single("thread switches", "", switches)];
    let subject = format!("CPU of an idle daemon, {} s", IDLE.as_secs());
    let outcomes = vec![Outcome::new("thread switches", time, "ms", Some(most))];
    Ok(Row { spec: Some(spec), outcomes, ..Row::of(subject, Kind::Daemon, &path, setup, figures) })
}

/// Maximum number of measurements of a ratio.
const ATTEMPTS: u32 = 3;

#[cfg(test)]
mod tests {
    use rnic_tools::perf::measured::Amount;
    use std::path::Path;

    use super::*;

    fn row(value: f64, goal: Goal) -> Row {
        let outcomes = vec![
            Outcome::new("relay", 9.0, "", None),
            Outcome::new("memcpy", value, "", Some(goal)),
        ];
        let kind = Kind::Of(Measure::Bw);
        Row { outcomes, ..Row::of("RDMA Write 1 MiB", kind, "direct", Setup::DIRECT, Vec::new()) }
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
        let options = Options {
            rnicd: Path::new("/bin/false"),
            only: "",
            amount: Amount::Messages(1),
            rounds: 1,
        };
        let rows = smoke(&options, &mut |_| ());
        assert_eq!(rows.len(), 7);
        for row in &rows {
            assert!(failure_message(row).unwrap().contains("not measured"), "{row:?}");
        }
    }
}
