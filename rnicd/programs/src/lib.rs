//! The programs `rnicd` and `rnicctl`, built on the daemon's library.
//!
//! [`cli`] has their command lines, and [`demo`] shows a private daemon at work. The binaries call
//! the `main` functions of [`cli`].

pub mod cli;
pub mod demo;
