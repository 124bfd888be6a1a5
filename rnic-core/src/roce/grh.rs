//! The 40 bytes that stand before the data of a received datagram: the global route header, or in
//! its last 20 bytes the IPv4 header of the packet (IBTA specification, volume 1, annex A17.4.5).
//!
//! Of a packet's IP header a program is told neither the type of service nor the hops left; here
//! they have the values that are usual, whichever way the datagram came.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Datagram;
use super::ip::{HOPS, IPV4_FIRST, IPV4_LEN, UDP, UDP_LEN, checksum, ipv4};
use super::packet;
use crate::types::Gid;

/// Bytes before the data.
pub const LEN: usize = 40;

/// The header of a datagram with so many bytes of data.
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
            (bytes[6], bytes[7]) = (UDP, HOPS);
            bytes[8..24].copy_from_slice(&datagram.from.0);
            bytes[24..].copy_from_slice(&datagram.to.0);
        }
    }
    bytes
}

/// Sender and receiver of the datagram with this header; none if the header is of neither kind.
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

/// Where in the 40 bytes an IPv4 header stands.
const IPV4_AT: usize = LEN - IPV4_LEN;

#[cfg(test)]
mod tests {
    use super::super::tests::datagram;
    use super::*;

    #[test]
    fn both_families_are_found_again() {
        for (from, to) in [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")] {
            let datagram = datagram(from, to, None);
            let bytes = emit(&datagram, 10);
            assert_eq!(parse(&bytes), Some((datagram.from, datagram.to)));
        }
        assert_eq!(parse(&[0; LEN]), None);
    }

    #[test]
    fn an_ipv4_header_is_one() {
        let bytes = emit(&datagram("192.0.2.1", "192.0.2.2", Some(1)), 5);
        assert_eq!(bytes[..20], [0; 20]);
        let header = etherparse::Ipv4Header::from_slice(&bytes[20..]).expect("a header").0;
        assert_eq!(header.header_checksum, header.calc_header_checksum());
        // UDP, BTH, DETH, immediate data, five bytes and three of padding, ICRC.
        assert_eq!(header.payload_len().ok(), Some(8 + 12 + 8 + 4 + 8 + 4));
        assert_eq!((header.source, header.destination), ([192, 0, 2, 1], [192, 0, 2, 2]));
    }
}
