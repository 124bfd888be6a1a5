//! The command line of `rnic-perf`. `rnic-bench` shares the measurements.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand};
use rnic_client::Context;

use super::driver::Driver;
use super::error::PerfError;
use super::machine::Machine;
use super::measured::Amount;
use super::peer::{Peer, open, peer_program, serve, serve_hosts};
use super::report::{Report, Row, describe_daemon, print};
use super::spec::{Flow, Measure, Op, Spec, Wait};
use crate::cli::{StatusLine, exit_code};
use crate::endpoint::Endpoint;
use crate::text::{size, size32};

/// Measures bandwidth, latency and message rate over RDMA.
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
    #[command(flatten)]
    Measure(Operation),
    /// Run the second process for `bw --to`, `lat --to` and `rate --to` on other hosts, for one
    /// host at a time. There is no authentication: use it on trusted networks only.
    Serve {
        /// Address to listen on: HOST:PORT.
        #[arg(default_value = "0.0.0.0:7472", value_parser = Endpoint::parse)]
        address: Endpoint,
        /// Control socket of the daemon [default: RNIC_SOCKET, or the daemon's default path].
        #[arg(long)]
        socket: Option<PathBuf>,
    },
    /// The second process; started by the first.
    #[command(hide = true)]
    Peer {
        #[arg(long)]
        socket: Option<PathBuf>,
    },
}

/// A measurement.
#[derive(Debug, Subcommand)]
pub enum Operation {
    /// Bandwidth of a stream.
    Bw {
        /// Operation.
        #[arg(long, value_delimiter = ',', default_value = "write")]
        op: Vec<Op>,
        /// Bytes per message.
        #[arg(long, value_parser = size32, default_value = "1MiB")]
        size: u32,
        /// Outstanding requests.
        #[arg(long, default_value_t = 16)]
        depth: u32,
        /// Requests per post; the last is signaled [default: a quarter of --depth].
        #[arg(long)]
        batch: Option<u32>,
        /// Memory used by the messages at each end: one message, as in UCX and libfabric, if it is
        /// no more than --size.
        #[arg(long, value_parser = size, default_value = "64MiB")]
        working_set: u64,
        /// Poll for completions instead of sleeping after 50 us without any. The daemon must wake a
        /// process that sleeps; a process that polls occupies a CPU.
        #[arg(long)]
        polled: bool,
        /// Daemons and rounds.
        #[command(flatten)]
        common: Common,
    },
    /// Latency of a ping-pong.
    Lat {
        /// Operation. The peer of a Write polls its memory; a Read or a FetchAdd is measured from
        /// post to completion.
        #[arg(long, value_delimiter = ',', default_value = "send")]
        op: Vec<Op>,
        /// Bytes per message.
        #[arg(long, value_parser = size32, default_value = "8")]
        size: u32,
        /// Arm the CQ and sleep for each message instead of polling.
        #[arg(long)]
        event: bool,
        /// Daemons and rounds.
        #[command(flatten)]
        common: Common,
    },
    /// Rate of small messages posted in batches.
    Rate {
        /// Operation.
        #[arg(long, value_delimiter = ',', default_value = "write")]
        op: Vec<Op>,
        /// Bytes per message.
        #[arg(long, value_parser = size32, default_value = "8")]
        size: u32,
        /// Outstanding requests per QP.
        #[arg(long, default_value_t = 256)]
        depth: u32,
        /// Requests per post; the last is signaled.
        #[arg(long, default_value_t = 32)]
        batch: u32,
        /// Connected QPs.
        #[arg(long, default_value_t = 1)]
        qps: u32,
        /// QPs with traffic [default: all].
        #[arg(long)]
        active: Option<u32>,
        /// Memory used by the messages at each end [default: --size times --depth].
        #[arg(long, value_parser = size)]
        working_set: Option<u64>,
        /// Daemons and rounds.
        #[command(flatten)]
        common: Common,
    },
}

