//! The RNIC itself, without the machine around it.
//!
//! This crate holds what the daemon and its clients must agree on ([`types`], [`abi`], [`shm`]),
//! the iWARP wire formats ([`mpa`], [`ddp`], [`rdmap`]) with their sans-IO state machines
//! ([`stream`]), the device model ([`device`]) and the [`engine`] in which wire and device meet.
//! It refuses to know sockets, threads, clocks, users and configuration files: bytes, time and
//! randomness come in as arguments, so that every layer runs alone in a test or a fuzzer.
//! `rnicd` drives it; `rnic-client` uses only `types`, `abi` and `shm`.

// Each lossy cast says why nothing is lost. Tests may cast as they like.
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

pub mod abi;
#[cfg(test)]
mod conformance;
pub mod ddp;
pub mod device;
pub mod engine;
pub mod mpa;
pub mod rdmap;
pub mod roce;
pub mod shm;
pub mod stream;
pub mod types;
