//! The machine of a measurement, from `/proc`.

use std::fs;
use std::time::Duration;

use rustix::thread::sched_getaffinity;
use serde::Serialize;

/// The machine of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// CPUs that this process may use.
    pub cpus: usize,
    /// CPU model; empty if unknown.
    pub model: String,
    /// Kernel release; empty if unknown.
    pub kernel: String,
    /// Share of CPU time used by other programs shortly before the first measurement, 0 to 1.
    pub busy: f64,
}

impl Machine {
    /// Returns the data of this machine. Measures the load for `MOMENT`, during which our own
    /// processes must be idle.
    pub fn this() -> Self {
        let before = cpu_times();
        std::thread::sleep(MOMENT);
        let busy = busy(before, cpu_times());

        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Machine {
            cpus: cpus(),
            model: model.unwrap_or_default().trim_start_matches([' ', '\t', ':']).to_owned(),
            kernel: kernel.trim().to_owned(),
            busy,
        }
    }
}

/// Returns the number of CPUs that this thread may run on, at least 1.
pub fn cpus() -> usize {
    sched_getaffinity(None).map_or(1, |set| set.count().max(1) as usize)
}

/// Ticks of all CPUs since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CpuTimes {
    idle: u64,
    total: u64,
}

/// Returns the ticks of all CPUs since boot; zeros if unknown.
fn cpu_times() -> CpuTimes {
    all_cpu_ticks(&fs::read_to_string("/proc/stat").unwrap_or_default()).unwrap_or_default()
}

/// Parses the first line of `/proc/stat`. Fields 4 and 5 are idle time and I/O wait, which counts
/// as idle. Fields from 9 on are guest time, which earlier fields include.
fn all_cpu_ticks(stat: &str) -> Option<CpuTimes> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace().take(8);
    let ticks = fields.map(str::parse).collect::<Result<Vec<u64>, _>>().ok()?;
    let idle = ticks.get(3)?.checked_add(*ticks.get(4)?)?;
    Some(CpuTimes { idle, total: ticks.iter().sum() })
}

fn busy(before: CpuTimes, after: CpuTimes) -> f64 {
    let idle = after.idle.saturating_sub(before.idle) as f64;
    let all = after.total.saturating_sub(before.total).max(1) as f64;
    (1.0 - idle / all).clamp(0.0, 1.0)
}

/// Duration of the load measurement: about 60 ticks of two CPUs.
const MOMENT: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_the_right_fields() {
        let all = "cpu  100 0 50 800 40 5 5 0 0 0\ncpu0 1 2 3\n";
        let before = CpuTimes { idle: 840, total: 1000 };
        assert_eq!(all_cpu_ticks(all), Some(before));
        let after = CpuTimes { idle: 890, total: 1100 };
        assert!((busy(before, after) - 0.5).abs() < 1e-9);
        assert!(Machine::this().cpus >= 1);
    }
}