/// Daemons and rounds of a measurement.
#[derive(Clone, Debug, Args)]
pub struct Common {
    /// Control socket of the daemon [default: RNIC_SOCKET, or the daemon's default path].
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Control socket of the peer's daemon [default: the same daemon].
    #[arg(long)]
    peer_socket: Option<PathBuf>,
    /// The host that runs `rnic-perf serve`: HOST or HOST:PORT [default port: 7472].
    #[arg(long, value_name = "HOST", conflicts_with = "peer_socket", value_parser = host)]
    pub to: Option<Endpoint>,
    /// Messages or round trips per round, instead of a time.
    #[arg(long, conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// Measure RC QPs of the RoCE device.
    #[arg(long)]
    rc: bool,
    /// Rounds.
    #[command(flatten)]
    pub rounds: Rounds,
}

/// Rounds of a measurement.
#[derive(Clone, Debug, Args)]
pub struct Rounds {
    /// Length of a round in seconds.
    #[arg(long, default_value = "0.5", value_parser = seconds)]
    pub seconds: Duration,
    /// Number of rounds; the result is the median.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Print all results, the parameters and the machine as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Returns the command line of `rnic-perf`, for its manual page and completions.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs `rnic-perf`. The exit code is 0 only if everything was measured.
pub fn main() -> ExitCode {
    let done = match Arguments::parse().what {
        What::Measure(operation) => Plan::new(operation).and_then(|plan| measure(&plan)),
        What::Serve { address, socket } => serve_hosts(socket.as_deref(), &address),
        What::Peer { socket } => {
            // The driver has already received the error.
            return serve(socket.as_deref()).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        }
    };
    exit_code("rnic-perf", done)
}

fn measure(plan: &Plan) -> Result<(), PerfError> {
    let Ends { machine, context, daemons, mut peer } = plan.open()?;
    let rounds = &plan.common.rounds;
    let status = StatusLine::new();
    let mut rows = Vec::new();
    for spec in &plan.specs {
        let mut driver = Driver::new(&context, &mut peer, spec)?;
        let mut measured = driver.prepare(plan.amount())?;
        for round in 1..=rounds.rounds {
            status.show(|| format!("{}, round {round}", spec.op));
            driver.round(&mut measured)?;
        }
        rows.push(Row::new(plan.kind, spec, driver.path(), &daemons, &measured));
    }
    status.clear();
    let report = Report::new(machine, rounds.rounds, rows);
    print(&report, rounds.json, &report.render())
}

/// A checked command line.
#[derive(Debug)]
pub struct Plan {
    /// Kind of the results.
    pub kind: Measure,
    /// Parameters of each measurement.
    pub specs: Vec<Spec>,
    /// Daemons and rounds.
    pub common: Common,
}

/// Both ends of a measurement.
pub struct Ends {
    /// The machine, observed before the first measurement.
    pub machine: Machine,
    /// Session of the driver.
    pub context: Context,
    /// Description of the daemons.
    pub daemons: String,
    /// The second process.
    pub peer: Peer,
}

impl Plan {
    /// Checks the parameters.
    pub fn new(operation: Operation) -> Result<Self, PerfError> {
        let (kind, ops, spec, common) = match operation {
            Operation::Bw { op, size, depth, batch, working_set, polled, common } => {
                let batch = batch.unwrap_or((depth / 4).max(1));
                let wait = if polled { Wait::Polled } else { Wait::Adaptive };
                let spec = Spec::new(Op::Write, Flow::Stream, size);
                let spec = spec.stream(depth, batch, working_set);
                (Measure::Bw, op, Spec { wait, ..spec }, common)
            }
            Operation::Lat { op, size, event, common } => {
                let wait = if event { Wait::Event } else { Wait::Polled };
                let spec = Spec::new(Op::Send, Flow::PingPong, size);
                (Measure::Lat, op, Spec { wait, ..spec }, common)
            }
            Operation::Rate { op, size, depth, batch, qps, active, working_set, common } => {
                let active = active.unwrap_or(qps);
                let all = u64::from(size) * u64::from(depth);
                let spec = Spec::new(Op::Write, Flow::Stream, size);
                let spec = spec.stream(depth, batch, working_set.unwrap_or(all));
                (Measure::Rate, op, Spec { qps, active, ..spec }, common)
            }
        };
        let of = |op| Spec { op, rc: common.rc, ..spec.clone() };
        let specs: Vec<Spec> = ops.into_iter().map(of).collect();
        specs.iter().try_for_each(Spec::check)?;
        Ok(Plan { kind, specs, common })
    }

