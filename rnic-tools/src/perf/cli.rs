//! The command line of `rnic-perf`.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};

use super::all::{AllOptions, all};
use super::bench::{Amount, Bench};
use super::compare::{CompareOptions, SIZES, compare, draw, render};
use super::daemon;
use super::error::PerfError;
use super::goals::{between_hosts, goals, subjects};
use super::load::serve_load;
use super::machine::Machine;
use super::neighbours::{NeighbourOptions, neighbours};
use super::peer::{Peer, open, peer_program, serve, serve_hosts, serve_relay};
use super::report::{Measure, Report, Row, daemon_in_words};
use super::scale::{ScaleOptions, scale};
use super::smoke::{SmokeOptions, failure_message, smoke};
use super::spec::{Flow, Op, Spec, Wait};
use super::table::parse_bytes;
use crate::cli;
use crate::endpoint::Endpoint;

/// Measures the RNIC, and raw TCP and memcpy in the same run.
///
/// Starts a second process; both use the daemon at RNIC_SOCKET or --socket. With --peer-socket the
/// second process uses another daemon, and the two daemons communicate over TCP.
/// Between two hosts: `rnic-perf serve` on one, `bw`, `lat` or `rate` with --to HOST on the other.
///
/// Exit codes: 0 everything was measured; 1 something failed; 2 wrong usage.
#[derive(Debug, Parser)]
#[command(name = "rnic-perf", version)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Bandwidth of a stream, compared with a raw TCP stream and memcpy.
    Bw {
        /// Operation.
        #[arg(long, value_delimiter = ',', default_value = "write")]
        op: Vec<Op>,
        /// Bytes per message.
        #[arg(long, value_parser = bytes_u32, default_value = "1MiB")]
        size: u32,
        /// Outstanding requests.
        #[arg(long, default_value_t = 16)]
        depth: u32,
        /// Requests per post, of which the last is signaled [default: a quarter of --depth].
        #[arg(long)]
        batch: Option<u32>,
        /// Memory used by the messages at each end of RDMA, TCP and memcpy: one message, as in UCX
        /// and libfabric, if it is no more than --size.
        #[arg(long, value_parser = parse_bytes, default_value = "64MiB")]
        working_set: u64,
        /// Poll for completions instead of sleeping after 50 us without any. The daemon must wake a
        /// process that sleeps; a process that polls occupies a CPU.
        #[arg(long)]
        polled: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Latency of a ping-pong, compared with a raw TCP ping-pong.
    Lat {
        /// Operation. The peer of a Write polls its memory; a Read or a FetchAdd is measured from
        /// post to completion.
        #[arg(long, value_delimiter = ',', default_value = "send")]
        op: Vec<Op>,
        /// Bytes per message.
        #[arg(long, value_parser = bytes_u32, default_value = "8")]
        size: u32,
        /// Arm the CQ and sleep for each message instead of polling.
        #[arg(long)]
        event: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Rate of small messages posted in batches, compared with one TCP write per message.
    Rate {
        /// Operation.
        #[arg(long, value_delimiter = ',', default_value = "write")]
        op: Vec<Op>,
        /// Bytes per message.
        #[arg(long, value_parser = bytes_u32, default_value = "8")]
        size: u32,
        /// Outstanding requests per QP.
        #[arg(long, default_value_t = 256)]
        depth: u32,
        /// Requests per post, of which the last is signaled.
        #[arg(long, default_value_t = 32)]
        batch: u32,
        /// Connected QPs.
        #[arg(long, default_value_t = 1)]
        qps: u32,
        /// QPs with traffic [default: all].
        #[arg(long)]
        active: Option<u32>,
        /// Memory used by the messages at each end [default: --size times --depth].
        #[arg(long, value_parser = parse_bytes)]
        working_set: Option<u64>,
        #[command(flatten)]
        common: Common,
    },
    /// Run the second process for `bw --to`, `lat --to` and `rate --to` on other hosts, for one
    /// host at a time. There is no authentication: use it in trusted networks only.
    Serve {
        /// Address to listen on: HOST:PORT.
        #[arg(default_value = "0.0.0.0:7472", value_parser = Endpoint::parse)]
        address: Endpoint,
        /// Control socket of the daemon [default: RNIC_SOCKET, or the daemon's default path].
        #[arg(long)]
        socket: Option<PathBuf>,
    },
    /// All design goals, measured with private daemons in each configuration.
    All {
        /// Path of rnicd [default: in the folder of this program].
        #[arg(long)]
        rnicd: Option<PathBuf>,
        /// QPs of a daemon in the rows about many QPs.
        #[arg(long, default_value_t = 10_000)]
        qps: u32,
        /// Only daemons whose title contains this, such as "direct" or "tcp: 2 daemons, CRC on".
        #[arg(long, default_value = "")]
        only: String,
        #[command(flatten)]
        rounds: Rounds,
    },
    /// Costs that grow with idle objects: a Write beside many QPs, regions and sessions, and
    /// connecting beside many connections; also two workers compared with one. Private daemons.
    Scale {
        /// Path of rnicd [default: in the folder of this program].
        #[arg(long)]
        rnicd: Option<PathBuf>,
        /// Maximum QPs of a daemon; ten times as many regions, a tenth as many sessions.
        #[arg(long, default_value_t = MOST_QPS, value_parser = clap::value_parser!(u32).range(QPS))]
        qps: u32,
        /// Only parts whose title contains this: "qps", "regions", "sessions", "connections" or
        /// "workers", as in "qps, direct" or "tcp".
        #[arg(long, default_value = "")]
        only: String,
        #[command(flatten)]
        rounds: Rounds,
    },
    /// Latency of a ping-pong while a program of another user (as root: uid 65534) writes 1 MiB
    /// messages as fast as it can, with one worker and with two. Private daemons.
    Neighbours {
        /// Path of rnicd [default: in the folder of this program].
        #[arg(long)]
        rnicd: Option<PathBuf>,
        /// Only daemons whose title contains this, such as "direct" or "one worker".
        #[arg(long, default_value = "")]
        only: String,
        #[command(flatten)]
        rounds: Rounds,
    },
    /// Detect large slowdowns in half a minute, for CI. Private daemons.
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
        /// Path of rnicd [default: in the folder of this program].
        #[arg(long)]
        rnicd: Option<PathBuf>,
        /// Bytes per message [default: from 8 to 1MiB].
        #[arg(long, value_delimiter = ',', value_parser = bytes_u32)]
        sizes: Vec<u32>,
        /// Only comparisons whose title contains this, such as "tcp path" or "send, bandwidth".
        #[arg(long, default_value = "")]
        only: String,
        /// Folder for plots of latency and bandwidth by size.
        #[arg(long)]
        svg: Option<PathBuf>,
        #[command(flatten)]
        rounds: Rounds,
    },
    /// The second process; started by the first.
    #[command(hide = true)]
    Peer {
        #[arg(long)]
        socket: Option<PathBuf>,
    },
    /// The second process of a relay; started by the first.
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
    /// Control socket of the daemon [default: RNIC_SOCKET, or the daemon's default path].
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Control socket of the peer's daemon [default: the same daemon].
    #[arg(long)]
    peer_socket: Option<PathBuf>,
    /// The host that runs `rnic-perf serve`: HOST or HOST:PORT [default port: 7472].
    #[arg(long, value_name = "HOST", conflicts_with = "peer_socket", value_parser = host)]
    to: Option<Endpoint>,
    /// Messages or round trips per round, instead of a time.
    #[arg(long, conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// Measure RC QPs of the RoCE device, compared with QPs of the iWARP device.
    #[arg(long)]
    rc: bool,
    #[command(flatten)]
    rounds: Rounds,
}

