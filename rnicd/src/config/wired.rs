//! `[wired]`: the device whose queue pairs programs wire by hand.

use super::checker::Checker;
use super::device::{MOST_VENDOR, plain_name};
use super::error::ConfigError;
use super::file;

/// `[wired]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wired {
    /// Name shown to programs; default `rnicd1`.
    pub name: String,
    /// Who is said to have made the device; default that of `[device]`.
    pub vendor_id: u32,
    /// Which device of its maker it is said to be; default 0.
    pub vendor_part_id: u32,
    /// TCP port at which daemons find each other, and UDP port of datagrams; default 4791.
    pub port: u16,
    /// Whether both ends must name the same PSNs and path MTU; default yes.
    pub compare: bool,
}

impl Default for Wired {
    fn default() -> Self {
        Wired {
            name: "rnicd1".to_owned(),
            vendor_id: super::Device::default().vendor_id,
            vendor_part_id: 0,
            // RoCE v2 has this number of UDP.
            port: 4791,
            compare: true,
        }
    }
}

impl Checker<'_> {
    /// Checks `[wired]` and fills in what the file does not say.
    pub(super) fn wired(&self, s: file::WiredSection) -> Result<Wired, ConfigError> {
        let default = Wired::default();
        Ok(Wired {
            name: self.checked(s.name, default.name, |name| plain_name(name))?,
            vendor_id: self.number(s.vendor_id, default.vendor_id, 0..=MOST_VENDOR)?,
            vendor_part_id: self.number(s.vendor_part_id, default.vendor_part_id, 0..=u32::MAX)?,
            port: self.number(s.port, default.port, 1..=u16::MAX)?,
            compare: self.checked(s.compare, default.compare, |_| Ok(()))?,
        })
    }
}
