//! Measures the same stream beside different numbers of objects, in turn.

use super::super::bench::{Amount, Bench, Measured, Subject};
use super::super::error::PerfError;
use super::super::footprint::MemoryUse;
use super::super::report::Figure;
use super::super::site::Site;
use super::super::spec::Spec;
use super::super::stats::Series;

/// A stream with its own daemons.
pub struct Case {
    /// Description of the objects beside it.
    pub what: String,
    /// Daemons of the case.
    pub site: Site,
    /// The stream, and the additional objects of its ends.
    pub spec: Spec,
}

/// Results, in the order of the cases.
pub struct Costs {
    /// Nanoseconds per message.
    pub figures: Vec<Figure>,
    /// Memory that the driver's daemon used for the ends.
    pub memory: Vec<MemoryUse>,
    /// The path of the connections.
    pub path: String,
}

/// Connects all cases, then measures one after the other, round by round.
pub fn costs(cases: &[Case], amount: Amount, rounds: u32) -> Result<Costs, PerfError> {
    let open = |case: &Case| case.site.open();
    let mut ends = cases.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let mut benches = Vec::new();
    let mut memory = Vec::new();
    for (case, ends) in cases.iter().zip(&mut ends) {
        let before = MemoryUse::of(&ends.context)?;
        let bench = Bench::new(&ends.context, &mut ends.peer, &case.spec, &[Subject::Rdma])?;
        let after = MemoryUse::of(&ends.context)?;
        memory.push(MemoryUse {
            anonymous: after.anonymous.saturating_sub(before.anonymous),
            arenas: after.arenas.saturating_sub(before.arenas),
        });
        benches.push(bench);
    }
    let warm = |bench: &mut Bench<'_>| bench.prepare(Subject::Rdma, amount);
    let mut all = benches.iter_mut().map(warm).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..rounds {
        for (bench, measured) in benches.iter_mut().zip(&mut all) {
            bench.round(measured)?;
        }
    }
    let figure = |(case, measured): (&Case, &Measured)| {
        let rounds = measured.rates.rounds.iter().map(|rate| 1e9 / rate).collect();
        Figure::new(&case.what, "ns", measured.count, Series { rounds })
    };
    Ok(Costs {
        figures: cases.iter().zip(&all).map(figure).collect(),
        memory,
        path: benches.first().map_or_else(String::new, |bench| bench.path().to_owned()),
    })
}
