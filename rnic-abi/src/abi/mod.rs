//! Interface between the daemon and its clients.
//!
//! [`queue`] and [`copies`] define the layout of shared memory, and [`control`] the messages of the
//! Unix socket and of the event channels. All are append-only: a released number, field or enum
//! position never changes its meaning, which tests with literal bytes verify. This module accesses
//! neither memory nor sockets. `rnicd` and `rnic-client` use it, and `docs/abi.md` describes it.

pub mod control;
pub mod copies;
#[cfg(test)]
mod golden;
pub mod queue;

/// Version of the interface. The daemon refuses a client that does not support it.
pub const ABI_VERSION: u16 = 1;
