//! The daemon's clock: the one place of the data plane that reads one.

use rnic_core::types::Time;
use rustix::time::{ClockId, clock_gettime};

/// Monotonic time; all threads share its origin.
pub fn now() -> Time {
    let t = clock_gettime(ClockId::Monotonic);
    // Neither is negative on a monotonic clock, and 2^64 ns are 584 years.
    Time(t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs())
}
