//! Checks whether this process may share its memory with a daemon.
//!
//! The path of a socket does not identify the process that listens on it. The decision depends on
//! the credentials that the kernel stores for the connected socket (`SO_PEERCRED`): those of the
//! process that called `listen(2)`, or of the service manager if it created the socket.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rnic_abi::shm::peer::peer_credentials;
use rnic_abi::shm::secure;
use rustix::process::{geteuid, getuid};

use crate::paths::SERVICE_FOLDER;

/// Users that may run the daemon.
#[derive(Debug, PartialEq, Eq)]
struct Accepted {
    effective: u32,
    /// Real user ID; equal to `effective` in a program with elevated privileges.
    real: u32,
    /// Owner of the system daemon's directory; `None` if there is no such directory.
    service: Option<u32>,
}

/// Refuses a connected socket unless its listener runs as root, as this process's own user, or as
/// the owner of `/run/rnicd`. `path` is the path that was used to connect.
pub(crate) fn check(socket: impl AsFd, path: &Path) -> io::Result<()> {
    let daemon = peer_credentials(socket.as_fd())?.uid;
    Accepted::by_this_process().at(path).check(daemon)
}

impl Accepted {
    fn by_this_process() -> Self {
        let effective = geteuid().as_raw();
        let real = if secure::is_secure_execution() { effective } else { getuid().as_raw() };
        let service = std::fs::symlink_metadata(Path::new(SERVICE_FOLDER));
        let service = service.ok().filter(|found| found.is_dir()).map(|found| found.uid());
        Accepted { effective, real, service }
    }

    /// Removes the directory's owner if its uid is the overflow uid, which all unmapped users
    /// share, unless `path` is directly in that directory: only the owner can have created the
    /// socket there.
    fn at(mut self, path: &Path) -> Self {
        if path.parent() != Some(Path::new(SERVICE_FOLDER)) {
            self.service = self.service.filter(|owner| *owner != OVERFLOW);
        }
        self
    }

    fn check(&self, daemon: u32) -> io::Result<()> {
        let Accepted { effective, real, service } = *self;
        if [ROOT, effective, real].contains(&daemon) || service == Some(daemon) {
            return Ok(());
        }
        let own = if real == effective {
            format!("user {effective}")
        } else {
            format!("users {real} and {effective}")
        };
        let service = match service {
            Some(owner) => format!("the owner of {SERVICE_FOLDER} (user {owner})"),
            None => format!("the owner of {SERVICE_FOLDER} (no such directory)"),
        };
        let text = format!(
            "the daemon at this socket runs as user {daemon}; this process accepts only daemons of \
             root, of its own {own}, and of {service}"
        );
        Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
    }
}

const ROOT: u32 = 0;

/// The uid that the kernel reports for users without a mapping in this user namespace
/// (`/proc/sys/kernel/overflowuid`), unless an administrator has changed it.
const OVERFLOW: u32 = 65_534;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_daemons_are_refused_by_uid() {
        let accepted = Accepted { effective: 1001, real: 1000, service: Some(990) };
        for daemon in [0, 990, 1000, 1001] {
            assert!(accepted.check(daemon).is_ok(), "{daemon}");
        }
        let error = accepted.check(1002).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        let text = error.to_string();
        for part in ["runs as user 1002", "users 1000 and 1001", "/run/rnicd (user 990)"] {
            assert!(text.contains(part), "{text}");
        }
        let accepted = Accepted { effective: 1001, real: 1001, service: None };
        let text = accepted.check(990).unwrap_err().to_string();
        assert!(text.contains("its own user 1001") && text.contains("no such directory"), "{text}");
    }

    #[test]
    fn overflow_uid_needs_an_unmapped_owner() {
        let accepted = |service, path: &str| {
            Accepted { effective: 1, real: 1, service }.at(Path::new(path)).check(OVERFLOW)
        };
        let service = "/run/rnicd/rnicd.sock";
        assert!(accepted(Some(OVERFLOW), service).is_ok());
        assert!(accepted(Some(0), service).is_err());
        assert!(accepted(None, service).is_err());
        // Any unmapped user may listen elsewhere.
        for path in ["/tmp/rnicd.sock", "/run/rnicd/../rnicd.sock", "rnicd.sock"] {
            assert!(accepted(Some(OVERFLOW), path).is_err(), "{path}");
        }
        // A mapped owner is accepted at any path.
        let mapped = Accepted { effective: 1, real: 1, service: Some(990) };
        assert!(mapped.at(Path::new("/tmp/rnicd.sock")).check(990).is_ok());
    }
}
