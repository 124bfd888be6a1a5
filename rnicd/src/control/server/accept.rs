//! Taking in clients: as many as there are descriptors for, at the cost of their users.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Interest, Token};
use rnic_core::abi::control::HelloStatus;
use rnic_core::types::Time;

use super::{FIRST_CLIENT, HELLO_DEADLINE, PROCESS, SOCKET, SOURCES, Server, turned_away};
use crate::clock;
use crate::control::connection::{Connection, turn_away};
use crate::privilege::Peer;

impl Server {
    /// Takes in clients that wait, as long as there are descriptors. That costs whoever they are of
    /// as much of his time as it takes.
    pub(super) fn accept(&mut self, now: Time) {
        let mut had = clock::on_cpu();
        for _ in 0..ACCEPTS {
            let Some(uid) = self.take_in(now) else { return };
            let took = clock::on_cpu().saturating_sub(had);
            had += took;
            self.served += took;
            self.budgets.spend(uid, took, now);
        }
        // More may wait, and the poll reports only what is new.
        self.accept_again = Some(now);
    }

    /// Takes in the next client that waits, or turns it away: its user. `None` if none waits, or
    /// none can be taken in for now.
    fn take_in(&mut self, now: Time) -> Option<u32> {
        let socket = self.socket.as_ref()?;
        // Each that is turned away may have to be closed elsewhere. That is soon over.
        if self.reaper.closing_soon() as u64 >= self.manager.most_closing() {
            self.accept_again = Some(now.after(CLOSING_PAUSE));
            return None;
        }
        let client = match socket.accept() {
            Ok(client) => client?,
            Err(error) => {
                self.pause_accepting(&error, now);
                return None;
            }
        };
        let peer = match Peer::of(client.as_fd()) {
            Ok(peer) => peer,
            // Its socket has taken the last descriptor, and what tells of its end needs one.
            Err(error) if is_exhausted(&error) => {
                turn_away(client.as_fd(), turned_away(HelloStatus::Resources));
                self.reaper.close_client(NOBODY, client);
                self.pause_accepting(&error, now);
                return None;
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::Unsupported {
                    tracing::debug!(%error, "a client was gone before it was known");
                } else if let Some(suppressed) = self.said.count("no process", Instant::now()) {
                    tracing::warn!(%error, suppressed, "a client cannot be served");
                }
                self.reaper.close_client(NOBODY, client);
                return Some(NOBODY);
            }
        };
        let uid = peer.uid;
        if self.greetings.of(uid) < SILENT_PER_USER {
            self.add(client, peer, now.after(HELLO_DEADLINE));
            return Some(uid);
        }
        // Told without having been heard: its Hello may be under way.
        let mut client = Connection::new(client, peer, now);
        let _ = client.welcome(turned_away(HelloStatus::Silent), Vec::new());
        client.close(&self.reaper);
        self.hostile += 1;
        if let Some(suppressed) = self.said.count("no hello", Instant::now()) {
            tracing::warn!(uid, suppressed, "too many clients without a Hello");
        }
        Some(uid)
    }

    /// No client can be taken in: says so, and looks again after a while.
    fn pause_accepting(&mut self, error: &io::Error, now: Time) {
        if let Some(suppressed) = self.said.count("no accept", Instant::now()) {
            tracing::warn!(%error, suppressed, "cannot accept clients for now");
        }
        self.accept_again = Some(now.after(ACCEPT_PAUSE));
    }

    pub(super) fn add(&mut self, socket: OwnedFd, peer: Peer, deadline: Time) {
        let uid = peer.uid;
        let client = Connection::new(socket, peer, deadline);
        let entry = self.connections.vacant_entry();
        let token = |source| Token(FIRST_CLIENT + entry.key() * SOURCES + source);
        let registry = self.poll.registry();
        let both = Interest::READABLE | Interest::WRITABLE;
        let socket = client.as_fd().as_raw_fd();
        let process = client.peer.process.as_raw_fd();
        let registered =
            registry.register(&mut SourceFd(&socket), token(SOCKET), both).and_then(|()| {
                registry.register(&mut SourceFd(&process), token(PROCESS), Interest::READABLE)
            });
        match registered {
            Ok(()) => {
                let key = entry.key();
                entry.insert(client);
                self.greetings.insert(deadline, key, uid);
                self.enqueue(key);
            }
            Err(error) => {
                if let Some(suppressed) = self.said.count("no watch", Instant::now()) {
                    tracing::warn!(%error, suppressed, "cannot watch a client");
                }
                client.close(&self.reaper);
            }
        }
    }
}

/// Whether this process or the machine has no descriptor left, or no memory for one.
fn is_exhausted(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// Whose a client is of which nothing is known.
const NOBODY: u32 = u32::MAX;
/// Clients of one user that may be connected without a Hello.
const SILENT_PER_USER: usize = 64;
/// Clients taken in before others have their turn.
const ACCEPTS: usize = 16;
/// How long to wait for clients that were turned away to be closed.
const CLOSING_PAUSE: Duration = Duration::from_millis(1);
/// How long to wait for descriptors to become free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
