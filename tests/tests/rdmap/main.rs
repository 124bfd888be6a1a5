//! RFC 5040 over real TCP: scripted peers against the daemon, and ordering guarantees.

mod ordering;
mod scripted;
