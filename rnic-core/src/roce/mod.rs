//! RoCE v2, as far as it carries unreliable datagrams: what a datagram is ([`Datagram`]), the
//! header that its receiver finds before the data ([`grh`]), and the packet that it is on the wire
//! ([`packet`]), with its checksum ([`icrc`]). Datagrams between the queue pairs 1 of two ports say
//! which queue pair serves a port of rdma_cm ([`sidr`]).
//!
//! It follows the IBTA specification, volume 1, sections 9.2, 9.3 and 9.8.3, and its annexes A16
//! and A17. Nothing here knows sockets or queue pairs.

pub mod grh;
pub mod icrc;
mod ip;
pub mod packet;
pub mod sidr;

use std::net::IpAddr;

use crate::types::{Gid, QpId};

/// Bytes of data in one datagram, at most: those of the largest path MTU.
pub const MAX_DATA: usize = 4096;

/// What is said of a datagram besides its data, however it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The port that it comes from.
    pub from: Gid,
    /// The queue pair that it comes from.
    pub source: QpId,
    /// The port that it goes to.
    pub to: Gid,
    /// The queue pair that it goes to, 24 bits.
    pub qp: QpId,
    /// The key that the queue pair must have.
    pub q_key: u32,
    /// Number of the packet among those of its sender, 24 bits. Nobody compares it.
    pub psn: u32,
    /// Immediate data, as a big-endian number.
    pub immediate: Option<u32>,
    /// The receiver's solicited event is asked for.
    pub solicited: bool,
}

/// Whether an address is one host's, from wherever it is looked at: datagrams go to no others.
pub fn is_a_host(ip: IpAddr) -> bool {
    let several = match ip {
        IpAddr::V4(ip) => ip.is_broadcast() || ip.is_multicast(),
        IpAddr::V6(ip) => ip.is_multicast(),
    };
    !several && !ip.is_unspecified()
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use proptest::prelude::*;

    use super::packet::{PacketFault, destination, emit, len, parse};
    use super::*;

    /// A datagram between two addresses.
    pub(super) fn datagram(from: &str, to: &str, immediate: Option<u32>) -> Datagram {
        let gid = |text: &str| Gid::from(text.parse::<IpAddr>().expect("an address"));
        Datagram {
            from: gid(from),
            source: QpId(0x11),
            to: gid(to),
            qp: QpId(0x123456),
            q_key: 0x1111_1111,
            psn: 0xABCDEF,
            immediate,
            solicited: false,
        }
    }

    fn ports(datagram: &Datagram) -> [SocketAddr; 2] {
        [datagram.from, datagram.to].map(|gid| SocketAddr::new(gid.address(), 4791))
    }

    proptest! {
        #[test]
        fn what_is_sent_is_read_again(
            data in proptest::collection::vec(any::<u8>(), 0..=MAX_DATA),
            immediate in any::<Option<u32>>(),
            solicited in any::<bool>(),
            ipv6 in any::<bool>(),
        ) {
            let (from, to) = match ipv6 {
                true => ("2001:db8::1", "2001:db8::2"),
                false => ("192.0.2.1", "192.0.2.2"),
            };
            let sent = Datagram { solicited, ..datagram(from, to, immediate) };
            let packet = emit(&sent, &data, (4791, 4791));
            prop_assert_eq!(packet.len(), len(&sent, data.len()));
            prop_assert_eq!(destination(&packet), Some(sent.qp));
            let [from, to] = ports(&sent);
            prop_assert_eq!(parse(from, to, &packet), Ok((sent, &data[..])));
        }

        #[test]
        fn noise_is_none(packet in proptest::collection::vec(any::<u8>(), 0..200)) {
            let [from, to] = ports(&datagram("192.0.2.1", "192.0.2.2", None));
            prop_assert!(parse(from, to, &packet).is_err());
        }
    }

    #[test]
    fn a_bit_that_differs_is_found_wherever_it_is() {
        let sent = datagram("192.0.2.1", "192.0.2.2", Some(7));
        let [from, to] = ports(&sent);
        let packet = emit(&sent, b"hello", (4791, 4791));
        for bit in 0..packet.len() * 8 {
            let mut other = packet.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            // Routers may change the byte that congestion control uses.
            let ignored = bit / 8 == 4;
            assert_eq!(parse(from, to, &other).is_ok(), ignored, "bit {bit}");
        }
        let elsewhere = SocketAddr::new([192, 0, 2, 3].into(), 4791);
        assert_eq!(parse(elsewhere, to, &packet), Err(PacketFault::Checksum));
        for short in 0..packet.len() {
            assert!(parse(from, to, &packet[..short]).is_err(), "{short} bytes");
            assert_eq!(destination(&packet[..short]).is_some(), short >= 8);
        }
    }

    #[test]
    fn a_packet_has_the_bytes_of_the_specification() {
        let sent = datagram("192.0.2.1", "192.0.2.2", None);
        let packet = emit(&sent, b"hello", (4791, 4791));
        let head = [0x64, 0x70, 0xFF, 0xFF, 0, 0x12, 0x34, 0x56, 0, 0xAB, 0xCD, 0xEF];
        assert_eq!(packet[..12], head);
        assert_eq!(packet[12..20], [0x11, 0x11, 0x11, 0x11, 0, 0, 0, 0x11]);
        assert_eq!(&packet[20..28], b"hello\0\0\0");
        // Of another program: zlib's CRC over what the annex says.
        assert_eq!(packet[28..], [0xB2, 0xD7, 0x5F, 0x02]);
    }
}
