//! What is known of the acknowledgements of a queue pair's requests.

/// How requests of one queue pair are acknowledged.
#[derive(Default)]
pub(in crate::engine) struct Acknowledgements {
    /// The peer has to be asked.
    pub asks: bool,
    /// Requests before this one are covered by the question under way.
    pub asked: Option<u64>,
    /// Requests that were sent since the last question.
    pub unasked: u32,
}
