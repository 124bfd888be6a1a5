//! `[engine]`: worker threads, the loopback path and deadlines.

use std::time::Duration;

use super::checker::{Checker, SECOND};
use super::error::ConfigError;
use super::file::{self, Loopback, WorkersValue};

/// `[engine]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Number of worker threads; `None` (the default) derives it from the CPUs.
    pub workers: Option<u32>,
    /// Path between two QPs of this daemon; default direct.
    pub loopback: Loopback,
    /// Polls of its queues before an idle worker yields; default 100.
    pub spins: u32,
    /// Time that an idle worker yields before it sleeps; default 50 us.
    pub yield_for: Duration,
    /// Time limit to send a Terminate and for the peer to close after it; default 5 s.
    pub terminate_deadline: Duration,
    /// Time limit for a graceful close; default 60 s.
    pub close_deadline: Duration,
    /// Time limit for a copy by a client's library; then the client's session ends. Default 10 s.
    pub copy_deadline: Duration,
}

impl Default for Engine {
    fn default() -> Self {
        Engine {
            workers: None,
            loopback: Loopback::Direct,
            spins: 100,
            yield_for: Duration::from_micros(50),
            terminate_deadline: Duration::from_secs(5),
            close_deadline: Duration::from_secs(60),
            copy_deadline: Duration::from_secs(10),
        }
    }
}

impl Checker<'_> {
    /// Checks `[engine]` and applies the defaults.
    pub(super) fn engine(&self, s: file::EngineSection) -> Result<Engine, ConfigError> {
        let default = Engine::default();
        let workers = self.checked(s.workers, WorkersValue::Auto, |value| match value {
            WorkersValue::Count(n) if !(1..=MAX_WORKERS).contains(n) => {
                Err(format!("must be \"auto\" or from 1 to {MAX_WORKERS}"))
            }
            _ => Ok(()),
        })?;
        Ok(Engine {
            workers: match workers {
                WorkersValue::Auto => None,
                WorkersValue::Count(n) => Some(n),
            },
            loopback: s.loopback.map_or(default.loopback, toml::Spanned::into_inner),
            spins: self.number(s.spins, default.spins, 0..=100_000)?,
            yield_for: self.span(s.yield_for, default.yield_for, Duration::ZERO..=SECOND)?,
            terminate_deadline: self.deadline(s.terminate_deadline, default.terminate_deadline)?,
            close_deadline: self.deadline(s.close_deadline, default.close_deadline)?,
            copy_deadline: self.deadline(s.copy_deadline, default.copy_deadline)?,
        })
    }
}

/// The doorbell pages and eventfds of a session limit the number of workers.
const MAX_WORKERS: u32 = 64;
