//! Latency of a ping-pong while another user's program writes as fast as it can.
//!
//! Both are clients of the same daemons. The writer is a separate pair of processes, which runs as
//! another user if this process is root. Each round measures the ping-pong with and without the
//! writer.

use std::thread::sleep;

use rnic_tools::perf::PerfError;
use rnic_tools::perf::driver::Driver;
use rnic_tools::perf::measured::{Amount, Measured};
use rnic_tools::perf::report::Figure;
use rnic_tools::perf::spec::{Flow, Measure, Op, Spec, Wait};
use rnic_tools::perf::stats::Series;
use rustix::process::getuid;

use crate::daemon::Setup;
use crate::load::Load;
use crate::only::TitleFilter;
use crate::report::{Goal, Kind, Outcome, Row};
use crate::site::{Ends, Options, Site};

/// Measures both paths, with one and with two workers. A failed measurement is a row with the
/// reason.
pub fn neighbours(
    options: &Options<'_>,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, PerfError> {
    let mut rows = Vec::new();
    let mut only = TitleFilter::new(options.only);
    for setup in [Setup::DIRECT, Setup::TCP] {
        for workers in [1, 2] {
            let setup = Setup { workers: Some(workers), others: true, ..setup };
            let title = setup.title();
            if !only.selects(&title) {
                continue;
            }
            progress(&title);
            match measure(options, setup) {
                Ok(more) => rows.extend(more),
                Err(e) => {
                    let kind = Kind::Of(Measure::Lat);
                    rows.push(Row::failed("ping-pong beside a writer", kind, setup, e));
                }
            }
        }
    }
    only.check()?;
    Ok(rows)
}

fn measure(options: &Options<'_>, setup: Setup) -> Result<Vec<Row>, PerfError> {
    let user = getuid().is_root().then_some(NOBODY);
    let site = Site::start(options.rnicd, setup)?;
    let mut writer = Load::start(&site, &bulk(), user)?;
    let waits = [Wait::Polled, Wait::Event];
    let mut ends = [site.open()?, site.open()?];
    let mut ping_pongs = Vec::new();
    for (wait, ends) in waits.into_iter().zip(&mut ends) {
        ping_pongs.push(PingPong::new(wait, ends, options.amount)?);
    }
    // Round trips take longer while the writer runs, so a round has fewer of them.
    writer.go()?;
    ping_pongs.iter_mut().try_for_each(|ping_pong| ping_pong.warm_up_beside(options.amount))?;
    writer.stop()?;
    writer.rate()?;

    let mut beside = Series::default();
    let mut alone = Series::default();
    for _ in 0..options.rounds {
        ping_pongs
            .iter_mut()
            .try_for_each(|ping_pong| ping_pong.driver.round(&mut ping_pong.alone))?;
        writer.go()?;
        ping_pongs
            .iter_mut()
            .try_for_each(|ping_pong| ping_pong.driver.round(&mut ping_pong.beside))?;
        writer.stop()?;
        beside.push(writer.rate()? * BULK);
        writer.go()?;
        sleep(options.time());
        writer.stop()?;
        alone.push(writer.rate()? * BULK);
    }

    let whose = match user {
        Some(_) => "of another user",
        None => "of the same user, because only root can run programs as other users",
    };
    let path = ping_pongs[0].driver.path().to_owned();
    let row = |subject: String, kind, spec: &Spec, figures: Vec<Figure>, goal| {
        let ratio = figures[0].median / figures[1].median;
        let outcomes = vec![Outcome::new(&figures[1].what, ratio, "", goal)];
        let spec = Some(spec.clone());
        Row { spec, outcomes, ..Row::of(subject, Kind::Of(kind), &path, setup, figures) }
    };
    let mut rows = Vec::new();
    for ping_pong in &ping_pongs {
        let how = if ping_pong.spec.wait == Wait::Polled { "polled" } else { "event-driven" };
        let named = |what: &str, measured: &Measured| {
            Figure::of(what, Measure::Lat, &ping_pong.spec, measured)
        };
        let figures =
            vec![named("beside the writer", &ping_pong.beside), named("alone", &ping_pong.alone)];
        let subject = format!("Send 8 B, half round trip, {how}, beside Writes of 1 MiB {whose}");
        rows.push(row(subject, Measure::Lat, &ping_pong.spec, figures, Some(Goal::AtMost(3.0))));
    }
    let figures = vec![
        Figure::new("beside the ping-pongs", "GB/s", 1, beside),
        Figure::new("alone", "GB/s", 1, alone),
    ];
    let subject = format!("the Writes of 1 MiB, {whose}");
    rows.push(row(subject, Measure::Bw, &bulk(), figures, None));
    Ok(rows)
}

/// A ping-pong that waits either by polling or for events.
struct PingPong<'a> {
    spec: Spec,
    driver: Driver<'a>,
    alone: Measured,
    beside: Measured,
}

impl<'a> PingPong<'a> {
    fn new(wait: Wait, ends: &'a mut Ends, amount: Amount) -> Result<Self, PerfError> {
        let spec = Spec { wait, ..Spec::new(Op::Send, Flow::PingPong, 8) };
        let mut driver = Driver::new(&ends.context, &mut ends.peer, &spec)?;
        let alone = driver.prepare(amount)?;
        let beside = Measured::default();
        Ok(PingPong { spec, driver, alone, beside })
    }

    fn warm_up_beside(&mut self, amount: Amount) -> Result<(), PerfError> {
        self.beside = self.driver.prepare(amount)?;
        Ok(())
    }
}

/// Returns the parameters of the writer, which saturates one connection.
fn bulk() -> Spec {
    Spec::new(Op::Write, Flow::Stream, 1 << 20).stream(16, 4, 64 << 20)
}

/// Gigabytes per message of the writer.
const BULK: f64 = (1 << 20) as f64 / 1e9;
/// An unprivileged user.
const NOBODY: u32 = 65534;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_wrong_binary_fails_every_kind() {
        let options = Options {
            rnicd: Path::new("/bin/false"),
            only: "",
            amount: Amount::Messages(1),
            rounds: 1,
        };
        let rows = neighbours(&options, &mut |_| ()).unwrap();
        assert_eq!(rows.len(), 4);
        assert!(rows.iter().all(|row| row.failure.is_some()));
        let one = Options { only: "direct: one daemon, 2 workers", ..options };
        assert_eq!(neighbours(&one, &mut |_| ()).unwrap().len(), 1);
        bulk().check().unwrap();
    }
}
