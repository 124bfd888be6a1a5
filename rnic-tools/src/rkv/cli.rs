//! The command line of `rkv`.

use std::io::Read;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use rnic_client::Context;

use super::{Bench, Client, Geometry, KvError, Operations, Server, ServerOptions};
use crate::cli::Failure;
use crate::endpoint::Endpoint;
use crate::{cli, clients, link};

/// A key-value store whose GETs are RDMA Reads, without work for the server process.
///
/// Start `rkv server`, then put and get. All commands need a running `rnicd`; RNIC_SOCKET is the
/// path of its socket.
///
/// Exit codes: 0 done; 1 failed, or the key does not exist; 2 wrong usage.
#[derive(Parser)]
#[command(name = "rkv", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Keeps a table in memory and serves clients.
    Server(Serve),
    /// Writes the value of a key to standard output.
    Get(Get),
    /// Stores a value.
    Put(Put),
    /// Deletes a key.
    Del(Del),
    /// Measures GETs and PUTs, and checks every value.
    Bench(Load),
}

#[derive(Args)]
struct Serve {
    /// Address to listen on; port 0 selects a free port, which is printed. There is no
    /// authentication: every peer that can connect may read and write.
    #[arg(value_name = "HOST:PORT", default_value = "127.0.0.1:7473",
          value_parser = Endpoint::parse)]
    address: Endpoint,
    /// Number of slots in the table; each holds one key and value.
    #[arg(long, value_name = "N", default_value_t = 16384)]
    slots: u64,
    /// Longest key in bytes, at most 4096.
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    max_key: u16,
    /// Longest value, at most 4MiB.
    #[arg(long, value_name = "SIZE", default_value = "1KiB", value_parser = cli::size32)]
    max_value: u32,
    /// Number of slots in which a key may be. More slots allow a fuller table and make searches
    /// longer.
    #[arg(long, value_name = "N", default_value_t = 16)]
    probes: u32,
    /// Maximum number of clients at a time; further clients are rejected. Each uses memory for
    /// eight of the longest keys and values.
    #[arg(long, value_name = "N", default_value = "64", value_parser = cli::at_least_one)]
    clients: usize,
    /// Disconnect clients that have sent no PUT or DELETE for this many seconds [default: never].
    #[arg(long, value_name = "SECONDS", value_parser = cli::seconds)]
    idle: Option<Duration>,
}

#[derive(Args)]
struct Connection {
    /// Address of the server.
    #[arg(long, short, value_name = "HOST:PORT", default_value = "127.0.0.1:7473",
          value_parser = Endpoint::parse)]
    server: Endpoint,
    /// Time limit for a reply from the server, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = cli::seconds)]
    timeout: Duration,
}

#[derive(Args)]
struct Get {
    /// The key.
    key: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
struct Put {
    /// The key.
    key: String,
    /// The value; `-` reads it from standard input.
    value: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
struct Del {
    /// The key.
    key: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
struct Load {
    #[command(flatten)]
    connection: Connection,
    /// Number of connections.
    #[arg(long, short, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    connections: u32,
    /// Number of different keys.
    #[arg(long, value_name = "N", default_value_t = 1000,
          value_parser = clap::value_parser!(u64).range(1..))]
    keys: u64,
    /// Value size in bytes, at least 16.
    #[arg(long, value_name = "SIZE", default_value = "256", value_parser = value_size)]
    value: u32,
    /// Percentage of GETs; the other operations are PUTs.
    #[arg(long, value_name = "PERCENT", default_value_t = 95,
          value_parser = clap::value_parser!(u8).range(..=100))]
    gets: u8,
    /// Duration in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = cli::seconds)]
    seconds: Duration,
}

/// Runs `rkv` and returns its exit code.
pub fn main() -> ExitCode {
    cli::exit_code(
        "rkv",
        match Cli::parse().command {
            Command::Server(serve) => serve.run(),
            Command::Get(get) => get.run(),
            Command::Put(put) => put.run(),
            Command::Del(del) => del.run(),
            Command::Bench(load) => load.run(),
        },
    )
}

