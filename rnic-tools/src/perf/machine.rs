//! Data about this machine and its processes, from `/proc`.

use std::fs;
use std::time::Duration;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

use super::error::PerfError;

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
    /// Returns the data of this machine. Measures the load for [`MOMENT`], during which our own
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

/// Returns the private anonymous memory of a process in bytes (`smaps_rollup` of `proc(5)`).
pub fn anonymous_memory(pid: u32) -> Result<u64, PerfError> {
    let text = read(pid, "smaps_rollup")?;
    anonymous(&text).ok_or_else(|| unknown("smaps_rollup"))
}

/// CPU usage of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuUse {
    /// User and system time, in clock ticks.
    pub ticks: u64,
    /// Context switches of its threads, voluntary and involuntary.
    pub switches: u64,
}

/// Returns the CPU usage of a process so far. `switches` counts only threads that still exist.
pub fn cpu_use(pid: u32) -> Result<CpuUse, PerfError> {
    let ticks = cpu_ticks(&read(pid, "stat")?).ok_or_else(|| unknown("stat"))?;
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .map_err(PerfError::io("reading the daemon's /proc entries"))?;
    let switches = tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("status")).ok())
        .map(|status| context_switches(&status))
        .sum();
    Ok(CpuUse { ticks, switches })
}

/// Pins this thread to one CPU until dropped.
///
/// A blocking ping-pong is fast when the scheduler puts both processes on one CPU, and slow when it
/// wakes an idle CPU for each message: 2.6 and 30 us were measured within a minute.
pub struct Pin {
    before: CpuSet,
}

impl Pin {
    /// Pins the thread to the first CPU that it may use.
    pub fn first() -> Result<Self, PerfError> {
        Pin::to(|set| (0..CpuSet::MAX_CPU).find(|cpu| set.is_set(*cpu)))
    }

    /// Pins the thread to the last CPU that it may use.
    pub fn last() -> Result<Self, PerfError> {
        Pin::to(|set| (0..CpuSet::MAX_CPU).rev().find(|cpu| set.is_set(*cpu)))
    }

    fn to(choose: impl FnOnce(&CpuSet) -> Option<usize>) -> Result<Self, PerfError> {
        let io = |e: rustix::io::Errno| PerfError::io("choosing a CPU")(e.into());
        let before = sched_getaffinity(None).map_err(io)?;
        let mut one = CpuSet::new();
        if let Some(cpu) = choose(&before) {
            one.set(cpu);
            sched_setaffinity(None, &one).map_err(io)?;
        }
        Ok(Pin { before })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // The previous set was allowed. If it no longer is, the thread stays pinned.
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// Pins the workers of a daemon to one CPU until dropped.
pub struct WorkersPin {
    before: Vec<(Pid, CpuSet)>,
}

impl WorkersPin {
    /// Pins the workers to the first CPU that this thread may use.
    ///
    /// # Errors
    ///
    /// Fails if the daemon runs as another user or is gone.
    pub fn first(daemon: u32) -> Result<Self, PerfError> {
        let io = |e: rustix::io::Errno| PerfError::io("choosing the CPU of a worker")(e.into());
        let own = sched_getaffinity(None).map_err(io)?;
        let mut one = CpuSet::new();
        (0..CpuSet::MAX_CPU).find(|cpu| own.is_set(*cpu)).into_iter().for_each(|cpu| one.set(cpu));
        let tasks = fs::read_dir(format!("/proc/{daemon}/task"))
            .map_err(PerfError::io("reading the daemon's /proc entries"))?;
        let mut pin = WorkersPin { before: Vec::new() };
        for task in tasks.flatten() {
            let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            let thread = task.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
            if let Some(thread) = thread.filter(|_| name.starts_with("rnicd-worker")) {
                let before = sched_getaffinity(Some(thread)).map_err(io)?;
                sched_setaffinity(Some(thread), &one).map_err(io)?;
                pin.before.push((thread, before));
            }
        }
        Ok(pin)
    }
}

impl Drop for WorkersPin {
    fn drop(&mut self) {
        for (thread, before) in &self.before {
            // Fails only if the thread has ended.
            let _ = sched_setaffinity(Some(*thread), before);
        }
    }
}

/// Returns the length of a clock tick.
pub fn tick() -> Duration {
    Duration::from_secs(1) / u32::try_from(rustix::param::clock_ticks_per_second()).unwrap_or(100)
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

fn read(pid: u32, file: &str) -> Result<String, PerfError> {
    fs::read_to_string(format!("/proc/{pid}/{file}"))
        .map_err(PerfError::io("reading the daemon's /proc entries"))
}

fn unknown(file: &str) -> PerfError {
    PerfError::Daemon(format!("/proc/PID/{file} does not have the format of proc(5)"))
}

fn anonymous(smaps_rollup: &str) -> Option<u64> {
    let line = smaps_rollup.lines().find_map(|line| line.strip_prefix("Anonymous:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Parses fields 14 and 15 of `stat`. The second field is a name that may contain any characters
/// and ends with the last parenthesis.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    user.checked_add(system)
}

fn context_switches(status: &str) -> u64 {
    let number = |line: &str| -> Option<u64> {
        line.split_once("voluntary_ctxt_switches:")?.1.trim().parse().ok()
    };
    status.lines().filter_map(number).sum()
}

/// Duration of the load measurement: about 60 ticks of two CPUs.
const MOMENT: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_the_right_fields() {
        let rollup = "5500-7fff ---p 00000000 00:00 0 [rollup]\nRss:  4000 kB\n\
                      Anonymous:           136 kB\nLazyFree: 0 kB\n";
        assert_eq!(anonymous(rollup), Some(136 * 1024));
        assert_eq!(anonymous("Rss: 1 kB\n"), None);
        let stat = "42 (a) b) c) S 1 42 42 0 -1 4194560 100 0 0 0 31 11 0 0 20 0 1 0 100 0 0";
        assert_eq!(cpu_ticks(stat), Some(42));
        assert_eq!(cpu_ticks("42 (a) S 1"), None);
        let all = "cpu  100 0 50 800 40 5 5 0 0 0\ncpu0 1 2 3\n";
        let before = CpuTimes { idle: 840, total: 1000 };
        assert_eq!(all_cpu_ticks(all), Some(before));
        let after = CpuTimes { idle: 890, total: 1100 };
        assert!((busy(before, after) - 0.5).abs() < 1e-9);
        let status = "Name:\ta\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t5\n";
        assert_eq!(context_switches(status), 12);
    }

    #[test]
    fn a_pin_is_undone_when_dropped() {
        let before = cpus();
        let pin = Pin::last().unwrap();
        assert_eq!(cpus(), 1);
        drop(pin);
        assert_eq!(cpus(), before);
    }

    #[test]
    fn this_process_has_memory_and_uses_cpus() {
        let pid = std::process::id();
        assert!(anonymous_memory(pid).unwrap() > 0);
        assert!(cpu_use(pid).unwrap().switches > 0);
        assert!(tick() > Duration::ZERO);
        assert!(Machine::this().cpus >= 1);
    }
}
