//! Explains to the user why a daemon's socket cannot be used.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Returns an error of the same kind whose text explains the cause. Returns errors of unknown kinds
/// unchanged.
pub(crate) fn explain(path: &Path, error: io::Error) -> io::Error {
    let text = match error.kind() {
        io::ErrorKind::PermissionDenied => denied(path),
        io::ErrorKind::NotFound => "there is no such socket".to_owned(),
        io::ErrorKind::ConnectionRefused => {
            "no daemon listens on this socket (connection refused)".to_owned()
        }
        _ => return error,
    };
    io::Error::new(error.kind(), text)
}

/// Explains a denied permission: on a directory of the path, or on the socket itself.
fn denied(path: &Path) -> String {
    let mut parents: Vec<_> = path.ancestors().skip(1).collect();
    parents.reverse();
    // The last directory whose metadata can be read is the directory that cannot be entered.
    let mut closed = None;
    for folder in parents {
        match std::fs::metadata(folder) {
            Ok(found) => closed = Some((folder, found)),
            Err(_) => break,
        }
    }
    match (std::fs::metadata(path), closed) {
        (Ok(socket), _) => {
            format!("permission denied: {}; {}", describe_mode(&socket), advice(&socket))
        }
        (Err(_), Some((folder, found))) => format!(
            "permission denied: the directory {} cannot be entered ({}); {}",
            folder.display(),
            describe_mode(&found),
            advice(&found)
        ),
        (Err(_), None) => "permission denied".to_owned(),
    }
}

/// Returns the mode, user and group as text.
fn describe_mode(found: &Metadata) -> String {
    let user = name("/etc/passwd", found.uid());
    let group = name("/etc/group", found.gid());
    format!("mode {:04o}, user {user}, group {group}", found.mode() & 0o7777)
}

/// Returns advice on how to get access.
fn advice(found: &Metadata) -> String {
    let group = name("/etc/group", found.gid());
    // Connecting to a socket requires write permission, entering a directory search permission.
    let needed = if found.is_dir() { 0o010 } else { 0o020 };
    if found.mode() & needed != 0 && found.gid() != 0 {
        format!("add the user with `usermod -aG {group} USER`, then log in again")
    } else if found.is_dir() {
        "grant search permission on it, or set RNIC_SOCKET to another path".to_owned()
    } else {
        "access is set by control.group and control.mode in the daemon's configuration".to_owned()
    }
}

/// Returns the name of an ID from a file like `/etc/passwd`, or the number.
fn name(file: &str, id: u32) -> String {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let named = text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(id)).then(|| name.to_owned())
    });
    named.unwrap_or_else(|| id.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn denied_access_is_explained() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rnicd.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(&path, 0o600);
        let explained = |kind: io::ErrorKind| explain(&path, kind.into());
        let e = explained(io::ErrorKind::PermissionDenied);
        assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
        let user = name("/etc/passwd", rustix::process::geteuid().as_raw());
        let start = format!("permission denied: mode 0600, user {user}, group ");
        assert!(e.to_string().starts_with(&start), "{e}");
        assert!(e.to_string().contains("control.group and control.mode"), "{e}");
        let group = std::fs::metadata(&path).unwrap().gid();
        if group != 0 {
            mode(&path, 0o660);
            assert!(explained(io::ErrorKind::PermissionDenied).to_string().contains("usermod -aG"));
        }
        assert!(explained(io::ErrorKind::NotFound).to_string().contains("no such socket"));
        assert!(
            explained(io::ErrorKind::ConnectionRefused).to_string().contains("no daemon listens")
        );
        assert_eq!(name("/etc/group", 0), "root");
        assert_eq!(name("/etc/passwd", u32::MAX - 7), (u32::MAX - 7).to_string());
    }
}
