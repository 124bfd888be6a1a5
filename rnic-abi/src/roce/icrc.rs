//! Invariant CRC (ICRC) of a packet, which covers the bytes that routers do not change (IBTA
//! specification, volume 1, section 7.8.1; annex A17.3.3 for the replacement of the local route
//! header).

use std::net::{IpAddr, SocketAddr};

use crc32fast::Hasher;

use super::ip::{self, UDP, UDP_LEN};

/// Size of the ICRC at the end of a packet, in bytes.
pub const LEN: usize = 4;

/// Computes the ICRC of a packet between two UDP addresses. `packet` contains the bytes between the
/// UDP header and the ICRC. Fields that may change in transit count as all ones. An IPv4 header is
/// assumed to have identification 0 and the don't-fragment flag.
#[expect(clippy::cast_possible_truncation, reason = "a packet is shorter than 64 KiB")]
pub fn of(from: SocketAddr, to: SocketAddr, packet: &[u8]) -> [u8; LEN] {
    let udp = (UDP_LEN + packet.len() + LEN) as u16;
    let mut crc = Hasher::new();
    crc.update(&[ONES; LOCAL_ROUTE]);
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut header = ip::ipv4(from, to, udp);
            header[TYPE_OF_SERVICE] = ONES;
            header[TIME_TO_LIVE] = ONES;
            header[CHECKSUM..CHECKSUM + 2].fill(ONES);
            crc.update(&header);
        }
        (from, to) => {
            let bytes = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            crc.update(&[0x6F, ONES, ONES, ONES]);
            crc.update(&udp.to_be_bytes());
            crc.update(&[UDP, ONES]);
            crc.update(&bytes(from));
            crc.update(&bytes(to));
        }
    }
    crc.update(&from.port().to_be_bytes());
    crc.update(&to.port().to_be_bytes());
    crc.update(&udp.to_be_bytes());
    crc.update(&[ONES; 2]);
    // The byte of the transport header used for congestion control counts as all ones.
    let (before, rest) = packet.split_at(packet.len().min(CONGESTION));
    crc.update(before);
    if let Some((_, after)) = rest.split_first() {
        crc.update(&[ONES]);
        crc.update(after);
    }
    crc.finalize().to_le_bytes()
}

const ONES: u8 = 0xFF;
const LOCAL_ROUTE: usize = 8;
const TYPE_OF_SERVICE: usize = 1;
const TIME_TO_LIVE: usize = 8;
const CHECKSUM: usize = 10;
const CONGESTION: usize = 4;
