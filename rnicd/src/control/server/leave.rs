//! The end of a daemon that nobody uses, without losing who comes at that moment.

use rnic_core::types::Time;

use super::Server;
use crate::config::Span;

impl Server {
    /// Begins the end if there has been no client for long enough.
    ///
    /// A client that connects meanwhile is served, or finds no socket; it is never taken in and
    /// hung up on. So the socket is closed to newcomers first: from then on the kernel refuses
    /// them, as it does where a socket is left over from a daemon that is gone. Who connected
    /// before stands in its queue, which is emptied next; only then do path and lock go, and
    /// another daemon can take the place. Whoever came out of the queue is served by this one as
    /// long as he likes, and it ends when he does. Looking into the queue before it is closed
    /// would not do: whoever connects after the look would be lost.
    pub(super) fn handle_idleness(&mut self, now: Time) {
        let has_clients = self.has_clients();
        let Some(idle) = self.idle.as_mut().filter(|_| self.stopping.is_none()) else { return };
        if idle.begins_to_leave(has_clients, now) {
            tracing::info!("no client for {}: ending", Span(idle.most()));
            if let Some(socket) = &self.socket {
                socket.close_to_newcomers();
            }
            self.accept(now);
        } else if !idle.is_leaving() {
            return;
        }
        // Otherwise more may wait, or one that could not be taken in for now.
        if self.accept_again.is_none() {
            self.leave_place();
        }
        if self.socket.is_none() && !self.has_clients() {
            self.begin_stop(now);
        }
    }

    fn has_clients(&self) -> bool {
        !self.connections.is_empty() || self.manager.sessions() > 0
    }
}
