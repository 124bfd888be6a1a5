//! Management datagrams for service ID resolution (SIDR), which find the UD QP of a port. A request
//! and its reply are datagrams between QP 1 of one port and QP 1 of the other.
//!
//! The formats follow the IBTA specification, volume 1, sections 12.11.1 and 13.4.3. The IP
//! addresses at the start of a request's private data (rdma_cm) follow annex A11. The caller
//! answers the requests. All messages start with these fields (offsets in bytes):
//!
//! ```text
//!   0  base version, class, class version, method
//!   4  status, zero
//!   8  transaction ID
//!  16  attribute (message type), zero
//! ```
//!
//! The remaining fields of a request (left) and of a reply (right):
//!
//! ```text
//!  24  request ID                 24  request ID
//!  28  partition key, zero        28  status, bytes of additional information, zero
//!  32  service ID                 32  QP, zero
//!  40  version of the next fields 36  service ID
//!  41  version of IP, 4 bits      44  Q_Key
//!  42  port of the requester      48  additional information
//!  44  address of the requester  120  private data
//!  60  destination address
//!  76  private data
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::types::QpId;

/// Size of a management datagram in bytes.
pub const LEN: usize = 256;
/// Number of the QP for management datagrams, the same on every port.
pub const QP: QpId = QpId(1);
/// Q_Key of management datagrams.
pub const Q_KEY: u32 = 0x8001_0000;
/// Size of the private data of a request, in bytes.
pub const REQUEST_DATA: usize = LEN - REQUEST_DATA_AT;
/// Size of the private data of a reply, in bytes.
pub const REPLY_DATA: usize = LEN - REPLY_DATA_AT;

/// An encoded message.
pub type Bytes = [u8; LEN];

/// A request or a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Asks for the UD QP of a port.
    Request(Request),
    /// Returns the UD QP or a failure.
    Reply(Reply),
}

/// Request for the UD QP that serves a port (`SIDR_REQ`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// IDs shared by all attempts of the request and by its reply.
    pub exchange: Exchange,
    /// Requested service.
    pub service: ServiceId,
    /// Address and port that the requester claims.
    pub from: SocketAddr,
    /// Destination address.
    pub to: IpAddr,
    /// Private data of the application, padded with zeros.
    pub private_data: [u8; REQUEST_DATA],
}

/// Answer to a request (`SIDR_REP`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// IDs of the request.
    pub exchange: Exchange,
    /// Service of the request.
    pub service: ServiceId,
    /// Result. Unless it is [`Status::VALID`], the QP and Q_Key have no meaning.
    pub status: Status,
    /// UD QP that serves the port, 24 bits.
    pub qp: QpId,
    /// Q_Key of the QP.
    pub q_key: u32,
    /// Private data of the application, padded with zeros.
    pub private_data: [u8; REPLY_DATA],
}

/// IDs of a request, repeated in its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Exchange {
    /// Transaction ID. Other hosts cannot predict it.
    pub transaction: u64,
    /// Request ID of the sender.
    pub id: u32,
}

/// Service ID. It contains the port space and the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceId(pub u64);

/// Status of a reply. Numbers other than the constants are possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u8);

/// Reason why a datagram is not a SIDR message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MadFault {
    /// The length is not that of a management datagram.
    #[error("{0} bytes instead of the 256 of a management datagram")]
    Length(usize),
    /// A class other than communication management, or a different version or method.
    #[error("version, class and method {0:#010x} are not those of communication management")]
    Class(u32),
    /// A message of communication management, but neither SIDR_REQ nor SIDR_REP.
    #[error("attribute {0:#06x} is neither SIDR_REQ nor SIDR_REP")]
    Attribute(u16),
    /// A request without the IP addresses of rdma_cm.
    #[error("unsupported version {0:#06x} of the IP address header")]
    Addresses(u16),
}

impl Status {
    /// A QP serves the port.
    pub const VALID: Status = Status(0);
    /// No QP serves the port.
    pub const UNSUPPORTED: Status = Status(1);
    /// The application rejects the request.
    pub const REJECTED: Status = Status(2);
}

