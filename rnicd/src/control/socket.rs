//! Path, owner and permissions of the control socket.
//!
//! A lock file beside the socket decides which daemon owns the path. Only the owner of the lock
//! removes a stale socket. Dropping the [`ControlSocket`] removes both files. A socket that a
//! service manager passed keeps its path, mode and group.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    Access, AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, accessat, chownat, fchmod,
    fchown, flock, fstat,
};
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Gid, Uid};

use crate::config::Control;
use crate::privilege;

/// Reasons why the daemon could not open its socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another daemon uses the path.
    #[error("{path} belongs to a running daemon (pid {pid}); stop it or choose another --socket")]
    Taken {
        /// Path of the socket.
        path: PathBuf,
        /// Process ID of that daemon, from its lock file.
        pid: String,
    },
    /// The path is not a socket.
    #[error("{path} exists and is not a socket; remove it or choose another --socket")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The folder in the temp dir is not safe to use.
    #[error("{path} is not a private folder of this user: {why}; remove it or use --socket")]
    UnsafeFolder {
        /// Path of the folder.
        path: PathBuf,
        /// Description of the problem.
        why: String,
    },
    /// The group `control.group` does not exist.
    #[error("control.group = {group:?}: no such group")]
    NoSuchGroup {
        /// The group as configured.
        group: String,
    },
    /// A socket that a service manager passed cannot be used.
    #[error("socket activation: {0}")]
    Passed(String),
    /// Another operation failed.
    #[error("{what} {path}: {error}")]
    System {
        /// The failed operation.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

/// A listening socket with its path.
#[derive(Debug)]
pub struct ControlSocket {
    socket: OwnedFd,
    path: PathBuf,
    /// `None` if a service manager opened the socket.
    lock: Option<Lock>,
}

#[derive(Debug)]
struct Lock {
    path: PathBuf,
    /// Holds the lock while it is open.
    file: File,
}

impl ControlSocket {
    /// Opens `path`, or the default path of the daemon's user, and listens there.
    pub fn open(path: Option<&Path>, control: &Control) -> Result<Self, SocketError> {
        let path = match path.or(control.socket.as_deref()) {
            Some(path) => path.to_owned(),
            None => default_path()?,
        };
        ControlSocket::open_at(path, control)
    }

    fn open_at(path: PathBuf, control: &Control) -> Result<Self, SocketError> {
        let mut lock_path = path.clone().into_os_string();
        lock_path.push(".lock");
        let lock_path = PathBuf::from(lock_path);
        let lock = take_lock(&path, &lock_path)?;
        let account = control.user.as_deref().and_then(privilege::user_id);
        let own = [0, privilege::own_user(), account.unwrap_or(0)];
        if let Some(who) = path.parent().and_then(|folder| others_who_may_replace(folder, own)) {
            let path = path.display();
            tracing::warn!(%path, "{who} can replace this socket with another one");
        }
        let opened = remove_stale(&path).and_then(|()| listen(&path, control));
        match opened {
            Ok(socket) => {
                let lock = Some(Lock { path: lock_path, file: lock });
                Ok(ControlSocket { socket, path, lock })
            }
            Err(error) => {
                // This daemon holds the lock, so the file is its own.
                let _ = std::fs::remove_file(&lock_path);
                Err(error)
            }
        }
    }

    /// Adopts a socket that a service manager passed. Clients must be able to use it, and its path
    /// must equal `path` and the configured path, if set.
    pub fn passed(
        socket: OwnedFd,
        path: Option<&Path>,
        control: &Control,
    ) -> Result<Self, SocketError> {
        use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
        let refused = |why: &str| SocketError::Passed(why.to_owned());
        let kind = || Ok((socket_domain(&socket)?, socket_type(&socket)?));
        let kind =
            kind().map_err(|_: rustix::io::Errno| refused("the descriptor is not a socket"))?;
        if kind != (AddressFamily::UNIX, SocketType::SEQPACKET) {
            return Err(refused(
                "the socket is not of the type SOCK_SEQPACKET (ListenSequentialPacket=)",
            ));
        }
        if !socket_acceptconn(&socket).is_ok_and(|listens| listens) {
            return Err(refused("the socket is not listening (Accept=no is needed)"));
        }
        let address = rustix::net::getsockname(&socket).and_then(SocketAddrUnix::try_from);
        let address = address.map_err(|e| refused(&format!("the socket has no address: {e}")))?;
        let Some(bound) = address.path_bytes().map(|p| Path::new(OsStr::from_bytes(p))) else {
            return Err(refused("the socket has no path, so clients cannot find it"));
        };
        for (key, wanted) in [("--socket", path), ("control.socket", control.socket.as_deref())] {
            if let Some(wanted) = wanted.filter(|wanted| *wanted != bound) {
                let bound = bound.display();
                let wanted = wanted.display();
                return Err(SocketError::Passed(format!(
                    "{bound} was passed, but {key} = {wanted}; set the same path or none"
                )));
            }
        }
        let nonblocking = rustix::io::ioctl_fionbio(&socket, true);
        nonblocking.map_err(|e| system("cannot use", bound)(e.into()))?;
        Ok(ControlSocket { path: bound.to_owned(), socket, lock: None })
    }

    /// Changes the owner of the path and lock to the user that the daemon switches to, so that it
    /// can remove them: in a folder with the sticky bit only the owner can. Also changes the owner
    /// of the default folder, which has no other use.
    pub fn give_to(&self, uid: u32) -> Result<(), SocketError> {
        let Some(lock) = &self.lock else { return Ok(()) };
        let owner = Some(Uid::from_raw(uid));
        fchown(&lock.file, owner, None)
            .map_err(|e| system("cannot change the owner of", &lock.path)(e.into()))?;
        let give = |there| Ok(chownat(there, c"", owner, None, AtFlags::EMPTY_PATH)?);
        let given = hold(&self.path).and_then(give);
        given.map_err(system("cannot change the owner of", &self.path))?;
        if self.path.parent() == Some(Path::new(DEFAULT_FOLDER)) {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let folder = rustix::fs::open(DEFAULT_FOLDER, flags, Mode::empty());
            let given = folder.and_then(|f| chownat(&f, c"", owner, None, AtFlags::EMPTY_PATH));
            let failed = system("cannot change the owner of", Path::new(DEFAULT_FOLDER));
            given.map_err(|e| failed(e.into()))?;
        }
        Ok(())
    }

    /// Returns true if this process can remove the path on exit, or does not have to.
    pub fn can_be_removed(&self) -> bool {
        let Some(folder) = self.path.parent().filter(|_| self.lock.is_some()) else { return true };
        accessat(CWD, folder, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS).is_ok()
    }

    /// Returns the path at which clients connect.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the kernel refuse new clients. Clients that have connected can still be accepted. A
    /// socket that a service manager passed stays open: the next client starts the next daemon.
    pub fn refuse_new_clients(&self) {
        if self.lock.is_some() {
            // Does not fail on a listening socket.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Read);
        }
    }

    /// Accepts the next client, if one waits.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(client) => Ok(Some(client)),
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let Some(lock) = &self.lock else { return };
        // The lock is held until both are removed, so no other daemon's files are removed here.
        // Errors are ignored: either the file no longer exists, or the next owner of the lock
        // removes it.
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(&lock.path);
    }
}

