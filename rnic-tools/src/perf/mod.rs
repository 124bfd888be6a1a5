//! `rnic-perf`: measures the RNIC, and compares it with TCP and memcpy on the same machine.
//!
//! A run has two processes, the driver and a peer that it starts, each with its own session with a
//! daemon. They measure bandwidth, latency or message rate of an operation, and in turn, round by
//! round, raw TCP between the same two processes and memcpy of the same working set. The ratios are
//! meaningful because all results come from the same machine at the same time. The code does not
//! depend on how a daemon works: it uses only the public interface of the library, the daemon's
//! entries in `/proc`, and the `rnicd` binary for private daemons. The binary `rnic-perf` calls
//! [`main`]; `rnicd demo` calls [`quick()`] and, in its second process, [`serve`].
//!
//! One file per part: `spec` defines a measurement, `end` the RDMA ends, `peer` the second process,
//! `bench` the rounds, `report` the output, `all` the table of design goals. The yardsticks are
//! `raw` TCP, `relay` through a third process, and `copies` (memcpy and CRC32C); `goals` assigns
//! them to measurements. `compare` runs other projects' benchmarks in turn with ours. `scale`
//! measures beside many idle objects, `neighbours` beside another user's `load`; `smoke` detects
//! large slowdowns.

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
mod protocol;
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

pub use cli::main;
pub use error::PerfError;
pub use peer::serve;
pub use quick::{Quick, QuickOptions, quick};
