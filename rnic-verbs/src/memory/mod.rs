//! The program's memory: what of it may be registered, and how.

pub(crate) mod adopt;
pub(crate) mod maps;
pub(crate) mod regions;
mod withhold;
