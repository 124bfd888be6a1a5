//! Connection rate with many established connections.

use rnic_tools::perf::PerfError;
use rnic_tools::perf::driver::Link;
use rnic_tools::perf::report::Figure;
use rnic_tools::perf::spec::{Measure, Spec};
use rnic_tools::perf::stats::Series;

use super::qps::work;
use super::row::{STEADY, row};
use crate::daemon::Setup;
use crate::report::{Kind, Row};
use crate::site::{Options, Site};

/// Measures the rate of sequential connections (connect, accept, established at both ends) while
/// the maximum number of connections, a tenth of it, or one connection exists.
pub fn measure(options: &Options<'_>, qps: u32, setup: Setup) -> Result<Vec<Row>, PerfError> {
    let counts = [qps, qps / 10, 1];
    let per_connection = 3 - setup.daemons;
    let room = PIECE * per_connection + 16;
    let mut sites = Vec::new();
    for qps in counts {
        let setup = Setup { qps: qps + room, ..setup };
        sites.push(Site::start(options.rnicd, setup)?);
    }
    let mut ends = sites.iter().map(Site::open).collect::<Result<Vec<_>, _>>()?;
    let mut links = Vec::new();
    for (qps, ends) in counts.iter().zip(&mut ends) {
        let spec = Spec { qps: setup.connections(*qps), ..work() };
        links.push(Link::new(&ends.context, &mut ends.peer, &spec, 0)?);
    }
    let more = Spec { qps: PIECE, ..work() };
    let mut rates = vec![Series::default(); counts.len()];
    // The first round warms up.
    for round in 0..=options.rounds {
        for (ends, rates) in ends.iter_mut().zip(&mut rates) {
            let connecting = Link::new(&ends.context, &mut ends.peer, &more, 1)?.connecting;
            // Creating the next end destroys the peer's QPs.
            let one = Spec { qps: 1, active: 1, ..more.clone() };
            Link::new(&ends.context, &mut ends.peer, &one, 1)?;
            if round > 0 {
                rates.push(f64::from(PIECE) / connecting.as_secs_f64() / 1e3);
            }
        }
    }
    let figure = |(qps, series): (&u32, Series)| {
        let standing = setup.connections(*qps);
        let what = match standing {
            1 => "beside one connection".to_owned(),
            n => format!("beside {n} connections"),
        };
        Figure::new(what, "k/s", u64::from(PIECE), series)
    };
    let figures = counts.iter().zip(rates).map(figure).collect();
    let subject = format!("connections made, {qps} QPs per daemon connected");
    let path = links[0].end.path()?;
    Ok(vec![row(subject, Kind::Of(Measure::Rate), &path, setup, &more, figures, Some(STEADY))])
}

/// Connections per round.
const PIECE: u32 = 400;
