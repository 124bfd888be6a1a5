//! `[control]`: the control socket, administrators, and the daemon's user.

use std::path::PathBuf;

use super::checker::Checker;
use super::error::ConfigError;
use super::file::{self, Seccomp};
use super::subjects::Subjects;

/// `[control]`
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Control {
    /// Path of the socket; the default depends on the daemon's user.
    pub socket: Option<PathBuf>,
    /// Permissions of the socket; default 0660 for root and 0600 otherwise.
    pub mode: Option<u32>,
    /// Group that owns the socket; by default the daemon's group.
    pub group: Option<String>,
    /// Administrators. They see the objects of all users, end connections and drain the daemon.
    /// Root and the daemon's user are always administrators.
    pub admins: Subjects,
    /// User to switch to when started as root, by name or number; by default the daemon stays root.
    pub user: Option<String>,
    /// Treatment of system calls that a thread does not need; default enforce.
    pub seccomp: Seccomp,
}

impl Checker<'_> {
    /// Checks `[control]` and applies the defaults.
    pub(super) fn control(&self, s: file::ControlSection) -> Result<Control, ConfigError> {
        let socket = self.optional(s.socket, |path| {
            if !path.is_absolute() {
                return Err("must be an absolute path".to_owned());
            }
            // The kernel holds 108 bytes of a Unix socket's path, with the terminating zero.
            if path.as_os_str().len() < 104 {
                Ok(())
            } else {
                Err("is too long for a Unix socket (at most 103 bytes)".to_owned())
            }
        })?;
        let parse_mode = |text: &String| {
            u32::from_str_radix(text, 8).ok().filter(|m| m & !0o777 == 0 && m & 0o600 == 0o600)
        };
        let mode = self.optional(s.mode, |text| match parse_mode(text) {
            Some(_) => Ok(()),
            None => Err("must be octal and let the owner read and write, like \"0660\"".to_owned()),
        })?;
        let not_empty = |text: &String| {
            if text.is_empty() { Err("must not be empty".to_owned()) } else { Ok(()) }
        };
        let group = self.optional(s.group, not_empty)?;
        let admins = self.checked(s.admins, Subjects::default(), |subjects| {
            if subjects.everyone {
                Err("not everybody can be an administrator".to_owned())
            } else {
                Ok(())
            }
        })?;
        let user = self.optional(s.user, not_empty)?;
        let seccomp = s.seccomp.map_or(Seccomp::default(), toml::Spanned::into_inner);
        let mode = mode.as_ref().and_then(parse_mode);
        Ok(Control { socket, mode, group, admins, user, seccomp })
    }
}
