//! State of the send queue, which a failed request stops on UC and UD.

/// Handling of posted send requests of a QP that works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SendQueue {
    /// Requests are carried out.
    #[default]
    Works,
    /// A request has failed (SQE): requests are flushed.
    Failed,
    /// In RTS again: the oldest `left` requests are flushed, later ones wait.
    Flushes { left: u32 },
}
