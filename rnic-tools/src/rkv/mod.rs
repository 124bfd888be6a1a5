//! A key-value store whose reads take no CPU time of the server process.
//!
//! The table is an array of slots of equal size in a region that clients may read. A GET is one
//! RDMA Read for each slot examined, without work for the server process. PUT and DELETE are Sends
//! that the server answers. A Read is not atomic with regard to the server's stores, so a slot has
//! its version at both ends and a checksum over all of it: a reader detects a mixture of two
//! versions and reads again. `layout` defines the bytes of a slot and the slots of a key, `wire`
//! the messages, `store` the server's table, `bench` the load of `rkv bench`.
//!
//! The private data of the server's accept contains the location and the geometry of the table.
//! Clients check them before they allocate memory. The server does not trust clients, and peers
//! cannot write to its table.

mod bench;
mod cli;
mod client;
mod layout;
mod server;
mod store;
mod wire;

use std::net::SocketAddr;

use rnic_client::Error;

use crate::link::LinkError;

pub use bench::{Bench, BenchReport, Operations};
pub use cli::main;
pub use client::{Client, Found};
pub use layout::{Geometry, MAX_KEY, MAX_PROBES, MAX_VALUE};
pub use server::{Server, ServerOptions};

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum KvError {
    /// The key is empty, or longer than the table allows.
    #[error("the key has {bytes} bytes; this table allows 1 to {max}")]
    KeyLength {
        /// Length of the key in bytes.
        bytes: usize,
        /// Maximum length of a key in bytes.
        max: u16,
    },
    /// The value is longer than the table allows.
    #[error("the value has {bytes} bytes; this table allows at most {max}")]
    ValueLength {
        /// Length of the value in bytes.
        bytes: usize,
        /// Maximum length of a value in bytes.
        max: u32,
    },
    /// All slots in which the key may be hold other keys.
    #[error("no room for this key: its {probes} slots hold other keys")]
    Full {
        /// Number of slots in which a key may be.
        probes: u32,
    },
    /// A slot was torn in each of many Reads.
    #[error("slot {slot} was torn in {reads} reads in a row")]
    Torn {
        /// Number of the slot, from 0.
        slot: u64,
        /// Number of Reads.
        reads: u32,
    },
    /// A value is not what was stored under its key.
    #[error("the value of {key:?} is not what was stored: {why}")]
    Wrong {
        /// The key of the value.
        key: String,
        /// The difference.
        why: String,
    },
    /// The requested geometry is invalid.
    #[error("invalid table: {0}")]
    Geometry(String),
    /// The other side violates the protocol of `rkv`.
    #[error("{peer} violates the protocol: {why}")]
    Protocol {
        /// Address of the other side.
        peer: SocketAddr,
        /// Description of the violation.
        why: String,
    },
    /// The connection failed before the operation was over.
    #[error(transparent)]
    Link(#[from] LinkError),
}

impl From<Error> for KvError {
    fn from(e: Error) -> Self {
        KvError::Link(e.into())
    }
}
