//! The programs that come with this library, as modules that other programs can call.
//!
//! Each is an ordinary user of the crate's public interface. The binaries in `src/bin` do nothing
//! but call them.

pub mod perf;
