//! Why a daemon's socket cannot be used, for the person who has to change that.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The same error in words that say what is wrong, found out now.
pub(crate) fn explained(path: &Path, error: io::Error) -> io::Error {
    let words = match error.kind() {
        io::ErrorKind::PermissionDenied => denied(path),
        io::ErrorKind::NotFound => "there is no such socket".to_owned(),
        io::ErrorKind::ConnectionRefused => {
            "no daemon listens there any more (connection refused)".to_owned()
        }
        _ => return error,
    };
    io::Error::new(error.kind(), words)
}

/// What keeps this process out: a folder on the way, or the socket itself.
fn denied(path: &Path) -> String {
    let mut parents: Vec<_> = path.ancestors().skip(1).collect();
    parents.reverse();
    // The last folder whose own metadata can be read is the one that may not be entered.
    let mut closed = None;
    for folder in parents {
        match std::fs::metadata(folder) {
            Ok(found) => closed = Some((folder, found)),
            Err(_) => break,
        }
    }
    match (std::fs::metadata(path), closed) {
        (Ok(socket), _) => format!("permission denied: {}; {}", owned(&socket), way_in(&socket)),
        (Err(_), Some((folder, found))) => format!(
            "permission denied: the folder {} may not be entered ({}); {}",
            folder.display(),
            owned(&found),
            way_in(&found)
        ),
        (Err(_), None) => "permission denied".to_owned(),
    }
}

/// Who may do what, as `ls -l` has it.
fn owned(found: &Metadata) -> String {
    let (user, group) = (name("/etc/passwd", found.uid()), name("/etc/group", found.gid()));
    format!("mode {:04o}, user {user}, group {group}", found.mode() & 0o7777)
}

/// What to do about it.
fn way_in(found: &Metadata) -> String {
    let group = name("/etc/group", found.gid());
    // A socket is connected to by who may write it, a folder is entered by who may search it.
    let needed = if found.is_dir() { 0o010 } else { 0o020 };
    match found.mode() & needed != 0 && found.gid() != 0 {
        true => format!(
            "members of group {group} may: add the user (`usermod -aG {group} USER`) and log in again"
        ),
        false => "the daemon's control.group and control.mode say who may".to_owned(),
    }
}

/// A name from a file like `/etc/passwd`, or the number.
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
    fn whoever_is_kept_out_is_told_by_what_and_how_to_get_in() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rnicd.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(&path, 0o600);
        let said = |kind: io::ErrorKind| explained(&path, kind.into());
        let e = said(io::ErrorKind::PermissionDenied);
        assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
        let user = name("/etc/passwd", rustix::process::geteuid().as_raw());
        let start = format!("permission denied: mode 0600, user {user}, group ");
        assert!(e.to_string().starts_with(&start), "{e}");
        assert!(e.to_string().contains("control.group and control.mode"), "{e}");
        let group = std::fs::metadata(&path).unwrap().gid();
        if group != 0 {
            mode(&path, 0o660);
            assert!(said(io::ErrorKind::PermissionDenied).to_string().contains("usermod -aG"));
        }
        assert!(said(io::ErrorKind::NotFound).to_string().contains("no such socket"));
        assert!(said(io::ErrorKind::ConnectionRefused).to_string().contains("no daemon listens"));
        assert_eq!(name("/etc/group", 0), "root");
        assert_eq!(name("/etc/passwd", u32::MAX - 7), (u32::MAX - 7).to_string());
    }
}
