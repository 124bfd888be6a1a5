//! A TCP connection that delivers bytes in order but may cut, delay or refuse them.

use std::collections::VecDeque;
use std::io;

use rnic_abi::types::{QpId, Time};

/// Where a stream of bytes is cut into calls.
#[derive(Clone, Debug)]
pub(super) enum Cuts {
    /// No cuts: each call gets all bytes.
    None,
    /// After this many bytes.
    Every(usize),
    /// Once, at this position of the stream.
    At(u64),
    /// At random, from this seed, mostly into small pieces.
    Random(u64),
}

impl Cuts {
    /// Returns how many of the `have` bytes at stream position `at` the next call gets.
    fn next(&mut self, at: u64, have: usize) -> usize {
        match self {
            Cuts::None => have,
            Cuts::Every(n) => have.min(*n),
            Cuts::At(cut) if at < *cut => have.min((*cut - at) as usize),
            Cuts::At(_) => have,
            Cuts::Random(seed) => {
                *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let r = (*seed >> 33) as usize;
                let most = [1, 3, 17, 200, 5000, have][r % 6];
                have.min(1 + (r >> 8) % most.max(1))
            }
        }
    }
}

/// The user of one end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// A QP of an engine.
    Qp { engine: usize, qp: QpId },
    /// The test.
    Raw,
    /// None: the socket is closed.
    Closed,
}

/// One direction of a link.
#[derive(Clone, Debug)]
pub(super) struct Pipe {
    chunks: VecDeque<(Time, Vec<u8>)>,
    /// Time at which the FIN arrives at the other end.
    fin: Option<Time>,
    fin_seen: bool,
    /// The connection was reset, and the receiver has not noticed yet.
    reset: bool,
    /// Maximum number of bytes in flight.
    pub window: usize,
    /// How the receiver's calls cut the stream.
    pub cuts: Cuts,
    /// How many bytes each call of the sender may write.
    pub takes: Cuts,
    /// Delay of each byte in nanoseconds.
    pub latency: u64,
    /// Number of bytes sent so far.
    pub sent: u64,
    received: u64,
    /// The sender could not write all bytes and waits for room.
    pub blocked: bool,
    /// All bytes ever sent, for tests that check the wire.
    pub log: Vec<u8>,
}

impl Pipe {
    fn new() -> Self {
        Pipe {
            chunks: VecDeque::new(),
            fin: None,
            fin_seen: false,
            reset: false,
            window: 1 << 30,
            cuts: Cuts::None,
            takes: Cuts::None,
            latency: 0,
            sent: 0,
            received: 0,
            blocked: false,
            log: Vec::new(),
        }
    }

    fn under_way(&self) -> usize {
        self.chunks.iter().map(|(_, c)| c.len()).sum()
    }

    /// Returns true if the sender could send now.
    pub fn has_room(&self) -> bool {
        self.under_way() < self.window
    }

    pub fn send(&mut self, bytes: &[u8], now: Time) -> io::Result<usize> {
        if self.fin.is_some() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let room = bytes.len().min(self.window.saturating_sub(self.under_way()));
        let n = self.takes.next(self.sent, room);
        self.blocked = n < bytes.len();
        if n == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.sent += n as u64;
        self.log.extend_from_slice(&bytes[..n]);
        self.chunks.push_back((Time(now.0 + self.latency), bytes[..n].to_vec()));
        Ok(n)
    }

    /// Ends the sending direction.
    pub fn finish(&mut self, now: Time) {
        self.fin.get_or_insert(Time(now.0 + self.latency));
    }

    /// Drops all bytes in flight and fails the receiver's next call.
    pub fn reset(&mut self) {
        self.chunks.clear();
        self.reset = true;
    }

    /// Returns true if there are bytes that were not received.
    pub fn has_unread(&self) -> bool {
        !self.chunks.is_empty()
    }

    /// Returns true if a receive would return bytes, an end or an error now.
    pub fn is_readable(&self, now: Time) -> bool {
        self.reset
            || self.chunks.front().is_some_and(|(at, _)| *at <= now)
            || self.chunks.is_empty() && !self.fin_seen && self.fin.is_some_and(|at| at <= now)
    }

    /// Returns the time of the next readable data.
    pub fn next_arrival(&self) -> Option<Time> {
        let fin = self.fin.filter(|_| !self.fin_seen);
        self.chunks.front().map(|(at, _)| *at).or(fin)
    }

    /// Returns the error of a reset, for a receiver that does not call `recv`.
    pub fn take_error(&mut self) -> Option<io::Error> {
        std::mem::take(&mut self.reset).then(|| io::ErrorKind::ConnectionReset.into())
    }

    pub fn recv(&mut self, into: &mut [&mut [u8]], now: Time) -> io::Result<usize> {
        if std::mem::take(&mut self.reset) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let room: usize = into.iter().map(|b| b.len()).sum();
        let have = self.chunks.iter().take_while(|(at, _)| *at <= now).map(|(_, c)| c.len()).sum();
        if have == 0 {
            if self.chunks.is_empty() && self.fin.is_some_and(|at| at <= now) {
                self.fin_seen = true;
                return Ok(0);
            }
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let n = self.cuts.next(self.received, have).min(room);
        let mut bytes = Vec::with_capacity(n);
        while bytes.len() < n {
            let Some((at, mut chunk)) = self.chunks.pop_front() else { break };
            let rest = chunk.split_off(chunk.len().min(n - bytes.len()));
            bytes.extend_from_slice(&chunk);
            if !rest.is_empty() {
                self.chunks.push_front((at, rest));
            }
        }
        self.received += n as u64;
        let mut from = 0;
        for buffer in into {
            let k = buffer.len().min(n - from);
            buffer[..k].copy_from_slice(&bytes[from..from + k]);
            from += k;
        }
        Ok(n)
    }
}

/// A connection with two ends, each of which sends in one direction.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub ends: [End; 2],
    /// `pipes[i]` carries the data that `ends[i]` sends.
    pub pipes: [Pipe; 2],
}

impl Link {
    pub fn new(a: End, b: End) -> Self {
        Link { ends: [a, b], pipes: [Pipe::new(), Pipe::new()] }
    }

    /// Closes the socket of one end as the kernel does: with unread bytes, or with `reset`, the
    /// other end sees a reset.
    pub fn close(&mut self, end: usize, reset: bool, now: Time) {
        let unread = self.pipes[1 - end].has_unread();
        self.ends[end] = End::Closed;
        if reset || unread {
            self.pipes[end].reset();
        }
        self.pipes[end].finish(now);
    }

    /// Sends from one end. Data to a closed end causes a reset.
    pub fn send(&mut self, end: usize, bytes: &[u8], now: Time) -> io::Result<usize> {
        if self.ends[1 - end] == End::Closed {
            self.pipes[1 - end].reset();
            return Ok(bytes.len());
        }
        self.pipes[end].send(bytes, now)
    }
}
