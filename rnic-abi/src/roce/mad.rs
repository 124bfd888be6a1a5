//! Management datagrams of communication management (IBTA specification, volume 1, sections 12.6
//! and 13.4.3): datagrams between QP 1 of one port and QP 1 of the other. All messages start with
//! these fields (offsets in bytes):
//!
//! ```text
//!   0  base version, class, class version, method
//!   4  status, zero
//!   8  transaction ID
//!  16  attribute (message type), zero
//! ```
//!
//! The private data of a request start with the IP addresses of rdma_cm (annex A11):
//!
//! ```text
//!   0  version of this header
//!   1  version of IP, 4 bits
//!   2  port of the requester
//!   4  address of the requester
//!  20  destination address
//! ```

use super::p_key::DEFAULT_P_KEY;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::{Datagram, packet};
use crate::types::QpId;

/// Size of a management datagram in bytes.
pub const LEN: usize = 256;
/// Number of the QP for management datagrams, the same on every port.
pub const QP: QpId = QpId(1);
/// Q_Key of management datagrams.
pub const Q_KEY: u32 = 0x8001_0000;

/// An encoded message.
pub type Bytes = [u8; LEN];

/// IDs of a message, repeated in its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Exchange {
    /// Transaction ID. Other hosts cannot predict it.
    pub transaction: u64,
    /// ID that the sender has chosen for the request or connection.
    pub id: u32,
}

/// Reason why a datagram is not a message of communication management.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MadFault {
    /// The length is not that of a management datagram.
    #[error("{0} bytes instead of the 256 of a management datagram")]
    Length(usize),
    /// A class other than communication management, or a different version or method.
    #[error("version, class and method {0:#010x} are not those of communication management")]
    Class(u32),
    /// An unsupported message of communication management.
    #[error("attribute {0:#06x} is not supported")]
    Attribute(u16),
    /// A request without the IP addresses of rdma_cm.
    #[error("unsupported version {0:#06x} of the IP address header")]
    Addresses(u16),
}

/// Returns the RoCE v2 packet of a message between the QPs 1 of two ports. Both use the UDP port
/// `port`.
pub fn packet(from: IpAddr, to: IpAddr, message: &Bytes, port: u16) -> Vec<u8> {
    let datagram = Datagram {
        from: from.into(),
        source: QP,
        to: to.into(),
        qp: QP,
        p_key: DEFAULT_P_KEY,
        q_key: Q_KEY,
        psn: 0,
        immediate: None,
        solicited: false,
    };
    packet::emit(&datagram, message, port, port)
}

/// Pads private data with zeros; `None` if they are too long.
pub fn zero_padded<const N: usize>(data: &[u8]) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    bytes.get_mut(..data.len())?.copy_from_slice(data);
    Some(bytes)
}

/// Returns the attribute ID: for messages of communication management the kind of message.
pub fn attribute(mad: &Bytes) -> u16 {
    u16::from_be_bytes(part(mad, ATTRIBUTE))
}

/// Returns the answer to a datagram that reads or sets an attribute of another class. Like a kernel
/// without an agent for the class, QP 1 answers that it does not support the attribute. Returns
/// `None` for all other datagrams, which get no answer.
pub fn unsupported(mad: &Bytes) -> Option<Bytes> {
    let [version, class, _, method] = part(mad, 0);
    let attribute = attribute(mad);
    let may_be_answered = match class {
        // Only QP 0 answers these classes.
        SUBNET | SUBNET_DIRECTED => false,
        COMMUNICATION => attribute == CLASS_PORT_INFO,
        _ => true,
    };
    if version != 1 || !matches!(method, GET | SET) || !may_be_answered {
        return None;
    }
    let mut answer = *mad;
    answer[3] = GET_RESPONSE;
    put(&mut answer, STATUS, UNSUPPORTED_ATTRIBUTE.to_be_bytes());
    Some(answer)
}

/// Returns a message with its header and the ID of the sender, which follows the header in all
/// messages.
pub(super) fn begin(attribute: u16, exchange: Exchange) -> Bytes {
    let mut bytes = [0; LEN];
    put(&mut bytes, 0, MESSAGE.to_be_bytes());
    put(&mut bytes, TRANSACTION, exchange.transaction.to_be_bytes());
    put(&mut bytes, ATTRIBUTE, attribute.to_be_bytes());
    put(&mut bytes, ID, exchange.id.to_be_bytes());
    bytes
}

/// Checks the header. Returns the message, its attribute, and the IDs of the sender.
pub(super) fn open(bytes: &[u8]) -> Result<(&Bytes, u16, Exchange), MadFault> {
    let bytes: &Bytes = bytes.try_into().map_err(|_| MadFault::Length(bytes.len()))?;
    if word(bytes, 0) != MESSAGE {
        return Err(MadFault::Class(word(bytes, 0)));
    }
    let transaction = u64::from_be_bytes(part(bytes, TRANSACTION));
    let exchange = Exchange { transaction, id: word(bytes, ID) };
    Ok((bytes, attribute(bytes), exchange))
}

