//! RFC 5040 over real TCP: scripted peers against the daemon, and what applications may rely on.

mod ordering;
mod scripted;
