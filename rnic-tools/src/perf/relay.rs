//! The yardstick of every design with a daemon in the path: three processes that pass a cache line
//! from the first through the second to the third, and back.
//!
//! The first is the driver, the third the peer, and the second one, started for this alone, stands
//! where the daemon does. They share a page, look for the next line as the ends of a polled
//! ping-pong do (and a daemon's worker that has had work a moment ago), and do nothing else: no
//! queues, no checks, no completions. Half a round trip is from the first process to the third. No
//! RNIC whose requests pass a daemon can be faster on this machine, and what it needs on top is the
//! price of what it does.
//!
//! On which CPUs the three are best is not known, so there are several ways to place them.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rnic_core::shm::{CopyFault, Mapping};
use serde::{Deserialize, Serialize};

use super::completions::look;
use super::error::PerfError;
use super::machine::{Pin, cpus};
use super::peer::Peer;
use super::stats::Times;
use super::talk::{Command, Reply};

/// Where the three processes run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Seats {
    /// Where the scheduler puts them.
    Free,
    /// All on the first CPU.
    Together,
    /// The first and the third on the first CPU, the second on the last one.
    MiddleAlone,
    /// The first on the first CPU, the others on the last one.
    FirstAlone,
}

/// Who of the three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    /// Plays the balls and has the clock.
    First,
    /// Passes them on.
    Second,
    /// Plays them back.
    Third,
}

impl Seats {
    /// All of them.
    pub const ALL: [Seats; 4] =
        [Seats::Free, Seats::Together, Seats::MiddleAlone, Seats::FirstAlone];

    /// Holds this thread, which is a member's.
    pub fn pin(self, member: Member) -> Result<Option<Pin>, PerfError> {
        let on_first = match (self, member) {
            (Seats::Free, _) => return Ok(None),
            (Seats::Together, _) | (Seats::FirstAlone, Member::First) => true,
            (Seats::MiddleAlone, member) => member != Member::Second,
            (Seats::FirstAlone, _) => false,
        };
        if on_first { Pin::first() } else { Pin::last() }.map(Some)
    }

    /// In words that follow the name of the yardstick.
    pub fn words(self) -> &'static str {
        match self {
            Seats::Free => "",
            Seats::Together => ", one CPU",
            Seats::MiddleAlone => ", the second alone",
            Seats::FirstAlone => ", the first alone",
        }
    }
}

/// The driver's part: the page, and the second process.
pub struct Relay {
    page: Page,
    /// Kept open for the others to open it, too.
    memory: OwnedFd,
    second: Peer,
}

impl Relay {
    /// Makes the page; `second` is started and shares it.
    pub fn start(second: std::process::Command) -> Result<Self, PerfError> {
        let (mapping, memory) = Mapping::create_arena("rnic-perf relay", PAGE)
            .map_err(PerfError::io("making a page"))?;
        let mut relay = Relay { page: Page(mapping), memory, second: Peer::start(second)? };
        let command = Command::RelayLink { memory: relay.memory() };
        relay.second.command(&command)?;
        relay.second.await_reply(&Reply::Done)?;
        Ok(relay)
    }

    /// Where the others find the page, as long as this exists.
    pub fn memory(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.memory.as_raw_fd())
    }

    /// The driver's part of `count` round trips with a `peer` that has the page; notes each.
    pub fn drive(
        &mut self,
        peer: &mut Peer,
        seats: Seats,
        count: u64,
        times: &mut Times,
    ) -> Result<Duration, PerfError> {
        let _pin = seats.pin(Member::First)?;
        self.page.clear()?;
        for process in [&mut self.second, &mut *peer] {
            process.command(&Command::Relay { count, seats })?;
            process.await_reply(&Reply::Ready)?;
        }
        let elapsed = self.page.play(count, times)?;
        for process in [&mut self.second, peer] {
            process.await_reply(&Reply::Done)?;
        }
        Ok(elapsed)
    }
}

/// A page that the three share: four lines, one for each hop of a round trip.
pub struct Page(Arc<Mapping>);

impl Page {
    /// The one that another process made.
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

    /// The part of the second or the third process.
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
            self.put(Line::FirstToSecond, &[0x5A; BALL], n)?;
            self.take(Line::SecondToFirst, n)?;
            let now = Instant::now();
            times.record(now - then);
            then = now;
        }
        Ok(start.elapsed())
    }

    /// Looks at both lines that may bring something, as a daemon has to, and passes on what came.
    fn pass_on(&self, count: u64) -> Result<(), PerfError> {
        let (mut there, mut back) = (0, 0);
        while back < count {
            look(cpus(), || {
                if self.number(Line::FirstToSecond)? == there + 1 {
                    there += 1;
                    self.put(Line::SecondToThird, &self.ball(Line::FirstToSecond)?, there)?;
                } else if self.number(Line::ThirdToSecond)? == back + 1 {
                    back += 1;
                    self.put(Line::SecondToFirst, &self.ball(Line::ThirdToSecond)?, back)?;
                } else {
                    return Ok(None);
                }
                Ok(Some(()))
            })?;
        }
        Ok(())
    }

    /// Takes ball `n` from one line and puts it into another.
    fn hop(&self, from: Line, to: Line, n: u64) -> Result<(), PerfError> {
        let ball = self.take(from, n)?;
        self.put(to, &ball, n)
    }

    /// Waits for ball `n`.
    fn take(&self, line: Line, n: u64) -> Result<[u8; BALL], PerfError> {
        look(cpus(), || Ok((self.number(line)? == n).then_some(())))?;
        self.ball(line)
    }

    fn ball(&self, line: Line) -> Result<[u8; BALL], PerfError> {
        let mut ball = [0; BALL];
        self.0.read(line.at(), &mut ball).map_err(outside)?;
        Ok(ball)
    }

    fn number(&self, line: Line) -> Result<u64, PerfError> {
        self.0.load_u64(line.at() + BALL).map_err(outside)
    }

    /// Its number last: who sees that has the ball.
    fn put(&self, line: Line, ball: &[u8; BALL], n: u64) -> Result<(), PerfError> {
        self.0.write(line.at(), ball).map_err(outside)?;
        self.0.store_u64(line.at() + BALL, n).map_err(outside)
    }

    /// Before the others look.
    fn clear(&self) -> Result<(), PerfError> {
        self.0.fill(0, PAGE, 0).map_err(outside)
    }
}

/// Which hop.
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

/// Bytes of a line before its number, with which it is a cache line.
const BALL: usize = 56;
/// From one line to the next: caches fetch lines in pairs.
const APART: usize = 128;
const PAGE: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ball_goes_through_the_second_to_the_third_and_back() {
        let (mapping, memory) = Mapping::create_arena("test", PAGE).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
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
            assert_eq!(first.ball(line).unwrap(), [0x5A; BALL]);
        }
    }

    #[test]
    fn members_are_seated_as_said() {
        let all = cpus();
        for (seats, member) in
            [(Seats::Together, Member::Third), (Seats::FirstAlone, Member::First)]
        {
            let pin = seats.pin(member).unwrap();
            assert!(pin.is_some() && cpus() == 1);
        }
        assert!(Seats::Free.pin(Member::Second).unwrap().is_none());
        assert_eq!(cpus(), all);
    }

    #[test]
    fn a_page_that_is_not_there_is_no_panic() {
        assert!(Page::open("/proc/self/fd/9999").is_err());
    }
}
