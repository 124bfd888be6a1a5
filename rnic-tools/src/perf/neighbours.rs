//! What becomes of a ping-pong while another user's program writes as much as it can.
//!
//! Both are clients of the same daemons. The writer is a pair of processes of its own, run as
//! another user where this one may do so. Each round measures the ping-pong without and with it.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use rustix::process::getuid;

use super::bench::{Amount, Bench, Measured, Subject};
use super::daemon::Setup;
use super::error::PerfError;
use super::load::Load;
use super::only::Only;
use super::report::{Figure, Goal, Measure, Outcome, Row, figure};
use super::site::{Ends, Site, words};
use super::spec::{Flow, Op, Spec, Wait};
use super::stats::Series;

/// Which daemon is measured, and how long.
pub struct NeighbourOptions<'a> {
    /// The daemon's binary.
    pub rnicd: &'a Path,
    /// Only with daemons of which this is said.
    pub only: &'a str,
    /// Per round and subject.
    pub amount: Amount,
    /// Rounds; the median counts.
    pub rounds: u32,
}

/// Measures both paths, with one worker and with two. What cannot be measured is a row that says
/// why.
pub fn neighbours(
    options: &NeighbourOptions<'_>,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, PerfError> {
    let (mut rows, mut only) = (Vec::new(), Only::new(options.only));
    for (setup, daemons) in [(Setup::DIRECT, 1), (Setup::TCP, 2)] {
        for workers in [1, 2] {
            let setup = Setup { workers: Some(workers), others: true, ..setup };
            let path = if setup.loopback_tcp { "tcp" } else { "direct" };
            let words = words(setup, daemons);
            let title = format!("{path}: {words}");
            if !only.takes(&title) {
                continue;
            }
            progress(&title);
            match measure(options, setup, daemons, &words) {
                Ok(more) => rows.extend(more),
                Err(e) => {
                    let what = "ping-pong beside a writer".to_owned();
                    rows.push(Row::failed(what, Measure::Lat, &words, e.to_string()));
                }
            }
        }
    }
    only.check()?;
    Ok(rows)
}

fn measure(
    options: &NeighbourOptions<'_>,
    setup: Setup,
    daemons: u32,
    words: &str,
) -> Result<Vec<Row>, PerfError> {
    let user = getuid().is_root().then_some(NOBODY);
    let site = Site::start(options.rnicd, setup, daemons)?;
    let mut writer = Load::start(&site, &bulk(), user)?;
    let waits = [Wait::Polled, Wait::Event];
    let mut ends = [site.open()?, site.open()?];
    let mut balls = Vec::new();
    for (wait, ends) in waits.into_iter().zip(&mut ends) {
        balls.push(Ball::new(wait, ends, options.amount)?);
    }
    // A round beside the writer has fewer balls if each takes longer.
    writer.go()?;
    balls.iter_mut().try_for_each(|ball| ball.warm_up_beside(options.amount))?;
    writer.rest()?;
    writer.rate()?;

    let time = match options.amount {
        Amount::Time(time) => time,
        Amount::Messages(_) => SHORT,
    };
    let (mut beside, mut alone) = (Series::default(), Series::default());
    for _ in 0..options.rounds {
        balls.iter_mut().try_for_each(|ball| ball.bench.round(&mut ball.alone))?;
        writer.go()?;
        balls.iter_mut().try_for_each(|ball| ball.bench.round(&mut ball.beside))?;
        writer.rest()?;
        beside.push(writer.rate()? * BULK);
        writer.go()?;
        sleep(time);
        writer.rest()?;
        alone.push(writer.rate()? * BULK);
    }

    let whose = match user {
        Some(_) => "of another user",
        None => "of the same user, as only root runs programs of others",
    };
    let path = balls[0].bench.path().to_owned();
    let row = |subject: String, kind, spec: &Spec, figures: Vec<Figure>, goal| Row {
        subject,
        manner: String::new(),
        kind,
        path: path.clone(),
        daemons: words.to_owned(),
        spec: Some(spec.clone()),
        outcomes: vec![Outcome::new(
            &figures[1].what,
            figures[0].median / figures[1].median,
            "",
            goal,
        )],
        figures,
        failure: None,
    };
    let mut rows = Vec::new();
    for ball in &balls {
        let how = if ball.spec.wait == Wait::Polled { "polled" } else { "event-driven" };
        let named = |what: &str, measured: &Measured| Figure {
            what: what.to_owned(),
            ..figure(Measure::Lat, &ball.spec, measured)
        };
        let figures = vec![named("beside the writer", &ball.beside), named("alone", &ball.alone)];
        let subject = format!("Send 8 B, half round trip, {how}, beside Writes of 1 MiB {whose}");
        rows.push(row(subject, Measure::Lat, &ball.spec, figures, Some(Goal::AtMost(3.0))));
    }
    let figures = vec![
        Figure::new("beside the ping-pongs", "GB/s", 1, beside),
        Figure::new("alone", "GB/s", 1, alone),
    ];
    let subject = format!("the Writes of 1 MiB, {whose}");
    rows.push(row(subject, Measure::Bw, &bulk(), figures, None));
    Ok(rows)
}

/// A ping-pong of one kind.
struct Ball<'a> {
    spec: Spec,
    bench: Bench<'a>,
    alone: Measured,
    beside: Measured,
}

impl<'a> Ball<'a> {
    fn new(wait: Wait, ends: &'a mut Ends, amount: Amount) -> Result<Self, PerfError> {
        let spec = Spec { wait, ..Spec::new(Op::Send, Flow::PingPong, 8) };
        let mut bench = Bench::new(&ends.context, &mut ends.peer, &spec, &[Subject::Rdma])?;
        let alone = bench.prepare(Subject::Rdma, amount)?;
        let beside = Measured { count: 0, ..bench.prepare(Subject::Rdma, Amount::Messages(1))? };
        Ok(Ball { spec, bench, alone, beside })
    }

    fn warm_up_beside(&mut self, amount: Amount) -> Result<(), PerfError> {
        self.beside = self.bench.prepare(Subject::Rdma, amount)?;
        Ok(())
    }
}

/// As much as one connection takes.
fn bulk() -> Spec {
    Spec::new(Op::Write, Flow::Stream, 1 << 20).stream(16, 4, 64 << 20)
}

/// Gigabytes of a message of the writer.
const BULK: f64 = (1 << 20) as f64 / 1e9;
/// Who owns nothing.
const NOBODY: u32 = 65534;
/// A round of the writer alone, if rounds are counted in messages.
const SHORT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binary_that_is_no_daemon_is_a_failed_row_for_each_kind() {
        let options = NeighbourOptions {
            rnicd: Path::new("/bin/false"),
            only: "",
            amount: Amount::Messages(1),
            rounds: 1,
        };
        let rows = neighbours(&options, &mut |_| ()).unwrap();
        assert_eq!(rows.len(), 4);
        assert!(rows.iter().all(|row| row.failure.is_some()));
        let one = NeighbourOptions { only: "direct: one daemon, 2 workers", ..options };
        assert_eq!(neighbours(&one, &mut |_| ()).unwrap().len(), 1);
        bulk().check().unwrap();
    }
}
