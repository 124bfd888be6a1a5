//! The device model: what an RNIC owns on behalf of its clients.
//!
//! Steering tags ([`allocator`], [`stag`]) and the memory they name ([`memory`]), windows
//! ([`window`]), completion queues ([`cq`]), shared receive queues ([`srq`]), the shared face of a
//! queue pair ([`qp`]) and the reasons of failures ([`diagnoses`], [`records`]). It never sees the
//! wire: the [`engine`](crate::engine) asks it whether a range may be touched and gets a token, or
//! asks it to publish a completion. Who may create what is decided before, by the resource manager
//! of the daemon.

pub mod allocator;
pub mod copier;
pub mod cq;
pub mod diagnoses;
mod fault;
pub mod memory;
pub mod qp;
mod recent_stag;
pub mod records;
pub mod srq;
pub mod stag;
pub mod window;

pub use allocator::StagAllocator;
pub use copier::Copier;
pub use cq::Cq;
pub use diagnoses::DiagnosisLog;
pub use memory::Memory;
pub use qp::QpShared;
pub use recent_stag::RecentStag;
pub use srq::Srq;
pub use stag::{StagChange, StagEntry, StagKind, StagTable};
pub use window::Window;
