//! The process at the other end of a Unix socket, as recorded by the kernel at `connect`.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rnic_abi::shm::peer::{PeerCredentials, peer_credentials};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::Network;

/// Identity of a peer, and a descriptor that becomes readable when the process exits.
#[derive(Debug)]
pub struct Peer {
    /// Process id in the daemon's pid namespace, 0 if it is not visible there.
    pub pid: i32,
    /// Effective user id at connect, in the daemon's user namespace.
    pub uid: u32,
    /// Effective group id at connect, in the daemon's user namespace.
    pub gid: u32,
    /// Effective and supplementary groups.
    pub groups: Vec<u32>,
    /// Command name, printable.
    pub command: String,
    /// Network namespace of its socket, `None` if the kernel does not report it.
    pub network: Option<Network>,
    /// Pidfd of the process, readable once the process has exited.
    pub process: OwnedFd,
}

impl Peer {
    /// Returns the process that has connected `socket`.
    pub fn of(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let PeerCredentials { pid, uid, gid } = peer_credentials(socket)?;
        // `None` for a process that has no pid in the daemon's namespace.
        let visible = Pid::from_raw(pid);
        let process = match (peer_pidfd(socket), visible) {
            (Ok(process), _) => process,
            // Kernels before 6.5. The pid may have been reused since connect, but only if the
            // peer has exited already, and then the socket has hung up too.
            (Err(_), Some(pid)) => pidfd_open(pid, PidfdFlags::NONBLOCK)?,
            (Err(error), None) => {
                let why = format!(
                    "a client of user {uid} runs outside the daemon's pid namespace, where this \
                     kernel cannot report its exit ({error}); this needs Linux 6.5"
                );
                return Err(io::Error::new(io::ErrorKind::Unsupported, why));
            }
        };
        let groups = peer_groups(socket, gid)?;
        let command = visible.map(command).unwrap_or_default();
        let network = Network::of(socket).ok();
        Ok(Peer { pid, uid, gid, groups, command, network, process })
    }

    /// Returns true if the process has exited.
    pub fn has_exited(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let process = self.process.as_fd();
        poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&now)).is_ok_and(|n| n > 0)
    }
}

/// Returns `SO_PEERPIDFD`, a pidfd of the process that connected, even if its pid was reused.
fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: getsockopt writes at most `len` bytes to `fd`. `fd` is a live local of exactly
    // that size and alignment, `len` is initialised to its size, and both outlive the call. The
    // socket is borrowed, so its descriptor is open.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut len,
        )
    };
    if result != 0 || fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us (with O_CLOEXEC), no other code
    // owns it, and it is not negative.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the effective group and `SO_PEERGROUPS`, the supplementary groups at connect. The kernel
/// is a better source for the client's groups than any database.
fn peer_groups(socket: BorrowedFd<'_>, gid: u32) -> io::Result<Vec<u32>> {
    const SO_PEERGROUPS: libc::c_int = 59;
    let mut groups = vec![0u32; 64];
    loop {
        let mut len = (groups.len() * size_of::<u32>()) as libc::socklen_t;
        // SAFETY: getsockopt writes at most `len` bytes to the vector, which has that many
        // initialised bytes and is not accessed otherwise during the call. `len` is a live local.
        // The socket is borrowed, so its descriptor is open.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let count = len as usize / size_of::<u32>();
        if result == 0 {
            groups.truncate(count);
            groups.insert(0, gid);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // The kernel returns the size needed, for at most NGROUPS_MAX groups.
            Some(libc::ERANGE) if (groups.len() + 1..=MAX_GROUPS).contains(&count) => {
                groups.resize(count, 0);
            }
            _ => return Err(error),
        }
    }
}

/// `NGROUPS_MAX` of Linux.
const MAX_GROUPS: usize = 65_536;

/// Returns the command name of `pid`, without control characters that could affect a terminal.
fn command(pid: Pid) -> String {
    let path = format!("/proc/{}/comm", pid.as_raw_nonzero());
    let raw = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&raw);
    text.trim_end().chars().map(|c| if c.is_control() { '?' } else { c }).take(16).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socketpair_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap_or_else(|e| panic!("{e}"));
        let peer = Peer::of(a.as_fd()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(peer.pid, rustix::process::getpid().as_raw_nonzero().get());
        assert_eq!(peer.uid, super::super::own_user());
        assert_eq!(peer.groups.first(), Some(&peer.gid));
        let own = rustix::process::getgroups().unwrap_or_default();
        let own: Vec<u32> = own.into_iter().map(|g| g.as_raw()).collect();
        assert_eq!(peer.groups[1..], own);
        assert_eq!(peer.network, Network::own().ok());
        assert!(!peer.command.is_empty());
        assert!(!peer.has_exited());
    }

    /// More groups than there is room for at first. Uses a separate thread, because groups belong
    /// to a thread.
    #[test]
    fn peer_has_all_its_groups() {
        let many: Vec<u32> = (61_000..61_200).collect();
        let groups: Vec<_> = many.iter().map(|g| rustix::process::Gid::from_raw(*g)).collect();
        let known = std::thread::spawn(move || {
            rustix::thread::set_thread_groups(&groups)?;
            let (a, _b) = UnixStream::pair()?;
            Peer::of(a.as_fd())
        });
        match known.join().unwrap_or_else(|_| panic!("the thread panicked")) {
            Ok(peer) => assert_eq!(peer.groups, [vec![peer.gid], many].concat()),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                assert!(std::env::var_os("RNIC_TEST_ALL").is_none(), "setgroups needs root");
                eprintln!("NOT TESTED: setgroups needs root");
            }
            Err(e) => panic!("{e}"),
        }
    }

    #[test]
    fn exited_peer_is_reported() {
        let (a, _b) = UnixStream::pair().unwrap_or_else(|e| panic!("{e}"));
        let mut peer = Peer::of(a.as_fd()).unwrap_or_else(|e| panic!("{e}"));
        let mut other = std::process::Command::new("cat");
        let other = other.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
        let mut other = other.spawn().unwrap_or_else(|e| panic!("{e}"));
        let flags = PidfdFlags::empty();
        let process = pidfd_open(Pid::from_child(&other), flags);
        peer.process = process.unwrap_or_else(|e| panic!("{e}"));
        assert!(!peer.has_exited());
        // Before and after it is waited for.
        drop(other.stdin.take());
        let mut end = [rustix::event::PollFd::new(&peer.process, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut end, None), Ok(1));
        assert!(peer.has_exited());
        assert!(other.wait().is_ok_and(|status| status.success()));
        assert!(peer.has_exited());
    }

    /// A client chooses its command name, which administrators see in lists.
    #[test]
    fn command_name_has_no_control_characters() {
        let own = rustix::process::getpid();
        let before = command(own);
        // The kernel truncates the second name.
        for (name, shown) in
            [("a\x1b[2Jb\rc", "a?[2Jb?c"), ("0123456789abcdefg", "0123456789abcde")]
        {
            std::fs::write("/proc/self/comm", name).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(command(own), shown);
        }
        std::fs::write("/proc/self/comm", before).unwrap_or_else(|e| panic!("{e}"));
    }
}
