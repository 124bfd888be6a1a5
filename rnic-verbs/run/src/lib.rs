//! `rnic-run`: runs unmodified programs of the C verbs API on the RDMA devices of rnicd.
//!
//! It performs these steps in order. It puts the directory with rnicd's `libibverbs.so.1` and
//! `librdmacm.so.1` first in the dynamic loader's path ([`libraries`]). It ensures that a daemon
//! serves this user ([`daemon`], `outlive`). It shows the daemon's devices in `/sys` and `/dev`, by
//! a preloaded library (`preload`) or by mounts (`mount`). Then it executes the program in its own
//! process, with the variables of [`environment`]. [`check`] predicts whether the program will
//! work: it simulates the loader ([`loader`]) on the contents of the files ([`elf`]). This crate
//! does not use verbs. For `--order-bisect`, it runs the program several times (`bisect`). It
//! queries only the daemon's status and device; all other communication is between the libraries
//! and the daemon.

mod bisect;
pub mod check;
mod cli;
pub mod daemon;
pub mod elf;
pub mod environment;
pub mod libraries;
pub mod loader;
pub mod mount;
mod options;
mod outlive;
pub mod preload;
mod shell;

pub use cli::{command, main};
