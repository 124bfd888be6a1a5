//! Follows this host's interfaces and their addresses.
//!
//! The kernel announces changes on a netlink socket in the control thread's poll. The content is
//! not parsed: a separate thread reads all addresses again. Its seccomp filter allows only the
//! sockets that this needs. Lost announcements (`ENOBUFS`) count as changes. A failed read, for
//! example for lack of descriptors, is repeated at growing intervals.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::time::Duration;

use if_addrs::Interface;
use mio::Waker;
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

use crate::config::Seccomp;
use crate::privilege::{ThreadKind, spawn_confined};

/// The addresses of this host. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Addresses {
    announcements: OwnedFd,
    wanted: SyncSender<()>,
    found: Receiver<io::Result<Vec<Interface>>>,
}

impl Addresses {
    /// Subscribes to changes before the first read, so that none is missed. Wakes `waker` after
    /// each read.
    pub(super) fn follow(waker: Arc<Waker>, seccomp: Seccomp) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Protocol 0 is `NETLINK_ROUTE`.
        let announcements = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&announcements, &SocketAddrNetlink::new(0, GROUPS))?;
        // Capacity 1: the read for a queued request sees all changes so far.
        let (wanted, inbox) = sync_channel::<()>(1);
        let (tell, found) = channel();
        spawn_confined("rnicd-addresses", ThreadKind::Addresses, seccomp, move || {
            read_on_request(&inbox, if_addrs::get_if_addrs, |found| {
                // The receiver lives as long as the sender of `inbox`.
                let _ = tell.send(found);
                // Fails only if the wake-up is already pending.
                let _ = waker.wake();
            });
        })?;
        let addresses = Addresses { announcements, wanted, found };
        // In case the daemon's own first read fails.
        addresses.read_again();
        Ok(addresses)
    }

    /// Requests another read of the addresses.
    pub(super) fn read_again(&self) {
        // Fails if a read is already requested, or if the thread has ended.
        let _ = self.wanted.try_send(());
    }

    /// Drains a bounded number of announcements and requests a read.
    pub(super) fn handle_readable(&self) {
        let mut any = false;
        for _ in 0..ANNOUNCEMENTS {
            match recv(&self.announcements, &mut [0; 1][..], RecvFlags::TRUNC) {
                Ok(_) | Err(Errno::NOBUFS) => any = true,
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        if any {
            self.read_again();
        }
    }

    /// Returns the result of the last read, if one has finished.
    pub(super) fn poll(&self) -> Option<io::Result<Vec<Interface>>> {
        self.found.try_iter().last()
    }
}

impl AsFd for Addresses {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.announcements.as_fd()
    }
}

/// Reads once for each request, and again after a failure until a read succeeds. Returns when the
/// sender of requests is dropped.
fn read_on_request<T>(
    inbox: &Receiver<()>,
    mut read: impl FnMut() -> io::Result<T>,
    mut tell: impl FnMut(io::Result<T>),
) {
    let mut pause = None;
    loop {
        let request = match pause {
            Some(pause) => inbox.recv_timeout(pause),
            None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        if request == Err(RecvTimeoutError::Disconnected) {
            return;
        }
        let found = read();
        pause = match (&found, pause) {
            (Ok(_), _) => None,
            (Err(_), None) => Some(FIRST_PAUSE),
            (Err(_), Some(pause)) => Some(MAX_PAUSE.min(pause * 2)),
        };
        tell(found);
    }
}

/// `RTMGRP_LINK`, `RTMGRP_IPV4_IFADDR` and `RTMGRP_IPV6_IFADDR`.
const GROUPS: u32 = 0x1 | 0x10 | 0x100;
/// More announcements than the socket holds.
const ANNOUNCEMENTS: usize = 4096;
/// Pause before a failed read is repeated. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_read_is_repeated_until_it_succeeds() {
        let (wanted, inbox) = sync_channel(1);
        let (tell, found) = channel();
        let thread = std::thread::spawn(move || {
            let mut readings = 0;
            let read = || {
                readings += 1;
                if readings < 3 { Err(io::Error::from(Errno::MFILE)) } else { Ok(readings) }
            };
            read_on_request(&inbox, read, |result| tell.send(result.ok()).unwrap());
        });
        wanted.send(()).unwrap();
        let next = || found.recv_timeout(Duration::from_secs(180)).unwrap();
        assert_eq!([next(), next(), next()], [None, None, Some(3)]);
        // Only a request starts another read.
        wanted.send(()).unwrap();
        assert_eq!(next(), Some(4));
        drop(wanted);
        thread.join().unwrap();
        assert!(found.try_recv().is_err());
    }
}
