//! GIDs of the RoCE device.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use serde::{Deserialize, Serialize};

/// GID of RoCE v2: an IPv6 address, or an IPv4 address mapped to one (RFC 4291 section 2.5.5.2).
/// The first byte is the most significant.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Returns true for the zero GID, which marks an empty table entry.
    pub fn is_zero(self) -> bool {
        self == Gid::default()
    }

    /// Returns the IP address: IPv4 if the GID is a mapped IPv4 address, otherwise IPv6.
    pub fn address(self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }
}

impl From<IpAddr> for Gid {
    fn from(address: IpAddr) -> Self {
        let v6 = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        Gid(v6.octets())
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv4_address_is_mapped() {
        for address in ["192.0.2.7", "2001:db8::7"] {
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(Gid::from(address).address(), address);
        }
        let mapped = Gid::from(IpAddr::from([192, 0, 2, 7]));
        assert_eq!(mapped.0[10..], [0xFF, 0xFF, 192, 0, 2, 7]);
        assert_eq!(mapped.to_string(), "::ffff:192.0.2.7");
    }
}
