//! The RNIC daemon: processes and policy around `rnic-core`.
//!
//! [`config`] holds the configuration, [`control`] serves clients, and only [`resource`] decides on
//! permissions and limits. [`cm`] establishes connections, [`worker`] drives them over the
//! [`socket`] that `cm` hands over, and [`events`] reports both to clients. [`exec`] runs a private
//! daemon for one program. [`privilege`] queries the kernel about processes and drops privileges,
//! [`system`] converts system errors, [`clock`] reads clocks, [`reaper`] closes descriptors if the
//! close may block, [`rate`] limits rates, and [`metrics`] writes metrics to a file. The programs
//! `rnicd` and `rnicctl` are a crate of their own.

pub mod clock;
pub mod cm;
pub mod config;
pub mod control;
pub mod events;
pub mod exec;
pub mod log;
pub mod metrics;
#[cfg(test)]
#[allow(dead_code, reason = "nothing is omitted here")]
#[path = "../../tests/src/omit.rs"]
mod omit;
mod packet;
pub mod privilege;
pub mod rate;
pub mod reaper;
pub mod resource;
pub mod socket;
pub mod system;
pub mod tree;
pub mod worker;
