//! CPUs and resources of processes, from `/proc`.

use std::fs;
use std::time::Duration;

use rnic_tools::perf::PerfError;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

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

/// Pins a thread to one CPU until dropped.
///
/// A blocking ping-pong is fast when the scheduler puts both processes on one CPU, and slow when it
/// wakes an idle CPU for each message: 2.6 and 30 us were measured within a minute.
pub struct Pin {
    /// The thread; `None` for this one.
    thread: Option<Pid>,
    before: CpuSet,
}

impl Pin {
    /// Pins a thread to the first CPU that it may use.
    pub fn first(thread: Option<Pid>) -> Result<Self, PerfError> {
        let cpu = allowed(thread)?.next();
        Pin::to(thread, cpu)
    }

    /// Pins a thread to the last CPU that it may use.
    pub fn last(thread: Option<Pid>) -> Result<Self, PerfError> {
        let cpu = allowed(thread)?.last();
        Pin::to(thread, cpu)
    }

    fn to(thread: Option<Pid>, cpu: Option<usize>) -> Result<Self, PerfError> {
        let before = sched_getaffinity(thread).map_err(affinity)?;
        let mut one = CpuSet::new();
        if let Some(cpu) = cpu {
            one.set(cpu);
            sched_setaffinity(thread, &one).map_err(affinity)?;
        }
        Ok(Pin { thread, before })
    }
}

/// Returns the CPUs that a thread may use, in ascending order.
fn allowed(thread: Option<Pid>) -> Result<impl Iterator<Item = usize>, PerfError> {
    let set = sched_getaffinity(thread).map_err(affinity)?;
    Ok((0..CpuSet::MAX_CPU).filter(move |cpu| set.is_set(*cpu)))
}

fn affinity(e: rustix::io::Errno) -> PerfError {
    PerfError::io("choosing a CPU")(e.into())
}

impl Drop for Pin {
    fn drop(&mut self) {
        // Fails if the previous set is no longer allowed or the thread has ended.
        let _ = sched_setaffinity(self.thread, &self.before);
    }
}

/// Pins the workers of a daemon to one CPU until dropped.
pub struct WorkersPin {
    _pins: Vec<Pin>,
}

impl WorkersPin {
    /// Pins the workers to the first CPU that this thread may use.
    ///
    /// # Errors
    ///
    /// Fails if the daemon runs as another user or is gone.
    pub fn first(daemon: u32) -> Result<Self, PerfError> {
        let cpu = allowed(None)?.next();
        let tasks = fs::read_dir(format!("/proc/{daemon}/task"))
            .map_err(PerfError::io("reading the daemon's /proc entries"))?;
        let mut pins = Vec::new();
        for task in tasks.flatten() {
            let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            let thread = task.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
            if thread.is_some() && name.starts_with("rnicd-worker") {
                pins.push(Pin::to(thread, cpu)?);
            }
        }
        Ok(WorkersPin { _pins: pins })
    }
}

/// Returns the length of a clock tick.
pub fn tick() -> Duration {
    Duration::from_secs(1) / u32::try_from(rustix::param::clock_ticks_per_second()).unwrap_or(100)
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

#[cfg(test)]
mod tests {
    use rnic_tools::perf::machine::cpus;

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
        let status = "Name:\ta\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t5\n";
        assert_eq!(context_switches(status), 12);
    }

    #[test]
    fn a_pin_is_undone_when_dropped() {
        let before = cpus();
        let pin = Pin::last(None).unwrap();
        assert_eq!(cpus(), 1);
        drop(pin);
        assert_eq!(cpus(), before);
    }

    #[test]
    fn another_process_is_pinned() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let thread = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let count = || sched_getaffinity(thread).unwrap().count();
        let before = count();
        let pin = Pin::first(thread).unwrap();
        assert_eq!((count(), cpus() as u32), (1, before));
        drop(pin);
        assert_eq!(count(), before);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn this_process_has_memory_and_uses_cpus() {
        let pid = std::process::id();
        assert!(anonymous_memory(pid).unwrap() > 0);
        assert!(cpu_use(pid).unwrap().switches > 0);
        assert!(tick() > Duration::ZERO);
    }
}
