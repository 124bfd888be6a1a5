//! Work for a daemon while something else is measured: a pair of processes of its own that streams
//! from the moment it is told to until it is told to rest.
//!
//! It may be of another user than the one who measures. Its first process is told by the same
//! messages as a peer, and starts the second one itself.

use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

use rnic_client::Context;

use super::bench::{Amount, Bench, Subject};
use super::error::PerfError;
use super::peer::{Peer, load_program, open, peer_program, unexpected};
use super::site::Site;
use super::spec::Spec;
use super::talk::{Command, Reply, hear, say};

/// A running load; ended when dropped.
pub struct Load {
    process: Peer,
}

impl Load {
    /// Starts its processes as `user`, if one is named, and connects them.
    pub fn start(site: &Site, spec: &Spec, user: Option<u32>) -> Result<Self, PerfError> {
        let program = load_program(site.socket(), site.peer_socket(), user)?;
        let mut process = Peer::start(program)?;
        process.command(&Command::Load { spec: spec.clone() })?;
        process.await_reply(&Reply::Done)?;
        Ok(Load { process })
    }

    /// Streams from now on.
    pub fn go(&mut self) -> Result<(), PerfError> {
        self.process.command(&Command::Go)?;
        self.process.await_reply(&Reply::Ready)
    }

    /// Stops. Several are to be told before the first one is asked.
    pub fn rest(&mut self) -> Result<(), PerfError> {
        self.process.command(&Command::Rest)
    }

    /// Messages per second since `go`, after `rest`.
    pub fn rate(&mut self) -> Result<f64, PerfError> {
        match self.process.reply()? {
            Reply::Streamed { rate } => {
                self.process.await_reply(&Reply::Done)?;
                Ok(rate)
            }
            other => Err(unexpected(&other)),
        }
    }
}

/// What the first process of a load does: carries out commands from standard input until its end.
/// Returns an error that has been reported already.
pub fn serve_load(socket: Option<&Path>, peer_socket: Option<&Path>) -> Result<(), PerfError> {
    let mut output = std::io::stdout();
    let served = open(socket)
        .map_err(PerfError::from)
        .and_then(|context| obey(&context, peer_socket, &mut output));
    if let Err(e) = &served {
        // Who started this and is gone needs no report.
        let _ = say(&mut output, &Reply::Failed { why: e.to_string() });
    }
    served
}

fn obey(
    context: &Context,
    peer_socket: Option<&Path>,
    output: &mut impl Write,
) -> Result<(), PerfError> {
    // What comes while it streams is to be noticed without waiting for it.
    let (tell, told) = channel();
    std::thread::spawn(move || {
        listen(&mut std::io::stdin().lock(), |heard| tell.send(heard).is_ok())
    });
    let spec = match next(&told)? {
        Some(Command::Load { spec }) => spec,
        Some(other) => return Err(unexpected(&other)),
        None => return Ok(()),
    };
    let mut peer = Peer::start(peer_program(peer_socket)?)?;
    let mut bench = Bench::new(context, &mut peer, &spec, &[Subject::Rdma])?;
    let mut measured = bench.prepare(Subject::Rdma, Amount::Time(PIECE))?;
    say(output, &Reply::Done)?;
    while let Some(command) = next(&told)? {
        if !matches!(command, Command::Go) {
            return Err(unexpected(&command));
        }
        say(output, &Reply::Ready)?;
        measured.rates.rounds.clear();
        let rest = loop {
            bench.round(&mut measured)?;
            match told.try_recv() {
                Ok(command) => break command?,
                Err(TryRecvError::Empty) => {}
                // Nobody measures any more.
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
        };
        match rest {
            Command::Rest => {
                say(output, &Reply::Streamed { rate: mean_rate(&measured.rates.rounds) })?;
                say(output, &Reply::Done)?;
            }
            other => return Err(unexpected(&other)),
        }
    }
    Ok(())
}

/// Hears commands until their end, or until nobody wants them.
fn listen(input: &mut impl BufRead, mut tell: impl FnMut(Result<Command, PerfError>) -> bool) {
    while let Some(heard) = hear(input).transpose() {
        let failed = heard.is_err();
        if !tell(heard) || failed {
            break;
        }
    }
}

/// The next command; `None` at their end.
fn next(told: &Receiver<Result<Command, PerfError>>) -> Result<Option<Command>, PerfError> {
    told.recv().ok().transpose()
}

/// Of pieces of the same number of messages: the rate of all of them together.
fn mean_rate(rates: &[f64]) -> f64 {
    let time: f64 = rates.iter().map(|rate| 1.0 / rate).sum();
    rates.len() as f64 / time
}

/// How long a piece of the stream is; between two, the ends agree that all has come.
const PIECE: Duration = Duration::from_millis(40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_the_same_size_have_the_rate_of_their_times() {
        // A second and a third of one for as many messages each.
        assert!((mean_rate(&[1.0, 3.0]) - 1.5).abs() < 1e-9);
    }

    #[test]
    fn commands_are_heard_until_one_makes_no_sense() {
        let mut said = Vec::new();
        listen(&mut &b"\"Go\"\n\"Rest\"\nwhat\n\"Go\"\n"[..], |heard| {
            said.push(heard.map(|c| format!("{c:?}")).map_err(|e| e.to_string()));
            true
        });
        assert_eq!(said.len(), 3);
        assert_eq!((said[0].as_deref(), said[1].as_deref()), (Ok("Go"), Ok("Rest")));
        assert!(said[2].as_ref().unwrap_err().contains("what"));
    }
}
