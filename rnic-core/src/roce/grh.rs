//! The 40 bytes that stand before the data of a received datagram: the global route header, or in
//! its last 20 bytes the IPv4 header of the packet (IBTA specification, volume 1, annex A17.4.5).
//!
//! Of a packet's IP header a program is told neither the type of service nor the hops left; here
//! they have the values that are usual, whichever way the datagram came.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Datagram;
use super::packet::{self, UDP_LEN};
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

/// An IPv4 header without options before `udp` bytes, which may not be fragmented. Its
/// identification is 0, as Linux has it on such packets.
#[expect(clippy::cast_possible_truncation, reason = "it is 20")]
pub(super) fn ipv4(from: Ipv4Addr, to: Ipv4Addr, udp: u16) -> [u8; IPV4_LEN] {
    let mut bytes = [0; IPV4_LEN];
    bytes[0] = IPV4_FIRST;
    bytes[2..4].copy_from_slice(&(IPV4_LEN as u16 + udp).to_be_bytes());
    bytes[6] = DONT_FRAGMENT;
    (bytes[8], bytes[9]) = (HOPS, UDP);
    bytes[12..16].copy_from_slice(&from.octets());
    bytes[16..].copy_from_slice(&to.octets());
    let sum = checksum(&bytes);
    bytes[10..12].copy_from_slice(&sum.to_be_bytes());
    bytes
}

/// The checksum of RFC 1071; 0 if the bytes have the right one among them.
#[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| match *pair {
        [high, low] => u32::from(u16::from_be_bytes([high, low])),
        _ => 0,
    });
    let sum: u32 = words.sum();
    let folded = (sum & 0xFFFF) + (sum >> 16);
    !(((folded & 0xFFFF) + (folded >> 16)) as u16)
}

/// Number of UDP in the header.
pub(super) const UDP: u8 = 17;
/// Hops that a packet has left, as far as it is told.
pub(super) const HOPS: u8 = 64;
/// Where in the 40 bytes an IPv4 header stands.
const IPV4_AT: usize = LEN - IPV4_LEN;
/// Bytes of an IPv4 header without options.
pub(super) const IPV4_LEN: usize = 20;
/// Version 4, five words.
const IPV4_FIRST: u8 = 0x45;
const DONT_FRAGMENT: u8 = 0x40;

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
