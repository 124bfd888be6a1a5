//! Logging to stderr, and a damper for what hostile clients and peers can cause at will.
//!
//! Structured fields go through `tracing`; who calls is the binary at its start. [`Damper`] counts
//! always and speaks seldom: a client that misbehaves a million times costs a few lines a minute.

use std::time::{Duration, Instant};

use tracing_subscriber::EnvFilter;

use crate::config::Log;

/// What came of starting to log.
pub struct Started {
    /// What was wrong with `RUST_LOG`, if it was not usable.
    pub problem: Option<String>,
    /// Changes the level later, unless `RUST_LOG` says what it is.
    pub level: Option<Level>,
}

/// Changes what is logged.
pub struct Level(Box<dyn Fn(EnvFilter) -> bool + Send>);

impl Level {
    /// Logs at the configured level from now on; false if that is impossible.
    pub fn set(&self, log: &Log) -> bool {
        (self.0)(configured(log))
    }
}

/// Starts logging to stderr at the configured level, unless `RUST_LOG` says otherwise.
pub fn start(log: &Log) -> Started {
    let (filter, problem, fixed) = match std::env::var("RUST_LOG") {
        Ok(text) => match EnvFilter::try_new(&text) {
            Ok(filter) => (filter, None, true),
            Err(error) => (configured(log), Some(format!("RUST_LOG={text}: {error}")), false),
        },
        Err(_) => (configured(log), None, false),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // A line that cannot be written is lost: saying so on the same stream would panic.
        .log_internal_errors(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_filter_reloading();
    let handle = builder.reload_handle();
    let level = Level(Box::new(move |filter| handle.reload(filter).is_ok()));
    // Fails only if this process logs already, as tests in one process may.
    let _ = builder.try_init();
    Started { problem, level: (!fixed).then_some(level) }
}

fn configured(log: &Log) -> EnvFilter {
    EnvFilter::try_new(&log.level).unwrap_or_else(|_| EnvFilter::new("info"))
}

/// Lets a few messages of a kind through per interval and counts the rest.
#[derive(Debug)]
pub struct Damper {
    burst: u32,
    interval: Duration,
    began: Option<Instant>,
    spoken: u32,
    suppressed: u64,
    total: u64,
}

impl Damper {
    /// `burst` messages per `interval`.
    pub fn new(burst: u32, interval: Duration) -> Self {
        Damper { burst, interval, began: None, spoken: 0, suppressed: 0, total: 0 }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_and_mostly_silent() {
        let mut damper = Damper::new(2, Duration::from_secs(60));
        let start = Instant::now();
        let spoken = (0..1000).filter(|_| damper.count(start).is_some()).count();
        assert_eq!((spoken, damper.total()), (2, 1000));
        assert_eq!(damper.count(start + Duration::from_secs(61)), Some(998));
        assert_eq!(damper.count(start + Duration::from_secs(61)), Some(0));
        assert_eq!(damper.count(start + Duration::from_secs(62)), None);
    }
}
