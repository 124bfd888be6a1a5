//! Paths at which the daemon's socket may be.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rnic_abi::faults::VARIABLE;
use rnic_abi::shm::secure;

/// Environment variable with the path of the socket.
pub(crate) const SOCKET_VARIABLE: &str = "RNIC_SOCKET";
/// Directory of the system's daemon. Only root can create it; its owner runs the daemon.
pub(crate) const SERVICE_FOLDER: &str = "/run/rnicd";
/// Name of the socket, in that directory and in a user's directory.
const SOCKET_NAME: &str = "rnicd.sock";

/// Returns the sockets to try, in order. A program with elevated privileges (`AT_SECURE`) ignores
/// the environment, because its user controls it.
pub(crate) fn candidates() -> Vec<PathBuf> {
    if secure::is_secure_execution() {
        return choose(None, None, Path::new("/tmp"), rustix::process::geteuid().as_raw());
    }
    let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    choose(
        variable(SOCKET_VARIABLE),
        variable("XDG_RUNTIME_DIR"),
        &std::env::temp_dir(),
        rustix::process::getuid().as_raw(),
    )
}

/// Returns the fault rules of the environment, which a program with elevated privileges ignores.
pub(crate) fn fault_rules() -> Option<String> {
    let rules = std::env::var(VARIABLE).ok().filter(|rules| !rules.trim().is_empty());
    rules.filter(|_| !secure::is_secure_execution())
}

fn choose(
    named: Option<PathBuf>,
    runtime: Option<PathBuf>,
    temporary: &Path,
    uid: u32,
) -> Vec<PathBuf> {
    if let Some(path) = named {
        return vec![path];
    }
    // The daemon ignores a relative directory too. After `su`, the variable may still contain the
    // previous user's directory.
    let is_own = |dir: &PathBuf| std::fs::metadata(dir).is_ok_and(|found| found.uid() == uid);
    let runtime = runtime.filter(|dir| dir.is_absolute() && is_own(dir));
    let mut paths: Vec<_> = runtime.into_iter().map(|dir| dir.join(SOCKET_NAME)).collect();
    let own = temporary.join(format!("rnicd-{uid}"));
    if belongs_to(&own, uid) {
        paths.push(own.join(SOCKET_NAME));
    }
    paths.push(Path::new(SERVICE_FOLDER).join(SOCKET_NAME));
    paths
}

/// Returns true if only `uid` can have created the contents of this directory. Any user can create
/// a directory of this name in the temporary directory and run a daemon there.
fn belongs_to(folder: &Path, uid: u32) -> bool {
    std::fs::symlink_metadata(folder)
        .is_ok_and(|m| m.is_dir() && m.uid() == uid && m.mode() & 0o077 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_named_socket_is_the_only_one() {
        let paths = choose(Some("/x".into()), Some("/".into()), Path::new("/tmp"), 1);
        assert_eq!(paths, [PathBuf::from("/x")]);
    }

    #[test]
    fn folders_of_other_users_are_skipped() {
        let temporary = tempfile::tempdir().unwrap();
        let runtime = tempfile::tempdir().unwrap();
        let uid = rustix::process::getuid().as_raw();
        let own = temporary.path().join(format!("rnicd-{uid}"));
        let choose = |uid| choose(None, Some(runtime.path().into()), temporary.path(), uid);
        let service = PathBuf::from("/run/rnicd/rnicd.sock");
        let without = [runtime.path().join("rnicd.sock"), service.clone()];
        assert_eq!(choose(uid), without);
        std::fs::create_dir(&own).unwrap();
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(choose(uid), without);
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(choose(uid)[1], own.join("rnicd.sock"));
        // As after `su`: the variable still names the previous user's directory.
        assert_eq!(choose(uid + 1), [service]);
    }
}
