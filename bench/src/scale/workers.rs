//! Compares two workers with a single worker.

use std::thread::sleep;

use rnic_tools::perf::PerfError;
use rnic_tools::perf::driver::Driver;
use rnic_tools::perf::report::Figure;
use rnic_tools::perf::spec::{Flow, Measure, Op, Spec};
use rnic_tools::perf::stats::Series;

use super::row::row;
use crate::daemon::Setup;
use crate::load::Load;
use crate::report::{Goal, Kind, Row};
use crate::site::{Options, Site};

/// Measures one busy QP, which a second worker should not slow down, and several pairs of processes
/// with one busy QP each.
pub fn measure(options: &Options<'_>, _: u32, setup: Setup) -> Result<Vec<Row>, PerfError> {
    let start = |workers| {
        let setup = Setup { workers: Some(workers), ..setup };
        Site::start(options.rnicd, setup)
    };
    let sites = [start(2)?, start(1)?];
    let small = Spec::new(Op::Write, Flow::Stream, 8).stream(256, 32, 8 * 256);
    let bulk = Spec::new(Op::Write, Flow::Stream, 1 << 20).stream(16, 4, 64 << 20);
    Ok(vec![
        one_busy(
            options,
            setup,
            &sites,
            &small,
            "RDMA Writes of 8 B in batches of 32, one busy QP",
        )?,
        one_busy(options, setup, &sites, &bulk, "RDMA Writes of 1 MiB, one busy QP")?,
        several_busy(options, setup, &sites, &small)?,
    ])
}

fn one_busy(
    options: &Options<'_>,
    setup: Setup,
    sites: &[Site; 2],
    spec: &Spec,
    subject: &str,
) -> Result<Row, PerfError> {
    let mut ends = sites.iter().map(Site::open).collect::<Result<Vec<_>, _>>()?;
    let mut drivers = Vec::new();
    for ends in &mut ends {
        drivers.push(Driver::new(&ends.context, &mut ends.peer, spec)?);
    }
    let warm = |driver: &mut Driver<'_>| driver.prepare(options.amount);
    let mut all = drivers.iter_mut().map(warm).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..options.rounds {
        for (driver, measured) in drivers.iter_mut().zip(&mut all) {
            driver.round(measured)?;
        }
    }
    let series = all.into_iter().map(|measured| measured.rates).collect();
    let path = drivers[0].path().to_owned();
    Ok(judged(subject.to_owned(), &path, setup, spec, series, Some(Goal::AtLeast(0.95))))
}

/// Measures the total rate of pairs of processes that stream at the same time.
fn several_busy(
    options: &Options<'_>,
    setup: Setup,
    sites: &[Site; 2],
    spec: &Spec,
) -> Result<Row, PerfError> {
    let mut loads = Vec::new();
    for site in sites {
        let start = |_| Load::start(site, spec, None);
        loads.push((0..PAIRS).map(start).collect::<Result<Vec<_>, _>>()?);
    }
    let mut rates = vec![Series::default(); loads.len()];
    for _ in 0..options.rounds {
        for (loads, rates) in loads.iter_mut().zip(&mut rates) {
            loads.iter_mut().try_for_each(Load::go)?;
            sleep(options.time());
            loads.iter_mut().try_for_each(Load::stop)?;
            rates.push(loads.iter_mut().map(Load::rate).sum::<Result<f64, _>>()?);
        }
    }
    let subject = format!("RDMA Writes of 8 B in batches of 32, {PAIRS} pairs of processes");
    Ok(judged(subject, setup.path(), setup, spec, rates, None))
}

/// Creates a row of the rates with two workers and with one worker.
fn judged(
    subject: String,
    path: &str,
    setup: Setup,
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
    row(subject, Kind::Of(Measure::Rate), path, setup, spec, figures, goal)
}

/// Number of pairs.
const PAIRS: u32 = 3;
