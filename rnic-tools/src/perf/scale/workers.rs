//! Compares two workers with one.

use std::thread::sleep;
use std::time::Duration;

use super::super::bench::{Amount, Bench, Subject};
use super::super::daemon::Setup;
use super::super::error::PerfError;
use super::super::load::Load;
use super::super::report::{Figure, Goal, Measure, Row};
use super::super::site::Site;
use super::super::spec::{Flow, Op, Spec};
use super::super::stats::Series;
use super::{Place, ScaleOptions, row};

/// Measures one busy QP, which a second worker should not slow down, and several pairs of processes
/// with one busy QP each.
pub fn measure(options: &ScaleOptions<'_>, place: Place) -> Result<Vec<Row>, PerfError> {
    let start = |workers| {
        let setup = Setup { workers: Some(workers), ..place.setup };
        Site::start(options.rnicd, setup, place.daemons)
    };
    let sites = [start(2)?, start(1)?];
    let small = Spec::new(Op::Write, Flow::Stream, 8).stream(256, 32, 8 * 256);
    let bulk = Spec::new(Op::Write, Flow::Stream, 1 << 20).stream(16, 4, 64 << 20);
    Ok(vec![
        one_busy(
            options,
            place,
            &sites,
            &small,
            "RDMA Writes of 8 B in batches of 32, one busy QP",
        )?,
        one_busy(options, place, &sites, &bulk, "RDMA Writes of 1 MiB, one busy QP")?,
        several_busy(options, place, &sites, &small)?,
    ])
}

fn one_busy(
    options: &ScaleOptions<'_>,
    place: Place,
    sites: &[Site; 2],
    spec: &Spec,
    subject: &str,
) -> Result<Row, PerfError> {
    let mut ends = sites.iter().map(Site::open).collect::<Result<Vec<_>, _>>()?;
    let mut benches = Vec::new();
    for ends in &mut ends {
        benches.push(Bench::new(&ends.context, &mut ends.peer, spec, &[Subject::Rdma])?);
    }
    let warm = |bench: &mut Bench<'_>| bench.prepare(Subject::Rdma, options.amount);
    let mut all = benches.iter_mut().map(warm).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..options.rounds {
        for (bench, measured) in benches.iter_mut().zip(&mut all) {
            bench.round(measured)?;
        }
    }
    let series = all.into_iter().map(|measured| measured.rates).collect();
    let path = benches[0].path().to_owned();
    Ok(judged(subject.to_owned(), &path, place, spec, series, Some(Goal::AtLeast(0.95))))
}

/// Measures the total rate of pairs of processes that stream at the same time.
fn several_busy(
    options: &ScaleOptions<'_>,
    place: Place,
    sites: &[Site; 2],
    spec: &Spec,
) -> Result<Row, PerfError> {
    let mut loads = Vec::new();
    for site in sites {
        let start = |_| Load::start(site, spec, None);
        loads.push((0..PAIRS).map(start).collect::<Result<Vec<_>, _>>()?);
    }
    let time = match options.amount {
        Amount::Time(time) => time,
        Amount::Messages(_) => SHORT,
    };
    let mut rates = vec![Series::default(); loads.len()];
    for _ in 0..options.rounds {
        for (loads, rates) in loads.iter_mut().zip(&mut rates) {
            loads.iter_mut().try_for_each(Load::go)?;
            sleep(time);
            loads.iter_mut().try_for_each(Load::stop)?;
            rates.push(loads.iter_mut().map(Load::rate).sum::<Result<f64, _>>()?);
        }
    }
    let subject = format!("RDMA Writes of 8 B in batches of 32, {PAIRS} pairs of processes");
    let path = if place.setup.loopback_tcp { "tcp" } else { "direct" };
    Ok(judged(subject, path, place, spec, rates, None))
}

/// Creates a row of rates with two workers and with one.
fn judged(
    subject: String,
    path: &str,
    place: Place,
    spec: &Spec,
    rates: Vec<Series>,
    goal: Option<Goal>,
) -> Row {
    let (unit, by) = match spec.size {
        8 => ("M/s", 1e-6),
        size => ("GB/s", f64::from(size) / 1e9),
    };
    let figure = |(what, series): (&str, Series)| {
        let rounds = series.rounds.iter().map(|rate| rate * by).collect();
        Figure::new(what, unit, 1, Series { rounds })
    };
    let figures = ["two workers", "one worker"].into_iter().zip(rates).map(figure).collect();
    row(subject, Measure::Rate, path, place, spec, figures, goal)
}

/// Number of pairs.
const PAIRS: u32 = 3;
/// Length of a round, if rounds are counted in messages.
const SHORT: Duration = Duration::from_millis(100);