impl ServiceId {
    /// Returns the service ID of a port of `RDMA_PS_UDP`.
    pub fn of_port(port: u16) -> Self {
        ServiceId(PORT_SPACE | u64::from(port))
    }

    /// Returns the port; `None` for a service outside `RDMA_PS_UDP`.
    pub fn port(self) -> Option<u16> {
        // Values above 16 bits belong to other port spaces.
        self.0.checked_sub(PORT_SPACE).and_then(|port| u16::try_from(port).ok())
    }
}

impl Request {
    /// Encodes the message.
    pub fn emit(&self) -> Bytes {
        let mut bytes = begin(REQUEST, self.exchange);
        bytes[PARTITION_AT..PARTITION_AT + 2].copy_from_slice(&DEFAULT_PARTITION.to_be_bytes());
        bytes[REQUEST_SERVICE..REQUEST_SERVICE + 8].copy_from_slice(&self.service.0.to_be_bytes());
        bytes[IP_VERSION] = if self.from.is_ipv4() { IPV4 } else { IPV6 };
        bytes[PORT..PORT + 2].copy_from_slice(&self.from.port().to_be_bytes());
        for (at, ip) in [(FROM, self.from.ip()), (TO, self.to)] {
            match ip {
                IpAddr::V4(ip) => bytes[at + 12..at + 16].copy_from_slice(&ip.octets()),
                IpAddr::V6(ip) => bytes[at..at + 16].copy_from_slice(&ip.octets()),
            }
        }
        bytes[REQUEST_DATA_AT..].copy_from_slice(&self.private_data);
        bytes
    }
}

impl Reply {
    /// Encodes the message.
    pub fn emit(&self) -> Bytes {
        let mut bytes = begin(REPLY, self.exchange);
        bytes[STATUS] = self.status.0;
        bytes[QP_AT..QP_AT + 4].copy_from_slice(&(self.qp.0 << 8).to_be_bytes());
        bytes[REPLY_SERVICE..REPLY_SERVICE + 8].copy_from_slice(&self.service.0.to_be_bytes());
        bytes[Q_KEY_AT..Q_KEY_AT + 4].copy_from_slice(&self.q_key.to_be_bytes());
        bytes[REPLY_DATA_AT..].copy_from_slice(&self.private_data);
        bytes
    }
}

/// Decodes a management datagram.
///
/// # Errors
///
/// Returns the reason if the datagram is not a SIDR message. It must not be answered then.
pub fn parse(bytes: &[u8]) -> Result<Message, MadFault> {
    let bytes: &Bytes = bytes.try_into().map_err(|_| MadFault::Length(bytes.len()))?;
    let word = |at: usize| u32::from_be_bytes(part(bytes, at));
    if word(0) != MESSAGE {
        return Err(MadFault::Class(word(0)));
    }
    let exchange =
        Exchange { transaction: u64::from_be_bytes(part(bytes, TRANSACTION)), id: word(ID) };
    let service = |at| ServiceId(u64::from_be_bytes(part(bytes, at)));
    match u16::from_be_bytes(part(bytes, ATTRIBUTE)) {
        REQUEST => {
            let (from, to) = match (bytes[CMA_VERSION], bytes[IP_VERSION] & 0xF0) {
                (0, IPV4) => (ipv4(bytes, FROM), ipv4(bytes, TO)),
                (0, IPV6) => (ipv6(bytes, FROM), ipv6(bytes, TO)),
                _ => {
                    let versions = u16::from_be_bytes(part(bytes, CMA_VERSION));
                    return Err(MadFault::Addresses(versions));
                }
            };
            Ok(Message::Request(Request {
                exchange,
                service: service(REQUEST_SERVICE),
                from: SocketAddr::new(from, u16::from_be_bytes(part(bytes, PORT))),
                to,
                private_data: part(bytes, REQUEST_DATA_AT),
            }))
        }
        REPLY => Ok(Message::Reply(Reply {
            exchange,
            service: service(REPLY_SERVICE),
            status: Status(bytes[STATUS]),
            qp: QpId(word(QP_AT) >> 8),
            q_key: word(Q_KEY_AT),
            private_data: part(bytes, REPLY_DATA_AT),
        })),
        other => Err(MadFault::Attribute(other)),
    }
}

