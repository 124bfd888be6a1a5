//! Credentials of the process at the other end of a Unix socket.
//!
//! `rustix::net::sockopt::socket_peercred` cannot represent a process outside the caller's PID
//! namespace: for such a process it returns an error with an arbitrary number.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Credentials of a process, in the namespaces of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process ID; 0 if the process is outside the PID namespace.
    pub pid: i32,
    /// Effective user ID; the overflow UID if it has no mapping.
    pub uid: u32,
    /// Effective group ID; the overflow GID if it has no mapping.
    pub gid: u32,
}

/// Returns `SO_PEERCRED`: for a connected socket, the credentials of the process that called
/// `listen(2)`; for an accepted socket, those of the process that called `connect(2)`.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<PeerCredentials> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    #[expect(clippy::cast_possible_truncation, reason = "12 bytes")]
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: getsockopt writes at most `len` bytes to `found`, a live local of exactly that size,
    // for which every bit pattern is valid. `len` is initialised to its size, and both outlive the
    // call. The socket is borrowed, so its descriptor is open.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let libc::ucred { pid, uid, gid } = found;
    Ok(PeerCredentials { pid: pid.max(0), uid, gid })
}
