//! Networks and ports of `[[listen]]` and `[[connect]]`.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// All addresses, one address, or a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// `"*"`
    Any,
    /// `"10.0.0.0/8"`, or one address, which is a prefix of its full length.
    Prefix(IpNet),
}

impl Network {
    fn parse(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Network::Any);
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Network::Prefix(address.to_canonical().into()));
        }
        let net: IpNet = text.parse().map_err(|_| {
            format!("{text:?} is not an address, a network like \"10.0.0.0/8\", or \"*\"")
        })?;
        match net.trunc() {
            exact if exact == net => Ok(Network::Prefix(net)),
            shorter => Err(format!("{text:?} has bits beyond its prefix; did you mean {shorter}?")),
        }
    }

    /// Returns true if the network contains an address. An unspecified one needs a network that
    /// contains all addresses of its family. The IPv6 one needs [`Network::Any`], because a socket
    /// bound to it takes IPv4 too.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self, address.to_canonical()) {
            (Network::Any, _) => true,
            (Network::Prefix(net), IpAddr::V4(a)) if a.is_unspecified() => {
                matches!(net, IpNet::V4(net) if net.prefix_len() == 0)
            }
            (Network::Prefix(_), IpAddr::V6(a)) if a.is_unspecified() => false,
            (Network::Prefix(net), a) => net.contains(&a),
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Network::Any => f.write_str("any address"),
            Network::Prefix(net) if net.prefix_len() == net.max_prefix_len() => {
                write!(f, "{}", net.addr())
            }
            Network::Prefix(net) => write!(f, "{net}"),
        }
    }
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        Network::parse(&text).map_err(D::Error::custom)
    }
}

/// Ports: `"*"`, `4791` or `"1024-65535"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    first: u16,
    last: u16,
}

impl Ports {
    fn parse(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Ports::default());
        }
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let ports = first.trim().parse().ok().zip(last.trim().parse().ok());
        match ports {
            Some((first, last)) if first <= last => Ok(Ports { first, last }),
            _ => Err(format!("{text:?} is not a port, a range like \"1024-65535\", or \"*\"")),
        }
    }

    /// Returns true for `"*"`.
    pub fn are_all(&self) -> bool {
        *self == Ports::default()
    }

    /// Returns true if the range contains a port.
    pub fn contains(&self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }
}

impl Default for Ports {
    fn default() -> Self {
        Ports { first: 0, last: u16::MAX }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.last) {
            (0, u16::MAX) => f.write_str("any port"),
            (first, last) if first == last => write!(f, "port {first}"),
            (first, last) => write!(f, "ports {first} to {last}"),
        }
    }
}

impl<'de> Deserialize<'de> for Ports {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct OneOrMore;
        impl Visitor<'_> for OneOrMore {
            type Value = Ports;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a port, a range like \"1024-65535\", or \"*\"")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Ports, E> {
                Ports::parse(text).map_err(E::custom)
            }
            fn visit_i64<E: Error>(self, n: i64) -> Result<Ports, E> {
                let port =
                    u16::try_from(n).map_err(|_| E::invalid_value(Unexpected::Signed(n), &self))?;
                Ok(Ports { first: port, last: port })
            }
        }
        d.deserialize_any(OneOrMore)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> Network {
        Network::parse(text).unwrap_or_else(|e| panic!("{e}"))
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    #[test]
    fn networks_match_by_prefix() {
        for (network, inside, outside) in [
            ("10.0.0.0/8", "10.255.0.1", "11.0.0.1"),
            ("127.0.0.1", "127.0.0.1", "127.0.0.2"),
            ("127.0.0.1", "::ffff:127.0.0.1", "::1"),
            ("0.0.0.0/0", "0.0.0.0", "::1"),
            ("0.0.0.0/0", "8.8.8.8", "::"),
            ("fe80::/10", "fe80::1", "fc00::1"),
            ("::/0", "::1", "::"),
            ("10.0.0.0/8", "10.0.0.0", "0.0.0.0"),
        ] {
            assert!(net(network).contains(ip(inside)), "{network} {inside}");
            assert!(!net(network).contains(ip(outside)), "{network} {outside}");
        }
        assert!(net("*").contains(ip("::")) && net("*").contains(ip("0.0.0.0")));
        for bad in ["10.0.0.1/8", "10.0.0.0/33", "host", "", "10.0.0.0/"] {
            assert!(Network::parse(bad).is_err(), "{bad}");
        }
        let e = Network::parse("10.0.0.1/8").unwrap_err();
        assert!(e.contains("did you mean 10.0.0.0/8?"), "{e}");
    }

    #[test]
    fn ports_are_one_a_range_or_any() {
        let range = Ports::parse("1024-65535").unwrap_or_default();
        assert!(range.contains(1024) && range.contains(65535) && !range.contains(1023));
        assert!(Ports::parse("*").is_ok_and(|p| p.contains(0)));
        assert!(Ports::parse("80").is_ok_and(|p| p.contains(80) && !p.contains(81)));
        for bad in ["2-1", "65536", "", "a-b", "-1", "1-"] {
            assert!(Ports::parse(bad).is_err(), "{bad}");
        }
    }
}
