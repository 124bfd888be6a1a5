//! The RNIC daemon: processes and policy around `rnic-core`.
//!
//! [`config`] says what is wanted, [`control`] talks to clients, [`resource`] alone decides who may
//! have what. [`cm`] brings connections about, [`worker`] drives them, [`events`] tells clients of
//! both. [`exec`] gives one program a daemon of its own, [`demo`] shows one to a
//! person; [`cli`] is what a shell sees of all this.
//! [`privilege`] asks the kernel about processes.

pub mod cli;
pub mod cm;
pub mod config;
pub mod control;
pub mod demo;
pub mod events;
pub mod exec;
pub mod log;
pub mod mover;
pub mod privilege;
pub mod resource;
pub mod worker;
