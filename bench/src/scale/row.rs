//! Rows that compare many objects with few.

use rnic_tools::perf::report::Figure;
use rnic_tools::perf::spec::Spec;

use crate::daemon::Setup;
use crate::report::{Goal, Kind, Outcome, Row};

/// Returns the counts below `most`, and `most`.
pub fn up_to(most: u32, counts: &[u32]) -> Vec<u32> {
    let mut all: Vec<u32> = counts.iter().copied().filter(|count| *count < most).collect();
    all.push(most);
    all
}

/// Returns a row whose outcomes are ratios of the first result, which must be of the most objects,
/// to each other result. The goal applies to the ratio to the last result, of the fewest objects.
pub fn row(
    subject: String,
    kind: Kind,
    path: &str,
    setup: Setup,
    spec: &Spec,
    figures: Vec<Figure>,
    goal: Option<Goal>,
) -> Row {
    let first = figures.first().map_or(0.0, |figure| figure.median);
    let last = figures.len().saturating_sub(1);
    let outcome = |(n, figure): (usize, &Figure)| {
        Outcome::new(&figure.what, first / figure.median, "", goal.filter(|_| n == last))
    };
    let outcomes = figures.iter().enumerate().skip(1).map(outcome).collect();
    Row { spec: Some(spec.clone()), outcomes, ..Row::of(subject, kind, path, setup, figures) }
}

/// Goal for the cost with the most objects relative to the fewest.
pub const FLAT: Goal = Goal::AtMost(1.1);
/// Goal for the rate with the most objects relative to the fewest.
pub const STEADY: Goal = Goal::AtLeast(0.8);

#[cfg(test)]
mod tests {
    use rnic_tools::perf::spec::{Flow, Op};

    use super::*;

    #[test]
    fn goal_compares_most_with_fewest_objects() {
        let figure = |what: &str, ns| Figure::single(what, "ns", ns);
        let figures = vec![figure("1000", 126.0), figure("100", 105.0), figure("10", 120.0)];
        let spec = Spec::new(Op::Write, Flow::Stream, 8);
        let cost = "cost".to_owned();
        let setup = Setup::DIRECT;
        let row = row(cost, Kind::Cost, "direct", setup, &spec, figures, Some(FLAT));
        let judged: Vec<_> = row.outcomes.iter().map(|o| (o.of.as_str(), o.met)).collect();
        assert_eq!(judged, [("100", None), ("10", Some(true))]);
        assert!((row.outcomes[0].value - 1.2).abs() < 1e-9);
    }

    #[test]
    fn counts_end_with_the_maximum() {
        assert_eq!(up_to(10_000, &[10, 100, 1000]), [10, 100, 1000, 10_000]);
        assert_eq!(up_to(200, &[10, 100, 1000]), [10, 100, 200]);
        assert_eq!(up_to(1, &[0, 100]), [0, 1]);
    }
}
