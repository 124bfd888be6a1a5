//! Lists for `rnicctl` and for collectors of metrics.

mod limits;
mod list;
mod metrics;
pub mod page;
mod tree;
