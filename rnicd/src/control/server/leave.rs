//! Ends an idle daemon without losing a client that connects at the same time.

use rnic_abi::types::Time;

use super::Server;
use crate::config::Span;

impl Server {
    /// Begins the end of the daemon if it has been idle for long enough.
    ///
    /// A client that connects at this time must be served or refused; it must not be accepted and
    /// then disconnected. So the listening socket is shut down first. From then on the kernel
    /// refuses new clients, as with the socket of a daemon that has exited. Clients that connected
    /// before are still in the queue and are accepted next. Only then are the path and lock
    /// removed, so that another daemon can start. Clients from the queue are served for as long as
    /// they like, and the daemon ends after them. A check of the queue before the shutdown would
    /// lose clients that connect after the check.
    pub(super) fn handle_idleness(&mut self, now: Time) {
        let has_clients = self.has_clients();
        let Some(idle) = self.idle.as_mut().filter(|_| self.stopping.is_none()) else { return };
        if idle.begins_to_end(has_clients, now) {
            tracing::info!("no client for {}: ending", Span(idle.most()));
            if let Some(socket) = &self.socket {
                socket.refuse_new_clients();
            }
            self.accept(now);
        } else if !idle.is_ending() {
            return;
        }
        // If it is set, more clients wait, or none can be accepted now.
        if self.accept_again.is_none() {
            self.release_path();
        }
        if self.socket.is_none() && !self.has_clients() {
            self.begin_stop(now);
        }
    }

    fn has_clients(&self) -> bool {
        !self.connections.is_empty() || self.manager.sessions() > 0
    }
}
