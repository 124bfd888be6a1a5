//! Memory of the program: what may be registered, and where each region lies.

pub(crate) mod maps;
pub(crate) mod regions;
