//! Raw TCP between the same two processes, to compare RDMA with.
//!
//! It uses a working set and messages of the same sizes as the RDMA ends.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::PerfError;
use super::spec::{Flow, Spec};
use super::stats::Times;

/// How both ends wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TcpMode {
    /// With blocking calls, as in most programs.
    Blocking,
    /// With repeated calls and yields, because both ends may share a CPU.
    Yielding,
    /// With repeated calls but no yields, which only cost time on separate CPUs.
    Spinning,
}

/// An end of a raw TCP connection with `TCP_NODELAY`.
pub struct RawEnd {
    stream: TcpStream,
    /// Current mode.
    mode: TcpMode,
    spec: Spec,
    /// Buffer, at least as large as the working set and as one read of small messages.
    memory: Vec<u8>,
}

impl RawEnd {
    /// Creates an end of an established connection.
    pub fn new(stream: TcpStream, spec: Spec) -> Result<Self, PerfError> {
        stream.set_nodelay(true).map_err(PerfError::io("TCP_NODELAY"))?;
        let memory = touched(spec.working_set().max(READ_AT_ONCE as u64) as usize);
        Ok(RawEnd { stream, mode: TcpMode::Blocking, spec, memory })
    }

    /// Changes the mode.
    pub fn set_mode(&mut self, mode: TcpMode) -> Result<(), PerfError> {
        let polls = mode != TcpMode::Blocking;
        self.stream.set_nonblocking(polls).map_err(PerfError::io("O_NONBLOCK"))?;
        self.mode = mode;
        Ok(())
    }

    /// Runs the driver's part of `count` messages or round trips. Records times of round trips.
    pub fn drive(&mut self, count: u64, times: &mut Times) -> Result<Duration, PerfError> {
        let start = Instant::now();
        match (self.spec.flow, self.spec.op) {
            (Flow::PingPong, _) => self.drive_ping_pong(count, times),
            (Flow::Stream, op) if op.is_answered() => {
                self.mark().and_then(|()| self.read_messages(count))
            }
            (Flow::Stream, _) => self.write_messages(count).and_then(|()| self.await_mark()),
        }
        .map_err(PerfError::io("raw TCP"))?;
        Ok(start.elapsed())
    }

    /// Runs the peer's part.
    pub fn follow(&mut self, count: u64) -> Result<(), PerfError> {
        match (self.spec.flow, self.spec.op) {
            (Flow::PingPong, _) => self.follow_ping_pong(count),
            (Flow::Stream, op) if op.is_answered() => {
                self.await_mark().and_then(|()| self.write_messages(count))
            }
            (Flow::Stream, _) => self.read_messages(count).and_then(|()| self.mark()),
        }
        .map_err(PerfError::io("raw TCP"))
    }

    /// Writes messages, one call each.
    fn write_messages(&mut self, count: u64) -> std::io::Result<()> {
        let size = self.spec.size as usize;
        let mut slots = self.memory[..size * self.spec.slots as usize].chunks_exact(size).cycle();
        (0..count).try_for_each(|_| match slots.next() {
            Some(message) => self.stream.write_all(message),
            None => Ok(()),
        })
    }

    /// Reads messages: large messages each into its slot, small messages together as they arrive.
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

    fn drive_ping_pong(&mut self, count: u64, times: &mut Times) -> std::io::Result<()> {
        let RawEnd { stream, mode, spec, memory } = self;
        let message = &mut memory[..spec.size as usize];
        let mut then = Instant::now();
        for _ in 0..count {
            send(stream, *mode, message)?;
            receive(stream, *mode, message)?;
            let now = Instant::now();
            times.record(now - then);
            then = now;
        }
        Ok(())
    }

    fn follow_ping_pong(&mut self, count: u64) -> std::io::Result<()> {
        let RawEnd { stream, mode, spec, memory } = self;
        let message = &mut memory[..spec.size as usize];
        for _ in 0..count {
            receive(stream, *mode, message)?;
            send(stream, *mode, message)?;
        }
        Ok(())
    }

    /// Sends a byte: everything has arrived, or the stream may start.
    fn mark(&mut self) -> std::io::Result<()> {
        self.stream.write_all(&[1])
    }

    fn await_mark(&mut self) -> std::io::Result<()> {
        self.stream.read_exact(&mut [0])
    }
}

fn send(stream: &mut TcpStream, mode: TcpMode, mut bytes: &[u8]) -> std::io::Result<()> {
    if mode == TcpMode::Blocking {
        return stream.write_all(bytes);
    }
    while !bytes.is_empty() {
        let n = retry_until_ready(mode, || stream.write(bytes))?;
        bytes = &bytes[n..];
    }
    Ok(())
}

fn receive(stream: &mut TcpStream, mode: TcpMode, bytes: &mut [u8]) -> std::io::Result<()> {
    if mode == TcpMode::Blocking {
        return stream.read_exact(bytes);
    }
    let mut got = 0;
    while got < bytes.len() {
        got += retry_until_ready(mode, || stream.read(&mut bytes[got..]))?;
    }
    Ok(())
}

/// Repeats a call until it transfers some bytes.
fn retry_until_ready(
    mode: TcpMode,
    mut attempt: impl FnMut() -> std::io::Result<usize>,
) -> std::io::Result<usize> {
    let mut start = None;
    loop {
        for _ in 0..TRIES {
            match attempt() {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Err(e) if e.kind() == ErrorKind::WouldBlock => match mode {
                    TcpMode::Spinning => std::hint::spin_loop(),
                    TcpMode::Blocking | TcpMode::Yielding => std::thread::yield_now(),
                },
                done => return done,
            }
        }
        if start.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            return Err(ErrorKind::TimedOut.into());
        }
    }
}

/// Allocates memory and touches all pages.
fn touched(len: usize) -> Vec<u8> {
    (0..len).map(|i| i as u8).collect()
}

/// Bytes per read of small messages, as is usual.
const READ_AT_ONCE: usize = 64 << 10;
/// Attempts between two checks of the clock.
const TRIES: u32 = 1000;
/// Time after which a wait fails.
const PATIENCE: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::spec::Op;
    use super::*;

    /// Runs both ends for `count` messages. Returns the driver's times.
    fn play(spec: &Spec, mode: TcpMode, count: u64) -> Times {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut times = Times::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let stream = listener.accept().unwrap().0;
                let mut end = RawEnd::new(stream, spec.clone()).unwrap();
                end.set_mode(mode).unwrap();
                end.follow(count).unwrap();
            });
            let stream = TcpStream::connect(address).unwrap();
            let mut end = RawEnd::new(stream, spec.clone()).unwrap();
            end.set_mode(mode).unwrap();
            assert!(end.drive(count, &mut times).unwrap() > Duration::ZERO);
        });
        times
    }

    #[test]
    fn streams_end_in_both_directions() {
        for op in [Op::Write, Op::Read, Op::FetchAdd] {
            for size in [1, 8, 70_000] {
                let spec = Spec::new(op, Flow::Stream, size).stream(4, 2, 4 * u64::from(size));
                assert_eq!(play(&spec, TcpMode::Blocking, 33).percentiles().count, 0);
            }
        }
    }

    #[test]
    fn every_round_trip_is_recorded() {
        let spec = Spec::new(Op::Send, Flow::PingPong, 8);
        for mode in [TcpMode::Blocking, TcpMode::Yielding, TcpMode::Spinning] {
            assert_eq!(play(&spec, mode, 100).percentiles().count, 100);
        }
    }
}
