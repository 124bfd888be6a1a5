//! Waits of an RC or UC QP that have a time limit.

/// A wait with a time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// For a stream, over which an acknowledgement could arrive.
    Stream,
    /// For a receive of the peer.
    Receive,
    /// For a QP that a fault rule has stopped, or whose link it has stalled: this one or its peer.
    Stopped,
    /// For any answer of a peer that owes one, or that accepts no more bytes.
    Answer,
    /// For more requests, which the same acknowledgement request could cover.
    AckRequest,
}
