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
    /// Addresses programs may bind; empty (the default) for any.
    pub addresses: Vec<IpAddr>,
    /// Who is said to have made the device, an OUI; default 0x02524e, which is
    /// nobody's.
    pub vendor_id: u32,
    /// Which device of its maker it is said to be; default 0.
    pub vendor_part_id: u32,
    /// Version of the hardware; default 0.
    pub hw_ver: u32,
    /// Its GUID, unless it follows from name and host.
    pub guid: Option<Guid>,
    /// Where the devices are shown in files; default beside the control socket.
    pub tree: TreeAt,
}

/// Where the devices are shown in files, as the kernel shows them in `/sys`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TreeAt {
    /// In a folder beside the control socket, if one can be made there.
    #[default]
    BesideSocket,
    /// In this folder.
    Path(PathBuf),
    /// They are not.
    Nowhere,
}

impl Device {
    /// The GUID of this device on this host, whose name it asks for. Threads that are confined
    /// cannot.
    pub fn guid_here(&self) -> Guid {
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
    /// Checks `[device]` and fills in what the file does not say.
    pub(super) fn device(&self, s: file::DeviceSection) -> Result<Device, ConfigError> {
        let default = Device::default();
        let name = self.checked(s.name, default.name, |name| plain_name(name))?;
        let addresses = s.addresses.map_or(default.addresses, toml::Spanned::into_inner);
        Ok(Device {
            name,
            addresses,
            vendor_id: self.number(s.vendor_id, default.vendor_id, 0..=MOST_VENDOR)?,
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
            path if path.len() > LONGEST_TREE => {
                Err(format!("is too long for programs to read (at most {LONGEST_TREE} bytes)"))
            }
            _ => Ok(()),
        })?;
        Ok(match said.as_deref() {
            None => TreeAt::BesideSocket,
            Some("off") => TreeAt::Nowhere,
            Some(path) => TreeAt::Path(path.into()),
        })
    }
}

/// Programs have 256 bytes for the folder of a device below it.
const LONGEST_TREE: usize = 160;

/// Whether programs can take this for the name of a device.
pub(super) fn plain_name(name: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if (1..=64).contains(&name.len()) && name.chars().all(plain) {
        Ok(())
    } else {
        Err("must be 1 to 64 letters, digits, '-', '_' or '.'".to_owned())
    }
}

/// What tells this host from others: the number of its installation, which copies of one image may
/// share, and its name, which containers have one each of.
fn host() -> Vec<u8> {
    let mut host = std::fs::read("/etc/machine-id").unwrap_or_default();
    host.extend(rustix::system::uname().nodename().to_bytes());
    host
}

/// An OUI has 24 bits.
pub(super) const MOST_VENDOR: u32 = (1 << 24) - 1;

/// An OUI of nobody (locally administered): test suites want one that is not 0, and no program
/// takes it for a device that it knows.
const OWN_VENDOR: u32 = 0x02_524e;
