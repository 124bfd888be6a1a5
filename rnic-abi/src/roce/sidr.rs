//! Management datagrams for service ID resolution (SIDR), which find the UD QP of a port.
//!
//! The formats follow the IBTA specification, volume 1, section 12.11.1; [`mad`] describes the
//! header. The caller answers the requests. The fields of a request (left) and of a reply (right),
//! by offset in bytes:
//!
//! ```text
//!  24  request ID                 24  request ID
//!  28  partition key, zero        28  status, bytes of additional information, zero
//!  32  service ID                 32  QP, zero
//!  40  IP addresses (rdma_cm)     36  service ID
//!  76  private data               44  Q_Key
//!                                 48  additional information
//!                                120  private data
//! ```

use std::net::{IpAddr, SocketAddr};

use super::ServiceId;
use super::mad::{self, ADDRESSES_LEN, Bytes, Exchange, LEN, MadFault, part, put, word};
use super::p_key::DEFAULT_P_KEY;
use crate::types::QpId;

/// Size of the private data of a request, in bytes.
pub const REQUEST_DATA: usize = LEN - REQUEST_DATA_AT;
/// Size of the private data of a reply, in bytes.
pub const REPLY_DATA: usize = LEN - REPLY_DATA_AT;

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

/// Status of a reply. Numbers other than the constants are possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u8);

impl Status {
    /// A QP serves the port.
    pub const VALID: Status = Status(0);
    /// No QP serves the port.
    pub const UNSUPPORTED: Status = Status(1);
    /// The application rejects the request.
    pub const REJECTED: Status = Status(2);
}

impl Request {
    /// Encodes the message.
    pub fn emit(&self) -> Bytes {
        let mut bytes = mad::begin(REQUEST, self.exchange);
        put(&mut bytes, PARTITION_AT, DEFAULT_P_KEY.to_be_bytes());
        put(&mut bytes, REQUEST_SERVICE, self.service.0.to_be_bytes());
        mad::put_addresses(&mut bytes, ADDRESSES_AT, self.from, self.to);
        put(&mut bytes, REQUEST_DATA_AT, self.private_data);
        bytes
    }
}

impl Reply {
    /// Encodes the message.
    pub fn emit(&self) -> Bytes {
        let mut bytes = mad::begin(REPLY, self.exchange);
        bytes[STATUS] = self.status.0;
        put(&mut bytes, QP_AT, (self.qp.0 << 8).to_be_bytes());
        put(&mut bytes, REPLY_SERVICE, self.service.0.to_be_bytes());
        put(&mut bytes, Q_KEY_AT, self.q_key.to_be_bytes());
        put(&mut bytes, REPLY_DATA_AT, self.private_data);
        bytes
    }
}

/// Decodes a management datagram.
///
/// # Errors
///
/// Returns the reason if the datagram is not a SIDR message. The caller must not answer it.
pub fn parse(bytes: &[u8]) -> Result<Message, MadFault> {
    let (bytes, attribute, exchange) = mad::open(bytes)?;
    let service = |at| ServiceId(u64::from_be_bytes(part(bytes, at)));
    match attribute {
        REQUEST => {
            let (from, to) = mad::addresses(bytes, ADDRESSES_AT)?;
            Ok(Message::Request(Request {
                exchange,
                service: service(REQUEST_SERVICE),
                from,
                to,
                private_data: part(bytes, REQUEST_DATA_AT),
            }))
        }
        REPLY => Ok(Message::Reply(Reply {
            exchange,
            service: service(REPLY_SERVICE),
            status: Status(bytes[STATUS]),
            qp: QpId(word(bytes, QP_AT) >> 8),
            q_key: word(bytes, Q_KEY_AT),
            private_data: part(bytes, REPLY_DATA_AT),
        })),
        other => Err(MadFault::Attribute(other)),
    }
}

const REQUEST: u16 = 0x0017;
const REPLY: u16 = 0x0018;

const PARTITION_AT: usize = 28;
const REQUEST_SERVICE: usize = 32;
const ADDRESSES_AT: usize = 40;
const REQUEST_DATA_AT: usize = ADDRESSES_AT + ADDRESSES_LEN;

const STATUS: usize = 28;
const QP_AT: usize = 32;
const REPLY_SERVICE: usize = 36;
const Q_KEY_AT: usize = 44;
const REPLY_DATA_AT: usize = 120;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::PortSpace;
    use super::super::mad::{MESSAGE, zero_padded};
    use super::*;

    fn request() -> Request {
        Request {
            exchange: Exchange { transaction: 0x0102_0304_0506_0708, id: 0x0A0B_0C0D },
            service: ServiceId::new(PortSpace::Udp, 7471),
            from: ([192, 0, 2, 1], 0xC123).into(),
            to: [192, 0, 2, 2].into(),
            private_data: zero_padded(b"hello").expect("it fits"),
        }
    }

    fn reply() -> Reply {
        Reply {
            exchange: request().exchange,
            service: ServiceId::new(PortSpace::Udp, 7471),
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
        let over_ipv6 = Request {
            from: "[2001:db8::1]:9".parse().expect("an address"),
            to: "2001:db8::2".parse().expect("an address"),
            ..request()
        };
        for sent in [request(), over_ipv6] {
            assert_eq!(parse(&sent.emit()), Ok(Message::Request(sent)));
        }
        let rejected = Reply { status: Status::REJECTED, ..reply() };
        let unknown_status = Reply { status: Status(77), ..reply() };
        for sent in [reply(), rejected, unknown_status] {
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
            message[40..42].copy_from_slice(&[0, 4 << 4]);
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
