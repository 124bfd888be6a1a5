//! Where the daemon's socket may be.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Environment variable that names the socket.
pub(crate) const SOCKET_VARIABLE: &str = "RNIC_SOCKET";
/// Socket of the daemon as a service.
pub(crate) const SERVICE_SOCKET: &str = "/run/rnicd/rnicd.sock";
/// Name of the socket in a user's own folder.
const SOCKET_NAME: &str = "rnicd.sock";

/// Sockets to try, in order.
pub(crate) fn candidates() -> Vec<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    choose(
        variable(SOCKET_VARIABLE),
        variable("XDG_RUNTIME_DIR"),
        std::env::temp_dir(),
        rustix::process::getuid().as_raw(),
    )
}

fn choose(
    named: Option<PathBuf>,
    runtime: Option<PathBuf>,
    temporary: PathBuf,
    uid: u32,
) -> Vec<PathBuf> {
    if let Some(path) = named {
        return vec![path];
    }
    // As the daemon does: a relative folder is a mistake of somebody's.
    let runtime = runtime.filter(|dir| dir.is_absolute());
    let mut paths: Vec<_> = runtime.into_iter().map(|dir| dir.join(SOCKET_NAME)).collect();
    let own = temporary.join(format!("rnicd-{uid}"));
    if belongs_to(&own, uid) {
        paths.push(own.join(SOCKET_NAME));
    }
    paths.push(PathBuf::from(SERVICE_SOCKET));
    paths
}

/// Whether nobody but `uid` can have put anything into this folder. The temporary directory is
/// everybody's, so another user could have made a folder of this name, with a daemon of his own.
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
        let paths = choose(Some("/x".into()), Some("/run/user/1".into()), "/tmp".into(), 1);
        assert_eq!(paths, [PathBuf::from("/x")]);
    }

    #[test]
    fn a_folder_of_somebody_else_is_passed_over() {
        let temporary = tempfile::tempdir().unwrap();
        let uid = rustix::process::getuid().as_raw();
        let own = temporary.path().join(format!("rnicd-{uid}"));
        let choose = || choose(None, Some("/run/user/1".into()), temporary.path().into(), uid);
        let without = [PathBuf::from("/run/user/1/rnicd.sock"), PathBuf::from(SERVICE_SOCKET)];
        assert_eq!(choose(), without);
        std::fs::create_dir(&own).unwrap();
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(choose(), without);
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(choose()[1], own.join("rnicd.sock"));
    }
}
