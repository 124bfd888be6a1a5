//! Memory order: a QP with an order rule ([`OrderRule`](rnic_abi::faults::order::OrderRule)) places
//! incoming data in an order that a memory model permits, and that is seldom seen in practice.
//!
//! [`model`] has the rules of the models as data, [`chooser`] selects one of the permitted orders,
//! and [`pending`] keeps the pieces that have arrived and are not visible yet. [`place`] writes
//! them to memory, [`served`] delays the Reads and atomic operations of the peer, and [`report`]
//! records each inversion.
//!
//! A held piece is written like a segment that has just arrived: its STag is checked again. A
//! [barrier](model::Barrier), the end of the stream, a change of the QP and the revocation of its
//! STag place all held pieces, so no write can occur after any of these.

mod chooser;
mod early;
mod model;
mod pending;
mod place;
mod report;
mod served;
mod set;
#[cfg(test)]
mod tests;

pub(super) use early::EarlyBytes;
pub(super) use model::Barrier;
pub(super) use pending::{Arrival, Kind};
pub(super) use set::{HELD, PendingSet};
