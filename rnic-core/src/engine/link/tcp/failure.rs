//! Errors of a connection's socket, in words.

use std::io;

/// What to say of a call that failed for good: a peer that is gone is named as what it is.
pub(in crate::engine) fn in_words(doing: &str, e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::TimedOut
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::NetworkDown => {
            format!("the peer's host does not answer any more: {doing} failed: {e}")
        }
        _ => format!("{doing} failed: {e}"),
    }
}
