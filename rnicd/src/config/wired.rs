//! `[wired]`: the RoCE device.

use super::checker::Checker;
use super::device::{MAX_VENDOR_ID, check_name};
use super::error::ConfigError;
use super::file;

/// `[wired]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wired {
    /// Name shown to programs; default `rnicd1`.
    pub name: String,
    /// Vendor ID, a 24-bit OUI; default that of `[device]`.
    pub vendor_id: u32,
    /// Part ID of the vendor; default 0.
    pub vendor_part_id: u32,
    /// TCP port for the daemons of other hosts, and UDP port of UD QPs; default 4791.
    pub port: u16,
    /// The PSNs and path MTUs of both ends must match; default true.
    pub compare: bool,
}

impl Default for Wired {
    fn default() -> Self {
        Wired {
            name: "rnicd1".to_owned(),
            vendor_id: super::Device::default().vendor_id,
            vendor_part_id: 0,
            // UDP port of RoCE v2.
            port: 4791,
            compare: true,
        }
    }
}

impl Checker<'_> {
    /// Checks `[wired]` and applies the defaults.
    pub(super) fn wired(&self, s: file::WiredSection) -> Result<Wired, ConfigError> {
        let default = Wired::default();
        Ok(Wired {
            name: self.checked(s.name, default.name, |name| check_name(name))?,
            vendor_id: self.number(s.vendor_id, default.vendor_id, 0..=MAX_VENDOR_ID)?,
            vendor_part_id: self.number(s.vendor_part_id, default.vendor_part_id, 0..=u32::MAX)?,
            port: self.number(s.port, default.port, 1..=u16::MAX)?,
            compare: self.checked(s.compare, default.compare, |_| Ok(()))?,
        })
    }
}
