//! Follows the addresses of this host's interfaces.
//!
//! The kernel announces changes on a netlink socket, which the control loop watches. What changed
//! is not parsed: all addresses are read again, by a thread that may make the sockets which that
//! takes and nothing else. Announcements that are lost (`ENOBUFS`) are changes as well. A reading
//! that fails, for example for want of descriptors, is repeated with growing pauses.

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

/// The addresses of this host. The thread ends when this is dropped.
#[derive(Debug)]
pub(super) struct Addresses {
    announcements: OwnedFd,
    wanted: SyncSender<()>,
    found: Receiver<io::Result<Vec<Interface>>>,
}

impl Addresses {
    /// Listens for changes from now on, so that no later one is missed. `waker` is woken when
    /// addresses have been read.
    pub(super) fn follow(waker: Arc<Waker>, seccomp: Seccomp) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Protocol 0 is `NETLINK_ROUTE`.
        let announcements = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&announcements, &SocketAddrNetlink::new(0, GROUPS))?;
        // One that waits is begun after all changes so far.
        let (wanted, inbox) = sync_channel::<()>(1);
        let (tell, found) = channel();
        spawn_confined("rnicd-addresses", ThreadKind::Addresses, seccomp, move || {
            read_on_request(&inbox, if_addrs::get_if_addrs, |found| {
                // The receiver lives as long as the sender of `inbox`.
                let _ = tell.send(found);
                // Fails only if it rings already.
                let _ = waker.wake();
            });
        })?;
        let addresses = Addresses { announcements, wanted, found };
        // Repeats the daemon's first reading if that failed.
        addresses.read_again();
        Ok(addresses)
    }

    /// Has the addresses read once more.
    pub(super) fn read_again(&self) {
        // Full if a reading is about to begin, or if the thread is gone.
        let _ = self.wanted.try_send(());
    }

    /// Takes announcements, a bounded number, and has the addresses read again.
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

    /// What the last reading found, if one has ended.
    pub(super) fn poll(&self) -> Option<io::Result<Vec<Interface>>> {
        self.found.try_iter().last()
    }
}

impl AsFd for Addresses {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.announcements.as_fd()
    }
}

/// Reads once for each request, and again after a failure until a reading succeeds. Ends with the
/// sender of requests.
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
            (Err(_), Some(pause)) => Some(LONGEST_PAUSE.min(pause * 2)),
        };
        tell(found);
    }
}

/// `RTMGRP_IPV4_IFADDR` and `RTMGRP_IPV6_IFADDR`.
const GROUPS: u32 = 0x10 | 0x100;
/// More than the socket holds.
const ANNOUNCEMENTS: usize = 4096;
/// Before a reading that failed is repeated; each pause is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_reading_is_repeated_until_it_succeeds() {
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
        // Only a request causes another reading.
        wanted.send(()).unwrap();
        assert_eq!(next(), Some(4));
        drop(wanted);
        thread.join().unwrap();
        assert!(found.try_recv().is_err());
    }
}
