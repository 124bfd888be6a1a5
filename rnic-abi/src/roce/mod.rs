//! Unreliable datagrams of RoCE v2.
//!
//! [`Datagram`] contains the fields of a datagram. [`packet`] encodes it as a packet, whose
//! checksum [`icrc`] computes, and [`grh`] as the header that a receiver finds before the data.
//! [`mad`] contains the header of management datagrams, [`sidr`] those that find the UD QP of an
//! rdma_cm port, and [`connection`] those that connect RC and UC QPs.
//!
//! The formats follow the IBTA specification, volume 1, sections 9.2, 9.3 and 9.8.3, and annexes
//! A16 and A17. This module uses neither sockets nor QPs.

pub mod connection;
pub mod grh;
pub mod icrc;
mod ip;
pub mod mad;
pub mod p_key;
pub mod packet;
pub mod sidr;

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::types::{Gid, QpId};

/// Maximum bytes of data in a datagram: the largest path MTU.
pub const MAX_DATA: usize = 4096;

/// Fields of a datagram except its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Source GID.
    pub from: Gid,
    /// Source QP.
    pub source: QpId,
    /// Destination GID.
    pub to: Gid,
    /// Destination QP, 24 bits.
    pub qp: QpId,
    /// P_Key of the source QP.
    pub p_key: u16,
    /// Q_Key that the destination QP must have.
    pub q_key: u32,
    /// PSN, 24 bits. Receivers ignore it.
    pub psn: u32,
    /// Immediate data, as a big-endian number.
    pub immediate: Option<u32>,
    /// True if the sender requests a solicited event at the receiver.
    pub solicited: bool,
}

/// Port space of rdma_cm (`rdma_port_space`). Each port space has its own ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum PortSpace {
    /// `RDMA_PS_TCP`: RC QPs.
    Tcp,
    /// `RDMA_PS_UDP`: UD QPs.
    Udp,
    /// `RDMA_PS_IB`: QPs of any connected type.
    Ib,
}

/// Service ID, which contains the port space and the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceId(pub u64);

impl ServiceId {
    /// Returns the service ID of a port.
    pub fn new(space: PortSpace, port: u16) -> Self {
        ServiceId(space.code() << 16 | u64::from(port))
    }

    /// Returns the port space and the port; `None` if the service is in none of the port spaces.
    pub fn port(self) -> Option<(PortSpace, u16)> {
        let [high, low] = [self.0 >> 16, self.0 & 0xFFFF];
        let space = [PortSpace::Tcp, PortSpace::Udp, PortSpace::Ib]
            .into_iter()
            .find(|s| s.code() == high)?;
        Some((space, u16::try_from(low).ok()?))
    }
}

impl PortSpace {
    /// Returns the number of the port space in `rdma_cma.h`.
    fn code(self) -> u64 {
        match self {
            PortSpace::Tcp => 0x0106,
            PortSpace::Udp => 0x0111,
            PortSpace::Ib => 0x013F,
        }
    }
}

/// Returns true for a unicast address: neither unspecified nor broadcast nor multicast.
pub fn is_unicast(ip: IpAddr) -> bool {
    let is_group = match ip {
        IpAddr::V4(ip) => ip.is_broadcast() || ip.is_multicast(),
        IpAddr::V6(ip) => ip.is_multicast(),
    };
    !is_group && !ip.is_unspecified()
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use proptest::prelude::*;

    use super::packet::{PacketFault, destination, emit, len, parse};
    use super::*;

    /// Returns a datagram between two addresses.
    pub(super) fn datagram(from: &str, to: &str, immediate: Option<u32>) -> Datagram {
        let gid = |text: &str| Gid::from(text.parse::<IpAddr>().expect("an address"));
        Datagram {
            from: gid(from),
            source: QpId(0x11),
            to: gid(to),
            qp: QpId(0x123456),
            p_key: 0xFFFF,
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
        fn packets_round_trip(
            data in proptest::collection::vec(any::<u8>(), 0..=MAX_DATA),
            immediate in any::<Option<u32>>(),
            solicited in any::<bool>(),
            ipv6 in any::<bool>(),
        ) {
            let (from, to) = if ipv6 {
                ("2001:db8::1", "2001:db8::2")
            } else {
                ("192.0.2.1", "192.0.2.2")
            };
            let sent = Datagram { solicited, ..datagram(from, to, immediate) };
            let packet = emit(&sent, &data, 4791, 4791);
            prop_assert_eq!(packet.len(), len(&sent, data.len()));
            prop_assert_eq!(destination(&packet), Some(sent.qp));
            let [from, to] = ports(&sent);
            prop_assert_eq!(parse(from, to, &packet), Ok((sent, &data[..])));
        }

        #[test]
        fn arbitrary_packets_are_refused(packet in proptest::collection::vec(any::<u8>(), 0..200)) {
            let [from, to] = ports(&datagram("192.0.2.1", "192.0.2.2", None));
            prop_assert!(parse(from, to, &packet).is_err());
        }
    }

    #[test]
    fn icrc_detects_every_flipped_bit() {
        let sent = datagram("192.0.2.1", "192.0.2.2", Some(7));
        let [from, to] = ports(&sent);
        let packet = emit(&sent, b"hello", 4791, 4791);
        for bit in 0..packet.len() * 8 {
            let mut other = packet.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            // The ICRC does not cover the congestion control byte, which routers may change.
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
    fn packet_matches_the_specification() {
        let sent = datagram("192.0.2.1", "192.0.2.2", None);
        let packet = emit(&sent, b"hello", 4791, 4791);
        let head = [0x64, 0x70, 0xFF, 0xFF, 0, 0x12, 0x34, 0x56, 0, 0xAB, 0xCD, 0xEF];
        assert_eq!(packet[..12], head);
        assert_eq!(packet[12..20], [0x11, 0x11, 0x11, 0x11, 0, 0, 0, 0x11]);
        assert_eq!(&packet[20..28], b"hello\0\0\0");
        // Computed with zlib over the bytes that annex A17 defines.
        assert_eq!(packet[28..], [0xB2, 0xD7, 0x5F, 0x02]);
    }

    #[test]
    fn service_ids_name_port_space_and_port() {
        assert_eq!(ServiceId::new(PortSpace::Udp, 7471), ServiceId(0x0111_1D2F));
        for space in [PortSpace::Tcp, PortSpace::Udp, PortSpace::Ib] {
            for port in [0, 1, u16::MAX] {
                assert_eq!(ServiceId::new(space, port).port(), Some((space, port)));
            }
        }
        for other in [0, 0x0107_1D2F, 0x0112_0000, 1 << 63 | 0x0111_1D2F] {
            assert_eq!(ServiceId(other).port(), None);
        }
    }
}
