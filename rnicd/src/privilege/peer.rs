//! The process at the other end of a Unix socket, as the kernel recorded it at `connect`.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::Network;

/// Identity of a peer, and a descriptor that becomes readable when it exits.
#[derive(Debug)]
pub struct Peer {
    /// Its process id in our namespace; 0 if it is not visible there.
    pub pid: i32,
    /// Effective user id, in our user namespace, when it connected.
    pub uid: u32,
    /// Effective group id, in our user namespace, when it connected.
    pub gid: u32,
    /// Its effective group and supplementary ones.
    pub groups: Vec<u32>,
    /// Its command name, printable.
    pub command: String,
    /// The network namespace in which it made its socket; none if the kernel does not say.
    pub network: Option<Network>,
    /// A pidfd of the process, readable when it has exited.
    pub process: OwnedFd,
}

impl Peer {
    /// Asks the kernel who connected `socket`.
    pub fn of(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let libc::ucred { pid, uid, gid } = peer_credentials(socket)?;
        // None for a process that has no number in our namespace.
        let visible = Pid::from_raw(pid.max(0));
        let process = match (peer_pidfd(socket), visible) {
            (Ok(process), _) => process,
            // Kernels before 6.5. The pid may have been reused since connect, but only if the
            // peer is gone already; then the socket's end tells as well.
            (Err(_), Some(pid)) => pidfd_open(pid, PidfdFlags::NONBLOCK)?,
            (Err(error), None) => {
                let why = format!(
                    "a client of user {uid} runs outside of the daemon's pid namespace, where this \
                     kernel cannot tell of its end ({error}); that takes Linux 6.5"
                );
                return Err(io::Error::new(io::ErrorKind::Unsupported, why));
            }
        };
        let groups = peer_groups(socket, gid)?;
        let command = visible.map(command).unwrap_or_default();
        let network = Network::of(socket).ok();
        Ok(Peer { pid: pid.max(0), uid, gid, groups, command, network, process })
    }

    /// Whether the process has exited.
    pub fn has_exited(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let process = self.process.as_fd();
        poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&now)).is_ok_and(|n| n > 0)
    }
}

/// `SO_PEERCRED`, as the kernel has it: the process is 0 if it is in a pid namespace outside of
/// ours.
fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: getsockopt writes at most `len` bytes to `credentials`, a live local of exactly that
    // size, of which every pattern of bits is a value; `len` is initialised to its size, and both
    // outlive the call. The socket is borrowed, so its descriptor is open.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(credentials)
}

/// `SO_PEERPIDFD`: names the process that connected, whatever became of its number.
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
    // SAFETY: the kernel has just made this descriptor for us (with O_CLOEXEC), nobody else
    // knows its number, and it is not negative.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `SO_PEERGROUPS`: supplementary groups at connect, after the effective one. Nothing is looked up
/// for the client, whose memberships the kernel knows better than any data base.
fn peer_groups(socket: BorrowedFd<'_>, gid: u32) -> io::Result<Vec<u32>> {
    const SO_PEERGROUPS: libc::c_int = 59;
    let mut groups = vec![0u32; 64];
    loop {
        let mut len = (groups.len() * size_of::<u32>()) as libc::socklen_t;
        // SAFETY: getsockopt writes at most `len` bytes to the vector, which has that many
        // initialised ones and is not touched otherwise during the call; `len` is a live local.
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
            // The kernel says how many there are, at most NGROUPS_MAX.
            Some(libc::ERANGE) if (groups.len() + 1..=MAX_GROUPS).contains(&count) => {
                groups.resize(count, 0);
            }
            _ => return Err(error),
        }
    }
}

/// `NGROUPS_MAX` of Linux.
const MAX_GROUPS: usize = 65_536;

/// The command name of `pid`, without characters that could trouble a terminal.
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

    /// More of them than there is room for at first. On a thread of its own, which has groups of
    /// its own as long as it lives.
    #[test]
    fn clients_of_many_groups_are_known_by_all_of_them() {
        let many: Vec<u32> = (61_000..61_200).collect();
        let groups: Vec<_> = many.iter().map(|g| rustix::process::Gid::from_raw(*g)).collect();
        let known = std::thread::spawn(move || {
            rustix::thread::set_thread_groups(&groups)?;
            let (a, _b) = UnixStream::pair()?;
            Peer::of(a.as_fd())
        });
        match known.join().unwrap_or_else(|_| panic!("a thread of ours")) {
            Ok(peer) => assert_eq!(peer.groups, [vec![peer.gid], many].concat()),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                assert!(std::env::var_os("RNIC_TEST_ALL").is_none(), "groups take root");
                eprintln!("NOT TESTED: groups take root");
            }
            Err(e) => panic!("{e}"),
        }
    }

    #[test]
    fn whoever_has_exited_is_known_to_have() {
        let (a, _b) = UnixStream::pair().unwrap_or_else(|e| panic!("{e}"));
        let mut peer = Peer::of(a.as_fd()).unwrap_or_else(|e| panic!("{e}"));
        let mut other = std::process::Command::new("cat");
        let other = other.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
        let mut other = other.spawn().unwrap_or_else(|e| panic!("{e}"));
        let flags = PidfdFlags::empty();
        let process = pidfd_open(Pid::from_child(&other), flags);
        peer.process = process.unwrap_or_else(|e| panic!("{e}"));
        assert!(!peer.has_exited());
        // Whether or not somebody has waited for it.
        drop(other.stdin.take());
        let mut end = [rustix::event::PollFd::new(&peer.process, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut end, None), Ok(1));
        assert!(peer.has_exited());
        assert!(other.wait().is_ok_and(|status| status.success()));
        assert!(peer.has_exited());
    }

    /// A client chooses its name, and administrators list it.
    #[test]
    fn the_name_of_a_program_cannot_talk_to_a_terminal() {
        let own = rustix::process::getpid();
        let before = command(own);
        // The kernel has no room for the last one.
        for (name, shown) in
            [("a\x1b[2Jb\rc", "a?[2Jb?c"), ("0123456789abcdefg", "0123456789abcde")]
        {
            std::fs::write("/proc/self/comm", name).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(command(own), shown);
        }
        std::fs::write("/proc/self/comm", before).unwrap_or_else(|e| panic!("{e}"));
    }
}
