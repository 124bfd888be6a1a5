//! The device model: the objects that an RNIC holds for its clients.
//!
//! These are steering tags ([`allocator`], [`stag`]) and the memory that they refer to
//! ([`memory`]), windows ([`window`]), completion queues ([`cq`]), shared receive queues ([`srq`]),
//! the shared state of QPs ([`qp`]), fault rules ([`faults`]), and diagnoses of failures
//! ([`diagnoses`], [`records`]). The device never sees a packet. The [`engine`](crate::engine) asks
//! it for checked ranges ([`Target`](memory::Target)) and publishes completions through it. The
//! daemon's resource manager decides which session may create which object.

pub mod allocator;
pub mod copier;
pub mod cq;
pub mod diagnoses;
mod fault;
pub mod faults;
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
pub use faults::{ArmedFault, Occasion};
pub use memory::Memory;
pub use qp::QpShared;
pub use recent_stag::RecentStag;
pub use srq::Srq;
pub use stag::{StagChange, StagEntry, StagKind, StagTable};
pub use window::Window;
