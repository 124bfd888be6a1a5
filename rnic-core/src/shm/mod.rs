//! Memory shared between the daemon and one client: mappings, queues, doorbells, and the sleeps
//! and wakes between two processes.
//!
//! Both sides of every ring stand here side by side, so that a change to one is seen next to the
//! other. Callers get safe functions only: a range is checked, foreign memory is copied or loaded
//! word by word and never lent out as a reference, the other side's index is a hint that is
//! bounded by the ring, and a shared buffer whose pages vanish is reported instead of killing us.
//! This module refuses to know what a request means, who may post it, which thread sleeps on what
//! descriptor, and what time it is. The engine and the workers use the daemon's ends,
//! `rnic-client` the client's.
//!
//! The algorithms that need an argument about memory order (rings, arm and re-check, doorbells,
//! parking) run over [`sync`]'s atomics through `view::View`, so that `loom` drives the very
//! code that runs in production:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p rnic-core --lib --release loom_
//! ```

// The one place in this crate where unsafe code may live.
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
mod program;
pub mod queue;
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
