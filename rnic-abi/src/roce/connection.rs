//! Management datagrams that connect RC and UC QPs.
//!
//! The formats follow the IBTA specification, volume 1, section 12.6; [`mad`] describes the header.
//! The active end sends REQ, the passive end answers with REP or REJ, and the active end confirms
//! with RTU. MRA asks for more time. DREQ ends a connection, and DREP answers it. Each end chooses
//! an ID for the connection, and messages contain the sender's and the receiver's.
//!
//! RoCE has no LIDs, so the alternate path and the LIDs are not used.

use std::net::{IpAddr, SocketAddr};

use super::ServiceId;
use super::mad::{self, ADDRESSES_LEN, Bytes, Exchange, LEN, MadFault, part, put, word};
use super::p_key::DEFAULT_P_KEY;
use crate::types::{Gid, QpId};

/// Size of the private data of a request after the IP addresses, in bytes.
pub const REQUEST_DATA: usize = 92 - ADDRESSES_LEN;
/// Size of the private data of a reply, in bytes.
pub const REPLY_DATA: usize = LEN - REPLY_DATA_AT;
/// Size of the private data of a rejection, in bytes.
pub const REJECT_DATA: usize = LEN - REJECT_DATA_AT;

/// A message between the ends of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// REQ.
    Request(Box<Request>),
    /// MRA.
    Delay(Delay),
    /// REJ.
    Reject(Box<Reject>),
    /// REP.
    Reply(Box<Reply>),
    /// RTU.
    Ready(Ids),
    /// DREQ, with the QP of its receiver.
    Disconnect(Ids, QpId),
    /// DREP.
    Disconnected(Ids),
}

/// IDs of a message: the sender's, the receiver's and the transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ids {
    /// Transaction and ID of the sender. The ID is 0 if the sender has none.
    pub exchange: Exchange,
    /// ID of the receiver. 0 in the rejection of an unreadable message.
    pub receiver: u32,
}

/// Type of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Between RC QPs.
    Reliable,
    /// Between UC QPs.
    Unreliable,
}

/// Request to connect a QP (REQ).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Transaction, and the sender's ID of the connection.
    pub exchange: Exchange,
    /// Requested service.
    pub service: ServiceId,
    /// GUID of the sender's device.
    pub guid: u64,
    /// The sender's QP, 24 bits.
    pub qp: QpId,
    /// Starting PSN, 24 bits: the PSN of the first packet that the sender expects.
    pub psn: u32,
    /// Outstanding Reads and atomic operations that the sender accepts.
    pub responder_resources: u8,
    /// Outstanding Reads and atomic operations that the sender requests.
    pub initiator_depth: u8,
    /// Type of the connection.
    pub kind: Service,
    /// Time in which the sender expects an answer: 4.096 us times 2 to the power of this value.
    pub response_timeout: u8,
    /// Number of times that the sender repeats a message, 4 bits.
    pub max_cm_retries: u8,
    /// Retries after an ACK timeout, 3 bits.
    pub retry_count: u8,
    /// Retries after an RNR NAK of the sender, 3 bits.
    pub rnr_retry: u8,
    /// Code of the path MTU: 1 (256 bytes) to 5 (4096 bytes).
    pub path_mtu: u8,
    /// The sender's QP has an SRQ.
    pub srq: bool,
    /// Traffic class of the path.
    pub traffic_class: u8,
    /// ACK timeout of the path, 5 bits.
    pub ack_timeout: u8,
    /// The sender's GID.
    pub from_gid: Gid,
    /// GID of the destination.
    pub to_gid: Gid,
    /// Address and port of the sender.
    pub from: SocketAddr,
    /// Destination address.
    pub to: IpAddr,
    /// Private data of the application, padded with zeros.
    pub private_data: [u8; REQUEST_DATA],
}

