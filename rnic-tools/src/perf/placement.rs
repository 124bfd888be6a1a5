//! On which CPUs the processes of a yardstick run.
//!
//! On a small machine this decides more than anything else: a blocking ping-pong takes 2.6 us if
//! both processes share a CPU, and 30 us if the scheduler wakes an idle CPU for each message. So a
//! yardstick is measured in every placement, and its best one counts.

use serde::{Deserialize, Serialize};

use super::error::PerfError;
use super::machine::{Pin, WorkersPin};

/// Where two processes run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    /// Where the scheduler puts them.
    Free,
    /// Both on the first CPU.
    Together,
    /// The driver on the first CPU, the peer on the last one.
    Apart,
    /// Both on the first CPU, and their daemon's workers, too.
    WithWorkers,
}

impl Placement {
    /// Holds this thread, which is the driver's.
    pub fn pin_driver(self) -> Result<Option<Pin>, PerfError> {
        match self {
            Placement::Free => Ok(None),
            Placement::Together | Placement::Apart | Placement::WithWorkers => {
                Pin::first().map(Some)
            }
        }
    }

    /// Holds this thread, which is the peer's.
    pub fn pin_peer(self) -> Result<Option<Pin>, PerfError> {
        match self {
            Placement::Free => Ok(None),
            Placement::Together | Placement::WithWorkers => Pin::first().map(Some),
            Placement::Apart => Pin::last().map(Some),
        }
    }

    /// Holds the workers of the daemon that both use.
    pub fn pin_workers(self, daemon: u32) -> Result<Option<WorkersPin>, PerfError> {
        match self {
            Placement::Free | Placement::Together | Placement::Apart => Ok(None),
            Placement::WithWorkers => WorkersPin::first(daemon).map(Some),
        }
    }

    /// In words that follow the name of a yardstick.
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
    use super::super::machine::cpus;
    use super::*;

    #[test]
    fn who_is_placed_has_one_cpu_and_the_others_all() {
        let all = cpus();
        for placement in
            [Placement::Free, Placement::Together, Placement::Apart, Placement::WithWorkers]
        {
            let wanted = if placement == Placement::Free { all } else { 1 };
            for pin in [Placement::pin_driver, Placement::pin_peer] {
                let pinned = pin(placement).unwrap();
                assert_eq!(cpus(), wanted, "{placement:?}");
                drop(pinned);
                assert_eq!(cpus(), all);
            }
        }
    }
}
