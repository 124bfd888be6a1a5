//! Costs that grow with the number of idle objects, and the effect of a second worker.
//!
//! Most parts measure the same work with few and with many idle objects, alternately, on separate
//! private daemons. The first result of a row has the most objects. The goal applies to its ratio
//! to the result with the fewest objects: idle objects should cost nothing.

mod connections;
mod costs;
mod qps;
mod regions;
mod row;
mod sessions;
mod workers;

use rnic_tools::perf::PerfError;

use crate::daemon::Setup;
use crate::only::TitleFilter;
use crate::report::{Kind, Row};
use crate::site::Options;

pub use qps::{ACTIVE, cost_of_qps, few_and_many};
pub use row::FLAT;

/// Measures all selected parts. A failed measurement is a row with the reason.
///
/// A daemon has at most `qps` QPs, ten times as many regions and a tenth as many sessions.
pub fn scale(
    options: &Options<'_>,
    qps: u32,
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
        for setup in [Setup::DIRECT, Setup::TCP] {
            let title = format!("{name}, {}", setup.path());
            if !only.selects(&title) {
                continue;
            }
            progress(&title);
            match part(options, qps, setup) {
                Ok(more) => rows.extend(more),
                Err(e) => rows.push(Row::failed(title, Kind::Daemon, setup, e)),
            }
        }
    }
    only.check()?;
    Ok(rows)
}

/// Measures one part on one path.
type Part = fn(&Options<'_>, u32, Setup) -> Result<Vec<Row>, PerfError>;

#[cfg(test)]
mod tests {
    use rnic_tools::perf::measured::Amount;
    use std::path::Path;

    use super::*;

    #[test]
    fn a_wrong_binary_fails_every_part() {
        let options = Options {
            rnicd: Path::new("/bin/false"),
            only: "",
            amount: Amount::Messages(1),
            rounds: 1,
        };
        let rows = scale(&options, 20, &mut |_| ()).unwrap();
        assert_eq!(rows.len(), 10);
        assert!(rows.iter().all(|row| row.failure.is_some()));
        let options = Options { only: "regions, tcp", ..options };
        assert_eq!(scale(&options, 20, &mut |_| ()).unwrap().len(), 1);
    }
}