    /// Returns the length of a round.
    pub fn amount(&self) -> Amount {
        let Common { iters, rounds, .. } = &self.common;
        iters.map_or(Amount::Time(rounds.seconds), Amount::Messages)
    }

    /// Opens a session, and starts the second process or connects to it.
    pub fn open(&self) -> Result<Ends, PerfError> {
        let Common { socket, peer_socket, to, .. } = &self.common;
        let machine = Machine::this();
        let context = open(socket.as_deref())?;
        let mut daemons = describe_daemon(&context.status()?);
        if let Some(other) = peer_socket {
            daemons += " and ";
            daemons += &describe_daemon(&open(Some(other))?.status()?);
        }
        if let Some(host) = to {
            daemons += &format!(" and the daemon of {host}");
        }
        let peer = match to {
            Some(host) => Peer::connect(host)?,
            None => Peer::start(peer_program(peer_socket.as_deref().or(socket.as_deref()))?)?,
        };
        Ok(Ends { machine, context, daemons, peer })
    }
}

/// Parses a host, with the default port of `serve` if it has none.
fn host(text: &str) -> Result<Endpoint, String> {
    Endpoint::parse(text).or_else(|_| Endpoint::parse(&format!("{text}:7472")))
}

/// Parses the length of a round.
pub fn seconds(text: &str) -> Result<Duration, String> {
    match crate::text::seconds(text)? {
        s if s >= Duration::from_millis(1) && s <= Duration::from_secs(3600) => Ok(s),
        _ => Err("must be from 0.001 to 3600".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(line: &str) -> Result<Plan, String> {
        let words = std::iter::once("rnic-perf").chain(line.split_whitespace());
        let parsed = Arguments::try_parse_from(words).map_err(|e| e.to_string())?;
        match parsed.what {
            What::Measure(operation) => Plan::new(operation).map_err(|e| e.to_string()),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn defaults_are_those_of_the_design_goals() {
        let bw = &plan("bw").unwrap().specs[0];
        assert_eq!((bw.op, bw.size, bw.depth, bw.batch, bw.slots), (Op::Write, 1 << 20, 16, 4, 64));
        let lat = &plan("lat").unwrap().specs[0];
        assert_eq!((lat.op, lat.size, lat.wait), (Op::Send, 8, Wait::Polled));
        let rate = &plan("rate").unwrap().specs[0];
        assert_eq!((rate.op, rate.size, rate.batch), (Op::Write, 8, 32));
    }

    #[test]
    fn several_operations_make_several_specs() {
        let plan = plan("rate --op send,write,read,fetch-add").unwrap();
        let ops: Vec<_> = plan.specs.iter().map(|s| s.op).collect();
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
            ("bw --size 9x", "not a size"),
            ("bw --depth 4 --batch 8", "--batch"),
            ("lat --op write --event", "--event"),
            ("rate --qps 10 --active 11", "--active"),
            ("rate --op send --qps 2", "--op send"),
            ("bw --rounds 0", "--rounds"),
            ("bw --iters 0", "--iters"),
            ("bw --seconds 0", "--seconds"),
            ("bw --seconds 4000", "--seconds"),
            ("bw --seconds 1 --iters 5", "--iters"),
            ("bw --frobnicate", "--frobnicate"),
            ("bw --op fly", "fly"),
            ("bw --to ::1", "brackets"),
            ("lat --to host --peer-socket x", "--peer-socket"),
            ("serve 7472", "HOST:PORT"),
        ] {
            let e = plan(line).err().unwrap_or_default();
            assert!(e.contains(said), "{line}: {e}");
        }
    }
}
