//! What the daemon is to the kernel, and what the kernel knows about others.
//!
//! Who a peer is and whether it lives, which signals came, what a service manager passed; and the
//! giving up of what is not needed: user, capabilities, system calls. The one place of the daemon
//! with `unsafe` code, so that a reader can check all of it at once. It decides nothing: `control`
//! asks who is there, `exec` passes signals on, `cli` says what to give up, threads confine
//! themselves.
#![allow(unsafe_code)]

mod account;
mod activation;
mod heap;
mod interrupt;
mod network;
mod peer;
mod renounce;
mod seccomp;
mod signals;
mod slice;

pub use account::{Account, Names, group_id, user_id};
pub use activation::passed_sockets;
pub use heap::return_free_memory;
pub use interrupt::Interrupter;
pub use network::Network;
pub use peer::Peer;
pub use renounce::{RenounceError, account_to_become, become_account, renounce};
pub use seccomp::{ThreadKind, check_available, confine, spawn_confined};
pub use signals::{Signal, SignalSet, Signals, die_of, send_signal};
pub use slice::set_short_slices;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on descriptors to the hard one; returns the limit in force.
pub fn raise_descriptor_limit() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    match setrlimit(Resource::Nofile, raised) {
        // No limit at all is more than the kernel ever gives.
        Ok(()) => maximum.unwrap_or(u64::MAX),
        Err(error) => {
            tracing::warn!(%error, "could not raise the soft limit on descriptors");
            current.unwrap_or(u64::MAX)
        }
    }
}

/// Leaves the session of whoever started this process, and with it his terminal, and closes every
/// descriptor it was started with but the standard ones. To be called before anything else opens
/// one.
pub fn detach() {
    // Only the leader of a process group cannot: that is in no session that would end it.
    let _ = rustix::process::setsid();
    let (first, last) = (3 as libc::c_uint, libc::c_uint::MAX);
    // SAFETY: closes descriptors that nothing of this process has taken over: it has opened none
    // yet, and knows none of those that it was started with. Touches no memory.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

/// The user the daemon runs as.
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}
