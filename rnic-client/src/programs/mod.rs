//! What the programs of this package are made of: `pingpong`, `rcopy`, `rkv`, `rnic-perf`, and the
//! tour of `rnicd demo`. They use the library as any application would.

pub mod perf;
pub mod tour;
