//! Emulated links: delay, rate, stalls and losses of outgoing data, on every kind of link.
//!
//! All outgoing data of a QP passes its `EmulatedLink`: requests, responses and, on an RC QP, the
//! acknowledgements of the direct path. The *rate* holds back the QP, which takes no turn at
//! sending while the link is busy. The *delay* puts each unit into a `DelayLine`, from which it
//! arrives in order: framed bytes before the socket of a TCP connection (`tcp/delayed.rs`),
//! segments before the other QP of the direct path ([`direct`]), and datagrams before their socket
//! or receiver (`datagram/delayed.rs`). A request is done when it has entered the line, as it is
//! done when TCP has accepted it. On RC it is done when the peer has acknowledged it, one delay of
//! each QP later.
//!
//! Payload is read when it enters the line and its target is checked when it arrives, so a
//! deregistration is a barrier here too. The memory of a line is bounded and charged to the session
//! of the QP that owns it. A QP whose session has reached a limit on unsent bytes waits until its
//! line is empty, so that no stream ends because of a rule.
//!
//! The end of a stream keeps its place behind earlier segments but has no delay of its own. A QP
//! that is destroyed sends all units in its line at once.

pub(in crate::engine) mod arrival;
pub(in crate::engine) mod delay_line;
mod direct;
mod qp;
pub(in crate::engine) mod shared;
pub(in crate::engine) mod state;
