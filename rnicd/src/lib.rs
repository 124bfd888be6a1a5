//! The RNIC daemon: processes and policy around `rnic-core`.
//!
//! [`config`] says what is wanted, [`control`] talks to clients, [`resource`] alone decides who may
//! have what. [`cm`] brings connections about, [`worker`] drives them, [`events`] tells clients of
//! both; [`socket`] is what the two hand on. [`exec`] gives one program a daemon of its own,
//! [`demo`] shows one to a person; [`cli`] is what a shell sees of all this. [`privilege`] asks the
//! kernel about processes, [`system`] names what it refuses; [`clock`] reads clocks, [`reaper`]
//! closes what may take its time to close, [`rate`] counts how often something happens, [`metrics`]
//! writes figures to a file.

pub mod cli;
pub mod clock;
pub mod cm;
pub mod config;
pub mod control;
pub mod demo;
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
