//! `rnic-perf`: bandwidth, latency and message rate of an operation.
//!
//! A run has two processes, the driver and a peer, each with its own session with a daemon. The
//! driver starts the peer, or connects to `rnic-perf serve` on another host. The code uses only the
//! public interface of the library. The binary `rnic-perf` calls [`main`]; `rnicd demo` calls
//! [`quick()`] and, in its second process, [`serve`]. The modules are public for `rnic-bench`,
//! which adds comparisons.
//!
//! `spec` defines a measurement, `end` the RDMA ends, `driver` the first process, `peer` the second
//! process, `measured` the rounds, `report` the output. `raw` TCP and `copies` (memcpy) are
//! measured by [`quick()`] and by `rnic-bench`.

pub mod cli;
pub mod completions;
pub mod copies;
pub mod driver;
pub mod end;
mod error;
pub mod machine;
pub mod measured;
pub mod peer;
pub mod protocol;
mod quick;
pub mod raw;
pub mod report;
pub mod spec;
pub mod stats;

pub use cli::{command, main};
pub use error::PerfError;
pub use peer::serve;
pub use quick::{Quick, QuickOptions, quick};
