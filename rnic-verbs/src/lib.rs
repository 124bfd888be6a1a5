//! `libibverbs.so.1` for programs written to the C verbs API. It translates their calls to calls of
//! `rnic-client`, so they run unchanged over an RNIC of `rnicd`, without kernel RDMA.
//!
//! `librdmacm.so.1` (the package `rnic-verbs-rdmacm`) only forwards into this library: statics are
//! not shared between two Rust libraries, so all state is here.
//!
//! The caller is the program itself. It may crash itself through a wrong pointer, as with any C
//! library. Only the daemon protects other programs from it.

#![allow(unsafe_code)] // A C boundary: pointers come from and go to programs.

pub mod c;
#[macro_use]
mod errno;
mod event_queue;
mod exports;
mod ffi;
mod fork;
mod log;
mod memory;
mod net;
mod rate;
mod rdma;
mod rdmacm;
mod strings;
mod system;
mod verbs;
