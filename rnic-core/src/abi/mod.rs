//! What the daemon and its clients agree on, and nothing else.
//!
//! [`queue`] and [`copies`] are the layout of shared memory, [`control`] the messages of the Unix
//! socket and of the event channels. All are append-only: a released number, field or enum position
//! never changes its meaning, and golden-bytes tests hold us to it. This module knows neither
//! memory nor sockets; `rnicd` and `rnic-client` both use it, `docs/abi.md` explains it.

pub mod control;
pub mod copies;
#[cfg(test)]
mod golden;
pub mod queue;

/// Version of everything in this module. A client and a daemon that share no version part in Hello.
pub const ABI_VERSION: u16 = 1;
