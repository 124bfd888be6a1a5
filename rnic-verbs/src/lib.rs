//! `libibverbs.so.1` for programs written to the C verbs API: their calls become calls of
//! `rnic-client`, so that they run unchanged over an RNIC of `rnicd`, without any kernel RDMA.
//!
//! `librdmacm.so.1` (the package `rnic-verbs-rdmacm`) only forwards into this library: statics are
//! not shared between two Rust libraries, so all state is here.
//!
//! The caller is the program itself. It may crash itself through a wrong pointer, as with any C
//! library; what it may do to others is decided by the daemon alone.

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
mod section;
mod srq;
mod states;
mod strings;
mod system;
mod visible;
mod wired_states;
mod work;
