//! What the clock of a queue pair that is wired by hand runs for.

/// What a clock runs for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// A stream, by which an acknowledgement could come.
    Stream,
    /// A receive of the peer's.
    Receive,
    /// More requests, which the same question could be about.
    Question,
}
