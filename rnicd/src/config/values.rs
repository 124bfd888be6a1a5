//! Values of individual keys: types and checks.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// `control.seccomp`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seccomp {
    /// Unneeded calls fail. Calls that only an attacker would make kill the daemon.
    #[default]
    Enforce,
    /// Unneeded calls succeed, and the kernel logs them.
    Log,
    /// System calls are not filtered.
    Off,
}

impl Seccomp {
    pub(super) const ALL: &[Self] = &[Seccomp::Enforce, Seccomp::Log, Seccomp::Off];

    /// Returns the name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Seccomp::Enforce => "enforce",
            Seccomp::Log => "log",
            Seccomp::Off => "off",
        }
    }
}

/// `engine.loopback`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loopback {
    /// One copy from buffer to buffer.
    Direct,
    /// Over TCP, through the kernel's loopback.
    Tcp,
}

impl Loopback {
    pub(super) const ALL: &[Self] = &[Loopback::Direct, Loopback::Tcp];

    /// Returns the name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Loopback::Direct => "direct",
            Loopback::Tcp => "tcp",
        }
    }
}

/// `mpa.mulpdu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mulpdu {
    /// From the connection's effective maximum segment size (RFC 5044 section 5).
    Mss,
    /// The largest that the length field allows, which violates the RFC.
    Max,
}

impl Mulpdu {
    pub(super) const ALL: &[Self] = &[Mulpdu::Mss, Mulpdu::Max];

    pub(super) fn name(self) -> &'static str {
        match self {
            Mulpdu::Mss => "mss",
            Mulpdu::Max => "max",
        }
    }
}

/// Location of the folder that shows the devices as the kernel does in `/sys`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TreeAt {
    /// Beside the control socket, if the folder can be created there.
    #[default]
    BesideSocket,
    /// At this path.
    Path(PathBuf),
    /// No folder.
    Off,
}

impl TreeAt {
    pub(super) fn parse(text: String) -> Result<Self, String> {
        match text.as_str() {
            "off" => Ok(TreeAt::Off),
            path if !Path::new(path).is_absolute() => {
                Err("must be an absolute path, or \"off\"".to_owned())
            }
            path if path.len() > MAX_TREE_PATH => {
                Err(format!("is too long for programs to read (at most {MAX_TREE_PATH} bytes)"))
            }
            path => Ok(TreeAt::Path(path.into())),
        }
    }
}

impl fmt::Display for TreeAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TreeAt::BesideSocket => f.write_str("(beside socket)"),
            TreeAt::Path(path) => write!(f, "{}", path.display()),
            TreeAt::Off => f.write_str("off"),
        }
    }
}

/// Maximum length of the folder's path in bytes. `ibv_device::ibdev_path` holds 256 bytes
/// (`IBV_SYSFS_PATH_MAX`) including the device's path below it.
const MAX_TREE_PATH: usize = 160;

/// `engine.workers` in the file: a number, or `None` for `"auto"`.
pub(super) struct Workers(Option<u32>);

impl Workers {
    pub(super) fn check(self) -> Result<Option<u32>, String> {
        match self.0 {
            Some(n) if !(1..=MAX_WORKERS).contains(&n) => {
                Err(format!("must be \"auto\" or from 1 to {MAX_WORKERS}"))
            }
            workers => Ok(workers),
        }
    }
}

impl<'de> Deserialize<'de> for Workers {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct AutoOrCount;
        impl Visitor<'_> for AutoOrCount {
            type Value = Workers;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"auto\" or a number of threads")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Workers, E> {
                match text {
                    "auto" => Ok(Workers(None)),
                    _ => Err(E::invalid_value(Unexpected::Str(text), &self)),
                }
            }
            fn visit_i64<E: Error>(self, n: i64) -> Result<Workers, E> {
                u32::try_from(n)
                    .map(|n| Workers(Some(n)))
                    .map_err(|_| E::invalid_value(Unexpected::Signed(n), &self))
            }
        }
        d.deserialize_any(AutoOrCount)
    }
}

/// The doorbell pages and eventfds of a session limit the number of workers.
const MAX_WORKERS: u32 = 64;

/// Checks the length and the characters of a name of a device or of a protection domain.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if (1..=64).contains(&name.len()) && name.chars().all(plain) {
        Ok(())
    } else {
        Err("must be 1 to 64 letters, digits, '-', '_' or '.'".to_owned())
    }
}

pub(super) fn check_not_empty(text: &str) -> Result<(), String> {
    if text.is_empty() { Err("must not be empty".to_owned()) } else { Ok(()) }
}

pub(super) fn check_absolute(path: &Path) -> Result<(), String> {
    if path.is_absolute() { Ok(()) } else { Err("must be an absolute path".to_owned()) }
}

/// Checks the path of the control socket.
pub(super) fn check_socket(path: &Path) -> Result<(), String> {
    check_absolute(path)?;
    // The kernel holds 108 bytes of a Unix socket's path, with the terminating zero.
    if path.as_os_str().len() < 104 {
        Ok(())
    } else {
        Err("is too long for a Unix socket (at most 103 bytes)".to_owned())
    }
}

/// Parses permission bits.
pub(super) fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|m| m & !0o777 == 0 && m & 0o600 == 0o600)
        .ok_or_else(|| "must be octal and let the owner read and write, like \"0660\"".to_owned())
}
