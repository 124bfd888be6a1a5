//! IP headers for the ICRC and the GRH.

use std::net::Ipv4Addr;

/// Returns an IPv4 header without options for `udp` bytes of payload. It has the don't-fragment
/// flag and identification 0, like the RoCE packets of Linux.
#[expect(clippy::cast_possible_truncation, reason = "it is 20")]
pub(super) fn ipv4(from: Ipv4Addr, to: Ipv4Addr, udp: u16) -> [u8; IPV4_LEN] {
    let mut bytes = [0; IPV4_LEN];
    bytes[0] = IPV4_FIRST;
    bytes[2..4].copy_from_slice(&(IPV4_LEN as u16 + udp).to_be_bytes());
    bytes[6] = DONT_FRAGMENT;
    bytes[8] = HOPS;
    bytes[9] = UDP;
    bytes[12..16].copy_from_slice(&from.octets());
    bytes[16..].copy_from_slice(&to.octets());
    let sum = checksum(&bytes);
    bytes[10..12].copy_from_slice(&sum.to_be_bytes());
    bytes
}

/// Computes the checksum of RFC 1071; 0 if the bytes include a valid checksum.
#[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
pub(super) fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| match *pair {
        [high, low] => u32::from(u16::from_be_bytes([high, low])),
        _ => 0,
    });
    let sum: u32 = words.sum();
    let folded = (sum & 0xFFFF) + (sum >> 16);
    !(((folded & 0xFFFF) + (folded >> 16)) as u16)
}

/// IP protocol number of UDP.
pub(super) const UDP: u8 = 17;
/// Assumed hop limit.
pub(super) const HOPS: u8 = 64;
/// Size of an IPv4 header without options, in bytes.
pub(super) const IPV4_LEN: usize = 20;
/// Size of a UDP header in bytes.
pub(super) const UDP_LEN: usize = 8;
/// First byte of an IPv4 header without options.
pub(super) const IPV4_FIRST: u8 = 0x45;
const DONT_FRAGMENT: u8 = 0x40;
