//! Logging to stderr, and a log_limit for what hostile clients and peers can cause at will.
//!
//! Structured fields go through `tracing`; who calls is the binary at its start. [`RateLimitedLog`]
//! counts always and speaks seldom: a client that misbehaves a million times costs a few lines a
//! minute.

mod journal;
mod queue;

use std::io::{self, Write};
use std::time::{Duration, Instant};

use tracing_subscriber::EnvFilter;

use crate::config::{self, Seccomp};
use crate::privilege::{self, ThreadKind};
use journal::Lines;
pub use journal::error_text;
use queue::{Drain, Queue};

/// The log of this process. What is queued when it goes is written, if stderr takes it.
pub struct Log {
    queue: Queue,
    /// Until the thread has it.
    drain: Option<Drain>,
    /// Until it is taken, unless `RUST_LOG` says what is logged.
    level: Option<Level>,
}

/// Changes what is logged.
pub struct Level(Box<dyn Fn(EnvFilter) -> bool + Send>);

impl Level {
    /// Logs at the configured level from now on; false if that is impossible.
    pub fn set(&self, log: &config::Log) -> bool {
        (self.0)(configured(log))
    }
}

impl Log {
    /// Starts logging to stderr at the configured level, unless `RUST_LOG` says otherwise. Also
    /// returns what was wrong with `RUST_LOG`, if it was not usable. A panic is told the same way,
    /// so that a full pipe cannot keep the process from ending.
    pub fn start(log: &config::Log) -> (Self, Option<String>) {
        let (filter, problem, fixed) = match std::env::var("RUST_LOG") {
            // Also of the variable no wrong word may mean silence.
            Ok(text) => match config::log_filter(&text) {
                Ok(filter) => (EnvFilter::new(filter), None, true),
                Err(error) => (configured(log), Some(format!("RUST_LOG={text} {error}")), false),
            },
            Err(_) => (configured(log), None, false),
        };
        let (queue, drain) = queue::queue(LINES);
        let lines = Lines::new(queue.clone());
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(lines)
            // A line that cannot be written is lost: saying so on the same stream would panic.
            .log_internal_errors(false)
            .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
            .with_filter_reloading();
        let handle = subscriber.reload_handle();
        let level = Level(Box::new(move |filter| handle.reload(filter).is_ok()));
        // Fails only if this process logs already, as tests in one process may.
        let _ = subscriber.try_init();
        let lines = queue.clone();
        std::panic::set_hook(Box::new(move |panic| {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("unnamed").to_owned();
            let trace = std::backtrace::Backtrace::capture();
            // All of it is one entry of the queue.
            let _ =
                lines.clone().write(format!("rnicd: thread {name}: {panic}\n{trace}\n").as_bytes());
            let _ = lines.flush_within(FLUSH_DEADLINE);
        }));
        let level = (!fixed).then_some(level);
        (Log { queue, drain: Some(drain), level }, problem)
    }

    /// What changes the level later, once; nothing if `RUST_LOG` says what is logged.
    pub fn level(&mut self) -> Option<Level> {
        self.level.take()
    }

    /// Starts the thread that writes; until then lines are kept. Not before privileges are
    /// dropped: a thread keeps those it was started with.
    pub fn start_writing(&mut self, seccomp: Seccomp) -> io::Result<()> {
        let Some(drain) = self.drain.clone() else { return Ok(()) };
        privilege::spawn_confined("rnicd-log", ThreadKind::Log, seccomp, move || {
            drain.write_all(io::stderr());
        })?;
        self.drain = None;
        Ok(())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        match self.drain.take() {
            // Nothing was started, so nobody is kept from anything by waiting here.
            Some(drain) => drain.write_queued(io::stderr()),
            None => drop(self.queue.flush_within(FLUSH_DEADLINE)),
        }
    }
}

fn configured(log: &config::Log) -> EnvFilter {
    EnvFilter::try_new(&log.level).unwrap_or_else(|_| EnvFilter::new("info"))
}

/// Lines that may wait to be written.
const LINES: usize = 4096;
/// How long the end of the process waits for its last lines to be written.
const FLUSH_DEADLINE: Duration = Duration::from_secs(1);

/// Lets a few messages of a kind through per interval and counts the rest.
#[derive(Debug)]
pub struct RateLimitedLog {
    burst: u32,
    interval: Duration,
    began: Option<Instant>,
    spoken: u32,
    suppressed: u64,
    total: u64,
}

impl RateLimitedLog {
    /// `burst` messages per `interval`.
    pub fn new(burst: u32, interval: Duration) -> Self {
        RateLimitedLog { burst, interval, began: None, spoken: 0, suppressed: 0, total: 0 }
    }

    /// Counts one; whether to log it, and then how many were not logged since the last one.
    pub fn count(&mut self, now: Instant) -> Option<u64> {
        self.total += 1;
        if self.began.is_none_or(|began| now.duration_since(began) >= self.interval) {
            self.began = Some(now);
            self.spoken = 0;
        }
        if self.spoken < self.burst {
            self.spoken += 1;
            return Some(std::mem::take(&mut self.suppressed));
        }
        self.suppressed += 1;
        None
    }

    /// How many there were in all.
    pub fn total(&self) -> u64 {
        self.total
    }
}

/// A [`RateLimitedLog`] for each kind of message, so that a flood of one silences no other.
#[derive(Debug)]
pub struct RateLimitedLogs {
    burst: u32,
    interval: Duration,
    /// One for each kind that was ever counted: kinds are words of the program.
    kinds: Vec<(&'static str, RateLimitedLog)>,
}

impl RateLimitedLogs {
    /// `burst` messages of each kind per `interval`.
    pub fn new(burst: u32, interval: Duration) -> Self {
        RateLimitedLogs { burst, interval, kinds: Vec::new() }
    }

    /// Counts one of a kind; whether to log it, and then how many of that kind were not logged
    /// since the last one.
    pub fn count(&mut self, kind: &'static str, now: Instant) -> Option<u64> {
        let place = self.kinds.iter().position(|(known, _)| *known == kind).unwrap_or_else(|| {
            self.kinds.push((kind, RateLimitedLog::new(self.burst, self.interval)));
            self.kinds.len() - 1
        });
        self.kinds[place].1.count(now)
    }

    /// How many of a kind there were in all.
    pub fn total(&self, kind: &'static str) -> u64 {
        let of_kind = self.kinds.iter().find(|(known, _)| *known == kind);
        of_kind.map_or(0, |(_, log_limit)| log_limit.total())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_one_kind_silences_no_other() {
        let mut log_limits = RateLimitedLogs::new(2, Duration::from_secs(60));
        let start = Instant::now();
        let spoken = (0..1000).filter(|_| log_limits.count("one", start).is_some()).count();
        assert_eq!((spoken, log_limits.count("other", start)), (2, Some(0)));
        assert_eq!(log_limits.count("one", start + Duration::from_secs(61)), Some(998));
        assert_eq!(["one", "other", "never"].map(|k| log_limits.total(k)), [1001, 1, 0]);
    }

    #[test]
    fn a_flood_is_counted_and_mostly_silent() {
        let mut log_limit = RateLimitedLog::new(2, Duration::from_secs(60));
        let start = Instant::now();
        let spoken = (0..1000).filter(|_| log_limit.count(start).is_some()).count();
        assert_eq!((spoken, log_limit.total()), (2, 1000));
        assert_eq!(log_limit.count(start + Duration::from_secs(61)), Some(998));
        assert_eq!(log_limit.count(start + Duration::from_secs(61)), Some(0));
        assert_eq!(log_limit.count(start + Duration::from_secs(62)), None);
    }
}
