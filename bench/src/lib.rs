//! The performance laboratory: compares the RNIC with the limits of the same machine.
//!
//! The measurements are those of `rnic-perf` (`rnic_tools::perf`). In turn with them, round by
//! round, the program measures yardsticks: raw TCP between the same two processes, memcpy of the
//! same working set, and a relay through a third process. The ratios are meaningful because all
//! results come from the same machine at the same time. It reaches daemons only by the public
//! interface of the library, their entries in `/proc`, and the `rnicd` binary.
//!
//! One file per part: `bench` runs a measurement with its yardsticks, `report` compares, `all` is
//! the table of design goals. `goals` assigns yardsticks and goals to measurements; `relay` is a
//! yardstick. `compare` runs other projects' benchmarks in turn with ours. `scale` measures beside
//! many idle objects, `neighbours` beside another user's `load`; `smoke` detects large slowdowns.

mod all;
mod bench;
mod calls;
mod cli;
mod compare;
mod daemon;
mod footprint;
mod goals;
mod load;
mod machine;
mod neighbours;
mod only;
mod placement;
mod relay;
mod report;
mod scale;
mod site;
mod smoke;

pub use cli::main;