#[derive(Clone, Debug, Args)]
struct Rounds {
    /// Length of a round of RDMA, TCP or memcpy.
    #[arg(long, default_value = "0.5", value_parser = seconds)]
    seconds: Duration,
    /// Number of rounds; the result is the median.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print all results, the parameters and the machine as JSON.
    #[arg(long)]
    json: bool,
}

/// Runs `rnic-perf`. The exit code is 0 only if everything was measured.
pub fn main() -> ExitCode {
    let done = match Arguments::parse().what {
        What::Peer { socket } => {
            // The driver has already received the error.
            return serve(socket.as_deref()).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        }
        What::Relay => {
            return serve_relay().map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        }
        What::Load { socket, peer_socket } => {
            return serve_load(socket.as_deref(), peer_socket.as_deref())
                .map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        }
        What::Serve { address, socket } => serve_hosts(socket.as_deref(), &address).map(|()| true),
        What::Scale { rnicd, qps, only, rounds } => run_scale(rnicd, qps, &only, &rounds),
        What::Neighbours { rnicd, only, rounds } => run_neighbours(rnicd, &only, &rounds),
        What::Smoke { rnicd, seconds, json } => {
            run_smoke(rnicd, &Rounds { seconds, rounds: SMOKE_ROUNDS, json })
        }
        What::All { rnicd, qps, only, rounds } => run_all(rnicd, qps, &only, &rounds),
        What::Compare { rnicd, sizes, only, svg, rounds } => {
            run_compare(rnicd, &sizes, &only, svg.as_deref(), &rounds)
        }
        what => Run::new(what).and_then(|run| run.measure()),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            cli::print_error("rnic-perf", e);
            ExitCode::FAILURE
        }
    }
}