fn default_path() -> Result<PathBuf, SocketError> {
    if privilege::own_user() == 0 {
        let folder = Path::new(DEFAULT_FOLDER);
        let made = std::fs::DirBuilder::new().mode(0o755).recursive(true).create(folder);
        made.map_err(system("cannot create folder", folder))?;
        return Ok(folder.join("rnicd.sock"));
    }
    // `su` keeps the variable of the previous user. The client library ignores another user's
    // folder too.
    let is_own = |folder: &Path| {
        std::fs::metadata(folder).is_ok_and(|found| found.uid() == privilege::own_user())
    };
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(folder) if folder.is_absolute() && is_own(&folder) => Ok(folder.join("rnicd.sock")),
        _ => Ok(own_folder(&std::env::temp_dir())?.join("rnicd.sock")),
    }
}

/// Returns this user's folder in `temp`. Creates it if it is missing, and otherwise checks it:
/// every user can write to the temp dir, so the folder may belong to another user.
fn own_folder(temp: &Path) -> Result<PathBuf, SocketError> {
    let user = privilege::own_user();
    let path = temp.join(format!("rnicd-{user}"));
    match std::fs::DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(system("cannot create folder", &path)(error)),
    }
    let found = std::fs::symlink_metadata(&path).map_err(system("cannot look at", &path))?;
    let why = if !found.is_dir() {
        "it is not a folder".to_owned()
    } else if found.uid() != user {
        format!("it belongs to user {}", found.uid())
    } else if found.mode() & 0o077 != 0 {
        format!("its mode is {:04o}", found.mode() & 0o7777)
    } else {
        return Ok(path);
    };
    Err(SocketError::UnsafeFolder { path, why })
}

