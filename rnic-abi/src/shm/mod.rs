//! Memory shared between the daemon and one client: mappings, queues, doorbells, and the sleep and
//! wake-up protocol between two processes.
//!
//! Both sides of each ring are in this module, so that a change to one is reviewed with the other.
//! Almost all public functions are safe: they check ranges, copy foreign memory or load it word by
//! word, and never create a reference to its bytes. They use the other side's index only within the
//! bounds of the ring. A missing page of a shared buffer causes an error and does not end the
//! process. This module does not depend on the meaning of a request, on permissions, on the
//! descriptors on which threads sleep, or on time. The engine and the workers use the daemon's
//! ends, and `rnic-client` the client's.
//!
//! The algorithms that depend on memory order (rings, arm and re-check, doorbells, parking) use the
//! atomics of [`sync`] through `view::View`, so that `loom` tests the code that runs in production:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p rnic-abi --lib --release loom_
//! ```

// Unsafe code in this crate is allowed in this module only.
#![allow(unsafe_code)]

pub mod attached;
mod bytes;
mod copy;
pub mod doorbell;
pub mod fault;
pub mod io;
pub mod lease;
mod mapping;
#[cfg(all(test, loom))]
mod models;
pub mod own;
pub mod owner;
pub mod parker;
mod past_caches;
pub mod peer;
mod program;
pub mod queue;
pub mod ruled_calls;
pub mod secure;
#[cfg(all(test, not(loom)))]
mod stress;
pub mod sync;
mod view;
pub mod wait;

pub use attached::AddressSpace;
pub use bytes::RawBytes;
pub use copy::CopyFault;
pub use mapping::{AdoptError, Mapping, POPULATE_STEP};
pub use program::ProgramRange;

#[cfg(target_endian = "big")]
compile_error!("the queues are little-endian words and are not byte-swapped");
#[cfg(not(target_pointer_width = "64"))]
compile_error!("offsets and lengths of shared memory are 64-bit");