/// Returns a status line for the terminal; hidden if standard error is not a terminal.
pub fn progress_line() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let line = ProgressBar::new_spinner();
    // Drawn only on messages: a drawing thread would disturb the measurement.
    line.with_style(
        ProgressStyle::with_template("{msg}").unwrap_or(ProgressStyle::default_spinner()),
    )
}

/// Parameters of `bw`, `lat` or `rate`.
#[derive(Debug)]
struct Run {
    kind: Measure,
    specs: Vec<Spec>,
    common: Common,
}

impl Run {
    fn new(what: What) -> Result<Run, PerfError> {
        let (kind, specs, common): (_, Vec<Spec>, _) = match what {
            What::Bw { op, size, depth, batch, working_set, polled, common } => {
                let batch = batch.unwrap_or((depth / 4).max(1));
                let wait = if polled { Wait::Polled } else { Wait::Adaptive };
                let stream =
                    |op| Spec::new(op, Flow::Stream, size).stream(depth, batch, working_set);
                let spec = |op| Spec { wait, ..stream(op) };
                (Measure::Bw, op.into_iter().map(spec).collect(), common)
            }
            What::Lat { op, size, event, common } => {
                let wait = if event { Wait::Event } else { Wait::Polled };
                let spec = |op| Spec { wait, ..Spec::new(op, Flow::PingPong, size) };
                (Measure::Lat, op.into_iter().map(spec).collect(), common)
            }
            What::Rate { op, size, depth, batch, qps, active, working_set, common } => {
                let active = active.unwrap_or(qps);
                let all = u64::from(size) * u64::from(depth);
                let working_set = working_set.unwrap_or(all);
                let stream =
                    |op| Spec::new(op, Flow::Stream, size).stream(depth, batch, working_set);
                let spec = |op| Spec { qps, active, ..stream(op) };
                (Measure::Rate, op.into_iter().map(spec).collect(), common)
            }
            What::All { .. }
            | What::Scale { .. }
            | What::Neighbours { .. }
            | What::Smoke { .. }
            | What::Compare { .. }
            | What::Serve { .. }
            | What::Peer { .. }
            | What::Relay
            | What::Load { .. } => {
                return Err(PerfError::Arguments("measures no single operation".to_owned()));
            }
        };
        let rc = common.rc;
        let specs: Vec<_> = specs.into_iter().map(|spec| Spec { rc, ..spec }).collect();
        specs.iter().try_for_each(Spec::check)?;
        Ok(Run { kind, specs, common })
    }

    fn measure(&self) -> Result<bool, PerfError> {
        let Common { socket, peer_socket, to, iters, rounds, .. } = &self.common;
        let machine = Machine::this();
        let amount = iters.map_or(Amount::Time(rounds.seconds), Amount::Messages);
        let context = open(socket.as_deref())?;
        let status = context.status()?;
        let mut daemons = daemon_in_words(&status);
        if let Some(other) = peer_socket {
            daemons += " and ";
            daemons += &daemon_in_words(&open(Some(other))?.status()?);
        }
        if let Some(host) = to {
            daemons += &format!(" and the daemon of {host}");
        }
        let mut peer = match to {
            Some(host) => Peer::connect(host)?,
            None => Peer::start(peer_program(peer_socket.as_deref().or(socket.as_deref()))?)?,
        };
        let line = progress_line();
        let mut rows = Vec::new();
        for spec in &self.specs {
            let mut subjects = subjects(self.kind, spec);
            if to.is_some() {
                subjects = between_hosts(&subjects);
            }
            let mut bench = Bench::new(&context, &mut peer, spec, &subjects)?;
            let measured = bench.measure(amount, rounds.rounds, &mut |subject, round| {
                line.set_message(format!("{} {subject:?}, round {round}", spec.op));
            })?;
            let goals = goals(self.kind, spec, bench.path());
            rows.push(Row::new(self.kind, spec, bench.path(), &daemons, &measured, &goals));
        }
        line.finish_and_clear();
        print(&Report::new(machine, rounds.rounds, rows), rounds.json, Report::render)?;
        Ok(true)
    }
}