fn take_lock(path: &Path, lock_path: &Path) -> Result<File, SocketError> {
    loop {
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(lock_path)
            .map_err(system("cannot open lock file", lock_path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let mut pid = String::new();
                // Another daemon has the lock, even if its pid cannot be read.
                let _ = lock.take(32).read_to_string(&mut pid);
                let pid = match pid.trim() {
                    "" => "unknown".to_owned(),
                    pid => pid.chars().filter(char::is_ascii_digit).collect(),
                };
                return Err(SocketError::Taken { path: path.to_owned(), pid });
            }
            Err(error) => return Err(system("cannot lock", lock_path)(error.into())),
        }
        // The previous owner removes the file before it releases the lock, so this lock may be on a
        // removed file, which no other daemon can find.
        let held = lock.metadata().map_err(system("cannot look at lock file", lock_path))?;
        let there = std::fs::symlink_metadata(lock_path);
        if there.is_ok_and(|there| held.dev() == there.dev() && held.ino() == there.ino()) {
            if !held.is_file() || held.nlink() != 1 {
                let error = io::Error::other("it is not a regular file, or links to another file");
                return Err(system("cannot write lock file", lock_path)(error));
            }
            let write = lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id()));
            write.map_err(system("cannot write lock file", lock_path))?;
            return Ok(lock);
        }
    }
}

/// Removes the socket of a daemon that has exited. The caller holds the lock.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {
            tracing::info!(path = %path.display(), "removing the socket of a daemon that exited");
            std::fs::remove_file(path).map_err(system("cannot remove stale socket", path))
        }
        Ok(_) => Err(SocketError::NotASocket { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(system("cannot look at", path)(error)),
    }
}

fn listen(path: &Path, control: &Control) -> Result<OwnedFd, SocketError> {
    let group = match &control.group {
        None => None,
        Some(group) => Some(
            privilege::group_id(group)
                .ok_or_else(|| SocketError::NoSuchGroup { group: group.clone() })?,
        ),
    };
    let mode = control.mode.unwrap_or(if privilege::own_user() == 0 { 0o660 } else { 0o600 });
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let bound = || -> rustix::io::Result<OwnedFd> {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // The path gets the mode of the unbound socket without the bits of the umask, so it never
        // has more permissions than it should.
        fchmod(&socket, Mode::from_raw_mode(mode))?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    };
    let socket = bound().map_err(|e| system("cannot bind", path)(e.into()))?;
    let listening = open_to_clients(path, mode, group)
        .and_then(|()| Ok(rustix::net::listen(&socket, BACKLOG)?));
    listening.map_err(|error| {
        // This daemon has bound the path.
        let _ = std::fs::remove_file(path);
        system("cannot set up", path)(error)
    })?;
    Ok(socket)
}

/// Sets the mode and group of the socket at `path`. The umask may have cleared bits of the mode.
fn open_to_clients(path: &Path, mode: u32, group: Option<u32>) -> io::Result<()> {
    let there = hold(path)?;
    if group.is_some() {
        chownat(&there, c"", None, group.map(Gid::from_raw), AtFlags::EMPTY_PATH)?;
    }
    if fstat(&there)?.st_mode & 0o7777 != mode {
        // Before Linux 6.6, fchmod(2) does not accept an O_PATH descriptor. This link refers to
        // exactly the file that the descriptor holds.
        let held = format!("/proc/self/fd/{}", there.as_raw_fd());
        std::fs::set_permissions(&held, Permissions::from_mode(mode)).map_err(|error| {
            let why = format!("changing its mode to {mode:04o} (control.mode) by {held}: {error}");
            io::Error::new(error.kind(), why)
        })?;
    }
    Ok(())
}

/// Opens the socket that this process has bound at `path`, to check and change it. A user with
/// write access to the folder may have replaced it, for example by a symbolic link to a file of
/// root or by a hard link to another socket of this user.
fn hold(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let there = rustix::fs::open(path, flags, Mode::empty())?;
    let found = fstat(&there)?;
    let is_socket = FileType::from_raw_mode(found.st_mode) == FileType::Socket;
    if !is_socket || found.st_uid != privilege::own_user() || found.st_nlink != 1 {
        return Err(io::Error::other("it has been replaced"));
    }
    Ok(there)
}

