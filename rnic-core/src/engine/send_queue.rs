//! Whether the send queue of a QP works, or has stopped at a request that failed.

/// What happens to posted send requests of a QP that works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SendQueue {
    /// They are carried out.
    #[default]
    Works,
    /// A request has failed (SQE): they are flushed.
    Failed,
    /// In Rts again: the oldest `left` requests are flushed, later ones wait.
    Flushes { left: u32 },
}