impl Serve {
    fn run(self) -> Result<(), Failure> {
        let Serve { slots, max_key, max_value, probes, .. } = self;
        let geometry = Geometry { slots, probes, max_key, max_value };
        let context = Context::open()?;
        let server = Server::new(&context, ServerOptions { geometry, idle: self.idle })?;
        let listener = link::listen(&context, &self.address, BACKLOG)?;
        cli::print_line(format_args!(
            "{slots} slots of {} bytes, {} in all, at {}",
            geometry.slot_size(),
            indicatif::BinaryBytes(geometry.bytes()),
            listener.local_addr()
        ))?;
        let report = |line: &str| cli::print_error("rkv", line);
        clients::serve(&listener, self.clients, b"too many clients", report, |request| {
            server.serve(request).map(drop)
        })?;
        Ok(())
    }
}

impl Connection {
    fn open(&self) -> Result<Client, Failure> {
        let context = Context::open()?;
        let connected =
            self.server.try_each(|at| Client::connect(&context, at, self.timeout), unreachable);
        Ok(connected?)
    }

    fn without(&self, key: &str) -> Failure {
        format!("there is no {key:?} at {}", self.server).into()
    }
}

/// Returns true if another address of the server may work.
fn unreachable(e: &KvError) -> bool {
    matches!(e, KvError::Link(e) if e.is_unreachable())
}

impl Get {
    fn run(self) -> Result<(), Failure> {
        let mut client = self.connection.open()?;
        let found = client.get(self.key.as_bytes());
        client.close();
        let found = found?.ok_or_else(|| self.connection.without(&self.key))?;
        Ok(cli::write(&found.value)?)
    }
}

impl Put {
    fn run(self) -> Result<(), Failure> {
        let mut client = self.connection.open()?;
        let mut value = self.value.into_bytes();
        if value == b"-" {
            value.clear();
            // One byte above the limit is enough to detect a value that is too long.
            let most = u64::from(client.geometry().max_value) + 1;
            let read = std::io::stdin().take(most).read_to_end(&mut value);
            read.map_err(|e| format!("cannot read the value: {e}"))?;
        }
        let version = client.put(self.key.as_bytes(), &value);
        client.close();
        let version = version?;
        Ok(cli::print_line(format_args!("stored {} bytes, version {version}", value.len()))?)
    }
}

impl Del {
    fn run(self) -> Result<(), Failure> {
        let mut client = self.connection.open()?;
        let there = client.delete(self.key.as_bytes());
        client.close();
        if there? { Ok(()) } else { Err(self.connection.without(&self.key)) }
    }
}

impl Load {
    fn run(self) -> Result<(), Failure> {
        let Load { connection, connections, keys, value, gets, seconds } = self;
        let Connection { server, timeout: patience } = connection;
        let context = Context::open()?;
        let bar = cli::percent_bar("get and put");
        let outcome = server.try_each(
            |server| {
                let duration = seconds;
                Bench { server, connections, keys, value, gets, duration, patience }
                    .run(&context, |share| bar.set_position((share * 100.0).min(100.0) as u64))
            },
            unreachable,
        );
        bar.finish_and_clear();
        let report = outcome?;
        let elapsed = report.elapsed.as_secs_f64();
        cli::print_line(format_args!(
            "{connections} connections, {keys} keys, values of {value} bytes, all verified"
        ))?;
        cli::print_line(operations("GET", &report.gets, elapsed))?;
        cli::print_line(operations("PUT", &report.puts, elapsed))?;
        Ok(cli::print_line(format_args!("torn reads, detected and repeated: {}", report.torn))?)
    }
}

fn operations(name: &str, operations: &Operations, seconds: f64) -> String {
    let count = operations.latencies.count();
    let rate = count as f64 / seconds.max(1e-9);
    format!("{name} {count} ({rate:.0}/s)  {}", operations.latencies)
}

fn value_size(text: &str) -> Result<u32, String> {
    match cli::size32(text)? {
        size if size >= Bench::MIN_VALUE => Ok(size),
        _ => Err(format!("a value must have at least {} bytes", Bench::MIN_VALUE)),
    }
}

/// Maximum number of pending connection requests.
const BACKLOG: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
