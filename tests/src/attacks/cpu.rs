//! Which CPU runs what: the worker and a well-behaved pair share one, attackers have another.

use std::path::PathBuf;

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// CPUs that this process may run on.
pub fn allowed() -> Vec<usize> {
    let set = sched_getaffinity(None).expect("one's own CPUs");
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// Confines the calling thread, and those it starts from now on, to these CPUs.
pub fn confine(cpus: &[usize]) {
    sched_setaffinity(None, &only(cpus)).expect("CPUs that are allowed");
}

/// Confines the threads of a process whose names begin so to one CPU; how many there are.
///
/// # Panics
///
/// If the process is gone, or belongs to somebody else.
pub fn confine_threads(process: u32, name: &str, cpu: usize) -> usize {
    let tasks = PathBuf::from(format!("/proc/{process}/task"));
    let mut confined = 0;
    for task in std::fs::read_dir(tasks).expect("a process that runs").map_while(Result::ok) {
        let comm = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let thread = task.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
        if !comm.starts_with(name) {
            continue;
        }
        match sched_setaffinity(thread, &only(&[cpu])) {
            Ok(()) => confined += 1,
            // It has ended since.
            Err(Errno::SRCH) => {}
            Err(e) => panic!("{name} cannot be confined to CPU {cpu}: {e}"),
        }
    }
    confined
}

/// Clock ticks for which the first thread of a process has had a CPU.
///
/// # Panics
///
/// If the process is gone.
pub fn ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/task/{process}/stat"));
    let stat = stat.expect("a process that runs");
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    // User time and system time.
    fields.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok()).sum()
}

/// Clock ticks of a second, as the kernel shows them to everybody.
pub const TICKS: f64 = 100.0;

fn only(cpus: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    set
}
