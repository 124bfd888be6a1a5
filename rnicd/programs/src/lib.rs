//! The programs `rnicd` and `rnicctl`, built on the daemon's library.
//!
//! [`cli`] has their command lines, [`demo`] shows a private daemon at work, [`system`] installs
//! the programs, and [`commands`] replaces programs of other packages. The binaries call the `main`
//! functions of [`cli`].

pub mod cli;
pub mod commands;
pub mod demo;
pub mod profile;
pub mod system;
