//! What the clock of a queue pair that is wired by hand runs for.

/// What a clock runs for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// A stream, by which an acknowledgement could come.
    Stream,
    /// A receive of the peer's.
    Receive,
    /// Anything at all from a peer that has been asked, or takes no more.
    Answer,
    /// More requests, which the same question could be about.
    Question,
}
