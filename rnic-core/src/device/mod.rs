//! The device model: what an RNIC owns on behalf of its clients.
//!
//! Steering tags ([`stag`]) and the memory they name ([`memory`]), completion queues ([`cq`]) and the shared face
//! of a queue pair ([`qp`]). It never sees the wire: the [`engine`](crate::engine) asks it whether a
//! range may be touched and gets a token, or asks it to publish a completion. Who may create what is
//! decided before, by the resource manager of the daemon.

pub mod cq;
pub mod memory;
pub mod mover;
pub mod qp;
pub mod stag;

pub use cq::Cq;
pub use memory::Memory;
pub use mover::Mover;
pub use qp::QpShared;
pub use stag::{StagAllocator, StagEntry, StagTable};
