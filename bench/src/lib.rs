//! `rnic-bench`: compares the RNIC with the limits of the same machine.
//!
//! The measurements are those of `rnic-perf` (`rnic_tools::perf`). Each round also measures
//! yardsticks: raw TCP between the same two processes, memcpy of the same working set, and a relay
//! through a third process. The ratios are meaningful because all results come from the same
//! machine at the same time. The program starts the `rnicd` binary, uses the public interface of
//! the library, and reads the daemons' entries in `/proc`.
//!
//! `bench` runs a measurement with its yardsticks, `goals` assigns yardsticks and goals to
//! measurements, `report` computes the ratios, and `all` is the table of design goals. `relay` is
//! the yardstick with a third process. `compare` interleaves other projects' benchmarks with ours.
//! `scale` measures operations while many objects are idle, `neighbours` while another user causes
//! `load`. `smoke` detects large slowdowns.

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
