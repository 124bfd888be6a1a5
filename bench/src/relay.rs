//! A lower bound for the latency of designs with a daemon in the path: three processes that pass a
//! cache line from the first via the second to the third, and back.
//!
//! The first is the driver, the second stands for the daemon, the third for the peer. They share a
//! page, poll like the ends of a polled ping-pong (and like a worker that has just had work), and
//! have no queues, checks or completions. Half a round trip is the time from the first process to
//! the third. No RNIC that passes requests through a daemon can be faster on this machine; any
//! additional time is the cost of its functions.
//!
//! The best CPU placement is not known in advance, so several are measured.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rnic_abi::shm::{CopyFault, Mapping};
use rnic_tools::perf::PerfError;
use rnic_tools::perf::completions::poll_until;
use rnic_tools::perf::machine::cpus;
use rnic_tools::perf::peer::{Peer, serve_child, this_program, unexpected};
use rnic_tools::perf::protocol::{Reply, read_msg, write_msg};
use rnic_tools::perf::stats::Times;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use crate::machine::Pin;

/// CPU placement of the three processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelayPlacement {
    /// Chosen by the scheduler.
    Free,
    /// All on the first CPU.
    Together,
    /// First and third process on the first CPU, second process on the last.
    MiddleAlone,
    /// First process on the first CPU, the other two on the last.
    FirstAlone,
}

/// One of the three processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Member {
    /// Starts each round trip and measures the time.
    First,
    /// Forwards in both directions.
    Second,
    /// Returns each message.
    Third,
}

impl RelayPlacement {
    /// All placements.
    pub const ALL: [RelayPlacement; 4] = [
        RelayPlacement::Free,
        RelayPlacement::Together,
        RelayPlacement::MiddleAlone,
        RelayPlacement::FirstAlone,
    ];

    /// Pins a process with one thread to the CPU of `member`. `None` stands for this thread.
    fn pin(self, member: Member, process: Option<Pid>) -> Result<Option<Pin>, PerfError> {
        let on_first = match (self, member) {
            (RelayPlacement::Free, _) => return Ok(None),
            (RelayPlacement::Together, _) | (RelayPlacement::FirstAlone, Member::First) => true,
            (RelayPlacement::MiddleAlone, member) => member != Member::Second,
            (RelayPlacement::FirstAlone, _) => false,
        };
        if on_first { Pin::first(process) } else { Pin::last(process) }.map(Some)
    }

    /// Returns a suffix for the name of the yardstick.
    pub fn words(self) -> &'static str {
        match self {
            RelayPlacement::Free => "",
            RelayPlacement::Together => ", one CPU",
            RelayPlacement::MiddleAlone => ", the second alone",
            RelayPlacement::FirstAlone => ", the first alone",
        }
    }
}

/// The driver's side: the page, and the other processes.
pub struct Relay {
    page: Page,
    others: [(Member, Peer); 2],
}

/// A command to the second or the third process.
#[derive(Debug, Serialize, Deserialize)]
enum Command {
    /// Open the page ([`Reply::Done`]).
    Open {
        /// The process that receives this.
        member: Member,
        /// Path of the page.
        memory: String,
    },
    /// Relay `count` round trips ([`Reply::Ready`], then done).
    Run {
        /// Round trips.
        count: u64,
    },
}

impl Relay {
    /// Creates the page, and starts the processes that share it.
    pub fn start() -> Result<Self, PerfError> {
        let (mapping, memory) = Mapping::create_arena("rnic-bench relay", PAGE)
            .map_err(PerfError::io("making a page"))?;
        let path = path_of(&memory);
        let start = |member| -> Result<(Member, Peer), PerfError> {
            let mut process = Peer::start(this_program("relay")?)?;
            process.command(&Command::Open { member, memory: path.clone() })?;
            process.await_reply(&Reply::Done)?;
            Ok((member, process))
        };
        let others = [start(Member::Second)?, start(Member::Third)?];
        Ok(Relay { page: Page(mapping), others })
    }

    /// Runs the driver's part of `count` round trips. Records the times.
    pub fn drive(
        &mut self,
        placement: RelayPlacement,
        count: u64,
        times: &mut Times,
    ) -> Result<Duration, PerfError> {
        let mut pins = Vec::new();
        self.page.clear()?;
        for (member, process) in &mut self.others {
            pins.push(placement.pin(*member, process.pid())?);
            process.command(&Command::Run { count })?;
            process.await_reply(&Reply::Ready)?;
        }
        pins.push(placement.pin(Member::First, None)?);
        let elapsed = self.page.play(count, times)?;
        for (_, process) in &mut self.others {
            process.await_reply(&Reply::Done)?;
        }
        Ok(elapsed)
    }
}

/// Runs the second or the third process: carries out commands from standard input until EOF.
pub fn serve_relay() -> Result<(), PerfError> {
    serve_child(|output| {
        let mut input = std::io::stdin().lock();
        let mut part = None;
        while let Some(command) = read_msg(&mut input)? {
            match (command, &part) {
                (Command::Open { member, memory }, _) => {
                    part = Some((member, Page::open(&memory)?));
                }
                (Command::Run { count }, Some((member, page))) => {
                    write_msg(output, &Reply::Ready)?;
                    page.follow(*member, count)?;
                }
                (command, None) => return Err(unexpected(&command)),
            }
            write_msg(output, &Reply::Done)?;
        }
        Ok(())
    })
}

/// Returns the path by which other processes open a page while it is open here.
fn path_of(memory: &OwnedFd) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd())
}

