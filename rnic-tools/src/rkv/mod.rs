//! A key-value store whose reads cost the server nothing.
//!
//! The table is an array of slots of one size in a region that clients may read. A GET is one RDMA
//! Read per slot looked at, and the server's process does not run for it. PUT and DELETE are Sends
//! that the server answers. A Read is not atomic against the server's own stores, so a slot carries
//! its version at both ends and a checksum over all of it: a reader that caught a mixture of two
//! versions sees that and reads again. `layout` has the bytes of a slot and where keys go, `wire`
//! what is said, `store` the server's table, `bench` the load of `rkv bench`.
//!
//! Clients learn place and geometry of the table from the private data of the server's accept. They
//! do not trust it further than their own memory goes; the server trusts clients in nothing, and
//! its table cannot be written from the wire.

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
    /// The key has no bytes, or more than the table takes.
    #[error("a key of {bytes} bytes; this table takes 1 to {max}")]
    KeyLength {
        /// Bytes of the key.
        bytes: usize,
        /// Most bytes of a key that the table takes.
        max: u16,
    },
    /// The value has more bytes than the table takes.
    #[error("a value of {bytes} bytes; this table takes at most {max}")]
    ValueLength {
        /// Bytes of the value.
        bytes: usize,
        /// Most bytes of a value that the table takes.
        max: u32,
    },
    /// All slots where the key may go hold other keys.
    #[error("no room for this key: its {probes} slots hold other keys")]
    Full {
        /// Slots where a key may be.
        probes: u32,
    },
    /// A slot was torn in every one of many reads.
    #[error("slot {slot} was torn in {reads} reads in a row")]
    Torn {
        /// Number of the slot, from 0.
        slot: u64,
        /// Reads of the slot that were tried.
        reads: u32,
    },
    /// A value was not what had been stored under its key.
    #[error("the value of {key:?} is not what was stored: {why}")]
    Wrong {
        /// The key whose value it is.
        key: String,
        /// What is wrong with it.
        why: String,
    },
    /// The table that was asked for makes no sense.
    #[error("such a table cannot be: {0}")]
    Geometry(String),
    /// The other side does not keep to the protocol of `rkv`.
    #[error("{peer} does not keep to the protocol: {why}")]
    Protocol {
        /// Address of the other side.
        peer: SocketAddr,
        /// What the other side did, in words.
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
