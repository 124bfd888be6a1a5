//! The interface between the RNIC daemon and its clients.
//!
//! This crate holds identifiers and rights ([`types`]), the layouts that both sides use ([`abi`]),
//! the memory that they share ([`shm`]), the datagrams of RoCE v2 ([`roce`]), the rules of fault
//! injection ([`faults`]), and sizes and times with units ([`units`]). It sets no policy:
//! `rnic-core` implements the RNIC on it, and `rnic-client` the verbs.

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

pub mod abi;
pub mod faults;
pub mod roce;
pub mod shm;
pub mod types;
pub mod units;
