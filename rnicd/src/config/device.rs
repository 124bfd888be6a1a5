//! `[device]`: identity and addresses.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::checker::Checker;
use super::error::ConfigError;
use super::field::Field;
use super::file;
use super::guid::Guid;

/// `[device]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name shown to programs; default `rnicd0`.
    pub name: String,
    /// Addresses that programs may bind; empty (the default) for any.
    pub addresses: Vec<IpAddr>,
    /// Vendor ID, a 24-bit OUI; default 0x02524e, which no vendor has.
    pub vendor_id: u32,
    /// Part ID of the vendor; default 0.
    pub vendor_part_id: u32,
    /// Hardware version; default 0.
    pub hw_ver: u32,
    /// GUID; derived from the name and the host if not set.
    pub guid: Option<Guid>,
    /// Folder that shows the devices; by default beside the control socket.
    pub tree: TreeAt,
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

impl Device {
    /// Returns the GUID of this device on this host. Reads the host name, which the seccomp filter
    /// denies to confined threads.
    pub fn effective_guid(&self) -> Guid {
        self.guid.unwrap_or_else(|| Guid::derived(&self.name, &host()))
    }
}

impl Default for Device {
    fn default() -> Self {
        Device {
            name: "rnicd0".to_owned(),
            addresses: Vec::new(),
            vendor_id: OWN_VENDOR,
            vendor_part_id: 0,
            hw_ver: 0,
            guid: None,
            tree: TreeAt::default(),
        }
    }
}

impl Checker<'_> {
    /// Checks `[device]` and applies the defaults.
    pub(super) fn device(&self, s: file::DeviceSection) -> Result<Device, ConfigError> {
        let default = Device::default();
        let name = self.checked(s.name, default.name, |name| check_name(name))?;
        let addresses = s.addresses.map_or(default.addresses, toml::Spanned::into_inner);
        Ok(Device {
            name,
            addresses,
            vendor_id: self.number(s.vendor_id, default.vendor_id, 0..=MAX_VENDOR_ID)?,
            vendor_part_id: self.number(s.vendor_part_id, default.vendor_part_id, 0..=u32::MAX)?,
            hw_ver: self.number(s.hw_ver, default.hw_ver, 0..=u32::MAX)?,
            guid: self.optional(s.guid, |_| Ok(()))?,
            tree: self.tree(s.tree)?,
        })
    }
}

impl Checker<'_> {
    fn tree(&self, said: Field<String>) -> Result<TreeAt, ConfigError> {
        let said = self.optional(said, |text| match text.as_str() {
            "off" => Ok(()),
            path if !Path::new(path).is_absolute() => {
                Err("must be an absolute path, or \"off\"".to_owned())
            }
            path if path.len() > MAX_TREE_PATH => {
                Err(format!("is too long for programs to read (at most {MAX_TREE_PATH} bytes)"))
            }
            _ => Ok(()),
        })?;
        Ok(match said.as_deref() {
            None => TreeAt::BesideSocket,
            Some("off") => TreeAt::Off,
            Some(path) => TreeAt::Path(path.into()),
        })
    }
}

/// Maximum length of the folder's path in bytes. `ibv_device::ibdev_path` holds 256 bytes
/// (`IBV_SYSFS_PATH_MAX`) including the device's path below it.
const MAX_TREE_PATH: usize = 160;

/// Checks the length and the characters of a device name.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if (1..=64).contains(&name.len()) && name.chars().all(plain) {
        Ok(())
    } else {
        Err("must be 1 to 64 letters, digits, '-', '_' or '.'".to_owned())
    }
}

/// Returns bytes that differ between hosts: the machine ID, which copies of one image may share,
/// and the host name, which differs between containers.
fn host() -> Vec<u8> {
    let mut host = std::fs::read("/etc/machine-id").unwrap_or_default();
    host.extend(rustix::system::uname().nodename().to_bytes());
    host
}

/// Maximum vendor ID: an OUI has 24 bits.
pub(super) const MAX_VENDOR_ID: u32 = (1 << 24) - 1;

/// A locally administered OUI, which no vendor has. Test suites require a nonzero vendor ID, and no
/// program mistakes this one for a device it has special handling for.
const OWN_VENDOR: u32 = 0x02_524e;
