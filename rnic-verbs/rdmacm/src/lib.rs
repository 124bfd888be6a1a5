//! `librdmacm.so.1`: each function jumps to the one of our `libibverbs.so.1` that does the work.
//!
//! Identifiers hold queue pairs, so both libraries need the same state, and two Rust libraries in a
//! process share none. A jump passes on arguments of any kind and number, and the return address.

#![allow(unsafe_code)] // Assembly.

// Made by the build script from `symbols.rs`. A test executable has no version nodes.
#[cfg(not(test))]
std::arch::global_asm!(include_str!(concat!(env!("OUT_DIR"), "/jumps.s")), options(raw));
