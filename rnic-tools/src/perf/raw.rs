//! The yardstick of everything that goes between processes: raw TCP between the same two.
//!
//! It goes through a working set of the same size as the RDMA ends' and in pieces of the same size.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::PerfError;
use super::placement::Placement;
use super::spec::{Flow, Spec};
use super::stats::Times;

/// How raw TCP is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manner {
    /// Both ends look for what has come, again and again, and never sleep.
    pub polled: bool,
    /// Where both processes run.
    pub placement: Placement,
}

impl Manner {
    /// As most programs do.
    pub const BLOCKING: Manner = Manner { polled: false, placement: Placement::Free };
}

/// One end of a raw TCP connection, without delay (`TCP_NODELAY`).
pub struct RawEnd {
    stream: TcpStream,
    /// How it is used just now.
    manner: Manner,
    spec: Spec,
    /// As large as the working set, and at least as one read of small messages.
    memory: Vec<u8>,
}

impl RawEnd {
    /// For a connection that stands.
    pub fn new(stream: TcpStream, spec: Spec) -> Result<Self, PerfError> {
        stream.set_nodelay(true).map_err(PerfError::io("TCP_NODELAY"))?;
        let memory = touched(spec.working_set().max(READ_AT_ONCE as u64) as usize);
        Ok(RawEnd { stream, manner: Manner::BLOCKING, spec, memory })
    }

    /// Changes how it is used from now on.
    pub fn set_manner(&mut self, manner: Manner) -> Result<(), PerfError> {
        self.stream.set_nonblocking(manner.polled).map_err(PerfError::io("O_NONBLOCK"))?;
        self.manner = manner;
        Ok(())
    }

    /// The driver's part: streams `count` messages, or plays so many round trips and notes each.
    pub fn drive(&mut self, count: u64, times: &mut Times) -> Result<Duration, PerfError> {
        let start = Instant::now();
        match (self.spec.flow, self.spec.op) {
            (Flow::PingPong, _) => self.serve_balls(count, times),
            (Flow::Stream, op) if op.is_answered() => {
                self.mark().and_then(|()| self.read_messages(count))
            }
            (Flow::Stream, _) => self.write_messages(count).and_then(|()| self.await_mark()),
        }
        .map_err(PerfError::io("raw TCP"))?;
        Ok(start.elapsed())
    }

    /// The peer's part.
    pub fn follow(&mut self, count: u64) -> Result<(), PerfError> {
        match (self.spec.flow, self.spec.op) {
            (Flow::PingPong, _) => self.return_balls(count),
            (Flow::Stream, op) if op.is_answered() => {
                self.await_mark().and_then(|()| self.write_messages(count))
            }
            (Flow::Stream, _) => self.read_messages(count).and_then(|()| self.mark()),
        }
        .map_err(PerfError::io("raw TCP"))
    }

    /// One write call per message.
    fn write_messages(&mut self, count: u64) -> std::io::Result<()> {
        let size = self.spec.size as usize;
        let mut slots = self.memory[..size * self.spec.slots as usize].chunks_exact(size).cycle();
        (0..count).try_for_each(|_| match slots.next() {
            Some(message) => self.stream.write_all(message),
            None => Ok(()),
        })
    }

    /// Large messages each to their place, small ones as they come.
    fn read_messages(&mut self, count: u64) -> std::io::Result<()> {
        let size = self.spec.size as usize;
        if size >= READ_AT_ONCE {
            let slots = self.spec.slots as usize;
            for slot in (0..slots).cycle().zip(0..count).map(|(slot, _)| slot) {
                self.stream.read_exact(&mut self.memory[slot * size..][..size])?;
            }
            return Ok(());
        }
        let mut left = count * size as u64;
        while left > 0 {
            let most = left.min(READ_AT_ONCE as u64) as usize;
            match self.stream.read(&mut self.memory[..most])? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                n => left -= n as u64,
            }
        }
        Ok(())
    }

    fn serve_balls(&mut self, count: u64, times: &mut Times) -> std::io::Result<()> {
        let RawEnd { stream, manner, spec, memory } = self;
        let ball = &mut memory[..spec.size as usize];
        let mut then = Instant::now();
        for _ in 0..count {
            send(stream, *manner, ball)?;
            receive(stream, *manner, ball)?;
            let now = Instant::now();
            times.record(now - then);
            then = now;
        }
        Ok(())
    }

    fn return_balls(&mut self, count: u64) -> std::io::Result<()> {
        let RawEnd { stream, manner, spec, memory } = self;
        let ball = &mut memory[..spec.size as usize];
        for _ in 0..count {
            receive(stream, *manner, ball)?;
            send(stream, *manner, ball)?;
        }
        Ok(())
    }

    /// Says that everything has arrived, or that the stream may start.
    fn mark(&mut self) -> std::io::Result<()> {
        self.stream.write_all(&[1])
    }

    fn await_mark(&mut self) -> std::io::Result<()> {
        self.stream.read_exact(&mut [0])
    }
}

