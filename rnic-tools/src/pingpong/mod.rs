//! Messages there and back, checked and timed: the first thing to try on a new device.
//!
//! The client says in its private data how large the ball is and how often it flies. Every ball has
//! a content of its own in either direction, and each side checks each ball it gets. Two receives
//! are posted at any time, so that the next ball finds room while the last one is looked at; the
//! checks of one side take place while the other side has the ball, or after the clock was read.

mod cli;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rnic_client::{AcceptOptions, Access, Arm, Completion, CompletionChannel, CompletionOpcode};
use rnic_client::{ConnectOptions, ConnectionRequest, Context, Cq, Error, Mr, Qp, QpOptions};
use rnic_client::{RecvRequest, SendRequest};

use crate::fields::Fields;
use crate::latency::Latencies;
use crate::link::{self, LinkError};

pub use cli::main;

/// A match, as the client proposes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// Bytes of the ball.
    pub size: u32,
    /// Times there and back.
    pub iterations: u64,
}

/// How a side waits for the ball.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waiting {
    /// Looks for a while, then sleeps: [`Cq::wait`].
    #[default]
    Adaptive,
    /// Looks all the time, yielding the CPU between looks.
    Poll,
    /// Sleeps on the completion channel at once.
    Event,
}

/// Why a match was broken off.
#[derive(Debug, thiserror::Error)]
pub enum PingpongError {
    /// A ball was not what the other side had sent.
    #[error("ball {number} from {peer} is damaged from byte {at} on")]
    Damaged {
        /// Address of the other side.
        peer: SocketAddr,
        /// Which ball, from 0.
        number: u64,
        /// First byte that differs.
        at: usize,
    },
    /// A ball had another size.
    #[error("ball {number} from {peer} has {bytes} bytes instead of {size}")]
    Size {
        /// Address of the other side.
        peer: SocketAddr,
        /// Which ball, from 0.
        number: u64,
        /// Bytes that the ball has.
        bytes: u32,
        /// Bytes that both sides agreed on.
        size: u32,
    },
    /// The server does not play this.
    #[error("refused a match with {peer}: {why}")]
    Refused {
        /// Address of the client.
        peer: SocketAddr,
        /// What the server does not play, in words.
        why: String,
    },
    /// The connection failed before the match was over.
    #[error(transparent)]
    Link(#[from] LinkError),
}

impl From<Error> for PingpongError {
    fn from(e: Error) -> Self {
        PingpongError::Link(e.into())
    }
}

/// What a client learned.
#[derive(Clone, Debug)]
pub struct Score {
    /// Time of each round trip.
    pub round_trips: Latencies,
    /// "direct" or "tcp".
    pub path: String,
    /// From the first ball to the last.
    pub elapsed: Duration,
}

/// Plays a match as client. `progress` is called with the number of balls that have returned.
pub fn play(
    context: &Context,
    peer: SocketAddr,
    game: Match,
    waiting: Waiting,
    patience: Duration,
    mut progress: impl FnMut(u64),
) -> Result<Score, PingpongError> {
    let mut table = Table::new(context, game, waiting, peer, patience)?;
    let options = ConnectOptions { private_data: game.to_bytes(), ..ConnectOptions::default() };
    link::connect(&table.qp, peer, &options)?;
    let path = table.qp.query()?.path;
    let mut round_trips = Latencies::new();
    let start = Instant::now();
    for number in 0..game.iterations {
        table.prepare(number, Side::Client)?;
        let served = Instant::now();
        table.send(number)?;
        table.await_ball(number)?;
        round_trips.record(served.elapsed());
        table.check(number, Side::Server)?;
        progress(number + 1);
    }
    let elapsed = start.elapsed();
    link::end(&table.qp);
    Ok(Score { round_trips, path, elapsed })
}

/// Plays one match as server; matches with larger balls than `max_size` are refused.
pub fn serve(
    context: &Context,
    request: ConnectionRequest,
    max_size: u32,
    waiting: Waiting,
    patience: Duration,
) -> Result<Match, PingpongError> {
    let peer = request.peer();
    let game = match Match::parse(request.private_data()) {
        Ok(game) if game.size <= max_size => game,
        other => {
            let why = match other {
                Ok(game) => format!("{} bytes are more than {max_size}", game.size),
                Err(why) => why.to_owned(),
            };
            request.reject(why.as_bytes())?;
            return Err(PingpongError::Refused { peer, why });
        }
    };
    let mut table = Table::new(context, game, waiting, peer, patience)?;
    if game.iterations > 0 {
        table.prepare(0, Side::Server)?;
    }
    request
        .accept(&table.qp, &AcceptOptions::default())
        .map_err(|source| LinkError::NotConnected { peer, source })?;
    for number in 0..game.iterations {
        table.await_ball(number)?;
        table.send(number)?;
        table.check(number, Side::Client)?;
        table.prepare(number + 1, Side::Server)?;
    }
    link::end(&table.qp);
    Ok(game)
}

impl Match {
    fn to_bytes(self) -> Vec<u8> {
        let mut b = MAGIC.to_vec();
        b.extend(self.size.to_le_bytes());
        b.extend(self.iterations.to_le_bytes());
        b
    }

    fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        let mut f = Fields(bytes);
        f.expect(MAGIC).ok_or("it is no pingpong of this version")?;
        let game = (|| {
            let game = Match { size: f.u32()?, iterations: f.u64()? };
            f.end()?;
            Some(game)
        })();
        game.ok_or("the proposal has a wrong length")
    }
}

/// Which side a ball comes from, as its bytes say.
#[derive(Clone, Copy)]
enum Side {
    Client = 0,
    Server = 1,
}

/// One side's end of a match: two places for balls that come and two for balls that go.
struct Table {
    qp: Qp,
    cq: Cq,
    channel: CompletionChannel,
    region: Mr,
    game: Match,
    waiting: Waiting,
    peer: SocketAddr,
    patience: Duration,
    /// Bytes from one place to the next.
    stride: u64,
    /// Bytes as they should be, and as they are.
    expected: Vec<u8>,
    found: Vec<u8>,
}

impl Table {
    fn new(
        context: &Context,
        game: Match,
        waiting: Waiting,
        peer: SocketAddr,
        patience: Duration,
    ) -> Result<Self, PingpongError> {
        let channel = context.create_completion_channel()?;
        let cq = context.create_cq(8, Some(&channel))?;
        let pd = context.open_pd(None)?;
        let mut options = QpOptions::new(&cq);
        // Sends are not signaled: the ball that comes back says that the last one has arrived.
        options.sq_depth = 4;
        options.rq_depth = 2;
        let qp = pd.create_qp(&options)?;
        let stride = u64::from(game.size.max(1)).next_multiple_of(64);
        let buffer = context.create_shared_buffer(4 * stride)?;
        let region = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)?;
        let table = Table {
            qp,
            cq,
            channel,
            region,
            game,
            waiting,
            peer,
            patience,
            stride,
            expected: vec![0; game.size as usize],
            found: vec![0; game.size as usize],
        };
        table.post_receive(0)?;
        table.post_receive(1)?;
        Ok(table)
    }

    /// Writes our ball of this number into its place.
    fn prepare(&mut self, number: u64, side: Side) -> Result<(), PingpongError> {
        paint(&mut self.expected, number, side);
        Ok(self.region.write_at(self.outgoing(number), &self.expected)?)
    }

    fn send(&self, number: u64) -> Result<(), PingpongError> {
        let sge = [self.region.sge(self.outgoing(number), self.game.size)];
        self.qp.post_send(&[SendRequest::send(number, &sge)]).map_err(LinkError::from)?;
        Ok(())
    }

    /// Waits for the peer's ball of this number.
    fn await_ball(&self, number: u64) -> Result<(), PingpongError> {
        let completion = self.completion()?;
        let completion = completion.ok().map_err(|e| LinkError::after(e, &self.qp, self.peer))?;
        // Sends complete only when they fail, so this is a ball, and balls come in order.
        debug_assert_eq!(completion.opcode, CompletionOpcode::Receive);
        match completion.byte_len {
            bytes if bytes == self.game.size => Ok(()),
            bytes => {
                let Match { size, .. } = self.game;
                Err(PingpongError::Size { peer: self.peer, number, bytes, size })
            }
        }
    }

    /// Compares the peer's ball with what it should be and makes its place free.
    fn check(&mut self, number: u64, side: Side) -> Result<(), PingpongError> {
        self.region.read_at(self.incoming(number), &mut self.found)?;
        self.post_receive(number)?;
        paint(&mut self.expected, number, side);
        if self.found == self.expected {
            return Ok(());
        }
        let pairs = self.found.iter().zip(&self.expected);
        let at = pairs.take_while(|(found, expected)| found == expected).count();
        Err(PingpongError::Damaged { peer: self.peer, number, at })
    }

    fn completion(&self) -> Result<Completion, PingpongError> {
        let mut place = [Completion::default()];
        let n = match self.waiting {
            Waiting::Adaptive => self.cq.wait(&mut place, Some(self.patience))?,
            Waiting::Poll => self.poll(&mut place)?,
            Waiting::Event => self.sleep(&mut place)?,
        };
        match n {
            0 => Err(LinkError::Silent { peer: self.peer, after: self.patience }.into()),
            _ => Ok(place[0]),
        }
    }

    fn poll(&self, place: &mut [Completion]) -> Result<usize, Error> {
        let start = Instant::now();
        let mut looks = 0_u32;
        loop {
            let n = self.cq.poll(place)?;
            if n > 0 {
                return Ok(n);
            }
            looks = looks.wrapping_add(1);
            if !looks.is_multiple_of(LOOKS_PER_YIELD) {
                std::hint::spin_loop();
                continue;
            }
            // Whoever has the ball may need this CPU to return it.
            std::thread::yield_now();
            if start.elapsed() > self.patience {
                return Ok(0);
            }
        }
    }

    fn sleep(&self, place: &mut [Completion]) -> Result<usize, Error> {
        let start = Instant::now();
        loop {
            // First arm, then look: a ball that comes in between is seen or told.
            self.cq.arm(Arm::Next)?;
            let n = self.cq.poll(place)?;
            if n > 0 {
                return Ok(n);
            }
            let left = self.patience.saturating_sub(start.elapsed());
            if left.is_zero() || self.channel.recv(Some(left))?.is_none() {
                return self.cq.poll(place);
            }
        }
    }

    fn post_receive(&self, number: u64) -> Result<(), PingpongError> {
        let sge = [self.region.sge(self.incoming(number), self.game.size)];
        self.qp.post_recv(&[RecvRequest::new(number, &sge)]).map_err(LinkError::from)?;
        Ok(())
    }

    fn incoming(&self, number: u64) -> u64 {
        number % 2 * self.stride
    }

    fn outgoing(&self, number: u64) -> u64 {
        (2 + number % 2) * self.stride
    }
}

