//! The daemon's privileges, and the kernel's information about other processes.
//!
//! Provides peer credentials and pidfds, signals and sockets passed by a service manager, and drops
//! the root user, capabilities and system calls. This is the only module of the daemon with
//! `unsafe` code, so that a reader can check all of it at once. It makes no decisions: `control`
//! queries peers, `exec` forwards signals, `cli` chooses which privileges to drop, and threads
//! confine themselves.
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
pub use renounce::{RenounceError, account_to_switch_to, renounce, switch_to_account};
pub use seccomp::{ThreadKind, check_available, confine, spawn_confined};
pub use signals::{Signal, SignalSet, Signals, exit_by_signal, send_signal};
pub use slice::set_short_slices;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on descriptors to the hard limit. Returns the limit in force.
pub fn raise_descriptor_limit() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    match setrlimit(Resource::Nofile, raised) {
        // `None` means unlimited.
        Ok(()) => maximum.unwrap_or(u64::MAX),
        Err(error) => {
            tracing::warn!(%error, "cannot raise the soft limit on descriptors (RLIMIT_NOFILE)");
            current.unwrap_or(u64::MAX)
        }
    }
}

/// Leaves the session and the terminal of the process that started this one, and closes all
/// inherited descriptors except the standard ones. Must run before anything else opens a
/// descriptor.
pub fn detach() {
    // Fails only for the leader of a process group, which signals to the parent's group do not
    // reach.
    let _ = rustix::process::setsid();
    let first = 3 as libc::c_uint;
    let last = libc::c_uint::MAX;
    // SAFETY: closes only descriptors that no code of this process owns: the process has opened
    // none yet, and uses none of the inherited ones. Touches no memory.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

/// Returns the effective user id of the daemon.
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}
