//! The yardsticks: raw TCP between the two processes, and memcpy.
//!
//! Both go through a working set of the same size as the RDMA ends' and in pieces of the same
//! size.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::error::PerfError;
use super::spec::{Flow, Spec};
use super::stats::Times;

/// One end of a raw TCP connection. Blocking, without delay (`TCP_NODELAY`).
pub struct RawEnd {
    stream: TcpStream,
    spec: Spec,
    /// As large as the working set, and at least as one read of small messages.
    memory: Vec<u8>,
}

impl RawEnd {
    /// For a connection that stands.
    pub fn new(stream: TcpStream, spec: Spec) -> Result<Self, PerfError> {
        stream.set_nodelay(true).map_err(PerfError::io("TCP_NODELAY"))?;
        let memory = touched(spec.working_set().max(READ_AT_ONCE as u64) as usize);
        Ok(RawEnd { stream, spec, memory })
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
        let ball = &mut self.memory[..self.spec.size as usize];
        let mut then = Instant::now();
        for _ in 0..count {
            self.stream.write_all(ball)?;
            self.stream.read_exact(ball)?;
            let now = Instant::now();
            times.record(now - then);
            then = now;
        }
        Ok(())
    }

    fn return_balls(&mut self, count: u64) -> std::io::Result<()> {
        let ball = &mut self.memory[..self.spec.size as usize];
        for _ in 0..count {
            self.stream.read_exact(ball)?;
            self.stream.write_all(ball)?;
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

/// Copies from one working set to another in this process.
pub struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
    size: usize,
}

impl Memcpy {
    /// Memory for this measurement, all of it touched.
    pub fn new(spec: &Spec) -> Self {
        let len = spec.working_set() as usize;
        Memcpy { from: touched(len), to: touched(len), size: spec.size as usize }
    }

    /// Copies `count` messages.
    pub fn run(&mut self, count: u64) -> Duration {
        let slots = (self.from.len() / self.size).max(1);
        let start = Instant::now();
        for slot in (0..slots).cycle().zip(0..count).map(|(slot, _)| slot) {
            let at = slot * self.size..(slot + 1) * self.size;
            black_box(&mut self.to[at.clone()]).copy_from_slice(black_box(&self.from[at]));
        }
        start.elapsed()
    }
}

/// Memory whose pages exist.
fn touched(len: usize) -> Vec<u8> {
    (0..len).map(|i| i as u8).collect()
}

/// How much a reader of small messages asks for at once, as programs do.
const READ_AT_ONCE: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::spec::Op;
    use super::*;

    /// Both ends play `count` messages; the driver's times.
    fn play(spec: &Spec, count: u64) -> Times {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut times = Times::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let stream = listener.accept().unwrap().0;
                RawEnd::new(stream, spec.clone()).unwrap().follow(count).unwrap();
            });
            let stream = TcpStream::connect(address).unwrap();
            let mut end = RawEnd::new(stream, spec.clone()).unwrap();
            assert!(end.drive(count, &mut times).unwrap() > Duration::ZERO);
        });
        times
    }

    #[test]
    fn streams_end_for_both_whatever_their_direction_and_size() {
        for op in [Op::Write, Op::Read, Op::FetchAdd] {
            for size in [1, 8, 70_000] {
                let spec = Spec::new(op, Flow::Stream, size).stream(4, 2, 4 * u64::from(size));
                assert_eq!(play(&spec, 33).percentiles().count, 0);
            }
        }
    }

    #[test]
    fn every_round_trip_is_noted() {
        let spec = Spec::new(Op::Send, Flow::PingPong, 8);
        assert_eq!(play(&spec, 100).percentiles().count, 100);
    }

    #[test]
    fn memcpy_goes_through_the_whole_working_set() {
        let spec = Spec::new(Op::Write, Flow::Stream, 64).stream(4, 1, 64 * 4);
        let mut memcpy = Memcpy::new(&spec);
        memcpy.to.fill(0xEE);
        memcpy.run(3);
        assert_eq!(memcpy.to[..192], memcpy.from[..192]);
        assert!(memcpy.to[192..].iter().all(|b| *b == 0xEE));
        memcpy.run(5);
        assert_eq!(memcpy.to, memcpy.from);
    }
}
