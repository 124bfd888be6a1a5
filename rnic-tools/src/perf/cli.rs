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
use super::smoke::{SmokeOptions, complaint, smoke};
use super::spec::{Flow, Op, Spec, Wait};
use super::table::parse_bytes;
use crate::cli;
use crate::endpoint::Endpoint;

/// How fast the RNIC is, beside raw TCP and memcpy measured in the same run.
///
/// Starts a second process; both use the daemon that RNIC_SOCKET or --socket names. With
/// --peer-socket the second one uses another daemon, and the two daemons talk TCP. Between two
/// hosts: `rnic-perf serve` on one, `bw`, `lat` or `rate` with --to HOST on the other.
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
    /// Bandwidth of a stream, against a raw TCP stream and memcpy.
    Bw {
        /// What carries the bytes.
        #[arg(long, value_delimiter = ',', default_value = "write")]
        op: Vec<Op>,
        /// Bytes per message.
        #[arg(long, value_parser = bytes_u32, default_value = "1MiB")]
        size: u32,
        /// Requests outstanding.
        #[arg(long, default_value_t = 16)]
        depth: u32,
        /// Requests per post, of which the last one is signaled [default: a quarter of --depth].
        #[arg(long)]
        batch: Option<u32>,
        /// Memory that messages go through at each end of RDMA, TCP and memcpy: one message, as
        /// UCX and libfabric measure, if it is no more than --size.
        #[arg(long, value_parser = parse_bytes, default_value = "64MiB")]
        working_set: u64,
        /// Look for completions all the time instead of sleeping after 50 us without any. Whoever
        /// sleeps has to be woken by the daemon; whoever looks takes a CPU.
        #[arg(long)]
        polled: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Latency of a ping-pong, against a blocking raw TCP ping-pong.
    Lat {
        /// What carries the ball. The peer of a Write looks at its memory; a Read or a FetchAdd is
        /// measured from post to completion.
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
    /// Rate of small messages posted in batches, against one TCP write per message.
    Rate {
        /// What carries the messages.
        #[arg(long, value_delimiter = ',', default_value = "write")]
        op: Vec<Op>,
        /// Bytes per message.
        #[arg(long, value_parser = bytes_u32, default_value = "8")]
        size: u32,
        /// Requests outstanding per QP.
        #[arg(long, default_value_t = 256)]
        depth: u32,
        /// Requests per post, of which the last one is signaled.
        #[arg(long, default_value_t = 32)]
        batch: u32,
        /// Connected QPs.
        #[arg(long, default_value_t = 1)]
        qps: u32,
        /// QPs with traffic [default: all].
        #[arg(long)]
        active: Option<u32>,
        /// Memory that messages go through at each end [default: as many as are outstanding].
        #[arg(long, value_parser = parse_bytes)]
        working_set: Option<u64>,
        #[command(flatten)]
        common: Common,
    },
    /// Be the second process for `bw --to`, `lat --to` and `rate --to` of other hosts, one after
    /// the other. There is no authentication: for networks that are trusted.
    Serve {
        /// Where to listen: HOST:PORT.
        #[arg(default_value = "0.0.0.0:7472", value_parser = Endpoint::parse)]
        address: Endpoint,
        /// Control socket of the daemon [default: RNIC_SOCKET, else where daemons usually listen].
        #[arg(long)]
        socket: Option<PathBuf>,
    },
    /// Every row of the table of design goals, with private daemons in each configuration.
    All {
        /// The rnicd to start [default: the one beside this program].
        #[arg(long)]
        rnicd: Option<PathBuf>,
        /// QPs of a daemon in the rows about many QPs.
        #[arg(long, default_value_t = 10_000)]
        qps: u32,
        /// Only with daemons of which this is said, as in "direct" or "tcp: 2 daemons, CRC on".
        #[arg(long, default_value = "")]
        only: String,
        #[command(flatten)]
        rounds: Rounds,
    },
    /// What grows with idle objects: a Write beside many QPs, regions and sessions, connecting
    /// beside many connections; and two workers against one. Private daemons.
    Scale {
        /// The rnicd to start [default: the one beside this program].
        #[arg(long)]
        rnicd: Option<PathBuf>,
        /// Most QPs of a daemon; ten times as many regions, a tenth as many sessions.
        #[arg(long, default_value_t = MOST_QPS, value_parser = clap::value_parser!(u32).range(QPS))]
        qps: u32,
        /// Only parts of which this is said: "qps", "regions", "sessions", "connections",
        /// "workers", as in "qps, direct" or "tcp".
        #[arg(long, default_value = "")]
        only: String,
        #[command(flatten)]
        rounds: Rounds,
    },
    /// Latency of a ping-pong while another user's program (root: as uid 65534) writes 1 MiB
    /// messages as fast as it can, by one worker and by two. Private daemons.
    Neighbours {
        /// The rnicd to start [default: the one beside this program].
        #[arg(long)]
        rnicd: Option<PathBuf>,
        /// Only with daemons of which this is said, as in "direct" or "one worker".
        #[arg(long, default_value = "")]
        only: String,
        #[command(flatten)]
        rounds: Rounds,
    },
    /// Whether anything is much slower than it should be, in half a minute, for CI. Private
    /// daemons.
    ///
    /// A handful of ratios with generous bounds. What misses is measured again, up to two times;
    /// exit code 1 if it misses each time.
    Smoke {
        /// The rnicd to start [default: the one beside this program].
        #[arg(long)]
        rnicd: Option<PathBuf>,
        /// How long a round of each subject is.
        #[arg(long, default_value = "0.15", value_parser = seconds)]
        seconds: Duration,
        /// Print every figure, the parameters and the machine as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Beside other people's benchmarks (ucx_perftest, fi_pingpong), run in turn with ours.
    Compare {
        /// The rnicd to start [default: the one beside this program].
        #[arg(long)]
        rnicd: Option<PathBuf>,
        /// Bytes per message [default: from 8 to 1MiB].
        #[arg(long, value_delimiter = ',', value_parser = bytes_u32)]
        sizes: Vec<u32>,
        /// Only what has one of these in its title, as in "tcp path" or "send, bandwidth".
        #[arg(long, default_value = "")]
        only: String,
        /// Write plots of latency and bandwidth by size into this folder.
        #[arg(long)]
        svg: Option<PathBuf>,
        #[command(flatten)]
        rounds: Rounds,
    },
    /// The second process; started by the first one.
    #[command(hide = true)]
    Peer {
        #[arg(long)]
        socket: Option<PathBuf>,
    },
    /// The second process of a relay; started by the first one.
    #[command(hide = true)]
    Relay,
    /// Traffic of another program; started by the first one.
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
    /// Control socket of the daemon [default: RNIC_SOCKET, else where daemons usually listen].
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Control socket of the peer's daemon [default: the same daemon].
    #[arg(long)]
    peer_socket: Option<PathBuf>,
    /// The host where `rnic-perf serve` runs: HOST or HOST:PORT; the port is 7472 otherwise.
    #[arg(long, value_name = "HOST", conflicts_with = "peer_socket", value_parser = host)]
    to: Option<Endpoint>,
    /// Messages or round trips per round, instead of a time.
    #[arg(long, conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// QPs that are wired by hand, against QPs that connect.
    #[arg(long)]
    wired: bool,
    #[command(flatten)]
    rounds: Rounds,
}

#[derive(Clone, Debug, Args)]
struct Rounds {
    /// How long a round of RDMA, TCP or memcpy is.
    #[arg(long, default_value = "0.5", value_parser = seconds)]
    seconds: Duration,
    /// Rounds; the median counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print every figure, the parameters and the machine as JSON.
    #[arg(long)]
    json: bool,
}

/// `rnic-perf`: reads the command line, measures, prints. The exit code tells whether everything
/// could be measured.
pub fn main() -> ExitCode {
    let done = match Arguments::parse().what {
        What::Peer { socket } => {
            // The driver has been told what was wrong.
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
            cli::complain("rnic-perf", e);
            ExitCode::FAILURE
        }
    }
}

/// A line that changes while a measurement runs; none if nobody watches.
pub fn progress_line() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let line = ProgressBar::new_spinner();
    // Changed only by messages: a thread that draws would disturb what is measured.
    line.with_style(
        ProgressStyle::with_template("{msg}").unwrap_or(ProgressStyle::default_spinner()),
    )
}

/// What `bw`, `lat` or `rate` measure.
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
        let wired = common.wired;
        let specs: Vec<_> = specs.into_iter().map(|spec| Spec { wired, ..spec }).collect();
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
            daemons += &format!(" and that of {host}");
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
    let rows = with_daemons(rnicd, rounds, all_of_it, |rnicd, amount, progress| {
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
    let rows = with_daemons(rnicd, rounds, all_of_it, |rnicd, amount, progress| {
        let options = ScaleOptions { rnicd, qps, only, amount, rounds: rounds.rounds };
        scale(&options, progress)
    })?;
    Ok(rows.iter().all(|row| row.failure.is_none()))
}

fn run_neighbours(rnicd: Option<PathBuf>, only: &str, rounds: &Rounds) -> Result<bool, PerfError> {
    let rows = with_daemons(rnicd, rounds, all_of_it, |rnicd, amount, progress| {
        neighbours(&NeighbourOptions { rnicd, only, amount, rounds: rounds.rounds }, progress)
    })?;
    Ok(rows.iter().all(|row| row.failure.is_none()))
}

fn run_smoke(rnicd: Option<PathBuf>, rounds: &Rounds) -> Result<bool, PerfError> {
    let rows = with_daemons(rnicd, rounds, Report::render_summary, |rnicd, amount, progress| {
        Ok(smoke(&SmokeOptions { rnicd, amount, rounds: rounds.rounds }, progress))
    })?;
    let complaints: Vec<String> = rows.iter().filter_map(complaint).collect();
    complaints.iter().for_each(|complaint| cli::complain("rnic-perf", complaint));
    Ok(complaints.is_empty())
}

/// Each row as a table, then all as one.
fn all_of_it(report: &Report) -> String {
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
    let (time, rounds_of) = (rounds.seconds, rounds.rounds);
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
    let text = match json {
        true => serde_json::to_string_pretty(report)
            .map_err(|e| PerfError::Arguments(format!("a report that is no JSON: {e}")))?,
        false => render(report),
    };
    cli::say(text.trim_end()).map_err(PerfError::io("printing"))
}

/// QPs of a daemon that leave descriptors for all else.
const MOST_QPS: u32 = 10_000;
const QPS: std::ops::RangeInclusive<i64> = 10..=MOST_QPS as i64;
/// Of the smoke test.
const SMOKE_ROUNDS: u32 = 3;

fn bytes_u32(text: &str) -> Result<u32, String> {
    u32::try_from(parse_bytes(text)?).map_err(|_| "is more than 4 GiB".to_owned())
}

/// A host with the port of `serve` unless there is another one.
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
    fn several_operations_are_measured_one_after_the_other() {
        let ops: Vec<_> = run("rate --op send,write,read,fetch-add")
            .unwrap()
            .specs
            .iter()
            .map(|s| s.op)
            .collect();
        assert_eq!(ops, [Op::Send, Op::Write, Op::Read, Op::FetchAdd]);
    }

    #[test]
    fn a_host_has_a_port_of_its_own_or_the_usual_one() {
        for (text, said) in
            [("host", "host:7472"), ("192.0.2.7:5", "192.0.2.7:5"), ("[::1]", "[::1]:7472")]
        {
            assert_eq!(host(text).map(|host| host.to_string()), Ok(said.to_owned()));
        }
    }

    #[test]
    fn nonsense_is_refused_by_name() {
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