/// A page shared by the three processes: four cache lines, one for each hop of a round trip.
pub struct Page(Arc<Mapping>);

impl Page {
    /// Opens the page that the driver has created.
    pub fn open(memory: &str) -> Result<Self, PerfError> {
        let io = PerfError::io;
        let file = File::options()
            .read(true)
            .write(true)
            .open(Path::new(memory))
            .map_err(io("opening the page of the relay"))?;
        let mapping = Mapping::map_arena(file.as_fd(), PAGE).map_err(io("mapping a page"))?;
        Ok(Page(mapping))
    }

    /// Runs the part of the second or the third process.
    pub fn follow(&self, member: Member, count: u64) -> Result<(), PerfError> {
        match member {
            Member::Second => self.pass_on(count),
            Member::First | Member::Third => {
                (1..=count).try_for_each(|n| self.hop(Line::SecondToThird, Line::ThirdToSecond, n))
            }
        }
    }

    fn play(&self, count: u64, times: &mut Times) -> Result<Duration, PerfError> {
        let start = Instant::now();
        let mut then = start;
        for n in 1..=count {
            self.put(Line::FirstToSecond, &[0x5A; MESSAGE], n)?;
            self.take(Line::SecondToFirst, n)?;
            let now = Instant::now();
            times.record(now - then);
            then = now;
        }
        Ok(start.elapsed())
    }

    /// Polls both incoming lines, as a daemon must, and forwards the messages.
    fn pass_on(&self, count: u64) -> Result<(), PerfError> {
        let mut there = 0;
        let mut back = 0;
        while back < count {
            poll_until(cpus(), || {
                if self.number(Line::FirstToSecond)? == there + 1 {
                    there += 1;
                    self.put(Line::SecondToThird, &self.message(Line::FirstToSecond)?, there)?;
                } else if self.number(Line::ThirdToSecond)? == back + 1 {
                    back += 1;
                    self.put(Line::SecondToFirst, &self.message(Line::ThirdToSecond)?, back)?;
                } else {
                    return Ok(None);
                }
                Ok(Some(()))
            })?;
        }
        Ok(())
    }

    /// Takes message `n` from one line and puts it into another.
    fn hop(&self, from: Line, to: Line, n: u64) -> Result<(), PerfError> {
        let message = self.take(from, n)?;
        self.put(to, &message, n)
    }

    /// Waits for message `n`.
    fn take(&self, line: Line, n: u64) -> Result<[u8; MESSAGE], PerfError> {
        poll_until(cpus(), || Ok((self.number(line)? == n).then_some(())))?;
        self.message(line)
    }

    fn message(&self, line: Line) -> Result<[u8; MESSAGE], PerfError> {
        let mut message = [0; MESSAGE];
        self.0.read(line.at(), &mut message).map_err(outside)?;
        Ok(message)
    }

    fn number(&self, line: Line) -> Result<u64, PerfError> {
        self.0.load_u64(line.at() + MESSAGE).map_err(outside)
    }

    /// Stores a message, then its number. A reader that sees the number also sees the message.
    fn put(&self, line: Line, message: &[u8; MESSAGE], n: u64) -> Result<(), PerfError> {
        self.0.write(line.at(), message).map_err(outside)?;
        self.0.store_u64(line.at() + MESSAGE, n).map_err(outside)
    }

    /// Clears the page. Must precede the commands to run.
    fn clear(&self) -> Result<(), PerfError> {
        self.0.fill(0, PAGE, 0).map_err(outside)
    }
}

/// A hop of a round trip.
#[derive(Clone, Copy, Debug)]
enum Line {
    FirstToSecond,
    SecondToThird,
    ThirdToSecond,
    SecondToFirst,
}

impl Line {
    fn at(self) -> usize {
        self as usize * APART
    }
}

fn outside(fault: CopyFault) -> PerfError {
    PerfError::Arguments(format!("the page of the relay: {fault:?}"))
}

/// Bytes of a message; with its number it fills a cache line.
const MESSAGE: usize = 56;
/// Bytes between lines, because caches fetch lines in pairs.
const APART: usize = 128;
const PAGE: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_pass_all_three_members() {
        let (mapping, memory) = Mapping::create_arena("test", PAGE).unwrap();
        let path = path_of(&memory);
        let first = Page(mapping);
        first.clear().unwrap();
        let mut times = Times::new();
        std::thread::scope(|scope| {
            for member in [Member::Second, Member::Third] {
                let page = Page::open(&path).unwrap();
                scope.spawn(move || page.follow(member, 100).unwrap());
            }
            assert!(first.play(100, &mut times).unwrap() > Duration::ZERO);
        });
        assert_eq!(times.percentiles().count, 100);
        for line in [Line::FirstToSecond, Line::SecondToThird, Line::ThirdToSecond] {
            assert_eq!(first.number(line).unwrap(), 100);
            assert_eq!(first.message(line).unwrap(), [0x5A; MESSAGE]);
        }
    }

    #[test]
    fn members_are_pinned() {
        let all = cpus();
        for (placement, member) in
            [(RelayPlacement::Together, Member::Third), (RelayPlacement::FirstAlone, Member::First)]
        {
            let pin = placement.pin(member, None).unwrap();
            assert!(pin.is_some() && cpus() == 1);
        }
        assert!(RelayPlacement::Free.pin(Member::Second, None).unwrap().is_none());
        assert_eq!(cpus(), all);
    }

    #[test]
    fn a_missing_page_is_an_error() {
        assert!(Page::open("/proc/self/fd/9999").is_err());
    }
}
