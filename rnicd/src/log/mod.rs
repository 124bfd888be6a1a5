//! The log to stderr, with a rate limit for events that hostile clients and peers can cause.
//!
//! Structured fields go through `tracing`. The binary starts the log. [`RateLimitedLog`] counts
//! every event and logs few: a client that misbehaves a million times causes a few lines a minute.

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

/// The log of this process. Dropping it writes the queued lines, if stderr accepts them.
pub struct Log {
    queue: Queue,
    /// `None` after the thread has taken it.
    drain: Option<Drain>,
    /// `None` after the caller has taken it, or if `RUST_LOG` sets the filter.
    level: Option<Level>,
}

/// Changes the log filter.
pub struct Level(Box<dyn Fn(EnvFilter) -> bool + Send>);

impl Level {
    /// Logs with the configured filter from now on. Returns false if that fails.
    pub fn set(&self, log: &config::Log) -> bool {
        (self.0)(configured(log))
    }
}

impl Log {
    /// Starts to log to stderr with the configured filter, or with `RUST_LOG`. Also returns the
    /// error of an invalid `RUST_LOG`. Panics go to the log too, so that a full pipe cannot keep
    /// the process from ending.
    pub fn start(log: &config::Log) -> (Self, Option<String>) {
        let (filter, problem, fixed) = match std::env::var("RUST_LOG") {
            // An invalid variable must not silence the log.
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
            // Write errors are ignored: reporting them on the same stream would panic.
            .log_internal_errors(false)
            .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
            .with_filter_reloading();
        let handle = subscriber.reload_handle();
        let level = Level(Box::new(move |filter| handle.reload(filter).is_ok()));
        // Fails only if this process already logs, as tests in one process may.
        let _ = subscriber.try_init();
        let lines = queue.clone();
        std::panic::set_hook(Box::new(move |panic| {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("unnamed").to_owned();
            let trace = std::backtrace::Backtrace::capture();
            // One entry of the queue, so that other lines cannot interleave.
            let _ =
                lines.clone().write(format!("rnicd: thread {name}: {panic}\n{trace}\n").as_bytes());
            let _ = lines.flush_within(FLUSH_DEADLINE);
        }));
        let level = (!fixed).then_some(level);
        (Log { queue, drain: Some(drain), level }, problem)
    }

    /// Returns, once, the handle that changes the filter. Returns `None` if `RUST_LOG` sets it.
    pub fn level(&mut self) -> Option<Level> {
        self.level.take()
    }

    /// Starts the thread that writes. Until then lines are queued. Call this after privileges are
    /// dropped, because a thread keeps the privileges it was started with.
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
            // No thread was started, so a wait here blocks nothing.
            Some(drain) => drain.write_queued(io::stderr()),
            None => drop(self.queue.flush_within(FLUSH_DEADLINE)),
        }
    }
}

fn configured(log: &config::Log) -> EnvFilter {
    EnvFilter::try_new(&log.level).unwrap_or_else(|_| EnvFilter::new("info"))
}

/// Maximum lines that wait to be written.
const LINES: usize = 4096;
/// Maximum wait for the last lines at the end of the process.
const FLUSH_DEADLINE: Duration = Duration::from_secs(1);

/// Passes a few messages per interval and counts the rest.
#[derive(Debug)]
pub struct RateLimitedLog {
    burst: u32,
    interval: Duration,
    began: Option<Instant>,
    logged: u32,
    suppressed: u64,
    total: u64,
}

impl RateLimitedLog {
    /// Allows `burst` messages per `interval`.
    pub fn new(burst: u32, interval: Duration) -> Self {
        RateLimitedLog { burst, interval, began: None, logged: 0, suppressed: 0, total: 0 }
    }

    /// Counts a message. Returns `None` if it must not be logged, otherwise the number of messages
    /// suppressed since the last logged one.
    pub fn count(&mut self, now: Instant) -> Option<u64> {
        self.total += 1;
        if self.began.is_none_or(|began| now.duration_since(began) >= self.interval) {
            self.began = Some(now);
            self.logged = 0;
        }
        if self.logged < self.burst {
            self.logged += 1;
            return Some(std::mem::take(&mut self.suppressed));
        }
        self.suppressed += 1;
        None
    }

    /// Returns the number of all messages.
    pub fn total(&self) -> u64 {
        self.total
    }
}

/// A [`RateLimitedLog`] for each kind of message, so a flood of one kind silences no other.
#[derive(Debug)]
pub struct RateLimitedLogs {
    burst: u32,
    interval: Duration,
    /// One for each kind counted so far. The kinds are string constants, so their number is
    /// bounded.
    kinds: Vec<(&'static str, RateLimitedLog)>,
}

impl RateLimitedLogs {
    /// Allows `burst` messages of each kind per `interval`.
    pub fn new(burst: u32, interval: Duration) -> Self {
        RateLimitedLogs { burst, interval, kinds: Vec::new() }
    }

    /// Counts a message of a kind. Returns `None` if it must not be logged, otherwise the number of
    /// messages of that kind suppressed since the last logged one.
    pub fn count(&mut self, kind: &'static str, now: Instant) -> Option<u64> {
        let place = self.kinds.iter().position(|(known, _)| *known == kind).unwrap_or_else(|| {
            self.kinds.push((kind, RateLimitedLog::new(self.burst, self.interval)));
            self.kinds.len() - 1
        });
        self.kinds[place].1.count(now)
    }

    /// Returns the number of all messages of a kind.
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
        let logged = (0..1000).filter(|_| log_limits.count("one", start).is_some()).count();
        assert_eq!((logged, log_limits.count("other", start)), (2, Some(0)));
        assert_eq!(log_limits.count("one", start + Duration::from_secs(61)), Some(998));
        assert_eq!(["one", "other", "never"].map(|k| log_limits.total(k)), [1001, 1, 0]);
    }

    #[test]
    fn a_flood_is_counted_and_mostly_silent() {
        let mut log_limit = RateLimitedLog::new(2, Duration::from_secs(60));
        let start = Instant::now();
        let logged = (0..1000).filter(|_| log_limit.count(start).is_some()).count();
        assert_eq!((logged, log_limit.total()), (2, 1000));
        assert_eq!(log_limit.count(start + Duration::from_secs(61)), Some(998));
        assert_eq!(log_limit.count(start + Duration::from_secs(61)), Some(0));
        assert_eq!(log_limit.count(start + Duration::from_secs(62)), None);
    }
}