fn run_all(
    rnicd: Option<PathBuf>,
    qps: u32,
    only: &str,
    rounds: &Rounds,
) -> Result<bool, PerfError> {
    let rows = with_daemons(rnicd, rounds, render_all, |rnicd, amount, progress| {
        all(&AllOptions { rnicd, qps, only, amount, rounds: rounds.rounds }, progress)
    })?;
    Ok(rows.iter().all(|row| row.failure.is_none()))
}

fn run_scale(
    rnicd: Option<PathBuf>,
    qps: u32,
    only: &str,
    rounds: &Rounds,
) -> Result<bool, PerfError> {
    let rows = with_daemons(rnicd, rounds, render_all, |rnicd, amount, progress| {
        let options = ScaleOptions { rnicd, qps, only, amount, rounds: rounds.rounds };
        scale(&options, progress)
    })?;
    Ok(rows.iter().all(|row| row.failure.is_none()))
}

fn run_neighbours(rnicd: Option<PathBuf>, only: &str, rounds: &Rounds) -> Result<bool, PerfError> {
    let rows = with_daemons(rnicd, rounds, render_all, |rnicd, amount, progress| {
        neighbours(&NeighbourOptions { rnicd, only, amount, rounds: rounds.rounds }, progress)
    })?;
    Ok(rows.iter().all(|row| row.failure.is_none()))
}

fn run_smoke(rnicd: Option<PathBuf>, rounds: &Rounds) -> Result<bool, PerfError> {
    let rows = with_daemons(rnicd, rounds, Report::render_summary, |rnicd, amount, progress| {
        Ok(smoke(&SmokeOptions { rnicd, amount, rounds: rounds.rounds }, progress))
    })?;
    let failures: Vec<String> = rows.iter().filter_map(failure_message).collect();
    failures.iter().for_each(|failure_message| cli::print_error("rnic-perf", failure_message));
    Ok(failures.is_empty())
}

/// Renders each row as a table, then all rows as one.
fn render_all(report: &Report) -> String {
    report.render() + "\n" + &report.render_summary()
}

/// Measures rows with private daemons and prints them.
fn with_daemons(
    rnicd: Option<PathBuf>,
    rounds: &Rounds,
    render: fn(&Report) -> String,
    measure: impl FnOnce(&Path, Amount, &mut dyn FnMut(&str)) -> Result<Vec<Row>, PerfError>,
) -> Result<Vec<Row>, PerfError> {
    let line = progress_line();
    let rnicd = daemon::find(rnicd)?;
    let machine = Machine::this();
    let amount = Amount::Time(rounds.seconds);
    let rows = measure(&rnicd, amount, &mut |what| line.set_message(what.to_owned()));
    line.finish_and_clear();
    let rows = rows?;
    let report = Report::new(machine, rounds.rounds, rows);
    print(&report, rounds.json, render)?;
    Ok(report.rows)
}

fn run_compare(
    rnicd: Option<PathBuf>,
    sizes: &[u32],
    only: &str,
    svg: Option<&Path>,
    rounds: &Rounds,
) -> Result<bool, PerfError> {
    let line = progress_line();
    let rnicd = daemon::find(rnicd)?;
    let machine = Machine::this();
    let sizes = if sizes.is_empty() { &SIZES } else { sizes };
    let time = rounds.seconds;
    let rounds_of = rounds.rounds;
    let options = CompareOptions { rnicd: &rnicd, sizes, only, time, rounds: rounds_of };
    let compared = compare(&options, &mut |what| line.set_message(what.to_owned()))?;
    line.finish_and_clear();
    if let Some(folder) = svg {
        draw(&compared, folder)?;
    }
    let tables = render(&compared);
    let rows: Vec<Row> = compared.into_iter().flat_map(|compared| compared.rows).collect();
    let complete = rows.iter().all(|row| row.failure.is_none());
    print(&Report::new(machine, rounds_of, rows), rounds.json, |report| {
        report.render_goals() + "\n" + &tables
    })?;
    Ok(complete)
}

