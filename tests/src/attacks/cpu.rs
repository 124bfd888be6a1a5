//! CPU affinity: the worker and a well-behaved pair share one CPU, attackers run on another.

use std::path::PathBuf;

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Returns the CPUs that this process may run on.
pub fn allowed() -> Vec<usize> {
    let set = sched_getaffinity(None).expect("the CPU mask of this process");
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// Confines the calling thread, and all threads it starts later, to these CPUs.
pub fn confine(cpus: &[usize]) {
    sched_setaffinity(None, &only(cpus)).expect("CPUs that are allowed");
}

/// Confines the threads of a process with names that start with `name` to one CPU. Returns
/// their number.
///
/// # Panics
///
/// If the process has exited or belongs to another user.
pub fn confine_threads(process: u32, name: &str, cpu: usize) -> usize {
    let tasks = PathBuf::from(format!("/proc/{process}/task"));
    let mut confined = 0;
    for task in std::fs::read_dir(tasks).expect("a running process").map_while(Result::ok) {
        let comm = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let thread = task.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
        if !comm.starts_with(name) {
            continue;
        }
        match sched_setaffinity(thread, &only(&[cpu])) {
            Ok(()) => confined += 1,
            // The thread has ended since it was listed.
            Err(Errno::SRCH) => {}
            Err(e) => panic!("{name} cannot be confined to CPU {cpu}: {e}"),
        }
    }
    confined
}

/// Returns the CPU time of a process's main thread in clock ticks.
///
/// # Panics
///
/// If the process has exited.
pub fn ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/task/{process}/stat"));
    let stat = stat.expect("a running process");
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    // User time and system time.
    fields.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok()).sum()
}

/// Clock ticks per second in `/proc` (`USER_HZ`).
pub const TICKS: f64 = 100.0;

fn only(cpus: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    set
}
