//! MPA start-up over TCP.
//!
//! `active` and `passive` drive the state machine of one connection; `rejected` finishes rejected
//! connections. The other modules have the calls of the
//! [`ConnectionManager`](super::ConnectionManager): `connect`, `accept`, `listen` with the limits,
//! `passed` for connections that clients pass, `ask_back` for queries.

mod accept;
pub(super) mod active;
mod ask_back;
mod connect;
mod listen;
pub(super) mod passed;
pub(super) mod passive;
pub(super) mod rejected;

pub(super) use accept::request_event;
