//! The command line of `rnic-bench`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use rnic_tools::cli::{StatusLine, print_error};
use rnic_tools::perf::PerfError;
use rnic_tools::perf::cli::{Ends, Operation, Plan, Rounds, seconds};
use rnic_tools::perf::machine::Machine;
use rnic_tools::perf::measured::Amount;
use rnic_tools::perf::peer::serve;
use rnic_tools::perf::report::print;
use rnic_tools::text::size32;

use crate::all::all;
use crate::bench::Bench;
use crate::compare::{SIZES, compare, draw, render};
use crate::daemon;
use crate::goals::{between_hosts, goals, subjects};
use crate::load::serve_load;
use crate::neighbours::neighbours;
use crate::relay::serve_relay;
use crate::report::{Report, Row};
use crate::scale::scale;
use crate::site::Options;
use crate::smoke::{failure_message, smoke};

/// Compares the RNIC with raw TCP, memcpy and other projects in the same run.
///
/// `bw`, `lat` and `rate` are those of rnic-perf, with yardsticks. The other commands use private
/// daemons.
///
/// Exit codes: 0 everything was measured; 1 something failed; 2 wrong usage.
#[derive(Debug, Parser)]
#[command(name = "rnic-bench", version)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    #[command(flatten)]
    Measure(Operation),
    /// All design goals, in each configuration.
    All {
        /// QPs of a daemon in the rows about many QPs.
        #[arg(long, default_value_t = 10_000)]
        qps: u32,
        /// Only setups whose title contains this, such as "direct" or "tcp: 2 daemons, CRC on".
        #[arg(long, default_value = "")]
        only: String,
        #[command(flatten)]
        common: Common,
    },
    /// Costs that grow with idle objects: a Write with many QPs, regions and sessions, and
    /// connecting with many connections; also two workers compared with one.
    Scale {
        /// Maximum QPs of a daemon; ten times as many regions, a tenth as many sessions.
        #[arg(long, default_value_t = MOST_QPS, value_parser = clap::value_parser!(u32).range(QPS))]
        qps: u32,
        /// Only parts whose title contains this: "qps", "regions", "sessions", "connections" or
        /// "workers", as in "qps, direct" or "tcp".
        #[arg(long, default_value = "")]
        only: String,
        #[command(flatten)]
        common: Common,
    },
    /// Latency of a ping-pong while a program of another user (as root: uid 65534) writes 1 MiB
    /// messages as fast as it can, with one worker and with two.
    Neighbours {
        /// Only setups whose title contains this, such as "direct" or "one worker".
        #[arg(long, default_value = "")]
        only: String,
        #[command(flatten)]
        common: Common,
    },
    /// Detect large slowdowns in half a minute, for CI.
    ///
    /// Measures a few ratios with generous bounds. A ratio that misses its bound is measured again,
    /// up to two times. Exit code 1 if it misses each time.
    Smoke {
        /// Path of rnicd [default: in the folder of this program].
        #[arg(long)]
        rnicd: Option<PathBuf>,
        /// Length of a round of each subject.
        #[arg(long, default_value = "0.15", value_parser = seconds)]
        seconds: Duration,
        /// Print all results, the parameters and the machine as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Compare with benchmarks of other projects (ucx_perftest, fi_pingpong), run in turn with
    /// ours.
    Compare {
        /// Bytes per message [default: from 8 to 1MiB].
        #[arg(long, value_delimiter = ',', value_parser = size32)]
        sizes: Vec<u32>,
        /// Only comparisons whose title contains one of these, such as "tcp path" or
        /// "send, bandwidth".
        #[arg(long, default_value = "")]
        only: String,
        /// Folder for plots of latency and bandwidth by size.
        #[arg(long)]
        svg: Option<PathBuf>,
        #[command(flatten)]
        common: Common,
    },
    /// The second process; started by the first.
    #[command(hide = true)]
    Peer {
        #[arg(long)]
        socket: Option<PathBuf>,
    },
    /// The second or third process of a relay; started by the first.
    #[command(hide = true)]
    Relay,
    /// Traffic of another program; started by the first.
    #[command(hide = true)]
    Load {
        #[arg(long)]
        socket: Option<PathBuf>,
        #[arg(long)]
        peer_socket: Option<PathBuf>,
    },
}

#[derive(Clone, Debug, Args)]
struct Common {
    /// Path of rnicd [default: in the folder of this program].
    #[arg(long)]
    rnicd: Option<PathBuf>,
    #[command(flatten)]
    rounds: Rounds,
}

/// Runs `rnic-bench`. The exit code is 0 only if everything was measured.
pub fn main() -> ExitCode {
    let child = |served: Result<(), PerfError>| {
        // The parent has already received the error.
        served.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
    };
    let done = match Arguments::parse().what {
        What::Peer { socket } => return child(serve(socket.as_deref())),
        What::Relay => return child(serve_relay()),
        What::Load { socket, peer_socket } => {
            return child(serve_load(socket.as_deref(), peer_socket.as_deref()));
        }
        What::Measure(operation) => Plan::new(operation).and_then(|plan| measure(&plan)),
        What::All { qps, only, common } => {
            with_daemons(common, &only, |options, progress| all(options, qps, progress))
        }
        What::Scale { qps, only, common } => {
            with_daemons(common, &only, |options, progress| scale(options, qps, progress))
        }
        What::Neighbours { only, common } => with_daemons(common, &only, neighbours),
        What::Smoke { rnicd, seconds, json } => {
            run_smoke(Common { rnicd, rounds: Rounds { seconds, rounds: SMOKE_ROUNDS, json } })
        }
        What::Compare { sizes, only, svg, common } => {
            run_compare(&sizes, &only, svg.as_deref(), common)
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            print_error("rnic-bench", e);
            ExitCode::FAILURE
        }
    }
}

