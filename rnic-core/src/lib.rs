//! RNIC without sockets, threads or clocks.
//!
//! This crate holds the wire formats of iWARP ([`mpa`], [`ddp`], [`rdmap`]) and their sans-IO state
//! machines ([`stream`]), the device model ([`device`]) and the [`engine`], which connects wire and
//! device. It uses no sockets, threads, clocks or configuration files: bytes, time and randomness
//! are arguments, so that every layer can run alone in a test or fuzzer. `rnicd` drives the engine.
//! `rnic-abi` has everything that clients also use.

// Each cast that could lose data states why it does not. Tests may cast freely.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        unreachable_pub
    )
)]

#[cfg(test)]
mod conformance;
pub mod ddp;
pub mod device;
pub mod engine;
pub mod mpa;
pub mod rdmap;
pub mod stream;
