//! Programs written against `rnic-client`: `rnic-copy`, `rnic-perf`, and the tour of `rnicd demo`.
//!
//! The binaries only call the `main` of their module. The code that moves data is separate from the
//! command lines, so that other programs can use it too: `rnicd demo` copies a file with [`copy`].
//! Like any application, all modules use only the public interface of the library. They do not
//! trust the peer: they parse a message completely before they act on it, and allocate all memory
//! of a connection when it is established.

pub mod cli;
pub mod clients;
pub mod copy;
pub mod endpoint;
mod fields;
pub mod link;
mod messenger;
pub mod perf;

pub mod text;
pub mod tour;