/// Writes the address header of a request at offset `at`.
pub(super) fn put_addresses(bytes: &mut Bytes, at: usize, from: SocketAddr, to: IpAddr) {
    bytes[at + IP_VERSION] = if from.is_ipv4() { IPV4 } else { IPV6 };
    put(bytes, at + PORT, from.port().to_be_bytes());
    for (at, ip) in [(at + FROM, from.ip()), (at + TO, to)] {
        match ip {
            IpAddr::V4(ip) => put(bytes, at + 12, ip.octets()),
            IpAddr::V6(ip) => put(bytes, at, ip.octets()),
        }
    }
}

/// Reads the address header at offset `at`. Returns the address and port of the requester, and the
/// destination address.
pub(super) fn addresses(bytes: &Bytes, at: usize) -> Result<(SocketAddr, IpAddr), MadFault> {
    let (from, to) = match (bytes[at], bytes[at + IP_VERSION] & 0xF0) {
        (0, IPV4) => (ipv4(bytes, at + FROM), ipv4(bytes, at + TO)),
        (0, IPV6) => (ipv6(bytes, at + FROM), ipv6(bytes, at + TO)),
        _ => return Err(MadFault::Addresses(u16::from_be_bytes(part(bytes, at)))),
    };
    Ok((SocketAddr::new(from, u16::from_be_bytes(part(bytes, at + PORT))), to))
}

/// Returns `N` bytes of a message. Callers use constant offsets within the message.
pub(super) fn part<const N: usize>(bytes: &Bytes, at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

/// Returns a big-endian number of a message.
pub(super) fn word(bytes: &Bytes, at: usize) -> u32 {
    u32::from_be_bytes(part(bytes, at))
}

/// Writes `N` bytes of a message.
pub(super) fn put<const N: usize>(bytes: &mut Bytes, at: usize, field: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&field);
}

fn ipv4(bytes: &Bytes, at: usize) -> IpAddr {
    Ipv4Addr::from(part::<4>(bytes, at + 12)).into()
}

fn ipv6(bytes: &Bytes, at: usize) -> IpAddr {
    Ipv6Addr::from(part::<16>(bytes, at)).into()
}

/// Base version 1, class of communication management in version 2, method Send.
pub(super) const MESSAGE: u32 = 0x0107_0203;
const STATUS: usize = 4;
const TRANSACTION: usize = 8;
const ATTRIBUTE: usize = 16;
const ID: usize = 24;

/// Management classes: subnet management (two classes) and communication management.
const SUBNET: u8 = 0x01;
const SUBNET_DIRECTED: u8 = 0x81;
const COMMUNICATION: u8 = 0x07;
const GET: u8 = 0x01;
const SET: u8 = 0x02;
const GET_RESPONSE: u8 = 0x81;
/// Attribute that all classes have.
const CLASS_PORT_INFO: u16 = 1;
/// Status: the combination of method and attribute is not supported.
const UNSUPPORTED_ATTRIBUTE: u16 = 0x000C;

/// Size of the address header in bytes.
pub(super) const ADDRESSES_LEN: usize = 36;
const IP_VERSION: usize = 1;
const IPV4: u8 = 4 << 4;
const IPV6: u8 = 6 << 4;
const PORT: usize = 2;
const FROM: usize = 4;
const TO: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reads_and_writes_of_attributes_are_answered() {
        let of = |class: u8, method: u8, attribute: u16| {
            let mut mad = begin(attribute, Exchange { transaction: 5, id: 6 });
            put(&mut mad, 0, [1, class, 1, method]);
            unsupported(&mad).map(|answer| (answer, mad))
        };
        // Performance management, and the class information of communication management.
        for (class, method, attribute) in [(0x04, GET, 0x12), (0x04, SET, 0x12), (0x07, GET, 1)] {
            let (answer, mut asked) = of(class, method, attribute).expect("an answer");
            assert_eq!(answer[..6], [1, class, 1, 0x81, 0, 0x0C]);
            asked[3] = 0x81;
            asked[5] = 0x0C;
            assert_eq!(answer, asked);
            assert_eq!(unsupported(&answer), None);
        }
        for (class, method, attribute) in
            [(0x01, GET, 1), (0x81, GET, 1), (0x07, GET, 0x10), (0x07, 3, 0x19), (0x04, 3, 0x12)]
        {
            assert_eq!(of(class, method, attribute), None);
        }
        let mut old = begin(1, Exchange { transaction: 5, id: 6 });
        put(&mut old, 0, [2, 0x04, 1, GET]);
        assert_eq!(unsupported(&old), None);
    }

    #[test]
    fn private_data_are_padded_or_too_long() {
        assert_eq!(zero_padded::<3>(b"ab"), Some(*b"ab\0"));
        assert_eq!(zero_padded::<3>(b"abcd"), None);
    }
}
