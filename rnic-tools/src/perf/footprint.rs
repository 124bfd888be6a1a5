//! What a daemon takes of the machine: memory, and CPU time while it has nothing to do.

use std::thread::sleep;
use std::time::Duration;

use rnic_client::Context;

use super::error::PerfError;
use super::machine::{anonymous_memory, cpu_use, tick};

/// Bytes that a daemon has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UseOfMemory {
    /// Anonymous memory, its own alone.
    pub anonymous: u64,
    /// Rings of its clients.
    pub arenas: u64,
}

impl UseOfMemory {
    /// Of the daemon of this session.
    pub fn of(context: &Context) -> Result<Self, PerfError> {
        let status = context.status()?;
        Ok(UseOfMemory { anonymous: anonymous_memory(status.pid)?, arenas: status.arena_bytes })
    }
}

/// Milliseconds of CPU time and the thread switches of a daemon that has nothing to do.
pub fn idle_cpu(context: &Context) -> Result<(f64, f64), PerfError> {
    let pid = context.status()?.pid;
    sleep(SETTLE);
    let before = cpu_use(pid)?;
    sleep(IDLE);
    let after = cpu_use(pid)?;
    let ticks = after.ticks - before.ticks;
    let switches = after.switches.saturating_sub(before.switches);
    Ok((ticks as f64 * tick().as_secs_f64() * 1e3, switches as f64))
}

/// How long an idle daemon is watched.
pub const IDLE: Duration = Duration::from_secs(3);
/// How long it has to become idle.
const SETTLE: Duration = Duration::from_millis(500);
