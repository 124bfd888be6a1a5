//! Accepts clients while descriptors are free, and charges their users for the time.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Interest, Token};
use rnic_abi::abi::control::HelloStatus;
use rnic_abi::types::Time;

use super::{FIRST_CLIENT, HELLO_DEADLINE, PROCESS, SOCKET, SOURCES, Server, rejection};
use crate::clock;
use crate::control::connection::{Connection, reject_client};
use crate::privilege::Peer;

impl Server {
    /// Accepts waiting clients while descriptors are free. Charges their users for the time.
    pub(super) fn accept(&mut self, now: Time) {
        let mut had = clock::on_cpu();
        for _ in 0..ACCEPTS {
            let Some(uid) = self.accept_one(now) else { return };
            let took = clock::on_cpu().saturating_sub(had);
            had += took;
            self.served += took;
            self.budgets.spend(uid, took, now);
        }
        // More clients may be waiting, and epoll reports only new clients.
        self.accept_again = Some(now);
    }

    /// Accepts or rejects the next waiting client and returns its user. Returns `None` if no client
    /// waits or none can be accepted now.
    fn accept_one(&mut self, now: Time) -> Option<u32> {
        let socket = self.socket.as_ref()?;
        // The reaper may have to close each rejected client. Wait while it has too many.
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
            // The socket took the last descriptor, but watching the process needs another.
            Err(error) if is_exhausted(&error) => {
                reject_client(client.as_fd(), rejection(HelloStatus::Resources));
                self.reaper.close_client(NO_USER, client);
                self.pause_accepting(&error, now);
                return None;
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::Unsupported {
                    tracing::debug!(%error, "a client disconnected before it was identified");
                } else if let Some(suppressed) = self.log_limits.count("no process", Instant::now())
                {
                    tracing::warn!(%error, suppressed, "a client cannot be served");
                }
                self.reaper.close_client(NO_USER, client);
                return Some(NO_USER);
            }
        };
        let uid = peer.uid;
        if self.pending_hellos.of(uid) < MAX_PENDING_HELLOS {
            self.add(client, peer, now.after(HELLO_DEADLINE));
            return Some(uid);
        }
        // Rejected without its Hello, which may still arrive.
        let mut client = Connection::new(client, peer, now);
        let _ = client.welcome(rejection(HelloStatus::TooManyUnauthenticated), Vec::new());
        client.close(&self.reaper);
        self.hostile += 1;
        if let Some(suppressed) = self.log_limits.count("no hello", Instant::now()) {
            tracing::warn!(uid, suppressed, "too many clients without a Hello");
        }
        Some(uid)
    }

    /// Logs that no client can be accepted, and schedules another attempt.
    fn pause_accepting(&mut self, error: &io::Error, now: Time) {
        if let Some(suppressed) = self.log_limits.count("no accept", Instant::now()) {
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
                self.pending_hellos.insert(deadline, key, uid);
                self.enqueue(key);
            }
            Err(error) => {
                if let Some(suppressed) = self.log_limits.count("no watch", Instant::now()) {
                    tracing::warn!(%error, suppressed, "cannot register a client with epoll");
                }
                client.close(&self.reaper);
            }
        }
    }
}

/// Returns true if this process or the machine has no descriptors or memory left.
fn is_exhausted(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// User of unidentified clients.
const NO_USER: u32 = u32::MAX;
/// Maximum clients of one user that are connected without a Hello.
const MAX_PENDING_HELLOS: usize = 64;
/// Maximum clients to accept before other work.
const ACCEPTS: usize = 16;
/// Pause while rejected clients are closed.
const CLOSING_PAUSE: Duration = Duration::from_millis(1);
/// Pause for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
