//! The control plane: one thread that polls all sockets without RDMA traffic.
//!
//! Clients connect to a Unix socket. The kernel provides their identity, and a session lasts until
//! its socket or its process ends. Requests go to the [resource manager](crate::resource), which
//! alone decides about them; readiness and time go to the connection manager; workers wake the
//! thread when they acknowledge commands. The control thread does not block, wait for a client, or
//! move payload. `rnicd run` and `rnicd exec` start it.

mod addresses;
mod budget;
mod connection;
mod high_water;
mod idle;
mod notify;
mod pending_hellos;
mod reload;
mod server;
mod socket;
mod turns;

pub use notify::Notifier;
pub use server::{Server, StartError, Stopper, check_filters};
pub use socket::{ControlSocket, SocketError};
