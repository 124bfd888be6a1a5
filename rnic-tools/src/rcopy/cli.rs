//! The command line of `rcopy`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use indicatif::{MultiProgress, ProgressBar};
use rnic_client::{ConnectionRequest, Context};

use super::send_file;
use super::{CopyError, ReceiveOptions, Report, SendOptions, check_folder, receive_file, refusal};
use crate::cli::Failure;
use crate::endpoint::Endpoint;
use crate::{cli, clients, link};

/// Copies files to other processes and hosts by RDMA Write, and verifies their SHA-256.
///
/// Start `rcopy serve` at the receiver, then `rcopy send FILE HOST:PORT` at the sender. Both need a
/// running `rnicd`; RNIC_SOCKET names its socket.
///
/// Exit codes: 0 copied and verified; 1 something failed, and there is no half file; 2 wrong usage.
#[derive(Parser)]
#[command(name = "rcopy", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Receives files.
    Serve(Serve),
    /// Sends one file; succeeds when the receiver has verified and stored it.
    Send(Send),
}

#[derive(Args)]
struct Serve {
    /// Address to listen on; port 0 takes a free one, which is printed. Everybody who reaches it
    /// may send files.
    #[arg(value_name = "HOST:PORT", default_value = "127.0.0.1:7472",
          value_parser = Endpoint::parse)]
    address: Endpoint,
    /// Folder the files go to; it must be there.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Receive one file, then exit: successfully if it arrived.
    #[arg(long)]
    once: bool,
    /// Replace files of the same name instead of refusing.
    #[arg(long)]
    replace: bool,
    /// Largest file accepted, as in 10GiB [default: what fits the disk].
    #[arg(long, value_name = "SIZE", value_parser = cli::size)]
    max_size: Option<u64>,
    /// Files received at the same time; more senders are turned away.
    #[arg(long, value_name = "N", default_value = "4", value_parser = cli::at_least_one)]
    clients: usize,
    #[command(flatten)]
    ring: Ring,
}

#[derive(Args)]
struct Send {
    /// File to send.
    file: PathBuf,
    /// Receiver, and the name the file shall have there [default: the name it has here].
    #[arg(value_name = "HOST:PORT[/NAME]", value_parser = destination)]
    to: (Endpoint, Option<String>),
    #[command(flatten)]
    ring: Ring,
}

#[derive(Args)]
struct Ring {
    /// Bytes per RDMA Write, at most 64MiB; the smaller wish of both sides counts.
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = chunk)]
    chunk: u32,
    /// Chunks under way at a time; the smaller wish of both sides counts. Each costs both sides a
    /// chunk of memory.
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    chunks: u16,
    /// Seconds the other side may be silent.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = cli::seconds)]
    timeout: Duration,
}

/// `rcopy`: reads the command line and copies. The exit code tells whether all went well.
pub fn main() -> ExitCode {
    cli::exit_code(
        "rcopy",
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
        let bar = cli::byte_bar(0, &label);
        let outcome = to.try_each(
            |peer| {
                send_file(&context, &self.file, peer, &options, |progress| {
                    bar.set_length(progress.total);
                    bar.set_position(progress.done);
                })
            },
            |e| matches!(e, CopyError::Link(e) if e.is_unreachable()),
        );
        bar.finish_and_clear();
        let Report { name, peer, bytes, seconds, sha256 } = outcome?;
        cli::say(format_args!("{name}: {} to {peer}", cli::throughput(bytes, seconds)))?;
        Ok(cli::say(format_args!("SHA-256 {sha256}, verified and stored by the receiver"))?)
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
        let bars = MultiProgress::new();
        let (dir, address) = (self.dir.display(), listener.local_addr());
        cli::say(format_args!("receiving files into {dir} at {address}"))?;
        if self.once {
            let request = listener.accept_request(None)?;
            return Ok(self.receive(&context, request, &options, &bars)?);
        }
        let report = |line: &str| bars.suspend(|| cli::complain("rcopy", line));
        clients::serve(&listener, self.clients, &refusal(BUSY), report, |request| {
            self.receive(&context, request, &options, &bars)
        })?;
        Ok(())
    }

    fn receive(
        &self,
        context: &Context,
        request: ConnectionRequest,
        options: &ReceiveOptions,
        bars: &MultiProgress,
    ) -> Result<(), CopyError> {
        let mut bar: Option<ProgressBar> = None;
        let outcome = receive_file(context, request, &self.dir, options, |name, progress| {
            bar.get_or_insert_with(|| bars.add(cli::byte_bar(progress.total, name.as_str())))
                .set_position(progress.done);
        });
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        let Report { name, peer, bytes, seconds, sha256 } = outcome?;
        let size = cli::throughput(bytes, seconds);
        let line = format!("{name}: {size} from {peer}, SHA-256 {sha256}");
        // The file is there, whether or not somebody reads that.
        let _ = bars.suspend(|| cli::say(line));
        Ok(())
    }
}

fn destination(text: &str) -> Result<(Endpoint, Option<String>), String> {
    match text.split_once('/') {
        None => Ok((Endpoint::parse(text)?, None)),
        Some((_, "")) => Err(format!("{text:?} has an empty NAME")),
        Some((address, name)) => Ok((Endpoint::parse(address)?, Some(name.to_owned()))),
    }
}

fn chunk(text: &str) -> Result<u32, String> {
    match cli::size32(text)? {
        chunk @ 1..=0x400_0000 => Ok(chunk),
        _ => Err("a chunk has 1 byte to 64MiB".to_owned()),
    }
}

/// Senders that may wait while others are looked at.
const BACKLOG: u32 = 64;
const BUSY: &str = "too many files are being received already; try again later";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
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
