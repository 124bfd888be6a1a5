//! The command line of `pingpong`.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use rnic_client::{ConnectionRequest, Context};

use super::{Match, PingpongError, Waiting, play, serve};
use crate::cli::Failure;
use crate::endpoint::Endpoint;
use crate::{cli, clients, link};

/// Sends messages there and back between two processes, checks each and prints how long they took.
///
/// Start `pingpong server`, then `pingpong client HOST:PORT`. Both need a running `rnicd`;
/// RNIC_SOCKET names its socket.
///
/// Exit codes: 0 every ball was right; 1 something failed; 2 wrong usage.
#[derive(Parser)]
#[command(name = "pingpong", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Returns what clients send.
    Server(Server),
    /// Sends, waits, checks and measures.
    Client(Client),
}

#[derive(Args)]
struct Server {
    /// Address to listen on; port 0 takes a free one, which is printed.
    #[arg(value_name = "HOST:PORT", default_value = "127.0.0.1:7471",
          value_parser = Endpoint::parse)]
    address: Endpoint,
    /// Serve one client, then exit: successfully if nothing went wrong.
    #[arg(long)]
    once: bool,
    /// Largest message; clients that want more are refused.
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = cli::size32)]
    max_size: u32,
    /// Clients at the same time; more are turned away.
    #[arg(long, value_name = "N", default_value = "16", value_parser = cli::at_least_one)]
    clients: usize,
    #[command(flatten)]
    wait: Wait,
}

#[derive(Args)]
struct Client {
    /// Where the server is.
    #[arg(value_name = "HOST:PORT", default_value = "127.0.0.1:7471",
          value_parser = Endpoint::parse)]
    server: Endpoint,
    /// Bytes of a message.
    #[arg(long, short, value_name = "SIZE", default_value = "64", value_parser = cli::size32)]
    size: u32,
    /// Times there and back.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 10_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    iterations: u64,
    #[command(flatten)]
    wait: Wait,
}

#[derive(Args)]
struct Wait {
    /// Wait by looking all the time [default: look for 50 us, then sleep].
    #[arg(long)]
    poll: bool,
    /// Wait by sleeping at once.
    #[arg(long, conflicts_with = "poll")]
    event: bool,
    /// Seconds the other side may be silent.
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

/// `pingpong`: reads the command line and plays. The exit code tells whether every ball was right.
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
        let bar = cli::step_bar(iterations, "there and back");
        let game = Match { size, iterations };
        let outcome = server.try_each(
            |address| {
                play(&context, address, game, wait.how(), wait.timeout, |done| {
                    if done.is_multiple_of(256) {
                        bar.set_position(done);
                    }
                })
            },
            |e| matches!(e, PingpongError::Link(e) if e.is_unreachable()),
        );
        bar.finish_and_clear();
        let score = outcome?;
        let seconds = score.elapsed.as_secs_f64();
        let rate = iterations as f64 / seconds.max(1e-9);
        cli::say(format_args!(
            "{iterations} times {size} bytes there and back, all as sent, by the {} path \
             in {seconds:.2} s ({rate:.0}/s)",
            score.path
        ))?;
        Ok(cli::say(format_args!("round trip  {}", score.round_trips))?)
    }
}

impl Server {
    fn run(self) -> Result<(), Failure> {
        let context = Context::open()?;
        let listener = link::listen(&context, &self.address, BACKLOG)?;
        cli::say(format_args!("waiting for clients at {}", listener.local_addr()))?;
        if self.once {
            return Ok(self.serve(&context, listener.accept_request(None)?)?);
        }
        let report = |line: &str| cli::complain("pingpong", line);
        clients::serve(&listener, self.clients, b"too many clients", report, |request| {
            self.serve(&context, request)
        })?;
        Ok(())
    }

    fn serve(&self, context: &Context, request: ConnectionRequest) -> Result<(), PingpongError> {
        let peer = request.peer();
        let wait = &self.wait;
        let Match { size, iterations } =
            serve(context, request, self.max_size, wait.how(), wait.timeout)?;
        // That somebody reads it is no condition of serving.
        let _ = cli::say(format_args!("{peer}: {iterations} times {size} bytes, all as sent"));
        Ok(())
    }
}

/// Clients that may wait while others are looked at.
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