/// Fills a ball with what only this ball holds.
fn paint(bytes: &mut [u8], number: u64, side: Side) {
    let mut word =
        number.wrapping_mul(2).wrapping_add(side as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for chunk in bytes.chunks_mut(8) {
        word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (word ^ word >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        chunk.copy_from_slice(&mixed.to_le_bytes()[..chunk.len()]);
    }
}

/// Name and version of the protocol, first in every proposal.
const MAGIC: &[u8] = b"pingpong\x01";
/// Looks between two yields.
const LOOKS_PER_YIELD: u32 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proposals_come_back_as_they_were_and_cuts_are_refused() {
        let game = Match { size: 64, iterations: 1 << 40 };
        let bytes = game.to_bytes();
        assert_eq!(Match::parse(&bytes), Ok(game));
        for n in 0..bytes.len() {
            assert!(Match::parse(&bytes[..n]).is_err());
        }
        assert!(Match::parse(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn every_ball_differs_from_the_others_and_from_its_answer() {
        let ball = |number, side| {
            let mut bytes = vec![0; 13];
            paint(&mut bytes, number, side);
            bytes
        };
        assert_eq!(ball(7, Side::Client), ball(7, Side::Client));
        assert_ne!(ball(7, Side::Client), ball(7, Side::Server));
        assert_ne!(ball(7, Side::Client), ball(8, Side::Client));
    }
}
