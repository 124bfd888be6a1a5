//! Memory of the program: page protection, and the location of regions.

pub(crate) mod maps;
pub(crate) mod regions;
