//! Cost of a Write beside idle connected QPs.

use std::path::Path;

use super::super::bench::Amount;
use super::super::daemon::Setup;
use super::super::error::PerfError;
use super::super::report::{Goal, Measure, Row};
use super::super::site::Site;
use super::super::spec::{Flow, Op, Spec};
use super::{Case, FLAT, Place, ScaleOptions, costs, row, up_to};

/// Measures with 10, 100 and 1000 QPs and with the maximum.
pub fn measure(options: &ScaleOptions<'_>, place: Place) -> Result<Vec<Row>, PerfError> {
    let counts = up_to(options.qps.max(ACTIVE), &[ACTIVE, 100, 1000]);
    Ok(vec![few_and_many(options.rnicd, place, &counts, FLAT, options.amount, options.rounds)?])
}

/// Measures with each number of QPs per daemon, of which ten have traffic.
pub fn few_and_many(
    rnicd: &Path,
    place: Place,
    counts: &[u32],
    goal: Goal,
    amount: Amount,
    rounds: u32,
) -> Result<Row, PerfError> {
    let case = |&qps: &u32| {
        let setup = Setup { qps: qps + 16, ..place.setup };
        let active = place.connections(ACTIVE);
        let connected = place.connections(qps).max(active);
        Ok(Case {
            what: format!("{qps} QPs"),
            site: Site::start(rnicd, setup, place.daemons)?,
            spec: Spec { qps: connected, active, ..work() },
        })
    };
    let cases = counts.iter().rev().map(case).collect::<Result<Vec<_>, PerfError>>()?;
    let measured = costs(&cases, amount, rounds)?;
    let most = counts.last().copied().unwrap_or(ACTIVE);
    Ok(row(
        format!("cost per RDMA Write of 8 B, {most} QPs per daemon of which {ACTIVE} active"),
        Measure::Cost,
        &measured.path,
        place,
        &cases[0].spec,
        measured.figures,
        Some(goal),
    ))
}

/// Returns a stream of single Writes, up to sixteen of them outstanding.
pub fn work() -> Spec {
    Spec::new(Op::Write, Flow::Stream, 8).stream(DEPTH, 1, 8 * u64::from(DEPTH))
}

/// QPs of a daemon with traffic.
const ACTIVE: u32 = 10;
const DEPTH: u32 = 16;
