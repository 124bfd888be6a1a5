//! Programs written against `rnic-client`: `pingpong`, `rcopy`, `rkv`, `rnic-perf`, and the tour of
//! `rnicd demo`.
//!
//! The binaries only call the `main` of their module; what moves data is apart from the command
//! lines, so that other programs may use it too ([`rcopy`] copies the file of `rnicd demo`).
//! Everything is written against the public interface of the library, as in any application. The
//! modules know nothing of the daemon but what that interface says, and trust the peer in nothing:
//! messages are parsed in full before they are acted on, and what a connection may allocate is
//! fixed when it is made.

pub mod cli;
pub mod clients;
pub mod endpoint;
mod fields;
pub mod latency;
pub mod link;
mod messenger;
pub mod perf;
pub mod pingpong;
pub mod rcopy;
pub mod rkv;
pub mod tour;