fn send(stream: &mut TcpStream, manner: Manner, mut bytes: &[u8]) -> std::io::Result<()> {
    if !manner.polled {
        return stream.write_all(bytes);
    }
    while !bytes.is_empty() {
        let n = again_and_again(manner, || stream.write(bytes))?;
        bytes = &bytes[n..];
    }
    Ok(())
}

fn receive(stream: &mut TcpStream, manner: Manner, bytes: &mut [u8]) -> std::io::Result<()> {
    if !manner.polled {
        return stream.read_exact(bytes);
    }
    let mut got = 0;
    while got < bytes.len() {
        got += again_and_again(manner, || stream.read(&mut bytes[got..]))?;
    }
    Ok(())
}

/// Tries until some bytes have gone. Who shares a CPU with the other end lets it run in between;
/// who has one alone would lose time by that.
fn again_and_again(
    manner: Manner,
    mut attempt: impl FnMut() -> std::io::Result<usize>,
) -> std::io::Result<usize> {
    let mut start = None;
    loop {
        for _ in 0..TRIES {
            match attempt() {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Err(e) if e.kind() == ErrorKind::WouldBlock => match manner.placement {
                    Placement::Apart => std::hint::spin_loop(),
                    Placement::Free | Placement::Together | Placement::WithWorkers => {
                        std::thread::yield_now();
                    }
                },
                done => return done,
            }
        }
        if start.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            return Err(ErrorKind::TimedOut.into());
        }
    }
}

/// Memory whose pages exist.
fn touched(len: usize) -> Vec<u8> {
    (0..len).map(|i| i as u8).collect()
}

/// How much a reader of small messages asks for at once, as programs do.
const READ_AT_ONCE: usize = 64 << 10;
/// Attempts between two looks at the clock.
const TRIES: u32 = 1000;
/// How long nothing may come.
const PATIENCE: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::spec::Op;
    use super::*;

    /// Both ends play `count` messages; the driver's times.
    fn play(spec: &Spec, manner: Manner, count: u64) -> Times {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut times = Times::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let stream = listener.accept().unwrap().0;
                let mut end = RawEnd::new(stream, spec.clone()).unwrap();
                end.set_manner(manner).unwrap();
                end.follow(count).unwrap();
            });
            let stream = TcpStream::connect(address).unwrap();
            let mut end = RawEnd::new(stream, spec.clone()).unwrap();
            end.set_manner(manner).unwrap();
            assert!(end.drive(count, &mut times).unwrap() > Duration::ZERO);
        });
        times
    }

    #[test]
    fn streams_end_for_both_whatever_their_direction_and_size() {
        for op in [Op::Write, Op::Read, Op::FetchAdd] {
            for size in [1, 8, 70_000] {
                let spec = Spec::new(op, Flow::Stream, size).stream(4, 2, 4 * u64::from(size));
                assert_eq!(play(&spec, Manner::BLOCKING, 33).percentiles().count, 0);
            }
        }
    }

    #[test]
    fn every_round_trip_is_noted() {
        let spec = Spec::new(Op::Send, Flow::PingPong, 8);
        for placement in [Placement::Together, Placement::Apart] {
            for polled in [false, true] {
                let manner = Manner { polled, placement };
                assert_eq!(play(&spec, manner, 100).percentiles().count, 100);
            }
        }
    }
}