/// Accepts a request (REP).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// IDs. The transaction is that of the request.
    pub ids: Ids,
    /// The sender's QP, 24 bits.
    pub qp: QpId,
    /// Starting PSN, 24 bits: the PSN of the first packet that the sender expects.
    pub psn: u32,
    /// Outstanding Reads and atomic operations that the sender accepts.
    pub responder_resources: u8,
    /// Outstanding Reads and atomic operations that the sender requests.
    pub initiator_depth: u8,
    /// Retries after an RNR NAK of the sender, 3 bits.
    pub rnr_retry: u8,
    /// The sender's QP has an SRQ.
    pub srq: bool,
    /// GUID of the sender's device.
    pub guid: u64,
    /// Private data of the application, padded with zeros.
    pub private_data: [u8; REPLY_DATA],
}

/// Rejects a request or a reply (REJ).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// IDs. The transaction is that of the request.
    pub ids: Ids,
    /// The rejected message.
    pub of: Rejected,
    /// Reason code.
    pub reason: Reason,
    /// Private data of the application, padded with zeros.
    pub private_data: [u8; REJECT_DATA],
}

/// Asks for more time to answer (MRA).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    /// IDs. The transaction is that of the request.
    pub ids: Ids,
    /// The message that is not answered yet.
    pub of: Rejected,
    /// Further time for the answer: 4.096 us times 2 to the power of this value, 5 bits.
    pub timeout: u8,
}

/// The message that REJ or MRA refers to, 2 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejected(pub u8);

impl Rejected {
    /// REQ.
    pub const REQUEST: Rejected = Rejected(0);
    /// REP.
    pub const REPLY: Rejected = Rejected(1);
    /// Neither.
    pub const OTHER: Rejected = Rejected(2);
}

/// Reason of a rejection. Numbers other than the constants are possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reason(pub u16);

impl Reason {
    /// The request names no QP.
    pub const NO_QP: Reason = Reason(1);
    /// The daemon accepts no connections now.
    pub const NO_RESOURCES: Reason = Reason(3);
    /// The answer did not arrive in time.
    pub const TIMEOUT: Reason = Reason(4);
    /// No program listens at the port.
    pub const INVALID_SERVICE: Reason = Reason(8);
    /// The port space or the accepting QP does not support the requested type.
    pub const INVALID_SERVICE_TYPE: Reason = Reason(9);
    /// The QP of the request is connected already, or the message belongs to a connection that has
    /// ended.
    pub const STALE: Reason = Reason(10);
    /// The GID of the request is not that of its sender.
    pub const INVALID_GID: Reason = Reason(12);
    /// The path MTU code is invalid.
    pub const INVALID_MTU: Reason = Reason(26);
    /// The program rejects the connection.
    pub const CONSUMER: Reason = Reason(28);
}

impl Message {
    /// Encodes the message.
    pub fn emit(&self) -> Bytes {
        match self {
            Message::Request(request) => request.emit(),
            Message::Delay(delay) => delay.emit(),
            Message::Reject(reject) => reject.emit(),
            Message::Reply(reply) => reply.emit(),
            Message::Ready(ids) => ids.emit_ready(),
            Message::Disconnect(ids, qp) => ids.emit_disconnect(*qp),
            Message::Disconnected(ids) => ids.emit_disconnected(),
        }
    }
}