fn print(
    report: &Report,
    json: bool,
    render: impl FnOnce(&Report) -> String,
) -> Result<(), PerfError> {
    let text = if json {
        serde_json::to_string_pretty(report)
            .map_err(|e| PerfError::Arguments(format!("cannot write the report as JSON: {e}")))?
    } else {
        render(report)
    };
    cli::print_line(text.trim_end()).map_err(PerfError::io("printing"))
}

/// Maximum QPs of a daemon, which leaves descriptors for everything else.
const MOST_QPS: u32 = 10_000;
const QPS: std::ops::RangeInclusive<i64> = 10..=MOST_QPS as i64;
/// Rounds of the smoke test.
const SMOKE_ROUNDS: u32 = 3;

fn bytes_u32(text: &str) -> Result<u32, String> {
    u32::try_from(parse_bytes(text)?).map_err(|_| "must be less than 4 GiB".to_owned())
}

/// Parses a host, with the default port of `serve` if it has none.
fn host(text: &str) -> Result<Endpoint, String> {
    Endpoint::parse(text).or_else(|_| Endpoint::parse(&format!("{text}:7472")))
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.001..=3600.0).contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err("must be from 0.001 to 3600".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> Result<Run, String> {
        let words = std::iter::once("rnic-perf").chain(line.split_whitespace());
        let parsed = Arguments::try_parse_from(words).map_err(|e| e.to_string())?;
        Run::new(parsed.what).map_err(|e| e.to_string())
    }

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }

    #[test]
    fn defaults_are_those_of_the_design_goals() {
        let bw = run("bw").unwrap();
        assert_eq!((bw.specs[0].op, bw.specs[0].size, bw.specs[0].depth), (Op::Write, 1 << 20, 16));
        assert_eq!((bw.specs[0].batch, bw.specs[0].slots), (4, 64));
        let lat = run("lat").unwrap();
        assert_eq!((lat.specs[0].op, lat.specs[0].size), (Op::Send, 8));
        assert_eq!(lat.specs[0].wait, Wait::Polled);
        let rate = run("rate").unwrap();
        assert_eq!((rate.specs[0].op, rate.specs[0].size, rate.specs[0].batch), (Op::Write, 8, 32));
    }

    #[test]
    fn several_operations_make_several_specs() {
        let ops: Vec<_> = run("rate --op send,write,read,fetch-add")
            .unwrap()
            .specs
            .iter()
            .map(|s| s.op)
            .collect();
        assert_eq!(ops, [Op::Send, Op::Write, Op::Read, Op::FetchAdd]);
    }

    #[test]
    fn a_host_has_a_default_port() {
        for (text, said) in
            [("host", "host:7472"), ("192.0.2.7:5", "192.0.2.7:5"), ("[::1]", "[::1]:7472")]
        {
            assert_eq!(host(text).map(|host| host.to_string()), Ok(said.to_owned()));
        }
    }

    #[test]
    fn invalid_options_are_named() {
        for (line, said) in [
            ("bw --size 0", "--size"),
            ("bw --op fetch-add", "--size 8"),
            ("bw --size 9x", "unit"),
            ("bw --depth 4 --batch 8", "--batch"),
            ("lat --op write --event", "--event"),
            ("rate --qps 10 --active 11", "--active"),
            ("rate --op send --qps 2", "--op send"),
            ("bw --rounds 0", "--rounds"),
            ("bw --iters 0", "--iters"),
            ("bw --seconds 0", "--seconds"),
            ("bw --seconds 1 --iters 5", "--iters"),
            ("bw --frobnicate", "--frobnicate"),
            ("bw --op fly", "fly"),
            ("scale --qps 9", "--qps"),
            ("scale --qps 20000", "--qps"),
            ("neighbours --rounds 0", "--rounds"),
            ("smoke --seconds 0", "--seconds"),
            ("bw --to ::1", "brackets"),
            ("lat --to host --peer-socket x", "--peer-socket"),
            ("serve 7472", "HOST:PORT"),
        ] {
            let e = run(line).err().unwrap_or_default();
            assert!(e.contains(said), "{line}: {e}");
        }
    }
}
