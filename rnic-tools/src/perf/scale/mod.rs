//! Costs that grow with the number of idle objects, and the effect of a second worker.
//!
//! Most parts measure the same work beside few and beside many idle objects, in turn, on separate
//! private daemons. The first result of a row has the most objects. The goal applies to its ratio
//! to the result with the fewest objects: idle objects should cost nothing.

mod connections;
mod costs;
mod qps;
mod regions;
mod sessions;
mod workers;

use std::path::Path;

use super::bench::Amount;
use super::daemon::Setup;
use super::error::PerfError;
use super::only::TitleFilter;
use super::report::{Figure, Goal, Measure, Outcome, Row};
use super::site::words;
use super::spec::Spec;

pub use costs::{Case, costs};
pub use qps::few_and_many;

/// Options of `rnic-perf scale`.
pub struct ScaleOptions<'a> {
    /// The daemon's binary.
    pub rnicd: &'a Path,
    /// Maximum QPs of each daemon; ten times as many regions, a tenth as many sessions.
    pub qps: u32,
    /// Selects measurements by a part of their title.
    pub only: &'a str,
    /// Length of a round of each subject.
    pub amount: Amount,
    /// Number of rounds; the result is the median.
    pub rounds: u32,
}

/// Measures all selected parts. A failed measurement is a row with the reason.
pub fn scale(
    options: &ScaleOptions<'_>,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, PerfError> {
    let parts: [(&str, Part); 5] = [
        ("qps", qps::measure),
        ("regions", regions::measure),
        ("sessions", sessions::measure),
        ("connections", connections::measure),
        ("workers", workers::measure),
    ];
    let mut rows = Vec::new();
    let mut only = TitleFilter::new(options.only);
    for (name, part) in parts {
        for (path, place) in [("direct", Place::DIRECT), ("tcp", Place::TCP)] {
            let title = format!("{name}, {path}");
            if !only.selects(&title) {
                continue;
            }
            progress(&title);
            match part(options, place) {
                Ok(more) => rows.extend(more),
                Err(e) => {
                    let why = e.to_string();
                    rows.push(Row::failed(title, Measure::Daemon, &place.words(), why));
                }
            }
        }
    }
    only.check()?;
    Ok(rows)
}

/// Measures one part on one path.
type Part = fn(&ScaleOptions<'_>, Place) -> Result<Vec<Row>, PerfError>;

/// Daemons of one configuration.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Setup of each daemon.
    pub setup: Setup,
    /// One daemon, or one for each end.
    pub daemons: u32,
}

impl Place {
    /// Both ends use the same daemon.
    pub const DIRECT: Place = Place { setup: Setup::DIRECT, daemons: 1 };
    /// Each end uses its own daemon.
    pub const TCP: Place = Place { setup: Setup::TCP, daemons: 2 };

    fn words(self) -> String {
        words(self.setup, self.daemons)
    }

    /// Returns the number of connections that gives each daemon `qps` QPs. A daemon has one end of
    /// each connection, or both.
    fn connections(self, qps: u32) -> u32 {
        (qps / (3 - self.daemons)).max(1)
    }
}

/// Returns the counts below `most`, and `most`.
fn up_to(most: u32, counts: &[u32]) -> Vec<u32> {
    let mut all: Vec<u32> = counts.iter().copied().filter(|count| *count < most).collect();
    all.push(most);
    all
}

/// Creates a row. Its first result must have the most objects; the goal applies to the ratio to the
/// last result.
fn row(
    subject: String,
    kind: Measure,
    path: &str,
    place: Place,
    spec: &Spec,
    figures: Vec<Figure>,
    goal: Option<Goal>,
) -> Row {
    let first = figures.first().map_or(0.0, |figure| figure.median);
    let last = figures.len().saturating_sub(1);
    let outcome = |(n, figure): (usize, &Figure)| {
        Outcome::new(&figure.what, first / figure.median, "", goal.filter(|_| n == last))
    };
    Row {
        subject,
        manner: String::new(),
        kind,
        path: path.to_owned(),
        daemons: place.words(),
        spec: Some(spec.clone()),
        outcomes: figures.iter().enumerate().skip(1).map(outcome).collect(),
        figures,
        failure: None,
    }
}

/// Goal for a cost with more objects.
const FLAT: Goal = Goal::AtMost(1.1);
/// Goal for a rate with more objects.
const STEADY: Goal = Goal::AtLeast(0.8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_goal_is_about_the_most_against_the_fewest() {
        let figure = |what: &str, ns| Figure::single(what, "ns", ns);
        let figures = vec![figure("1000", 126.0), figure("100", 105.0), figure("10", 120.0)];
        let spec = qps::work();
        let cost = "cost".to_owned();
        let place = Place::DIRECT;
        let row = row(cost, Measure::Cost, "direct", place, &spec, figures, Some(FLAT));
        let judged: Vec<_> = row.outcomes.iter().map(|o| (o.of.as_str(), o.met)).collect();
        assert_eq!(judged, [("100", None), ("10", Some(true))]);
        assert!((row.outcomes[0].value - 1.2).abs() < 1e-9);
    }

    #[test]
    fn counts_go_up_to_the_most() {
        assert_eq!(up_to(10_000, &[10, 100, 1000]), [10, 100, 1000, 10_000]);
        assert_eq!(up_to(200, &[10, 100, 1000]), [10, 100, 200]);
        assert_eq!(up_to(1, &[0, 100]), [0, 1]);
    }

    #[test]
    fn a_wrong_binary_fails_every_part() {
        let options = ScaleOptions {
            rnicd: Path::new("/bin/false"),
            qps: 20,
            only: "",
            amount: Amount::Messages(1),
            rounds: 1,
        };
        let rows = scale(&options, &mut |_| ()).unwrap();
        assert_eq!(rows.len(), 10);
        assert!(rows.iter().all(|row| row.failure.is_some()));
        let options = ScaleOptions { only: "regions, tcp", ..options };
        assert_eq!(scale(&options, &mut |_| ()).unwrap().len(), 1);
    }
}
