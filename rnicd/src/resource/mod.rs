//! The resource manager.

mod capacity;
mod extents;
mod ledger;

pub use capacity::Capacity;
