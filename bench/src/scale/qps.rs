//! Cost of a Write while other connected QPs are idle.

use rnic_client::Context;
use rnic_tools::perf::PerfError;
use rnic_tools::perf::spec::{Flow, Op, Spec};

use super::costs::{Case, Costs, costs};
use super::row::{FLAT, row, up_to};
use crate::daemon::Setup;
use crate::report::{Goal, Kind, Row};
use crate::site::{Options, Site};

/// Measures with 10, 100 and 1000 QPs and with the maximum.
pub fn measure(options: &Options<'_>, qps: u32, setup: Setup) -> Result<Vec<Row>, PerfError> {
    let counts = up_to(qps.max(ACTIVE), &[ACTIVE, 100, 1000]);
    let (costs, ()) = few_and_many(options, setup, &counts, |_| Ok(()))?;
    Ok(vec![cost_of_qps(setup, &costs, FLAT)])
}

/// Measures with each number of QPs per daemon, of which ten have traffic. `counts` must be
/// ascending. Then calls `then` with the daemon that has the most QPs.
pub fn few_and_many<T>(
    options: &Options<'_>,
    setup: Setup,
    counts: &[u32],
    then: impl FnOnce(&Context) -> Result<T, PerfError>,
) -> Result<(Costs, T), PerfError> {
    let case = |&qps: &u32| {
        let active = setup.connections(ACTIVE);
        Ok(Case {
            what: format!("{qps} QPs"),
            site: Site::start(options.rnicd, Setup { qps: qps + 16, ..setup })?,
            spec: Spec { qps: setup.connections(qps).max(active), active, ..work() },
        })
    };
    let cases = counts.iter().rev().map(case).collect::<Result<Vec<_>, PerfError>>()?;
    costs(cases, options, then)
}

/// Returns the row of the results of [`few_and_many`].
pub fn cost_of_qps(setup: Setup, costs: &Costs, goal: Goal) -> Row {
    let Case { what, spec, .. } = &costs.cases[0];
    let subject = format!("cost per RDMA Write of 8 B, {what} per daemon of which {ACTIVE} active");
    row(subject, Kind::Cost, &costs.path, setup, spec, costs.figures.clone(), Some(goal))
}

/// Returns a stream of unbatched Writes, at most sixteen outstanding.
pub fn work() -> Spec {
    Spec::new(Op::Write, Flow::Stream, 8).stream(DEPTH, 1, 8 * u64::from(DEPTH))
}

/// QPs with traffic per daemon.
pub const ACTIVE: u32 = 10;
const DEPTH: u32 = 16;
