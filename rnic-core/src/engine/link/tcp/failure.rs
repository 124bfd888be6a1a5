//! Texts for errors of a connection's socket.

use std::io;

/// Describes a socket call that failed permanently, and whether the peer's host is unreachable.
pub(in crate::engine) fn socket_error_text(doing: &str, e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::TimedOut
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::NetworkDown => {
            format!("the peer's host no longer answers: {doing} failed: {e}")
        }
        _ => format!("{doing} failed: {e}"),
    }
}
