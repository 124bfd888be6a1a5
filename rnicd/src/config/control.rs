//! `[control]`: the control socket, and who administers.

use std::path::PathBuf;

use super::checker::Checker;
use super::error::ConfigError;
use super::file::{self, Seccomp};
use super::subjects::Subjects;

/// `[control]`
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Control {
    /// Path of the socket; by default chosen by who runs the daemon.
    pub socket: Option<PathBuf>,
    /// Permissions of the socket; by default 0660 for root and 0600 otherwise.
    pub mode: Option<u32>,
    /// Group that owns the socket; by default the daemon's own.
    pub group: Option<String>,
    /// Who sees everybody's objects and may drain and disconnect, as root and the daemon's user do.
    pub admins: Subjects,
    /// Whom to become when started as root, by name or number; by default nobody else.
    pub user: Option<String>,
    /// What happens to system calls that a thread has no need of; default enforce.
    pub seccomp: Seccomp,
}

impl Checker<'_> {
    /// Checks `[control]` and fills in what the file does not say.
    pub(super) fn control(&self, s: file::ControlSection) -> Result<Control, ConfigError> {
        let socket = self.optional(s.socket, |path| match path.is_absolute() {
            // The kernel holds 108 bytes of a Unix socket's path, the last one a zero.
            true if path.as_os_str().len() < 104 => Ok(()),
            true => Err("is too long for a Unix socket (103 bytes)".to_owned()),
            false => Err("must be an absolute path".to_owned()),
        })?;
        let parse_mode = |text: &String| {
            u32::from_str_radix(text, 8).ok().filter(|m| m & !0o777 == 0 && m & 0o600 == 0o600)
        };
        let mode = self.optional(s.mode, |text| match parse_mode(text) {
            Some(_) => Ok(()),
            None => Err("must be octal and let the owner read and write, like \"0660\"".to_owned()),
        })?;
        let not_empty = |text: &String| match text.is_empty() {
            true => Err("must not be empty".to_owned()),
            false => Ok(()),
        };
        let group = self.optional(s.group, not_empty)?;
        let admins =
            self.checked(s.admins, Subjects::default(), |subjects| match subjects.everyone {
                true => Err("not everybody can be an administrator".to_owned()),
                false => Ok(()),
            })?;
        let user = self.optional(s.user, not_empty)?;
        let seccomp = s.seccomp.map_or(Seccomp::default(), toml::Spanned::into_inner);
        let mode = mode.as_ref().and_then(parse_mode);
        Ok(Control { socket, mode, group, admins, user, seccomp })
    }
}
