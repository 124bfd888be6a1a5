//! A TCP connection: bytes in order, however cut, late, or refused.

use std::collections::VecDeque;
use std::io;

use crate::types::{QpId, Time};

/// Where a stream of bytes is cut into calls.
#[derive(Clone, Debug)]
pub(super) enum Cuts {
    /// As much as there is.
    None,
    /// So many bytes at a time.
    Every(usize),
    /// Once, at this position of the stream.
    At(u64),
    /// By this seed, mostly into small pieces.
    Random(u64),
}

impl Cuts {
    /// Bytes of the next call, of `have` at stream position `at`.
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

/// What is at one end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// A QP of an engine.
    Qp { engine: usize, qp: QpId },
    /// The test itself.
    Raw,
    /// Nothing any more.
    Closed,
}

/// One direction.
#[derive(Clone, Debug)]
pub(super) struct Pipe {
    chunks: VecDeque<(Time, Vec<u8>)>,
    /// The sender has finished: when that is known at the other end, and whether it was.
    fin: Option<Time>,
    fin_seen: bool,
    /// The connection was reset: the receiver has not been told yet.
    reset: bool,
    /// Bytes that may be under way.
    pub window: usize,
    /// How the receiver's calls cut the stream.
    pub cuts: Cuts,
    /// How much a call of the sender is allowed.
    pub takes: Cuts,
    /// Nanoseconds a byte is under way.
    pub latency: u64,
    /// Bytes sent and received so far.
    pub sent: u64,
    received: u64,
    /// The sender was refused bytes and waits to be called.
    pub blocked: bool,
    /// Everything ever sent, for tests that look at the wire.
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

    /// Whether the sender could send now.
    pub fn has_room(&self) -> bool {
        self.under_way() < self.window
    }

    /// The sender's call.
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

    /// The sender will send no more.
    pub fn finish(&mut self, now: Time) {
        self.fin.get_or_insert(Time(now.0 + self.latency));
    }

    /// Drops what is under way and fails the receiver's next call.
    pub fn reset(&mut self) {
        self.chunks.clear();
        self.reset = true;
    }

    /// Whether bytes are there that nobody has read.
    pub fn has_unread(&self) -> bool {
        !self.chunks.is_empty()
    }

    /// Whether the receiver's call would say something now.
    pub fn is_readable(&self, now: Time) -> bool {
        self.reset
            || self.chunks.front().is_some_and(|(at, _)| *at <= now)
            || self.chunks.is_empty() && !self.fin_seen && self.fin.is_some_and(|at| at <= now)
    }

    /// When something more will be readable, if nothing is.
    pub fn next_arrival(&self) -> Option<Time> {
        let fin = self.fin.filter(|_| !self.fin_seen);
        self.chunks.front().map(|(at, _)| *at).or(fin)
    }

    /// The error of a reset, for a receiver that does not call.
    pub fn take_error(&mut self) -> Option<io::Error> {
        std::mem::take(&mut self.reset).then(|| io::ErrorKind::ConnectionReset.into())
    }

    /// The receiver's call.
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

/// A connection: two ends, and the direction from each of them.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub ends: [End; 2],
    /// `pipes[i]` carries what `ends[i]` sends.
    pub pipes: [Pipe; 2],
}

impl Link {
    pub fn new(a: End, b: End) -> Self {
        Link { ends: [a, b], pipes: [Pipe::new(), Pipe::new()] }
    }

    /// One end closes its socket, as the kernel would do it: with unread bytes, or when asked to,
    /// the other end sees a reset.
    pub fn close(&mut self, end: usize, reset: bool, now: Time) {
        let unread = self.pipes[1 - end].has_unread();
        self.ends[end] = End::Closed;
        if reset || unread {
            self.pipes[end].reset();
        }
        self.pipes[end].finish(now);
    }

    /// The end sends; to a closed end the answer is a reset.
    pub fn send(&mut self, end: usize, bytes: &[u8], now: Time) -> io::Result<usize> {
        if self.ends[1 - end] == End::Closed {
            self.pipes[1 - end].reset();
            return Ok(bytes.len());
        }
        self.pipes[end].send(bytes, now)
    }
}
