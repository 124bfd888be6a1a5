//! `rnic-run`: programs of the C verbs API, as they are, on an RNIC of rnicd.
//!
//! It puts the folder with our `libibverbs.so.1` and `librdmacm.so.1` in front of the program
//! loader's path ([`libraries`]) and a library that shows the daemon's devices in `/sys` and `/dev`
//! on its list (`preload`), or mounts them (`mount`), sees that a daemon serves this user
//! ([`daemon`], `outlive`), and becomes the program. [`check`] says beforehand whether that will
//! work, by what the loader would do ([`loader`]) with what is in the files ([`elf`]). It knows
//! nothing of verbs and asks the daemon nothing but who it is: all of that is between the libraries
//! and the daemon.

pub mod check;
mod cli;
pub mod daemon;
pub mod elf;
pub mod libraries;
pub mod loader;
mod mount;
mod options;
mod outlive;
mod preload;
mod shell;

pub use cli::main;
