//! CPU placement of the measured processes.
//!
//! On a small machine this has the largest effect: a blocking ping-pong takes 2.6 us if both
//! processes share a CPU, and 30 us if the scheduler wakes an idle CPU for each message. So each
//! yardstick is measured in every placement, and the best result is used.

use rnic_tools::perf::PerfError;
use rustix::process::Pid;

use crate::machine::{Pin, WorkersPin};

/// Placement of two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Chosen by the scheduler.
    Free,
    /// Both on the first CPU.
    Together,
    /// The driver on the first CPU, the peer on the last.
    Apart,
    /// Both on the first CPU, together with the workers of their daemon.
    WithWorkers,
}

impl Placement {
    /// Pins this thread to the driver's CPU.
    pub fn pin_driver(self) -> Result<Option<Pin>, PerfError> {
        match self {
            Placement::Free => Ok(None),
            Placement::Together | Placement::Apart | Placement::WithWorkers => {
                Pin::first(None).map(Some)
            }
        }
    }

    /// Pins the peer, a process with one thread, to its CPU. `None` stands for this thread.
    pub fn pin_peer(self, peer: Option<Pid>) -> Result<Option<Pin>, PerfError> {
        match self {
            Placement::Free => Ok(None),
            Placement::Together | Placement::WithWorkers => Pin::first(peer).map(Some),
            Placement::Apart => Pin::last(peer).map(Some),
        }
    }

    /// Pins the workers of the daemon, if the placement includes them.
    pub fn pin_workers(self, daemon: u32) -> Result<Option<WorkersPin>, PerfError> {
        match self {
            Placement::Free | Placement::Together | Placement::Apart => Ok(None),
            Placement::WithWorkers => WorkersPin::first(daemon).map(Some),
        }
    }

    /// Returns a suffix for the name of a subject.
    pub fn words(self) -> &'static str {
        match self {
            Placement::Free => "",
            Placement::Together => ", one CPU",
            Placement::Apart => ", two CPUs",
            Placement::WithWorkers => ", one CPU for all",
        }
    }
}

#[cfg(test)]
mod tests {
    use rnic_tools::perf::machine::cpus;

    use super::*;

    #[test]
    fn a_pinned_process_has_one_cpu() {
        let all = cpus();
        for placement in
            [Placement::Free, Placement::Together, Placement::Apart, Placement::WithWorkers]
        {
            let wanted = if placement == Placement::Free { all } else { 1 };
            let pinned = placement.pin_driver().unwrap();
            assert_eq!(cpus(), wanted, "{placement:?}");
            drop(pinned);
            let pinned = placement.pin_peer(None).unwrap();
            assert_eq!(cpus(), wanted, "{placement:?}");
            drop(pinned);
            assert_eq!(cpus(), all);
        }
    }
}
