//! Cost of a Write, and rate of registrations, with unused regions.

use std::time::Instant;

use rnic_tools::perf::PerfError;
use rnic_tools::perf::end::many_regions;
use rnic_tools::perf::peer::open;
use rnic_tools::perf::report::Figure;
use rnic_tools::perf::spec::{Measure, Spec};
use rnic_tools::perf::stats::Series;

use super::costs::{Case, costs};
use super::qps::work;
use super::row::{FLAT, STEADY, row};
use crate::daemon::Setup;
use crate::report::{Kind, Outcome, Row};
use crate::site::{Options, Site};

/// Measures Writes on any path. Registration has no path, and is measured with the direct path.
pub fn measure(options: &Options<'_>, qps: u32, setup: Setup) -> Result<Vec<Row>, PerfError> {
    let most = qps.saturating_mul(10);
    let mut rows = writes(options, setup, most)?;
    if setup.daemons == 1 {
        rows.extend(registering(options, setup, most)?);
    }
    Ok(rows)
}

/// Measures Writes into a session with many regions.
fn writes(options: &Options<'_>, setup: Setup, most: u32) -> Result<Vec<Row>, PerfError> {
    let case = |regions: u32| {
        Ok(Case {
            what: match regions {
                1 => "one region".to_owned(),
                n => format!("{n} regions"),
            },
            site: Site::start(options.rnicd, setup)?,
            // One region is the target of the Writes.
            spec: Spec { regions: regions - 1, ..work() },
        })
    };
    let counts = [most, most / 100, 1].map(|n| n.max(1));
    let cases = counts.into_iter().map(case).collect::<Result<Vec<_>, PerfError>>()?;
    let (measured, ()) = costs(cases, options, |_| Ok(()))?;
    let mut rows = vec![row(
        format!("cost per RDMA Write of 8 B, {most} regions in the session written to"),
        Kind::Cost,
        &measured.path,
        setup,
        &measured.cases[0].spec,
        measured.figures,
        Some(FLAT),
    )];
    if setup.daemons == 1 {
        let grown = measured.memory[0].anonymous.saturating_sub(measured.memory[2].anonymous);
        let bytes = grown as f64 / f64::from(most);
        let figures = vec![Figure::single("anonymous", "B", bytes)];
        let path = &measured.path;
        let what = format!("daemon's anonymous memory per region, {most} of one shared buffer");
        let mut memory =
            row(what, Kind::Daemon, path, setup, &measured.cases[0].spec, figures, None);
        memory.outcomes = vec![Outcome::new("", bytes, "B", None)];
        rows.push(memory);
    }
    Ok(rows)
}

/// Measures registrations in sessions with many and with few regions.
fn registering(options: &Options<'_>, setup: Setup, most: u32) -> Result<Vec<Row>, PerfError> {
    let counts = [most, (most / 100).max(1)];
    let mut cases = Vec::new();
    for count in counts {
        let site = Site::start(options.rnicd, setup)?;
        let context = open(site.socket())?;
        let pd = context.open_pd(None)?;
        let idle = many_regions(&context, &pd, count)?;
        cases.push((site, context, pd, idle));
    }
    let mut made = vec![Series::default(); 2];
    let mut ended = vec![Series::default(); 2];
    // The first round warms up.
    for round in 0..=options.rounds {
        for (n, (_, context, pd, _)) in cases.iter().enumerate() {
            let start = Instant::now();
            let regions = many_regions(context, pd, PIECE)?;
            let registered = start.elapsed();
            let start = Instant::now();
            drop(regions);
            let deregistered = start.elapsed();
            if round > 0 {
                made[n].push(f64::from(PIECE) / registered.as_secs_f64() / 1e3);
                ended[n].push(f64::from(PIECE) / deregistered.as_secs_f64() / 1e3);
            }
        }
    }
    let row = |what: &str, series: Vec<Series>| {
        let figure = |(count, series): (&u32, Series)| {
            Figure::new(format!("{count} regions"), "k/s", u64::from(PIECE), series)
        };
        let figures = counts.iter().zip(series).map(figure).collect();
        let subject = format!("{what}, {most} in the session");
        let row = row(subject, Kind::Of(Measure::Rate), "", setup, &work(), figures, Some(STEADY));
        Row { spec: None, ..row }
    };
    Ok(vec![row("regions registered", made), row("regions deregistered", ended)])
}

/// Regions registered and deregistered per round.
const PIECE: u32 = 4000;
