//! The daemon's clocks: the one place of the data plane that reads them.

use std::time::Duration;

use rnic_core::types::Time;
use rustix::time::{ClockId, clock_gettime};

/// Monotonic time; all threads share its origin.
pub fn now() -> Time {
    let t = clock_gettime(ClockId::Monotonic);
    // Neither is negative on a monotonic clock, and 2^64 ns are 584 years.
    Time(t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs())
}

/// For how long the calling thread has had a CPU. It stands still while others have that CPU, and
/// while the process is stopped.
pub fn on_cpu() -> Duration {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_does_not_run_has_no_cpu() {
        let (began, had) = (now(), on_cpu());
        while on_cpu() - had < Duration::from_millis(2) {}
        let ran = on_cpu() - had;
        assert!(now().since(began) >= ran);
        let (_kept, nothing) = crossbeam_channel::bounded::<()>(0);
        let (began, had) = (now(), on_cpu());
        assert!(nothing.recv_timeout(Duration::from_millis(50)).is_err());
        assert!(now().since(began) >= Duration::from_millis(50));
        assert!(on_cpu() - had < Duration::from_millis(25));
    }
}