impl Request {
    /// Encodes the message.
    pub fn emit(&self) -> Bytes {
        let mut bytes = mad::begin(REQUEST, self.exchange);
        let kind = match self.kind {
            Service::Reliable => 0,
            Service::Unreliable => 1,
        };
        put(&mut bytes, SERVICE, self.service.0.to_be_bytes());
        put(&mut bytes, REQUEST_GUID, self.guid.to_be_bytes());
        put(&mut bytes, REQUEST_QP, high(self.qp.0, self.responder_resources));
        put(&mut bytes, EECN, high(0, self.initiator_depth));
        put(&mut bytes, REMOTE_EECN, high(0, self.response_timeout << 3 | kind << 1));
        put(
            &mut bytes,
            REQUEST_PSN,
            high(self.psn, self.response_timeout << 3 | self.retry_count & 7),
        );
        put(&mut bytes, PARTITION, DEFAULT_P_KEY.to_be_bytes());
        bytes[MTU] = self.path_mtu << 4 | self.rnr_retry & 7;
        bytes[CM_RETRIES] = self.max_cm_retries << 4 | u8::from(self.srq) << 3;
        put(&mut bytes, LOCAL_LID, LID.to_be_bytes());
        put(&mut bytes, REMOTE_LID, LID.to_be_bytes());
        put(&mut bytes, FROM_GID, self.from_gid.0);
        put(&mut bytes, TO_GID, self.to_gid.0);
        bytes[TRAFFIC_CLASS] = self.traffic_class;
        bytes[HOP_LIMIT] = HOPS;
        bytes[ACK_TIMEOUT] = self.ack_timeout << 3;
        mad::put_addresses(&mut bytes, REQUEST_ADDRESSES, self.from, self.to);
        put(&mut bytes, REQUEST_ADDRESSES + ADDRESSES_LEN, self.private_data);
        bytes
    }
}

impl Reply {
    /// Encodes the message.
    pub fn emit(&self) -> Bytes {
        let mut bytes = self.ids.begin(REPLY);
        put(&mut bytes, REPLY_QP, high(self.qp.0, 0));
        put(&mut bytes, REPLY_PSN, high(self.psn, 0));
        bytes[RESPONDER_RESOURCES] = self.responder_resources;
        bytes[INITIATOR_DEPTH] = self.initiator_depth;
        bytes[REPLY_RNR] = (self.rnr_retry & 7) << 5 | u8::from(self.srq) << 4;
        put(&mut bytes, REPLY_GUID, self.guid.to_be_bytes());
        put(&mut bytes, REPLY_DATA_AT, self.private_data);
        bytes
    }
}

impl Reject {
    /// Encodes the message.
    pub fn emit(&self) -> Bytes {
        let mut bytes = self.ids.begin(REJECT);
        bytes[OF] = self.of.0 << 6;
        put(&mut bytes, REASON, self.reason.0.to_be_bytes());
        put(&mut bytes, REJECT_DATA_AT, self.private_data);
        bytes
    }
}

impl Delay {
    /// Encodes the message.
    pub fn emit(&self) -> Bytes {
        let mut bytes = self.ids.begin(DELAY);
        bytes[OF] = self.of.0 << 6;
        bytes[DELAY_TIMEOUT] = self.timeout << 3;
        bytes
    }
}

impl Ids {
    /// Encodes RTU.
    pub fn emit_ready(&self) -> Bytes {
        self.begin(READY)
    }

    /// Encodes DREQ for the receiver's QP.
    pub fn emit_disconnect(&self, qp: QpId) -> Bytes {
        let mut bytes = self.begin(DISCONNECT);
        put(&mut bytes, DISCONNECT_QP, high(qp.0, 0));
        bytes
    }

    /// Encodes DREP.
    pub fn emit_disconnected(&self) -> Bytes {
        self.begin(DISCONNECTED)
    }

    /// Returns the IDs of an answer in the same transaction.
    pub fn answered_by(&self, id: u32) -> Ids {
        let transaction = self.exchange.transaction;
        Ids { exchange: Exchange { transaction, id }, receiver: self.exchange.id }
    }

    fn begin(&self, attribute: u16) -> Bytes {
        let mut bytes = mad::begin(attribute, self.exchange);
        put(&mut bytes, RECEIVER, self.receiver.to_be_bytes());
        bytes
    }
}

