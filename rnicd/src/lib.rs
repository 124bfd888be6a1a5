//! The RNIC daemon: processes and policy around `rnic-core`.

pub mod cm;
pub mod events;
pub mod worker;
