//! Sends checked and timed messages back and forth: a first test of a new device.
//!
//! The private data of the client contains the message size and the number of round trips. Every
//! message has its own content in each direction, and each side checks each message that it
//! receives. Two receives are posted at any time, so that the next message can arrive while the
//! previous one is checked. The server checks a message after it has sent its reply, the client
//! after it has read the clock.

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

/// Parameters of a run, proposed by the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Params {
    /// Message size in bytes.
    pub size: u32,
    /// Number of round trips.
    pub iterations: u64,
}

/// How a side waits for a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waiting {
    /// Polls for a while, then sleeps: [`Cq::wait`].
    #[default]
    Adaptive,
    /// Polls all the time, with yields in between.
    Poll,
    /// Sleeps on the completion channel without polling first.
    Event,
}

/// Why a run was aborted.
#[derive(Debug, thiserror::Error)]
pub enum PingpongError {
    /// The content of a message differs from what the other side sent.
    #[error("message {number} from {peer} is damaged from byte {at} on")]
    Damaged {
        /// Address of the other side.
        peer: SocketAddr,
        /// Number of the message, from 0.
        number: u64,
        /// First byte that differs.
        at: usize,
    },
    /// A message has the wrong size.
    #[error("message {number} from {peer} has {bytes} bytes instead of {size}")]
    Size {
        /// Address of the other side.
        peer: SocketAddr,
        /// Number of the message, from 0.
        number: u64,
        /// Size of the message in bytes.
        bytes: u32,
        /// Agreed size in bytes.
        size: u32,
    },
    /// The server rejected the proposal.
    #[error("rejected {peer}: {why}")]
    Refused {
        /// Address of the client.
        peer: SocketAddr,
        /// Reason for the rejection.
        why: String,
    },
    /// The connection failed before the run was over.
    #[error(transparent)]
    Link(#[from] LinkError),
}

impl From<Error> for PingpongError {
    fn from(e: Error) -> Self {
        PingpongError::Link(e.into())
    }
}

/// Results of the client.
#[derive(Clone, Debug)]
pub struct Results {
    /// Times of all round trips.
    pub round_trips: Latencies,
    /// Path of the connection: "direct" or "tcp".
    pub path: String,
    /// Time from the first message to the last.
    pub elapsed: Duration,
}

/// Runs the client. Calls `progress` with the number of messages that have returned.
pub fn run_client(
    context: &Context,
    peer: SocketAddr,
    params: Params,
    waiting: Waiting,
    patience: Duration,
    mut progress: impl FnMut(u64),
) -> Result<Results, PingpongError> {
    let mut session = Session::new(context, params, waiting, peer, patience)?;
    let options = ConnectOptions { private_data: params.to_bytes(), ..ConnectOptions::default() };
    link::connect(&session.qp, peer, &options)?;
    let path = session.qp.query()?.path;
    let mut round_trips = Latencies::new();
    let start = Instant::now();
    for number in 0..params.iterations {
        session.prepare(number, Side::Client)?;
        let served = Instant::now();
        session.send(number)?;
        session.await_message(number)?;
        round_trips.record(served.elapsed());
        session.check(number, Side::Server)?;
        progress(number + 1);
    }
    let elapsed = start.elapsed();
    link::end(&session.qp);
    Ok(Results { round_trips, path, elapsed })
}

/// Serves one run. Rejects messages larger than `max_size`.
pub fn serve(
    context: &Context,
    request: ConnectionRequest,
    max_size: u32,
    waiting: Waiting,
    patience: Duration,
) -> Result<Params, PingpongError> {
    let peer = request.peer();
    let params = match Params::parse(request.private_data()) {
        Ok(params) if params.size <= max_size => params,
        other => {
            let why = match other {
                Ok(params) => {
                    format!("message size {} is above the maximum, {max_size}", params.size)
                }
                Err(why) => why.to_owned(),
            };
            request.reject(why.as_bytes())?;
            return Err(PingpongError::Refused { peer, why });
        }
    };
    let mut session = Session::new(context, params, waiting, peer, patience)?;
    if params.iterations > 0 {
        session.prepare(0, Side::Server)?;
    }
    request
        .accept(&session.qp, &AcceptOptions::default())
        .map_err(|source| LinkError::NotConnected { peer, source })?;
    for number in 0..params.iterations {
        session.await_message(number)?;
        session.send(number)?;
        session.check(number, Side::Client)?;
        session.prepare(number + 1, Side::Server)?;
    }
    link::end(&session.qp);
    Ok(params)
}

impl Params {
    fn to_bytes(self) -> Vec<u8> {
        let mut b = MAGIC.to_vec();
        b.extend(self.size.to_le_bytes());
        b.extend(self.iterations.to_le_bytes());
        b
    }

    fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        let mut f = Fields(bytes);
        f.expect(MAGIC).ok_or("not the pingpong protocol of this version")?;
        let params = (|| {
            let params = Params { size: f.u32()?, iterations: f.u64()? };
            f.end()?;
            Some(params)
        })();
        params.ok_or("the proposal has a wrong length")
    }
}

