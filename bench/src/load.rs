//! Load on a daemon during a measurement: a separate pair of processes that streams until told to
//! stop.
//!
//! The processes may run as another user. The first process takes commands like a peer, and starts
//! the second process.

use std::io::{BufRead, Stdout};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

use rnic_tools::perf::PerfError;
use rnic_tools::perf::driver::Driver;
use rnic_tools::perf::measured::Amount;
use rnic_tools::perf::peer::{
    Peer, THIS, open, peer_program, serve_child, this_program, unexpected,
};
use rnic_tools::perf::protocol::{Reply, read_msg, write_msg};
use rnic_tools::perf::spec::Spec;
use serde::{Deserialize, Serialize};

use crate::site::Site;

/// A command to the first process of a load.
#[derive(Debug, Serialize, Deserialize)]
enum Command {
    /// Connect a separate pair of processes for this stream ([`Reply::Done`]).
    Load {
        /// Parameters of the stream.
        spec: Spec,
    },
    /// Start streaming ([`Reply::Ready`]), until [`Command::Stop`].
    Go,
    /// Stop streaming. The reply is a number, the messages per second.
    Stop,
}

/// A running load. Ends when dropped.
pub struct Load {
    process: Peer,
}

impl Load {
    /// Starts the processes, as `user` if given, and connects them.
    pub fn start(site: &Site, spec: &Spec, user: Option<u32>) -> Result<Self, PerfError> {
        let program = program(site, user)?;
        let mut process = Peer::start(program)?;
        process.command(&Command::Load { spec: spec.clone() })?;
        process.await_reply(&Reply::Done)?;
        Ok(Load { process })
    }

    /// Starts streaming.
    pub fn go(&mut self) -> Result<(), PerfError> {
        self.process.command(&Command::Go)?;
        self.process.await_reply(&Reply::Ready)
    }

    /// Stops streaming. With several loads, stop all before the first call of [`rate`](Self::rate).
    pub fn stop(&mut self) -> Result<(), PerfError> {
        self.process.command(&Command::Stop)
    }

    /// Returns messages per second between `go` and `stop`.
    pub fn rate(&mut self) -> Result<f64, PerfError> {
        self.process.receive()
    }
}

/// Returns the command of a load, run as `user` if given.
fn program(site: &Site, user: Option<u32>) -> Result<process::Command, PerfError> {
    let mut program = match user {
        None => this_program("load")?,
        Some(id) => {
            let mut program = process::Command::new(THIS);
            program.arg("load").uid(id).gid(id).current_dir("/");
            program
        }
    };
    for (option, socket) in [("--socket", site.socket()), ("--peer-socket", site.peer_socket())] {
        if let Some(socket) = socket {
            program.arg(option).arg(socket);
        }
    }
    Ok(program)
}

/// Runs the first process of a load: carries out commands from standard input until EOF. The error
/// returned has already been reported.
pub fn serve_load(socket: Option<&Path>, peer_socket: Option<&Path>) -> Result<(), PerfError> {
    serve_child(|output| carry_out(socket, peer_socket, output))
}

fn carry_out(
    socket: Option<&Path>,
    peer_socket: Option<&Path>,
    output: &mut Stdout,
) -> Result<(), PerfError> {
    let context = open(socket)?;
    // A separate thread reads commands, so that streaming need not wait for them.
    let (forward, commands) = channel();
    std::thread::spawn(move || {
        listen(&mut std::io::stdin().lock(), |received| forward.send(received).is_ok())
    });
    let spec = match next(&commands)? {
        Some(Command::Load { spec }) => spec,
        Some(other) => return Err(unexpected(&other)),
        None => return Ok(()),
    };
    let mut peer = Peer::start(peer_program(peer_socket)?)?;
    let mut driver = Driver::new(&context, &mut peer, &spec)?;
    let mut measured = driver.prepare(Amount::Time(PIECE))?;
    write_msg(output, &Reply::Done)?;
    while let Some(command) = next(&commands)? {
        if !matches!(command, Command::Go) {
            return Err(unexpected(&command));
        }
        write_msg(output, &Reply::Ready)?;
        measured.rates.rounds.clear();
        let stop = loop {
            driver.round(&mut measured)?;
            match commands.try_recv() {
                Ok(command) => break command?,
                Err(TryRecvError::Empty) => {}
                // The parent process has exited.
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
        };
        match stop {
            Command::Stop => write_msg(output, &mean_rate(&measured.rates.rounds))?,
            other => return Err(unexpected(&other)),
        }
    }
    Ok(())
}

/// Reads commands and passes them to `forward`, until the end of the input or until `forward`
/// returns false.
fn listen(input: &mut impl BufRead, mut forward: impl FnMut(Result<Command, PerfError>) -> bool) {
    while let Some(received) = read_msg(input).transpose() {
        let failed = received.is_err();
        if !forward(received) || failed {
            break;
        }
    }
}

/// Returns the next command, or `None` at the end.
fn next(commands: &Receiver<Result<Command, PerfError>>) -> Result<Option<Command>, PerfError> {
    commands.recv().ok().transpose()
}

/// Returns the mean rate over rounds with the same number of messages.
fn mean_rate(rates: &[f64]) -> f64 {
    let time: f64 = rates.iter().map(|rate| 1.0 / rate).sum();
    rates.len() as f64 / time
}

/// Length of a round. Between rounds, both ends wait until everything has arrived.
const PIECE: Duration = Duration::from_millis(40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_rate_weighs_the_times() {
        // Equal numbers of messages take one second and a third of a second.
        assert!((mean_rate(&[1.0, 3.0]) - 1.5).abs() < 1e-9);
    }

    #[test]
    fn commands_are_read_until_an_invalid_one() {
        let mut said = Vec::new();
        listen(&mut &b"\"Go\"\n\"Stop\"\nwhat\n\"Go\"\n"[..], |received| {
            said.push(received.map(|c| format!("{c:?}")).map_err(|e| e.to_string()));
            true
        });
        assert_eq!(said.len(), 3);
        assert_eq!((said[0].as_deref(), said[1].as_deref()), (Ok("Go"), Ok("Stop")));
        assert!(said[2].as_ref().unwrap_err().contains("what"));
    }
}