/// Decodes a management datagram.
///
/// # Errors
///
/// Returns the reason if the datagram is not one of these messages. The caller must not answer it.
pub fn parse(bytes: &[u8]) -> Result<Message, MadFault> {
    let (bytes, attribute, exchange) = mad::open(bytes)?;
    let ids = Ids { exchange, receiver: word(bytes, RECEIVER) };
    Ok(match attribute {
        REQUEST => Message::Request(Box::new(request(bytes, exchange)?)),
        DELAY => Message::Delay(Delay {
            ids,
            of: Rejected(bytes[OF] >> 6),
            timeout: bytes[DELAY_TIMEOUT] >> 3,
        }),
        REJECT => Message::Reject(Box::new(Reject {
            ids,
            of: Rejected(bytes[OF] >> 6),
            reason: Reason(u16::from_be_bytes(part(bytes, REASON))),
            private_data: part(bytes, REJECT_DATA_AT),
        })),
        REPLY => Message::Reply(Box::new(Reply {
            ids,
            qp: QpId(word(bytes, REPLY_QP) >> 8),
            psn: word(bytes, REPLY_PSN) >> 8,
            responder_resources: bytes[RESPONDER_RESOURCES],
            initiator_depth: bytes[INITIATOR_DEPTH],
            rnr_retry: bytes[REPLY_RNR] >> 5,
            srq: bytes[REPLY_RNR] & 1 << 4 != 0,
            guid: u64::from_be_bytes(part(bytes, REPLY_GUID)),
            private_data: part(bytes, REPLY_DATA_AT),
        })),
        READY => Message::Ready(ids),
        DISCONNECT => Message::Disconnect(ids, QpId(word(bytes, DISCONNECT_QP) >> 8)),
        DISCONNECTED => Message::Disconnected(ids),
        other => return Err(MadFault::Attribute(other)),
    })
}

fn request(bytes: &Bytes, exchange: Exchange) -> Result<Request, MadFault> {
    let (from, to) = mad::addresses(bytes, REQUEST_ADDRESSES)?;
    let kind = match bytes[REMOTE_EECN + 3] >> 1 & 3 {
        0 => Service::Reliable,
        1 => Service::Unreliable,
        _ => return Err(MadFault::Attribute(REQUEST)),
    };
    Ok(Request {
        exchange,
        service: ServiceId(u64::from_be_bytes(part(bytes, SERVICE))),
        guid: u64::from_be_bytes(part(bytes, REQUEST_GUID)),
        qp: QpId(word(bytes, REQUEST_QP) >> 8),
        psn: word(bytes, REQUEST_PSN) >> 8,
        responder_resources: bytes[REQUEST_QP + 3],
        initiator_depth: bytes[EECN + 3],
        kind,
        response_timeout: bytes[REQUEST_PSN + 3] >> 3,
        max_cm_retries: bytes[CM_RETRIES] >> 4,
        retry_count: bytes[REQUEST_PSN + 3] & 7,
        rnr_retry: bytes[MTU] & 7,
        path_mtu: bytes[MTU] >> 4,
        srq: bytes[CM_RETRIES] & 1 << 3 != 0,
        traffic_class: bytes[TRAFFIC_CLASS],
        ack_timeout: bytes[ACK_TIMEOUT] >> 3,
        from_gid: Gid(part(bytes, FROM_GID)),
        to_gid: Gid(part(bytes, TO_GID)),
        from,
        to,
        private_data: part(bytes, REQUEST_ADDRESSES + ADDRESSES_LEN),
    })
}

/// Returns a field of 24 bits followed by a field of 8 bits.
fn high(high: u32, low: u8) -> [u8; 4] {
    (high << 8 | u32::from(low)).to_be_bytes()
}

const REQUEST: u16 = 0x0010;
const DELAY: u16 = 0x0011;
const REJECT: u16 = 0x0012;
const REPLY: u16 = 0x0013;
const READY: u16 = 0x0014;
const DISCONNECT: u16 = 0x0015;
const DISCONNECTED: u16 = 0x0016;

/// ID of the receiver, in all messages except REQ.
const RECEIVER: usize = 28;

