//! Socket addresses in messages.
//!
//! `serde` omits the scope of an IPv6 address, without which a link-local address is unusable. This
//! encoding appends the scope. Human-readable formats use the usual text (`[fe80::1%2]:7471`).

use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Encoding of an address.
#[derive(Serialize, Deserialize)]
enum Wire {
    V4([u8; 4], u16),
    V6([u8; 16], u16, u32),
}

/// Serializer for `#[serde(with = "...")]` on a [`SocketAddr`].
pub fn serialize<S: Serializer>(address: &SocketAddr, s: S) -> Result<S::Ok, S::Error> {
    if s.is_human_readable() {
        return s.collect_str(address);
    }
    let wire = match address {
        SocketAddr::V4(a) => Wire::V4(a.ip().octets(), a.port()),
        SocketAddr::V6(a) => Wire::V6(a.ip().octets(), a.port(), a.scope_id()),
    };
    wire.serialize(s)
}

/// Deserializer for `#[serde(with = "...")]` on a [`SocketAddr`].
pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<SocketAddr, D::Error> {
    if d.is_human_readable() {
        return String::deserialize(d)?.parse().map_err(D::Error::custom);
    }
    Ok(match Wire::deserialize(d)? {
        Wire::V4(ip, port) => SocketAddrV4::new(ip.into(), port).into(),
        Wire::V6(ip, port, scope) => SocketAddrV6::new(ip.into(), port, 0, scope).into(),
    })
}

/// Module for `#[serde(with = "...")]` on an `Option<SocketAddr>`.
pub mod optional {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Whole(#[serde(with = "super")] SocketAddr);

    /// See [`serialize`](super::serialize).
    pub fn serialize<S: Serializer>(address: &Option<SocketAddr>, s: S) -> Result<S::Ok, S::Error> {
        address.map(Whole).serialize(s)
    }

    /// See [`deserialize`](super::deserialize).
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SocketAddr>, D::Error> {
        Ok(Option::<Whole>::deserialize(d)?.map(|whole| whole.0))
    }
}

#[cfg(test)]
mod tests {
    use super::super::AddressPair;
    use super::*;

    #[test]
    fn address_round_trips_with_its_scope() {
        for (local, peer) in [
            ("[fe80::1%7]:80", "[fe80::2%4294967295]:65535"),
            ("192.0.2.1:0", "[2001:db8::1]:1"),
            ("[::ffff:192.0.2.1]:9", "0.0.0.0:9"),
        ] {
            let address = |text: &str| text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            let pair = AddressPair { local: address(local), peer: address(peer) };
            let bytes = postcard::to_stdvec(&pair).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(postcard::from_bytes::<AddressPair>(&bytes).ok(), Some(pair));
        }
        // Families other than 0 and 1 and truncated addresses are refused.
        assert!(postcard::from_bytes::<Wire>(&[2, 0, 0, 0, 0, 0]).is_err());
        assert!(postcard::from_bytes::<Wire>(&[0, 1, 2, 3, 4]).is_err());
    }
}
