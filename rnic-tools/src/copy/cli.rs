//! The command line of `rnic-copy`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand};
use rnic_client::{ConnectionRequest, Context};

use super::Progress;
use super::send_file;
use super::{CopyError, ReceiveOptions, Report, SendOptions, check_folder, receive_file, refusal};
use crate::cli::{Failure, StatusLine};
use crate::endpoint::Endpoint;
use crate::text::{rounded, seconds, size, size32, throughput};
use crate::{cli, clients, link};

/// Copies files to other processes and hosts by RDMA Write, and verifies their SHA-256.
///
/// Start `rnic-copy serve` on the receiver, then `rnic-copy send FILE HOST:PORT` on the sender.
/// Both need a running `rnicd`; RNIC_SOCKET is the path of its socket.
///
/// Exit codes: 0 copied and verified; 1 failed, leaving no partial file; 2 wrong usage.
#[derive(Parser)]
#[command(name = "rnic-copy", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Receives files.
    Serve(Serve),
    /// Sends a file; succeeds when the receiver has verified and stored it.
    Send(Send),
}

#[derive(Args)]
struct Serve {
    /// Address to listen on; port 0 selects a free port, which is printed. There is no
    /// authentication: every peer that can connect may send files.
    #[arg(value_name = "HOST:PORT", default_value = "127.0.0.1:7472",
          value_parser = Endpoint::parse)]
    address: Endpoint,
    /// Folder for the files; must exist.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Receive one file, then exit; the exit code is 0 if it arrived.
    #[arg(long)]
    once: bool,
    /// Replace files of the same name instead of rejecting new ones.
    #[arg(long)]
    replace: bool,
    /// Largest file accepted, such as 10GiB [default: the free space on the disk].
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_size: Option<u64>,
    /// Maximum number of files received at a time; further senders are rejected.
    #[arg(long, value_name = "N", default_value = "4", value_parser = cli::at_least_one)]
    clients: usize,
    #[command(flatten)]
    ring: Ring,
}

#[derive(Args)]
struct Send {
    /// File to send.
    file: PathBuf,
    /// Receiver, and the name of the file there [default: the same name].
    #[arg(value_name = "HOST:PORT[/NAME]", value_parser = destination)]
    to: (Endpoint, Option<String>),
    #[command(flatten)]
    ring: Ring,
}

#[derive(Args)]
struct Ring {
    /// Bytes per RDMA Write, at most 64MiB; the smaller value of both sides applies.
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = chunk)]
    chunk: u32,
    /// Chunks in flight; the smaller value of both sides applies. Each uses the memory of one chunk
    /// on both sides.
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    chunks: u16,
    /// Seconds without a message from the other side before giving up.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    timeout: Duration,
}

/// Returns the command line of `rnic-copy`, for its manual page and completions.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs `rnic-copy` and returns its exit code.
pub fn main() -> ExitCode {
    cli::exit_code(
        "rnic-copy",
        match Cli::parse().command {
            Command::Serve(serve) => serve.run(),
            Command::Send(send) => send.run(),
        },
    )
}

impl Send {
    fn run(self) -> Result<(), Failure> {
        let (to, name) = self.to;
        let Ring { chunk, chunks, timeout } = self.ring;
        let options = SendOptions { name, chunk, chunks, patience: timeout };
        let context = Context::open()?;
        let label = self.file.file_name().unwrap_or_default().to_string_lossy();
        let status = StatusLine::new();
        let outcome = to.try_each(
            |peer| {
                send_file(&context, &self.file, peer, &options, |progress| {
                    status.show(|| under_way(&label, progress));
                })
            },
            |e| matches!(e, CopyError::Link(e) if e.is_unreachable()),
        );
        status.clear();
        let Report { name, peer, bytes, seconds, sha256 } = outcome?;
        cli::print_line(format_args!("{name}: {} to {peer}", throughput(bytes, seconds)))?;
        Ok(cli::print_line(format_args!("SHA-256 {sha256}, verified and stored by the receiver"))?)
    }
}

impl Serve {
    fn run(self) -> Result<(), Failure> {
        let options = ReceiveOptions {
            replace: self.replace,
            max_size: self.max_size,
            chunk: self.ring.chunk,
            chunks: self.ring.chunks,
            patience: self.ring.timeout,
        };
        check_folder(&self.dir)?;
        let context = Context::open()?;
        let listener = link::listen(&context, &self.address, BACKLOG)?;
        let status = StatusLine::new();
        let dir = self.dir.display();
        let address = listener.local_addr();
        cli::print_line(format_args!("receiving files into {dir} at {address}"))?;
        if self.once {
            let request = listener.accept_request(None)?;
            return Ok(self.receive(&context, request, &options, &status)?);
        }
        let report = |line: &str| {
            status.clear();
            cli::print_error("rnic-copy", line);
        };
        clients::serve(&listener, self.clients, &refusal(BUSY), report, |request| {
            self.receive(&context, request, &options, &status)
        })?;
        Ok(())
    }

    fn receive(
        &self,
        context: &Context,
        request: ConnectionRequest,
        options: &ReceiveOptions,
        status: &StatusLine,
    ) -> Result<(), CopyError> {
        let outcome = receive_file(context, request, &self.dir, options, |name, progress| {
            status.show(|| under_way(name.as_str(), progress));
        });
        status.clear();
        let Report { name, peer, bytes, seconds, sha256 } = outcome?;
        let size = throughput(bytes, seconds);
        let line = format!("{name}: {size} from {peer}, SHA-256 {sha256}");
        // A failure to print does not matter: the file has been stored.
        let _ = cli::print_line(line);
        Ok(())
    }
}

/// Describes a copy that is under way.
fn under_way(name: &str, Progress { done, total }: Progress) -> String {
    format!("{name}: {} of {}", rounded(done as f64), rounded(total as f64))
}

fn destination(text: &str) -> Result<(Endpoint, Option<String>), String> {
    match text.split_once('/') {
        None => Ok((Endpoint::parse(text)?, None)),
        Some((_, "")) => Err(format!("{text:?} has an empty NAME")),
        Some((address, name)) => Ok((Endpoint::parse(address)?, Some(name.to_owned()))),
    }
}

fn chunk(text: &str) -> Result<u32, String> {
    match size32(text)? {
        chunk @ 1..=0x400_0000 => Ok(chunk),
        _ => Err("a chunk must be from 1 byte to 64MiB".to_owned()),
    }
}

/// Maximum number of pending connection requests.
const BACKLOG: u32 = 64;
const BUSY: &str = "too many files are being received already; try again later";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn destinations_may_name_the_file() {
        let at = || Endpoint::parse("127.0.0.1:7472").unwrap();
        assert_eq!(destination("127.0.0.1:7472"), Ok((at(), None)));
        assert_eq!(destination("127.0.0.1:7472/b"), Ok((at(), Some("b".to_owned()))));
        assert!(destination("127.0.0.1:7472/").is_err());
        assert!(destination("127.0.0.1/b").is_err());
    }
}
