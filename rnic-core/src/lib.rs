//! RNIC without sockets, threads or clocks.
//!
//! This crate holds the interface between the daemon and its clients ([`types`], [`abi`],
//! [`shm`]), the wire formats of iWARP ([`mpa`], [`ddp`], [`rdmap`]) and their sans-IO state
//! machines ([`stream`]), formats of RoCE v2 ([`roce`]), the device model ([`device`]) and the
//! [`engine`], which connects wire and device. It uses no sockets, threads, clocks or configuration
//! files: bytes, time and randomness are arguments, so that every layer can run alone in a test or
//! fuzzer. `rnicd` drives the engine. `rnic-client` uses only `types`, `abi` and `shm`.

// Each lossy cast states the reason why no data are lost. Tests may cast freely.
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
