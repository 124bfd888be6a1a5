//! Connection rate beside many established connections.

use super::super::bench::{Bench, Subject};
use super::super::daemon::Setup;
use super::super::error::PerfError;
use super::super::report::{Figure, Measure, Row};
use super::super::site::Site;
use super::super::spec::Spec;
use super::super::stats::Series;
use super::qps::work;
use super::{Place, STEADY, ScaleOptions, row};

/// Measures the rate of connections made one after the other (connect, accept, established at both
/// ends), beside the maximum number of connections, a tenth of it, and a single connection.
pub fn measure(options: &ScaleOptions<'_>, place: Place) -> Result<Vec<Row>, PerfError> {
    let counts = [options.qps, options.qps / 10, 1];
    let per_connection = 3 - place.daemons;
    let room = PIECE * per_connection + 16;
    let mut sites = Vec::new();
    for qps in counts {
        let setup = Setup { qps: qps + room, ..place.setup };
        sites.push(Site::start(options.rnicd, setup, place.daemons)?);
    }
    let mut ends = sites.iter().map(Site::open).collect::<Result<Vec<_>, _>>()?;
    let mut benches = Vec::new();
    let mut contexts = Vec::new();
    for (qps, ends) in counts.iter().zip(&mut ends) {
        let spec = Spec { qps: place.connections(*qps), ..work() };
        benches.push(Bench::new(&ends.context, &mut ends.peer, &spec, &[Subject::Rdma])?);
        contexts.push(&ends.context);
    }
    let more = Spec { qps: PIECE, ..work() };
    let mut rates = vec![Series::default(); counts.len()];
    // The first round warms up.
    for round in 0..=options.rounds {
        for (n, bench) in benches.iter_mut().enumerate() {
            let rate = bench.connect_more(contexts[n], &more)?;
            if round > 0 {
                rates[n].push(rate / 1e3);
            }
        }
    }
    let figure = |(qps, series): (&u32, Series)| {
        let standing = place.connections(*qps);
        let what = match standing {
            1 => "beside one connection".to_owned(),
            n => format!("beside {n} connections"),
        };
        Figure::new(what, "k/s", u64::from(PIECE), series)
    };
    let figures = counts.iter().zip(rates).map(figure).collect();
    let subject = format!("connections made, {} QPs per daemon connected", options.qps);
    let path = benches[0].path().to_owned();
    Ok(vec![row(subject, Measure::Rate, &path, place, &more, figures, Some(STEADY))])
}

/// Connections per round.
const PIECE: u32 = 400;
