//! The control server.

mod packet;
mod reaper;
mod socket;
