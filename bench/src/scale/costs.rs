//! Measures the same stream with different numbers of objects, alternately.

use rnic_client::Context;
use rnic_tools::perf::PerfError;
use rnic_tools::perf::driver::Driver;
use rnic_tools::perf::measured::Measured;
use rnic_tools::perf::report::Figure;
use rnic_tools::perf::spec::Spec;
use rnic_tools::perf::stats::Series;

use crate::footprint::MemoryUse;
use crate::site::{Options, Site};

/// A stream with its own daemons.
pub struct Case {
    /// Description of the other objects.
    pub what: String,
    /// Daemons of the case.
    pub site: Site,
    /// The stream, and the additional objects of its ends.
    pub spec: Spec,
}

/// Results, in the order of the cases.
pub struct Costs {
    /// The cases.
    pub cases: Vec<Case>,
    /// Nanoseconds per message.
    pub figures: Vec<Figure>,
    /// Memory that the driver's daemon used for the ends.
    pub memory: Vec<MemoryUse>,
    /// The path of the connections.
    pub path: String,
}

/// Connects all cases, then measures each case once per round. Then calls `then` with the first
/// case's daemon, which is idle and still has all objects.
pub fn costs<T>(
    cases: Vec<Case>,
    options: &Options<'_>,
    then: impl FnOnce(&Context) -> Result<T, PerfError>,
) -> Result<(Costs, T), PerfError> {
    let open = |case: &Case| case.site.open();
    let mut ends = cases.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let mut drivers = Vec::new();
    let mut memory = Vec::new();
    for (case, ends) in cases.iter().zip(&mut ends) {
        let before = MemoryUse::of(&ends.context)?;
        let driver = Driver::new(&ends.context, &mut ends.peer, &case.spec)?;
        let after = MemoryUse::of(&ends.context)?;
        memory.push(MemoryUse {
            anonymous: after.anonymous.saturating_sub(before.anonymous),
            arenas: after.arenas.saturating_sub(before.arenas),
        });
        drivers.push(driver);
    }
    let warm = |driver: &mut Driver<'_>| driver.prepare(options.amount);
    let mut all = drivers.iter_mut().map(warm).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..options.rounds {
        for (driver, measured) in drivers.iter_mut().zip(&mut all) {
            driver.round(measured)?;
        }
    }
    let figure = |(case, measured): (&Case, &Measured)| {
        let rounds = measured.rates.rounds.iter().map(|rate| 1e9 / rate).collect();
        Figure::new(&case.what, "ns", measured.count, Series { rounds })
    };
    let figures = cases.iter().zip(&all).map(figure).collect();
    let path = drivers.first().map_or_else(String::new, |driver| driver.path().to_owned());
    let then = then(&ends[0].context)?;
    Ok((Costs { cases, figures, memory, path }, then))
}