/// Pads private data with zeros; `None` if they are too long.
pub fn zero_padded<const N: usize>(data: &[u8]) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    bytes.get_mut(..data.len())?.copy_from_slice(data);
    Some(bytes)
}

/// Returns a message with its header only.
fn begin(attribute: u16, exchange: Exchange) -> Bytes {
    let mut bytes = [0; LEN];
    bytes[..4].copy_from_slice(&MESSAGE.to_be_bytes());
    bytes[TRANSACTION..TRANSACTION + 8].copy_from_slice(&exchange.transaction.to_be_bytes());
    bytes[ATTRIBUTE..ATTRIBUTE + 2].copy_from_slice(&attribute.to_be_bytes());
    bytes[ID..ID + 4].copy_from_slice(&exchange.id.to_be_bytes());
    bytes
}

/// Returns `N` bytes of a message. Callers use constant offsets within the message.
fn part<const N: usize>(bytes: &Bytes, at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

fn ipv4(bytes: &Bytes, at: usize) -> IpAddr {
    Ipv4Addr::from(part::<4>(bytes, at + 12)).into()
}

fn ipv6(bytes: &Bytes, at: usize) -> IpAddr {
    Ipv6Addr::from(part::<16>(bytes, at)).into()
}

/// Base version 1, class of communication management in version 2, method Send.
const MESSAGE: u32 = 0x0107_0203;
const TRANSACTION: usize = 8;
const ATTRIBUTE: usize = 16;
const REQUEST: u16 = 0x0017;
const REPLY: u16 = 0x0018;
const ID: usize = 24;

const PARTITION_AT: usize = 28;
const DEFAULT_PARTITION: u16 = 0xFFFF;
const REQUEST_SERVICE: usize = 32;
const CMA_VERSION: usize = 40;
const IP_VERSION: usize = 41;
const IPV4: u8 = 4 << 4;
const IPV6: u8 = 6 << 4;
const PORT: usize = 42;
const FROM: usize = 44;
const TO: usize = 60;
const REQUEST_DATA_AT: usize = 76;

const STATUS: usize = 28;
const QP_AT: usize = 32;
const REPLY_SERVICE: usize = 36;
const Q_KEY_AT: usize = 44;
const REPLY_DATA_AT: usize = 120;

/// `RDMA_PS_UDP`: the bits of a service ID above the port.
const PORT_SPACE: u64 = 0x0111 << 16;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request() -> Request {
        Request {
            exchange: Exchange { transaction: 0x0102_0304_0506_0708, id: 0x0A0B_0C0D },
            service: ServiceId::of_port(7471),
            from: ([192, 0, 2, 1], 0xC123).into(),
            to: [192, 0, 2, 2].into(),
            private_data: zero_padded(b"hello").expect("it fits"),
        }
    }

    fn reply() -> Reply {
        Reply {
            exchange: request().exchange,
            service: ServiceId::of_port(7471),
            status: Status::VALID,
            qp: QpId(0x12_3456),
            q_key: 0x0123_4567,
            private_data: zero_padded(b"welcome").expect("it fits"),
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn sidr_messages_match_the_specification() {
        let header = |attribute: &str| {
            format!("010702030000000001020304050607080{attribute}0000000000000a0b0c0d")
        };
        let bytes = request().emit();
        assert_eq!(hex(&bytes[..28]), header("017"));
        assert_eq!(hex(&bytes[28..40]), "ffff00000000000001111d2f");
        assert_eq!(hex(&bytes[40..44]), "0040c123");
        assert_eq!(hex(&bytes[44..60]), "000000000000000000000000c0000201");
        assert_eq!(hex(&bytes[60..76]), "000000000000000000000000c0000202");
        assert_eq!((&bytes[76..81], bytes[81..] == [0; 175]), (&b"hello"[..], true));
        let bytes = reply().emit();
        assert_eq!(hex(&bytes[..28]), header("018"));
        assert_eq!(hex(&bytes[28..48]), "0000000012345600000000000111".to_owned() + "1d2f01234567");
        assert_eq!((&bytes[48..120], &bytes[120..127]), (&[0; 72][..], &b"welcome"[..]));
        assert_eq!((REQUEST_DATA, REPLY_DATA), (180, 136));
    }

    #[test]
    fn sidr_messages_round_trip() {
        let six = Request {
            from: "[2001:db8::1]:9".parse().expect("an address"),
            to: "2001:db8::2".parse().expect("an address"),
            ..request()
        };
        for sent in [request(), six] {
            assert_eq!(parse(&sent.emit()), Ok(Message::Request(sent)));
        }
        let turned_away = Reply { status: Status::REJECTED, ..reply() };
        let of_the_future = Reply { status: Status(77), ..reply() };
        for sent in [reply(), turned_away, of_the_future] {
            assert_eq!(parse(&sent.emit()), Ok(Message::Reply(sent)));
        }
    }

    #[test]
    fn invalid_sidr_messages_are_refused() {
        for len in 0..LEN {
            assert_eq!(parse(&request().emit()[..len]), Err(MadFault::Length(len)));
            assert_eq!(parse(&reply().emit()[..len]), Err(MadFault::Length(len)));
        }
        assert_eq!(parse(&[0; LEN + 1]), Err(MadFault::Length(LEN + 1)));
        let spoilt = |at: usize, byte: u8| {
            let mut bytes = request().emit();
            bytes[at] = byte;
            parse(&bytes)
        };
        assert_eq!(spoilt(3, 0x81), Err(MadFault::Class(0x0107_0281)));
        assert_eq!(spoilt(17, 0x10), Err(MadFault::Attribute(0x10)));
        assert_eq!(spoilt(40, 1), Err(MadFault::Addresses(0x0140)));
        assert_eq!(spoilt(41, 0x50), Err(MadFault::Addresses(0x0050)));
        // The low bits of this byte are ignored.
        assert!(spoilt(41, 0x4F).is_ok());
    }

    #[test]
    fn other_port_spaces_have_no_port() {
        assert_eq!(ServiceId::of_port(7471), ServiceId(0x0111_1D2F));
        for port in [0, 1, u16::MAX] {
            assert_eq!(ServiceId::of_port(port).port(), Some(port));
        }
        for other in [0, 0x0106_1D2F, 0x0112_0000, 1 << 63 | 0x0111_1D2F] {
            assert_eq!(ServiceId(other).port(), None);
        }
    }

    #[test]
    fn private_data_are_padded_or_too_long() {
        assert_eq!(zero_padded::<3>(b"ab"), Some(*b"ab\0"));
        assert_eq!(zero_padded::<3>(b"abcd"), None);
    }

    proptest! {
        #[test]
        fn parsed_messages_round_trip(mut bytes in proptest::array::uniform32(any::<u8>()),
            kind in 0..3_u8) {
            let mut message = [0x5A; LEN];
            if kind > 0 {
                bytes[..4].copy_from_slice(&MESSAGE.to_be_bytes());
                bytes[16..18].copy_from_slice(&[0, 0x16 + kind]);
            }
            message[..32].copy_from_slice(&bytes);
            message[40..42].copy_from_slice(&[0, IPV4]);
            match parse(&message) {
                Ok(Message::Request(request)) => {
                    prop_assert_eq!(parse(&request.emit()), Ok(Message::Request(request)));
                }
                Ok(Message::Reply(reply)) => {
                    prop_assert_eq!(parse(&reply.emit()), Ok(Message::Reply(reply)));
                }
                Err(_) => prop_assert_eq!(kind, 0),
            }
        }
    }
}
