//! `libibverbs.so.1` for programs written to the C verbs API. It translates their calls to calls of
//! `rnic-client`, so they run unchanged over an RNIC of `rnicd`, without kernel RDMA.
//!
//! `librdmacm.so.1` (the package `rnic-verbs-rdmacm`) only forwards into this library: statics are
//! not shared between two Rust libraries, so all state is here.
//!
//! The caller is the program itself. It may crash itself through a wrong pointer, as with any C
//! library. Only the daemon protects other programs from it.

#![allow(unsafe_code)] // A C boundary: pointers come from and go to programs.

mod address_handle;
mod async_events;
mod boundary;
pub mod c;
mod channel;
mod cm;
mod context;
mod cq;
mod device;
mod device_filter;
mod errno;
mod event_queue;
mod events;
mod exports;
mod fork;
mod gid_table;
mod log;
mod memory;
mod mr;
mod mw;
mod net;
mod object;
mod pd;
mod qp;
mod rate;
mod roce_states;
mod section;
mod srq;
mod states;
mod strings;
mod system;
mod work;
