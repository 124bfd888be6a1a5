//! The command line of `pingpong`.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use rnic_client::{ConnectionRequest, Context};

use super::{Params, PingpongError, Waiting, run_client, serve};
use crate::cli::Failure;
use crate::endpoint::Endpoint;
use crate::{cli, clients, link};

/// Sends messages back and forth between two processes, and checks and times them.
///
/// Start `pingpong server`, then `pingpong client HOST:PORT`. Both need a running `rnicd`;
/// RNIC_SOCKET is the path of its socket.
///
/// Exit codes: 0 every message was correct; 1 something failed; 2 wrong usage.
#[derive(Parser)]
#[command(name = "pingpong", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answers the messages of clients.
    Server(Server),
    /// Sends messages, checks the replies and prints the times.
    Client(Client),
}

#[derive(Args)]
struct Server {
    /// Address to listen on; port 0 selects a free port, which is printed.
    #[arg(value_name = "HOST:PORT", default_value = "127.0.0.1:7471",
          value_parser = Endpoint::parse)]
    address: Endpoint,
    /// Serve one client, then exit; the exit code is 0 if nothing failed.
    #[arg(long)]
    once: bool,
    /// Largest message; clients that propose larger ones are rejected.
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = cli::size32)]
    max_size: u32,
    /// Maximum number of clients at a time; further clients are rejected.
    #[arg(long, value_name = "N", default_value = "16", value_parser = cli::at_least_one)]
    clients: usize,
    #[command(flatten)]
    wait: Wait,
}

#[derive(Args)]
struct Client {
    /// Address of the server.
    #[arg(value_name = "HOST:PORT", default_value = "127.0.0.1:7471",
          value_parser = Endpoint::parse)]
    server: Endpoint,
    /// Message size in bytes.
    #[arg(long, short, value_name = "SIZE", default_value = "64", value_parser = cli::size32)]
    size: u32,
    /// Number of round trips.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 10_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    iterations: u64,
    #[command(flatten)]
    wait: Wait,
}

#[derive(Args)]
struct Wait {
    /// Poll for messages [default: poll for 50 us, then sleep].
    #[arg(long)]
    poll: bool,
    /// Sleep until a message arrives, without polling first.
    #[arg(long, conflicts_with = "poll")]
    event: bool,
    /// Seconds without a message from the other side before giving up.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = cli::seconds)]
    timeout: Duration,
}

impl Wait {
    fn how(&self) -> Waiting {
        match (self.poll, self.event) {
            (true, _) => Waiting::Poll,
            (_, true) => Waiting::Event,
            _ => Waiting::Adaptive,
        }
    }
}

/// Runs `pingpong` and returns its exit code.
pub fn main() -> ExitCode {
    cli::exit_code(
        "pingpong",
        match Cli::parse().command {
            Command::Server(server) => server.run(),
            Command::Client(client) => client.run(),
        },
    )
}

impl Client {
    fn run(self) -> Result<(), Failure> {
        let Client { server, size, iterations, wait } = self;
        let context = Context::open()?;
        let bar = cli::step_bar(iterations, "round trips");
        let params = Params { size, iterations };
        let outcome = server.try_each(
            |address| {
                run_client(&context, address, params, wait.how(), wait.timeout, |done| {
                    if done.is_multiple_of(256) {
                        bar.set_position(done);
                    }
                })
            },
            |e| matches!(e, PingpongError::Link(e) if e.is_unreachable()),
        );
        bar.finish_and_clear();
        let results = outcome?;
        let seconds = results.elapsed.as_secs_f64();
        let rate = iterations as f64 / seconds.max(1e-9);
        cli::print_line(format_args!(
            "{iterations} round trips of {size} bytes, all verified, over the {} path \
             in {seconds:.2} s ({rate:.0}/s)",
            results.path
        ))?;
        Ok(cli::print_line(format_args!("round trip  {}", results.round_trips))?)
    }
}

impl Server {
    fn run(self) -> Result<(), Failure> {
        let context = Context::open()?;
        let listener = link::listen(&context, &self.address, BACKLOG)?;
        cli::print_line(format_args!("waiting for clients at {}", listener.local_addr()))?;
        if self.once {
            return Ok(self.serve(&context, listener.accept_request(None)?)?);
        }
        let report = |line: &str| cli::print_error("pingpong", line);
        clients::serve(&listener, self.clients, b"too many clients", report, |request| {
            self.serve(&context, request)
        })?;
        Ok(())
    }

    fn serve(&self, context: &Context, request: ConnectionRequest) -> Result<(), PingpongError> {
        let peer = request.peer();
        let wait = &self.wait;
        let Params { size, iterations } =
            serve(context, request, self.max_size, wait.how(), wait.timeout)?;
        // A failure to print must not end the server.
        let _ = cli::print_line(format_args!(
            "{peer}: {iterations} round trips of {size} bytes, all verified"
        ));
        Ok(())
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
