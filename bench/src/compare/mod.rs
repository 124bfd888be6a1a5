//! `rnic-bench compare`: measurements interleaved with other projects' benchmarks on the same
//! machine.
//!
//! Each round has one measurement of rnicd, between the same two processes as in other commands,
//! and two runs of each other program with its own server and client: one placed by the scheduler,
//! one with server and client pinned to separate CPUs. The result of a program is the better of the
//! two medians. A failed measurement is a row with the reason.

mod foreign;
mod pair;
mod plot;
mod sweep;
mod table;

use std::time::Duration;

use rnic_tools::perf::PerfError;
use rnic_tools::perf::driver::Driver;
use rnic_tools::perf::measured::Measured;
use rnic_tools::perf::report::Figure;
use rnic_tools::perf::spec::{Measure, Spec};
use rnic_tools::perf::stats::Series;

use self::foreign::Foreign;
use self::pair::{installed, run_on_free_port};
use self::sweep::{Compared, Sweep};
use crate::bench::Subject;
use crate::placement::Placement;
use crate::report::{Kind, Outcome, Row};
use crate::site::{Ends, Options, Site};

pub use self::plot::draw;
pub use self::sweep::SIZES;
pub use self::table::render;

/// Runs all selected comparisons.
pub fn compare(
    options: &Options<'_>,
    sizes: &[u32],
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Compared>, PerfError> {
    let sweeps: Vec<Sweep> = sweep::ALL
        .into_iter()
        .filter(|sweep| {
            let title = sweep.title().to_lowercase();
            options.only.to_lowercase().split(',').any(|part| title.contains(part.trim()))
        })
        .collect();
    if sweeps.is_empty() {
        let titles: Vec<_> = sweep::ALL.iter().map(|sweep| sweep.title()).collect();
        return Err(PerfError::Arguments(format!(
            "no title contains --only {:?}:\n{}",
            options.only,
            titles.join("\n")
        )));
    }
    for &size in sizes {
        sweeps.iter().try_for_each(|sweep| sweep.spec(size).check())?;
    }
    let mut all = Vec::new();
    for same_daemons in sweeps.chunk_by(|a, b| a.path == b.path) {
        let Some(first) = same_daemons.first() else { continue };
        let setup = first.path.setup();
        let site = Site::start(options.rnicd, setup)?;
        for sweep in same_daemons {
            let mut rows = Vec::new();
            for &size in sizes.iter().filter(|size| sweep.has(**size)) {
                progress(&format!("{}, {size} B", sweep.title()));
                let mut ends = site.open()?;
                rows.extend(one_size(options, &mut ends, *sweep, size)?);
            }
            all.push(Compared { sweep: *sweep, rows });
        }
    }
    Ok(all)
}

/// Measures all rounds of one size. Returns the row with the results, and a row for each failure.
fn one_size(
    options: &Options<'_>,
    ends: &mut Ends,
    sweep: Sweep,
    size: u32,
) -> Result<Vec<Row>, PerfError> {
    let spec = sweep.spec(size);
    let mut driver = Driver::new(&ends.context, &mut ends.peer, &spec)?;
    let mut own = driver.prepare(options.amount)?;
    let mut others: Vec<Other> = sweep
        .foreign()
        .into_iter()
        .flat_map(|foreign| {
            [Placement::Free, Placement::Apart].map(|placement| (foreign, placement))
        })
        .map(|(foreign, at)| Other::prepare(foreign, at, sweep.kind, size, options.time()))
        .collect();
    for _ in 0..options.rounds {
        driver.round(&mut own)?;
        others.iter_mut().for_each(|other| other.round());
    }
    Ok(rows(sweep, &spec, driver.path(), own, others))
}

fn rows(sweep: Sweep, spec: &Spec, path: &str, own: Measured, others: Vec<Other>) -> Vec<Row> {
    let mut row =
        Row::new(sweep.kind, spec, path, &sweep.path.setup().words(), &[(Subject::Rdma, own)], &[]);
    // The other programs print only one result per run.
    row.figures.iter_mut().for_each(|figure| figure.times = None);
    let mut failed = Vec::new();
    for other in best_of_each(others) {
        if let Some(why) = other.failure {
            let title = format!("{} for {}", other.foreign.name(), row.subject);
            failed.push(Row::failed(title, Kind::Of(sweep.kind), sweep.path.setup(), why));
            continue;
        }
        let name = format!("{}{}", other.foreign.name(), other.placement.words());
        let unit = row.figures.first().map_or("", |figure| figure.unit);
        let figure = Figure::new(name, unit, other.count, other.series);
        let ours = row.figures.first().map_or(0.0, |figure| figure.median);
        let goal = sweep.goal(spec.size, other.foreign);
        row.outcomes.push(Outcome::new(&figure.what, ours / figure.median, "", goal));
        row.figures.push(figure);
    }
    failed.insert(0, row);
    failed
}

/// Another project's program being measured.
struct Other {
    foreign: Foreign,
    kind: Measure,
    size: u32,
    placement: Placement,
    /// Messages, or round trips, per run.
    count: u64,
    /// Results in the unit of the row.
    series: Series,
    failure: Option<String>,
}

impl Other {
    /// Determines the number of messages per round.
    fn prepare(
        foreign: Foreign,
        placement: Placement,
        kind: Measure,
        size: u32,
        time: Duration,
    ) -> Self {
        let count = first_count(size);
        let mut other = Other {
            foreign,
            kind,
            size,
            placement,
            count,
            series: Series::default(),
            failure: None,
        };
        if installed(foreign.program()).is_none() {
            let program = foreign.program();
            let package = foreign.package();
            let why = format!("{program} is not installed (Debian package {package})");
            return Other { failure: Some(why), ..other };
        }
        match other.run() {
            Ok(seconds) => {
                other.count = ((time.as_secs_f64() / seconds) as u64).clamp(LEAST, MOST);
            }
            Err(why) => other.failure = Some(why),
        }
        other
    }

    fn round(&mut self) {
        if self.failure.is_some() {
            return;
        }
        match self.run() {
            Ok(seconds) => self.series.push(match self.kind {
                Measure::Lat => seconds * 1e6 / 2.0,
                Measure::Rate => 1e-6 / seconds,
                _ => f64::from(self.size) / seconds / 1e9,
            }),
            Err(why) => self.failure = Some(why),
        }
    }

    /// Runs the program. Returns seconds per message or round trip.
    fn run(&self) -> Result<f64, String> {
        let pair = |port| self.foreign.pair(self.size, self.count, port);
        let printed = run_on_free_port(pair, self.placement)?;
        let figure = self.foreign.figure(self.kind, &printed)?;
        Ok(match self.kind {
            Measure::Lat => 2.0 * figure * 1e-6,
            _ => 1.0 / figure,
        })
    }
}

/// Returns for each program the placement with the best median, or a failed placement if all have
/// failed.
fn best_of_each(others: Vec<Other>) -> Vec<Other> {
    let speed = |other: &Other| {
        let median = other.series.median().filter(|_| other.failure.is_none());
        match other.kind {
            Measure::Lat => median.map_or(f64::NEG_INFINITY, |us| -us),
            _ => median.unwrap_or(f64::NEG_INFINITY),
        }
    };
    let mut best: Vec<Other> = Vec::new();
    for other in others {
        match best.iter_mut().find(|known| known.foreign == other.foreign) {
            Some(known) if speed(&other) > speed(known) => *known = other,
            Some(_) => {}
            None => best.push(other),
        }
    }
    best
}

/// Returns the number of messages for a first run of some tens of milliseconds.
fn first_count(size: u32) -> u64 {
    (FIRST_BYTES / u64::from(size.max(1))).clamp(LEAST, 10_000)
}

const FIRST_BYTES: u64 = 64 << 20;
const LEAST: u64 = 50;
const MOST: u64 = 50_000_000;

#[cfg(test)]
mod tests {
    use rnic_tools::perf::measured::Amount;
    use std::path::Path;

    use super::foreign::{Test, Transport};
    use super::*;

    fn other(test: Test, at: Placement, rounds: &[f64], failure: Option<&str>) -> Other {
        Other {
            foreign: Foreign { transport: Transport::Tcp, test },
            kind: Measure::Lat,
            size: 8,
            placement: at,
            count: 10,
            series: Series { rounds: rounds.to_vec() },
            failure: failure.map(str::to_owned),
        }
    }

    #[test]
    fn foreign_figures_and_failures_make_rows() {
        let sweep = sweep::ALL[4];
        let medians_us = Series { rounds: vec![12.0, 12.0, 12.0] };
        let own = Measured { count: 10, medians_us, ..Measured::default() };
        let others = vec![
            other(Test::TagLat, Placement::Free, &[9.0, 9.5, 1.0], None),
            other(Test::TagLat, Placement::Apart, &[5.0, 4.0, 9.0], None),
            other(Test::PutLat, Placement::Free, &[], Some("ended with exit status: 1")),
            other(Test::PutLat, Placement::Apart, &[3.0], None),
            other(Test::PingPong, Placement::Free, &[], Some("fi_pingpong is not installed")),
            other(Test::PingPong, Placement::Apart, &[], Some("fi_pingpong is not installed")),
        ];
        let rows = rows(sweep, &sweep.spec(8), "tcp", own, others);
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].figures[1].what, "UCX tcp tag_lat, two CPUs");
        assert!((rows[0].outcomes[0].value - 1.2).abs() < 1e-9);
        assert_eq!(rows[0].outcomes[0].met, Some(true));
        assert_eq!(rows[0].figures[2].what, "UCX tcp ucp_put_lat, two CPUs");
        assert!(rows[1].failure.as_deref().unwrap().contains("not installed"));
    }

    #[test]
    fn an_unknown_selection_is_refused() {
        let options = Options {
            rnicd: Path::new("/bin/false"),
            only: "infiniband",
            amount: Amount::Messages(1),
            rounds: 1,
        };
        let e = compare(&options, &[8], &mut |_| ()).err().unwrap().to_string();
        assert!(e.contains("infiniband") && e.contains("direct path: Send"), "{e}");
    }

    #[test]
    fn a_first_run_is_short_for_every_size() {
        assert_eq!(first_count(8), 10_000);
        assert_eq!(first_count(1 << 20), 64);
        assert_eq!(first_count(1 << 30), 50);
    }
}