/// Measures an operation and its yardsticks with running daemons.
fn measure(plan: &Plan) -> Result<bool, PerfError> {
    let Ends { machine, context, daemons, mut peer } = plan.open()?;
    let rounds = &plan.common.rounds;
    let status = StatusLine::new();
    let mut rows = Vec::new();
    for spec in &plan.specs {
        let mut subjects = subjects(plan.kind, spec);
        if plan.common.to.is_some() {
            subjects = between_hosts(&subjects);
        }
        let mut bench = Bench::new(&context, &mut peer, spec, &subjects)?;
        let mut progress = |subject, round| {
            status.show(|| format!("{} {subject:?}, round {round}", spec.op));
        };
        let measured = bench.measure(plan.amount(), rounds.rounds, &mut progress)?;
        let goals = goals(plan.kind, spec, bench.path());
        rows.push(Row::new(plan.kind, spec, bench.path(), &daemons, &measured, &goals));
    }
    status.clear();
    let report = Report::new(machine, rounds.rounds, rows);
    print(&report, rounds.json, &report.render())?;
    Ok(true)
}

/// Measures rows with private daemons, and prints each as a table, then all as one.
fn with_daemons(
    common: Common,
    only: &str,
    measure: impl FnOnce(&Options<'_>, &mut dyn FnMut(&str)) -> Result<Vec<Row>, PerfError>,
) -> Result<bool, PerfError> {
    let json = common.rounds.json;
    let report = observed(common, only, measure)?;
    print(&report, json, &(report.render() + "\n" + &report.render_summary()))?;
    Ok(report.is_complete())
}

fn run_smoke(common: Common) -> Result<bool, PerfError> {
    let json = common.rounds.json;
    let report = observed(common, "", |options, progress| Ok(smoke(options, progress)))?;
    print(&report, json, &report.render_summary())?;
    let failures: Vec<String> = report.rows.iter().filter_map(failure_message).collect();
    failures.iter().for_each(|message| print_error("rnic-bench", message));
    Ok(failures.is_empty())
}

fn run_compare(
    sizes: &[u32],
    only: &str,
    svg: Option<&Path>,
    common: Common,
) -> Result<bool, PerfError> {
    let sizes = if sizes.is_empty() { &SIZES } else { sizes };
    let json = common.rounds.json;
    let mut tables = String::new();
    let report = observed(common, only, |options, progress| {
        let compared = compare(options, sizes, progress)?;
        if let Some(folder) = svg {
            draw(&compared, folder)?;
        }
        tables = render(&compared);
        Ok(compared.into_iter().flat_map(|compared| compared.rows).collect())
    })?;
    print(&report, json, &(report.render_goals() + "\n" + &tables))?;
    Ok(report.is_complete())
}

/// Runs a measurement with a status line. Observes the machine first, while it is idle.
fn observed(
    Common { rnicd, rounds: Rounds { seconds, rounds, .. } }: Common,
    only: &str,
    measure: impl FnOnce(&Options<'_>, &mut dyn FnMut(&str)) -> Result<Vec<Row>, PerfError>,
) -> Result<Report, PerfError> {
    let rnicd = &daemon::find(rnicd)?;
    let machine = Machine::this();
    let options = Options { rnicd, only, amount: Amount::Time(seconds), rounds };
    let status = StatusLine::new();
    let rows = measure(&options, &mut |what| status.show(|| what.to_owned()));
    status.clear();
    Ok(Report::new(machine, rounds, rows?))
}

/// Maximum QPs of a daemon, which leaves descriptors for everything else.
const MOST_QPS: u32 = 10_000;
const QPS: std::ops::RangeInclusive<i64> = 10..=MOST_QPS as i64;
/// Rounds of the smoke test.
const SMOKE_ROUNDS: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }

    #[test]
    fn invalid_options_are_named() {
        for (line, said) in [
            ("bw --depth 4 --batch 8", "--batch"),
            ("scale --qps 9", "--qps"),
            ("scale --qps 20000", "--qps"),
            ("neighbours --rounds 0", "--rounds"),
            ("smoke --seconds 0", "--seconds"),
            ("compare --sizes x", "--sizes"),
        ] {
            let words = std::iter::once("rnic-bench").chain(line.split_whitespace());
            let e = match Arguments::try_parse_from(words) {
                Ok(Arguments { what: What::Measure(operation) }) => {
                    Plan::new(operation).unwrap_err().to_string()
                }
                parsed => parsed.unwrap_err().to_string(),
            };
            assert!(e.contains(said), "{line}: {e}");
        }
    }
}
