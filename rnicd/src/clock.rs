//! The daemon's clocks. The data plane reads others only to limit logs.

use std::time::Duration;

use rnic_abi::types::Time;
use rustix::time::{ClockId, clock_gettime};

/// Returns the monotonic time, with the same origin in all threads.
pub fn now() -> Time {
    let t = clock_gettime(ClockId::Monotonic);
    // Neither value is negative on a monotonic clock, and 2^64 ns are 584 years.
    Time(t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs())
}

/// Returns the CPU time of the calling thread. It does not advance while the thread waits for a CPU
/// or the process is stopped.
pub fn on_cpu() -> Duration {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_thread_uses_no_cpu_time() {
        let began = now();
        let had = on_cpu();
        while on_cpu() - had < Duration::from_millis(2) {}
        let ran = on_cpu() - had;
        assert!(now().since(began) >= ran);
        let (_kept, nothing) = crossbeam_channel::bounded::<()>(0);
        let began = now();
        let had = on_cpu();
        assert!(nothing.recv_timeout(Duration::from_millis(50)).is_err());
        assert!(now().since(began) >= Duration::from_millis(50));
        assert!(on_cpu() - had < Duration::from_millis(25));
    }
}
