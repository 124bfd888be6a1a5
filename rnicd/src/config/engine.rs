//! `[engine]`: workers, paths and deadlines.

use std::time::Duration;

use super::checker::{Checker, SECOND};
use super::error::ConfigError;
use super::file::{self, Loopback, WorkersValue};

/// `[engine]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Worker threads; `None` (the default) derives them from the CPUs.
    pub workers: Option<u32>,
    /// How QPs of this daemon talk to each other; default direct.
    pub loopback: Loopback,
    /// Looks at the queues before an idle worker yields; default 100.
    pub spins: u32,
    /// How long an idle worker yields before it sleeps; default 50 us.
    pub yield_for: Duration,
    /// How long a Terminate may take to leave and the peer to close after it; default 5 s.
    pub terminate_deadline: Duration,
    /// How long an orderly end of a connection may take; default 60 s.
    pub close_deadline: Duration,
    /// How long a copy by a client's library may take before the client is detached; default 10 s.
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
    /// Checks `[engine]` and fills in what the file does not say.
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

/// Doorbell pages and eventfds per session bound the workers.
const MAX_WORKERS: u32 = 64;
