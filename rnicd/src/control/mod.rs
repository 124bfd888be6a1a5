//! The control plane: one thread, one poll, every socket that is not a data connection.
//!
//! Clients talk to it over a Unix socket; the kernel says who they are, and a session lasts until
//! its socket or its process ends. What they ask goes to the [resource manager](crate::resource),
//! which alone decides; readiness and time go to the connection manager; workers wake it when they
//! have acknowledged. Nothing here blocks, waits for a client, or moves payload. `rnicd run` and
//! `rnicd exec` start it.

mod addresses;
mod budget;
mod connection;
mod greetings;
mod high_water;
mod idle;
mod notify;
mod reload;
mod server;
mod socket;
mod turns;

pub use notify::Notifier;
pub use server::{Server, StartError, Stopper, check_filters};
pub use socket::{ControlSocket, SocketError};
