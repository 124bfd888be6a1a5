//! GRH: the 40 bytes before the data of a received datagram. They contain an IPv6 header, or in the
//! last 20 bytes an IPv4 header (IBTA specification, volume 1, annex A17.4.5).
//!
//! The type of service and the hop limit of the received packet are unknown. These fields have
//! fixed default values on every path.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Datagram;
use super::ip::{HOPS, IPV4_FIRST, IPV4_LEN, UDP, UDP_LEN, checksum, ipv4};
use super::packet;
use crate::types::Gid;

/// Size of the GRH in bytes.
pub const LEN: usize = 40;

/// Returns the GRH of a datagram with `data` bytes of data.
#[expect(clippy::cast_possible_truncation, reason = "a packet is shorter than 64 KiB")]
pub fn emit(datagram: &Datagram, data: usize) -> [u8; LEN] {
    let udp = UDP_LEN + packet::len(datagram, data);
    let mut bytes = [0; LEN];
    match (datagram.from.address(), datagram.to.address()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            bytes[IPV4_AT..].copy_from_slice(&ipv4(from, to, udp as u16));
        }
        _ => {
            bytes[0] = 6 << 4;
            bytes[4..6].copy_from_slice(&(udp as u16).to_be_bytes());
            bytes[6] = UDP;
            bytes[7] = HOPS;
            bytes[8..24].copy_from_slice(&datagram.from.0);
            bytes[24..].copy_from_slice(&datagram.to.0);
        }
    }
    bytes
}

/// Returns a GRH's source and destination GID; `None` if it holds neither an IPv4 nor an IPv6
/// header.
pub fn parse(bytes: &[u8; LEN]) -> Option<(Gid, Gid)> {
    let ipv4 = &bytes[IPV4_AT..];
    if ipv4[0] == IPV4_FIRST && checksum(ipv4) == 0 {
        let address = |at: usize| {
            let bytes: [u8; 4] = ipv4[at..at + 4].try_into().unwrap_or_default();
            Gid::from(IpAddr::from(Ipv4Addr::from(bytes)))
        };
        return Some((address(12), address(16)));
    }
    let address = |at: usize| {
        let bytes: [u8; 16] = bytes[at..at + 16].try_into().unwrap_or_default();
        Gid::from(IpAddr::from(Ipv6Addr::from(bytes)))
    };
    (bytes[0] >> 4 == 6).then(|| (address(8), address(24)))
}

/// Offset of the IPv4 header in the 40 bytes.
const IPV4_AT: usize = LEN - IPV4_LEN;

#[cfg(test)]
mod tests {
    use super::super::tests::datagram;
    use super::*;

    #[test]
    fn grh_round_trips_in_both_families() {
        for (from, to) in [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")] {
            let datagram = datagram(from, to, None);
            let bytes = emit(&datagram, 10);
            assert_eq!(parse(&bytes), Some((datagram.from, datagram.to)));
        }
        assert_eq!(parse(&[0; LEN]), None);
    }

    #[test]
    fn ipv4_header_is_valid() {
        let bytes = emit(&datagram("192.0.2.1", "192.0.2.2", Some(1)), 5);
        assert_eq!(bytes[..20], [0; 20]);
        let header = etherparse::Ipv4Header::from_slice(&bytes[20..]).expect("a header").0;
        assert_eq!(header.header_checksum, header.calc_header_checksum());
        // UDP, BTH, DETH, immediate data, five bytes and three of padding, ICRC.
        assert_eq!(header.payload_len().ok(), Some(8 + 12 + 8 + 4 + 8 + 4));
        assert_eq!((header.source, header.destination), ([192, 0, 2, 1], [192, 0, 2, 2]));
    }
}
