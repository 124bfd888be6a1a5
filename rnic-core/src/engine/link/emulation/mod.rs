//! Emulated links: delay, rate, stalls and losses of outgoing data, on every kind of link.
//!
//! All outgoing data of a QP passes its `EmulatedLink`: requests, responses and, on an RC QP, the
//! acknowledgements of the direct path. The *rate* delays the QP, which does not send while the
//! link is busy. The *delay* puts each unit into a `DelayLine`, from which it arrives in order:
//! framed bytes before the socket of a TCP connection (`tcp/delayed.rs`), segments before the other
//! QP of the direct path ([`direct`]), and datagrams before their socket or receiver
//! (`datagram/delayed.rs`). A request completes when it has entered the line, just as it completes
//! without emulation when TCP has accepted it. On RC it completes when the peer has acknowledged
//! it, one delay of each QP later.
//!
//! Payload is read when it enters the line, and its target is checked when it arrives, so no data
//! arrive in a region after its deregistration. The memory of a line is bounded and charged to the
//! session of the QP that owns it. A QP whose session has reached a limit on unsent bytes waits
//! until its line is empty, so that a rule does not end a stream.
//!
//! The end of a stream stays ordered after earlier segments but has no delay of its own. A QP that
//! is destroyed sends all units in its line at once.

pub(in crate::engine) mod arrival;
pub(in crate::engine) mod delay_line;
mod direct;
mod qp;
pub(in crate::engine) mod shared;
pub(in crate::engine) mod state;
