//! `rnic-perf`: how fast the RNIC is, beside what the machine could do at best.
//!
//! A run has two processes, the driver and a peer that it starts, each with its own session of a
//! daemon. They measure bandwidth, latency or message rate of an operation and in the same run, in
//! turn and round by round, raw TCP between the same two processes and memcpy of the same working
//! set: figures of one machine at one time, whose ratios mean something. This refuses to know how a
//! daemon works: all it uses is this crate's public interface, the daemon's entries in `/proc`, and
//! the `rnicd` binary for private daemons. The binary `rnic-perf` calls [`main`], `rnicd demo`
//! calls [`quick()`] and, in its second process, [`serve`].
//!
//! One file per part: `spec` what is measured, `end` the RDMA ends, `peer` the second process,
//! `bench` the rounds, `report` what is told of them, `all` the table of design goals. The
//! yardsticks: `raw` TCP, `relay` through a third process, `copies` memcpy and CRC32C; `goals` says
//! which ones a measurement has. `compare` has other people's benchmarks run in turn with ours.
//! `scale` measures beside many idle objects, `neighbours` beside another user's `load`; `smoke`
//! says whether anything has become much slower.

mod all;
mod bench;
mod calls;
mod cli;
mod compare;
mod completions;
mod copies;
mod daemon;
mod end;
mod error;
mod footprint;
mod goals;
mod load;
mod machine;
mod neighbours;
mod only;
mod peer;
mod placement;
mod quick;
mod raw;
mod relay;
mod report;
mod scale;
mod site;
mod smoke;
mod spec;
mod stats;
mod table;
mod talk;

pub use cli::main;
pub use error::PerfError;
pub use peer::serve;
pub use quick::{Quick, QuickOptions, quick};
