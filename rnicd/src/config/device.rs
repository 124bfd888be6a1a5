//! `[device]`: identity and addresses.

use std::net::IpAddr;

use super::checker::Checker;
use super::error::ConfigError;
use super::file;

/// `[device]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name shown to programs; default `rnicd0`.
    pub name: String,
    /// Addresses programs may bind; empty (the default) for any.
    pub addresses: Vec<IpAddr>,
}

impl Default for Device {
    fn default() -> Self {
        Device { name: "rnicd0".to_owned(), addresses: Vec::new() }
    }
}

impl Checker<'_> {
    /// Checks `[device]` and fills in what the file does not say.
    pub(super) fn device(&self, s: file::DeviceSection) -> Result<Device, ConfigError> {
        let default = Device::default();
        let name = self.checked(s.name, default.name, |name| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if (1..=64).contains(&name.len()) && name.chars().all(plain) {
                Ok(())
            } else {
                Err("must be 1 to 64 letters, digits, '-', '_' or '.'".to_owned())
            }
        })?;
        let addresses = s.addresses.map_or(default.addresses, toml::Spanned::into_inner);
        Ok(Device { name, addresses })
    }
}
