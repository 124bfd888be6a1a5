//! Follows the addresses of this host's interfaces.
//!
//! The kernel announces changes on a netlink socket, which the control loop watches. What changed
//! is not parsed: all addresses are read again, by a thread that may make the sockets which that
//! takes and nothing else. Announcements that are lost (`ENOBUFS`) are changes as well.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};

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
            for () in inbox {
                // The receiver lives as long as the sender of `inbox`.
                let _ = tell.send(if_addrs::get_if_addrs());
                // Fails only if it rings already.
                let _ = waker.wake();
            }
        })?;
        Ok(Addresses { announcements, wanted, found })
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
            // Full if a reading is about to begin, or if the thread is gone.
            let _ = self.wanted.try_send(());
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

/// `RTMGRP_IPV4_IFADDR` and `RTMGRP_IPV6_IFADDR`.
const GROUPS: u32 = 0x10 | 0x100;
/// More than the socket holds.
const ANNOUNCEMENTS: usize = 4096;