// REQ. The fields of the end-to-end context are zero except for their low bytes.
const SERVICE: usize = 32;
const REQUEST_GUID: usize = 40;
const REQUEST_QP: usize = 56;
const EECN: usize = 60;
const REMOTE_EECN: usize = 64;
const REQUEST_PSN: usize = 68;
const PARTITION: usize = 72;
const MTU: usize = 74;
const CM_RETRIES: usize = 75;
const LOCAL_LID: usize = 76;
const REMOTE_LID: usize = 78;
const FROM_GID: usize = 80;
const TO_GID: usize = 96;
const TRAFFIC_CLASS: usize = 116;
const HOP_LIMIT: usize = 117;
const ACK_TIMEOUT: usize = 119;
const REQUEST_ADDRESSES: usize = 164;
/// The permissive LID, as in the requests of the kernel's RoCE devices.
const LID: u16 = 0xFFFF;
/// The kernel's default hop limit.
const HOPS: u8 = 64;

// REP.
const REPLY_QP: usize = 36;
const REPLY_PSN: usize = 44;
const RESPONDER_RESOURCES: usize = 48;
const INITIATOR_DEPTH: usize = 49;
const REPLY_RNR: usize = 51;
const REPLY_GUID: usize = 52;
const REPLY_DATA_AT: usize = 60;

// REJ and MRA.
const OF: usize = 32;
const DELAY_TIMEOUT: usize = 33;
const REASON: usize = 34;
const REJECT_DATA_AT: usize = 108;

