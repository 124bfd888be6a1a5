//! Harness of the end-to-end tests, which run daemons and clients as real processes.
//!
//! Every test starts its own daemons in its own directory, on ports that the kernel chooses for a
//! socket that stays open, or that [`ports`] reserves. Every wait ends at [`DEADLINE`]: the harness
//! then kills the process and fails the test with the process's output. Dropping a [`Daemon`] stops
//! it and fails the test if it exits with a failure or leaves its socket file behind.

pub mod apart;
pub mod attached;
pub mod attacks;
pub mod built;
pub mod burst;
pub mod client;
pub mod conformance;
pub mod daemon;
pub mod exhaust;
pub mod frozen;
pub mod hammer;
pub mod hostile;
pub mod mortal;
pub mod mpi;
mod omit;
pub mod over;
pub mod pcap;
pub mod pinger;
pub mod ports;
pub mod process;
pub mod raw;
pub mod relay;
pub mod rping;
pub mod target;
pub mod traffic;
pub mod tshark;
pub mod unit;
pub mod verbs;
pub mod wire;
pub mod wired_port;

pub use client::{Client, End, READ_WRITE, join};
pub use daemon::{Daemon, PATHS, engine, on_path};
pub use omit::{omit, timing};
pub use process::{DEADLINE, Process, copy_files, in_path, installed, output_text};
