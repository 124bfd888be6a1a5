//! Waits of an RC or UC QP that have a time limit.

/// A wait with a time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// For a stream, over which an acknowledgement could arrive.
    Stream,
    /// For a receive of the peer.
    Receive,
    /// For this QP or its peer, which a fault rule has stopped or whose link it has stalled.
    Stopped,
    /// For a peer that owes an answer, or that accepts no more bytes.
    Answer,
    /// For the end of sending, or a stream, before the QP moves to Error.
    Error,
    /// For more requests, which the same acknowledgement request could cover.
    AckRequest,
}