// DREQ.
const DISCONNECT_QP: usize = 32;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::PortSpace;
    use super::super::mad::zero_padded;
    use super::*;

    const IDS: Ids = Ids {
        exchange: Exchange { transaction: 0x0102_0304_0506_0708, id: 0x0A0B_0C0D },
        receiver: 0x1A1B_1C1D,
    };

    fn a_request() -> Request {
        Request {
            exchange: IDS.exchange,
            service: ServiceId::new(PortSpace::Tcp, 7471),
            guid: 0x0230_95FF_FEB1_D8CE,
            qp: QpId(0x12_3456),
            psn: 0x65_4321,
            responder_resources: 16,
            initiator_depth: 8,
            kind: Service::Reliable,
            response_timeout: 20,
            max_cm_retries: 15,
            retry_count: 7,
            rnr_retry: 6,
            path_mtu: 3,
            srq: true,
            traffic_class: 0x28,
            ack_timeout: 17,
            from_gid: Gid::from(IpAddr::from([192, 0, 2, 1])),
            to_gid: Gid::from(IpAddr::from([192, 0, 2, 2])),
            from: ([192, 0, 2, 1], 0xC123).into(),
            to: [192, 0, 2, 2].into(),
            private_data: zero_padded(b"hello").expect("it fits"),
        }
    }

    fn a_reply() -> Reply {
        Reply {
            ids: IDS,
            qp: QpId(0x12_3456),
            psn: 0x65_4321,
            responder_resources: 16,
            initiator_depth: 8,
            rnr_retry: 7,
            srq: true,
            guid: 0x0230_95FF_FEB1_D8CE,
            private_data: zero_padded(b"welcome").expect("it fits"),
        }
    }

    fn a_rejection() -> Reject {
        let private_data = zero_padded(b"no").expect("it fits");
        Reject { ids: IDS, of: Rejected::REPLY, reason: Reason::CONSUMER, private_data }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn header(attribute: &str) -> String {
        format!("010702030000000001020304050607080{attribute}0000000000000a0b0c0d")
    }

    #[test]
    fn request_matches_the_specification() {
        let bytes = a_request().emit();
        assert_eq!(hex(&bytes[..28]), header("010"));
        assert_eq!(hex(&bytes[28..40]), "000000000000000001061d2f");
        assert_eq!(hex(&bytes[40..56]), "023095fffeb1d8ce0000000000000000");
        assert_eq!(
            hex(&bytes[56..76]),
            "12345610000000080000 00a0654321a7ffff36f8".replace(' ', "")
        );
        assert_eq!(hex(&bytes[76..80]), "ffffffff");
        assert_eq!(hex(&bytes[80..96]), "00000000000000000000ffffc0000201");
        assert_eq!(hex(&bytes[96..112]), "00000000000000000000ffffc0000202");
        assert_eq!(hex(&bytes[112..120]), "0000000028400088");
        assert_eq!(bytes[120..164], [0; 44]);
        assert_eq!(hex(&bytes[164..168]), "0040c123");
        assert_eq!(
            hex(&bytes[168..200]),
            "000000000000000000000000c0000201".to_owned() + "000000000000000000000000c0000202"
        );
        assert_eq!((&bytes[200..205], bytes[205..] == [0; 51]), (&b"hello"[..], true));
        assert_eq!((REQUEST_DATA, REPLY_DATA, REJECT_DATA), (56, 196, 148));
    }

    #[test]
    fn answers_match_the_specification() {
        let bytes = a_reply().emit();
        assert_eq!(hex(&bytes[..32]), header("013") + "1a1b1c1d");
        assert_eq!(hex(&bytes[32..52]), "00000000123456000000000065432100100800f0");
        assert_eq!(hex(&bytes[52..60]), "023095fffeb1d8ce");
        assert_eq!(&bytes[60..67], b"welcome");
        let bytes = a_rejection().emit();
        assert_eq!(hex(&bytes[..32]), header("012") + "1a1b1c1d");
        assert_eq!((hex(&bytes[32..36]), &bytes[108..110]), ("4000001c".to_owned(), &b"no"[..]));
        let bytes = Delay { ids: IDS, of: Rejected::REQUEST, timeout: 24 }.emit();
        assert_eq!(hex(&bytes[..34]), header("011") + "1a1b1c1d00c0");
        assert_eq!(hex(&IDS.emit_ready()[..32]), header("014") + "1a1b1c1d");
        assert_eq!(hex(&IDS.emit_disconnect(QpId(7))[..36]), header("015") + "1a1b1c1d00000700");
        assert_eq!(hex(&IDS.emit_disconnected()[..32]), header("016") + "1a1b1c1d");
    }

    #[test]
    fn messages_round_trip() {
        let over_ipv6 = Request {
            from: "[2001:db8::1]:9".parse().expect("an address"),
            to: "2001:db8::2".parse().expect("an address"),
            kind: Service::Unreliable,
            srq: false,
            ..a_request()
        };
        let delay = Delay { ids: IDS, of: Rejected::OTHER, timeout: 31 };
        for sent in [
            Message::Request(a_request().into()),
            Message::Request(over_ipv6.into()),
            Message::Reply(a_reply().into()),
            Message::Reject(Reject { reason: Reason(77), ..a_rejection() }.into()),
            Message::Delay(delay),
            Message::Ready(IDS),
            Message::Disconnect(IDS, QpId(9)),
            Message::Disconnected(IDS),
        ] {
            assert_eq!(parse(&sent.emit()), Ok(sent));
        }
    }

    #[test]
    fn invalid_messages_are_refused() {
        for len in 0..LEN {
            assert_eq!(parse(&a_request().emit()[..len]), Err(MadFault::Length(len)));
        }
        let spoilt = |at: usize, byte: u8| {
            let mut bytes = a_request().emit();
            bytes[at] = byte;
            parse(&bytes)
        };
        assert_eq!(spoilt(1, 3), Err(MadFault::Class(0x0103_0203)));
        assert_eq!(spoilt(17, 0x19), Err(MadFault::Attribute(0x19)));
        assert_eq!(spoilt(164, 1), Err(MadFault::Addresses(0x0140)));
        // Transports 2 (reliable datagram) and 3.
        for transport in [2, 3] {
            assert_eq!(spoilt(67, transport << 1), Err(MadFault::Attribute(REQUEST)));
        }
    }

    proptest! {
        #[test]
        fn parsed_messages_round_trip(bytes in prop::collection::vec(any::<u8>(), LEN - 24),
            attribute in REQUEST..=DISCONNECTED) {
            let mut message = mad::begin(attribute, IDS.exchange);
            message[24..].copy_from_slice(&bytes);
            if let Ok(parsed) = parse(&message) {
                prop_assert_eq!(parse(&parsed.emit()), Ok(parsed));
            }
        }
    }
}