/// Side that sends a message; determines its content.
#[derive(Clone, Copy)]
enum Side {
    Client = 0,
    Server = 1,
}

/// One side of a run, with two buffers for incoming and two for outgoing messages.
struct Session {
    qp: Qp,
    cq: Cq,
    channel: CompletionChannel,
    region: Mr,
    params: Params,
    waiting: Waiting,
    peer: SocketAddr,
    patience: Duration,
    /// Distance between two buffers in bytes.
    stride: u64,
    /// Expected and received content of the last message.
    expected: Vec<u8>,
    found: Vec<u8>,
}

impl Session {
    fn new(
        context: &Context,
        params: Params,
        waiting: Waiting,
        peer: SocketAddr,
        patience: Duration,
    ) -> Result<Self, PingpongError> {
        let channel = context.create_completion_channel()?;
        let cq = context.create_cq(8, Some(&channel))?;
        let pd = context.open_pd(None)?;
        let mut options = QpOptions::new(&cq);
        // Sends are not signaled: the reply shows that the message has arrived.
        options.sq_depth = 4;
        options.rq_depth = 2;
        let qp = pd.create_qp(&options)?;
        let stride = u64::from(params.size.max(1)).next_multiple_of(64);
        let buffer = context.create_shared_buffer(4 * stride)?;
        let region = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)?;
        let session = Session {
            qp,
            cq,
            channel,
            region,
            params,
            waiting,
            peer,
            patience,
            stride,
            expected: vec![0; params.size as usize],
            found: vec![0; params.size as usize],
        };
        session.post_receive(0)?;
        session.post_receive(1)?;
        Ok(session)
    }

    /// Writes the outgoing message of this number into its buffer.
    fn prepare(&mut self, number: u64, side: Side) -> Result<(), PingpongError> {
        fill(&mut self.expected, number, side);
        Ok(self.region.write_at(self.outgoing(number), &self.expected)?)
    }

    fn send(&self, number: u64) -> Result<(), PingpongError> {
        let sge = [self.region.sge(self.outgoing(number), self.params.size)];
        self.qp.post_send(&[SendRequest::send(number, &sge)]).map_err(LinkError::from)?;
        Ok(())
    }

    /// Waits for the peer's message of this number.
    fn await_message(&self, number: u64) -> Result<(), PingpongError> {
        let completion = self.completion()?;
        let completion = completion.ok().map_err(|e| LinkError::after(e, &self.qp, self.peer))?;
        // Sends complete only if they fail, so this is a message, and messages arrive in order.
        debug_assert_eq!(completion.opcode, CompletionOpcode::Receive);
        match completion.byte_len {
            bytes if bytes == self.params.size => Ok(()),
            bytes => {
                let Params { size, .. } = self.params;
                Err(PingpongError::Size { peer: self.peer, number, bytes, size })
            }
        }
    }

    /// Compares the peer's message with the expected content, and posts the receive again.
    fn check(&mut self, number: u64, side: Side) -> Result<(), PingpongError> {
        self.region.read_at(self.incoming(number), &mut self.found)?;
        self.post_receive(number)?;
        fill(&mut self.expected, number, side);
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
        let mut polls = 0_u32;
        loop {
            let n = self.cq.poll(place)?;
            if n > 0 {
                return Ok(n);
            }
            polls = polls.wrapping_add(1);
            if !polls.is_multiple_of(POLLS_PER_YIELD) {
                std::hint::spin_loop();
                continue;
            }
            // The process that must reply may need this CPU.
            std::thread::yield_now();
            if start.elapsed() > self.patience {
                return Ok(0);
            }
        }
    }

    fn sleep(&self, place: &mut [Completion]) -> Result<usize, Error> {
        let start = Instant::now();
        loop {
            // Arms before polling, so that a message in between is polled or causes an event.
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
        let sge = [self.region.sge(self.incoming(number), self.params.size)];
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

/// Fills a message with content that no other message has.
fn fill(bytes: &mut [u8], number: u64, side: Side) {
    let mut word =
        number.wrapping_mul(2).wrapping_add(side as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for chunk in bytes.chunks_mut(8) {
        word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (word ^ word >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        chunk.copy_from_slice(&mixed.to_le_bytes()[..chunk.len()]);
    }
}

/// Name and version of the protocol, at the start of every proposal.
const MAGIC: &[u8] = b"pingpong\x01";
/// Polls between two yields.
const POLLS_PER_YIELD: u32 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proposals_round_trip_and_cuts_are_refused() {
        let params = Params { size: 64, iterations: 1 << 40 };
        let bytes = params.to_bytes();
        assert_eq!(Params::parse(&bytes), Ok(params));
        for n in 0..bytes.len() {
            assert!(Params::parse(&bytes[..n]).is_err());
        }
        assert!(Params::parse(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn every_message_has_its_own_content() {
        let message = |number, side| {
            let mut bytes = vec![0; 13];
            fill(&mut bytes, number, side);
            bytes
        };
        assert_eq!(message(7, Side::Client), message(7, Side::Client));
        assert_ne!(message(7, Side::Client), message(7, Side::Server));
        assert_ne!(message(7, Side::Client), message(8, Side::Client));
    }
}