/// Returns the users other than `own` that can remove and replace files in a folder.
fn others_who_may_replace(folder: &Path, own: [u32; 3]) -> Option<String> {
    // If stat(2) fails, bind(2) fails too.
    let found = std::fs::metadata(folder).ok()?;
    let mode = found.mode();
    let owner = found.uid();
    if !own.contains(&owner) {
        return Some(format!("user {owner}, the owner of {},", folder.display()));
    }
    // With the sticky bit, users can only remove their own files.
    let sticky = mode & 0o1000 != 0;
    let may_write = mode & 0o022 != 0 && !sticky;
    let folder = folder.display();
    may_write
        .then(|| format!("every user with write access to {folder} (mode {:04o})", mode & 0o7777))
}

fn system(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SocketError {
    let path = path.to_owned();
    move |error| SocketError::System { what, path, error }
}

/// Folder of the system daemon's socket.
const DEFAULT_FOLDER: &str = "/run/rnicd";
/// Maximum clients that wait to be accepted.
const BACKLOG: i32 = 128;

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"))
    }

    fn open(path: &Path) -> Result<ControlSocket, SocketError> {
        ControlSocket::open(Some(path), &Control::default())
    }

    #[test]
    fn socket_and_lock_are_removed_on_drop() {
        let dir = folder();
        let path = dir.path().join("s");
        let socket = open(&path).unwrap_or_else(|e| panic!("{e}"));
        let mode = std::fs::metadata(&path).map(|m| m.mode() & 0o777).ok();
        let expected = if privilege::own_user() == 0 { 0o660 } else { 0o600 };
        assert_eq!(mode, Some(expected));
        drop(socket);
        assert_eq!(std::fs::read_dir(dir.path()).map(Iterator::count).ok(), Some(0));
    }

    #[test]
    fn the_command_line_overrides_control_socket() {
        let dir = folder();
        let named = dir.path().join("named");
        let control = Control { socket: Some(named.clone()), ..Control::default() };
        let opened = |path| ControlSocket::open(path, &control).map(|s| s.path().to_owned());
        assert_eq!(opened(None).ok(), Some(named));
        let other = dir.path().join("other");
        assert_eq!(opened(Some(&other)).ok(), Some(other));
    }

    #[test]
    fn the_socket_has_the_configured_mode_and_group() {
        let dir = folder();
        let path = dir.path().join("s");
        let is_root = privilege::own_user() == 0;
        // Only root may give the socket to any group.
        let group = is_root.then(|| "65534".to_owned());
        let control = Control { mode: Some(0o626), group, ..Control::default() };
        let _socket = ControlSocket::open(Some(&path), &control).unwrap_or_else(|e| panic!("{e}"));
        let found = std::fs::metadata(&path).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(found.mode() & 0o7777, 0o626);
        assert!(!is_root || found.gid() == 65_534, "{}", found.gid());
    }

    #[test]
    fn second_daemon_reports_the_pid_of_the_first() {
        let dir = folder();
        let path = dir.path().join("s");
        let _first = open(&path).unwrap_or_else(|e| panic!("{e}"));
        let error = open(&path).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        assert!(path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced() {
        let dir = folder();
        let path = dir.path().join("s");
        drop(std::os::unix::net::UnixListener::bind(&path));
        std::fs::write(dir.path().join("s.lock"), "4711\n").unwrap_or_else(|e| panic!("{e}"));
        assert!(path.exists());
        assert!(open(&path).is_ok());
    }

    #[test]
    fn a_file_in_the_way_is_left_alone() {
        let dir = folder();
        let path = dir.path().join("s");
        std::fs::write(&path, "precious").unwrap_or_else(|e| panic!("{e}"));
        assert!(matches!(open(&path), Err(SocketError::NotASocket { .. })));
        assert_eq!(std::fs::read_to_string(&path).ok().as_deref(), Some("precious"));
        assert!(!dir.path().join("s.lock").exists());
    }

    /// A user with write access to the folder replaces the socket between two steps.
    #[test]
    fn replaced_socket_path_keeps_its_mode() {
        let dir = folder();
        let at = |name: &str| dir.path().join(name);
        let mode = |path: &Path| std::fs::symlink_metadata(path).map(|m| m.mode() & 0o7777).ok();
        std::fs::write(at("secret"), "kept").unwrap_or_else(|e| panic!("{e}"));
        std::fs::set_permissions(at("secret"), Permissions::from_mode(0o600))
            .unwrap_or_else(|e| panic!("{e}"));
        std::os::unix::fs::symlink(at("secret"), at("link")).unwrap_or_else(|e| panic!("{e}"));
        std::fs::hard_link(at("secret"), at("file")).unwrap_or_else(|e| panic!("{e}"));
        let _other = std::os::unix::net::UnixListener::bind(at("other"));
        std::fs::set_permissions(at("other"), Permissions::from_mode(0o600))
            .unwrap_or_else(|e| panic!("{e}"));
        std::os::unix::fs::symlink(at("other"), at("socket-link"))
            .unwrap_or_else(|e| panic!("{e}"));
        let own = privilege::own_user();
        for name in ["link", "file", "socket-link", "missing"] {
            assert!(open_to_clients(&at(name), 0o666, None).is_err(), "{name}");
        }
        std::fs::hard_link(at("other"), at("second")).unwrap_or_else(|e| panic!("{e}"));
        assert!(open_to_clients(&at("second"), 0o666, None).is_err(), "another name of a socket");
        assert_eq!((mode(&at("secret")), mode(&at("other"))), (Some(0o600), Some(0o600)));
        std::fs::remove_file(at("second")).unwrap_or_else(|e| panic!("{e}"));
        // The socket itself gets its mode.
        open_to_clients(&at("other"), 0o666, None).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(mode(&at("other")), Some(0o666));
        if own == 0 {
            open_to_clients(&at("other"), 0o660, Some(65_534)).unwrap_or_else(|e| panic!("{e}"));
            let found = std::fs::metadata(at("other")).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!((found.gid(), found.uid(), found.mode() & 0o7777), (65_534, 0, 0o660));
            // A socket of another user.
            std::os::unix::fs::lchown(at("other"), Some(65_534), None)
                .unwrap_or_else(|e| panic!("{e}"));
            assert!(open_to_clients(&at("other"), 0o666, None).is_err());
        }
    }

    #[test]
    fn hard_linked_lock_file_is_left_alone() {
        let dir = folder();
        let precious = dir.path().join("precious");
        std::fs::write(&precious, "kept").unwrap_or_else(|e| panic!("{e}"));
        std::fs::hard_link(&precious, dir.path().join("s.lock")).unwrap_or_else(|e| panic!("{e}"));
        let error = open(&dir.path().join("s")).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("another file"), "{error}");
        assert_eq!(std::fs::read_to_string(&precious).ok().as_deref(), Some("kept"));
    }

    #[test]
    fn folders_writable_by_others_are_reported() {
        let dir = folder();
        let who = |mode| {
            std::fs::set_permissions(dir.path(), Permissions::from_mode(mode))
                .unwrap_or_else(|e| panic!("{e}"));
            others_who_may_replace(dir.path(), [0, privilege::own_user(), 65_533])
        };
        for safe in [0o700, 0o755, 0o1777, 0o1775] {
            assert_eq!(who(safe), None, "{safe:o}");
        }
        for unsafe_mode in [0o777, 0o775, 0o702] {
            assert!(who(unsafe_mode).is_some_and(|who| who.starts_with("every user with write")));
        }
        if privilege::own_user() == 0 {
            std::os::unix::fs::chown(dir.path(), Some(65_534), None)
                .unwrap_or_else(|e| panic!("{e}"));
            assert!(who(0o755).is_some_and(|who| who.starts_with("user 65534")));
            // Owned by the user that the daemon switches to.
            std::os::unix::fs::chown(dir.path(), Some(65_533), None)
                .unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(who(0o755), None);
        }
    }

    #[test]
    fn an_unknown_group_is_named() {
        let dir = folder();
        let control = Control { group: Some("no-such-group".to_owned()), ..Control::default() };
        let error = ControlSocket::open(Some(&dir.path().join("s")), &control);
        assert!(error.is_err_and(|e| e.to_string().contains("no-such-group")));
    }

    #[test]
    fn a_folder_in_the_temp_dir_is_verified() {
        let dir = folder();
        let made = own_folder(dir.path()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(own_folder(dir.path()).ok(), Some(made.clone()));
        std::fs::set_permissions(&made, Permissions::from_mode(0o755))
            .unwrap_or_else(|e| panic!("{e}"));
        let error = own_folder(dir.path()).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("its mode is 0755"), "{error}");
        // A link to a suitable folder.
        let elsewhere = dir.path().join("elsewhere");
        std::fs::rename(&made, &elsewhere).unwrap_or_else(|e| panic!("{e}"));
        std::fs::set_permissions(&elsewhere, Permissions::from_mode(0o700))
            .unwrap_or_else(|e| panic!("{e}"));
        std::os::unix::fs::symlink(&elsewhere, &made).unwrap_or_else(|e| panic!("{e}"));
        assert!(matches!(own_folder(dir.path()), Err(SocketError::UnsafeFolder { .. })));
    }
}
