//! Resources used by a daemon: memory, and CPU time while it is idle.

use std::thread::sleep;
use std::time::Duration;

use rnic_client::Context;
use rnic_tools::perf::PerfError;

use crate::machine::{anonymous_memory, cpu_use, tick};

/// Memory of a daemon in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Private anonymous memory.
    pub anonymous: u64,
    /// Rings of its clients.
    pub arenas: u64,
}

impl MemoryUse {
    /// Returns the memory used by the daemon of this session.
    pub fn of(context: &Context) -> Result<Self, PerfError> {
        let status = context.status()?;
        Ok(MemoryUse { anonymous: anonymous_memory(status.pid)?, arenas: status.arena_bytes })
    }
}

/// Returns an idle daemon's CPU time in milliseconds and its context switches.
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

/// Time for which an idle daemon is observed.
pub const IDLE: Duration = Duration::from_secs(3);
/// Time to wait for a daemon to become idle.
const SETTLE: Duration = Duration::from_millis(500);
