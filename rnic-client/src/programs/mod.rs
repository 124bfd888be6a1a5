//! What the programs `pingpong`, `rcopy` and `rkv` are made of.
//!
//! The binaries hold only their command lines; what moves data is here, so that other programs may
//! use it too ([`rcopy`] copies the file of `rnicd demo`). Everything is written against the public
//! interface of this library: the modules are examples of it as much as they are tools. They know
//! nothing of the daemon but what that interface says, and trust the peer in nothing: messages are
//! parsed in full before they are acted on, and what a connection may allocate is fixed when it is
//! made.

pub mod cli;
pub mod clients;
mod fields;
pub mod latency;
pub mod link;
mod messenger;
pub mod pingpong;
pub mod rcopy;
pub mod rkv;
