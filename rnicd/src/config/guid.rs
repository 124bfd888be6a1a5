//! The GUID of a device, an EUI-64.

use std::fmt;

use serde::{Deserialize, Deserializer};

/// A GUID; the first byte as written is the most significant. Neither half is zero, because
/// programs treat a port address that ends in zeros as unset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guid(u64);

impl Guid {
    /// Parses sixteen hexadecimal digits, with or without colons between bytes.
    pub fn parse(text: &str) -> Result<Self, String> {
        let digits = match text.len() {
            23 if text.bytes().skip(2).step_by(3).all(|c| c == b':') => text.replace(':', ""),
            _ => text.to_owned(),
        };
        let plain = digits.len() == 16 && digits.bytes().all(|c| c.is_ascii_hexdigit());
        let number = u64::from_str_radix(&digits, 16).ok().filter(|_| plain).ok_or_else(|| {
            format!("{text:?} is not eight hexadecimal bytes like \"02:00:5e:00:53:01:00:01\"")
        })?;
        match (number >> 32, number & LOW_HALF) {
            (0, _) | (_, 0) => Err(format!("{text:?} has a half that is zero")),
            _ => Ok(Guid(number)),
        }
    }

    /// Derives a GUID from the device's name and this host.
    pub(super) fn of_this_host(name: &str) -> Self {
        Guid::derived(name, &host())
    }

    /// Derives a GUID from the device's name and the host's bytes. Equal inputs give equal GUIDs;
    /// different inputs almost never do.
    pub fn derived(name: &str, host: &[u8]) -> Self {
        let parts = [name.as_bytes(), &[0], host];
        let hash = parts
            .into_iter()
            .flatten()
            .fold(FNV_OFFSET, |hash: u64, byte| (hash ^ u64::from(*byte)).wrapping_mul(FNV_PRIME));
        // FNV hashes of names that differ only in the last byte have equal first bytes.
        let hash = (hash ^ hash >> 32).wrapping_mul(SPREAD);
        let hash = hash ^ hash >> 29;
        // Locally administered and not a group address, so it is in no vendor's range.
        Guid((hash | LOCAL) & !GROUP | u64::from(hash & LOW_HALF == 0))
    }

    /// Returns the GUID as a number. Its most significant byte is written first.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.to_be_bytes().map(|byte| format!("{byte:02x}"));
        f.write_str(&bytes.join(":"))
    }
}

impl<'de> Deserialize<'de> for Guid {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        Guid::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// Returns bytes that differ between hosts: the machine ID, which copies of one image may share,
/// and the host name, which differs between containers.
fn host() -> Vec<u8> {
    let mut host = std::fs::read("/etc/machine-id").unwrap_or_default();
    host.extend(rustix::system::uname().nodename().to_bytes());
    host
}

const LOW_HALF: u64 = u32::MAX as u64;
/// Bit of the first byte: locally administered.
const LOCAL: u64 = 0x02 << 56;
/// Bit of the first byte: group address.
const GROUP: u64 = 0x01 << 56;
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;
/// Odd multiplier that spreads the bits (from the golden ratio).
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_with_or_without_colons() {
        let guid = Guid::parse("02:00:5e:00:53:01:00:01").unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(guid.number(), 0x0200_5e00_5301_0001);
        assert_eq!(guid.to_string(), "02:00:5e:00:53:01:00:01");
        assert_eq!(Guid::parse("02005E0053010001"), Ok(guid));
        for bad in [
            "",
            "02:00:5e:00:53:01:00",
            "02:00:5e:00:53:01:00:0g",
            "02-00-5e-00-53-01-00-01",
            "+2005e0053010001",
            "02005e00530100010",
            "0000000053010001",
            "02005e0000000000",
        ] {
            assert!(Guid::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn derived_guids_are_stable_and_distinct() {
        // The value must not change: programs may remember it, and a new one means a new device.
        let guid = Guid::derived("rnicd0", b"host");
        assert_eq!(guid.to_string(), "72:85:6c:6a:e2:f6:0f:d8");
        let of_names = (0..1000).map(|n| Guid::derived(&format!("rnicd{n}"), b"host"));
        let of_hosts = (0..1000).map(|n| Guid::derived("rnicd0", format!("host{n}").as_bytes()));
        let numbers: Vec<u64> = of_names.chain(of_hosts).map(Guid::number).collect();
        let low: std::collections::BTreeSet<u64> = numbers.iter().map(|n| n & LOW_HALF).collect();
        assert!(low.len() == 2000 && !low.contains(&0));
        assert!(numbers.iter().all(|n| n & LOCAL != 0 && n & GROUP == 0));
        // The separator keeps name and host apart.
        assert_ne!(Guid::derived("a", b"b"), Guid::derived("ab", b""));
    }
}
