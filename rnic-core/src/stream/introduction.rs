//! Messages between daemons about RC and UC queue pairs, in the Private Data of MPA start-up. With
//! an introduction, an end that connects or accepts identifies itself. With a verification query, a
//! daemon that has received a connection request checks that the peer's daemon sent it.

use rnic_abi::types::{Gid, QpId};

/// The QP and its limits, sent by both ends of a stream. All numbers are big-endian, and offsets
/// are in bytes.
///
/// ```text
///  0  "RNWD"           40  own QP number           51  flags
///  4  version          44  QP number of the peer   52  first PSN to receive
///  5  first PSN sent   48  inbound reads           56  number of the request
///  8  own GID          50  minimum RNR NAK timer   64  daemon to reach
/// 24  GID of the peer
/// ```
///
/// Bit 0 of the flags means UC. Bit 1 means that the PSN at 5 is set; otherwise it is zero. Bits 2
/// to 4 are the path MTU as numbered by verbs: 1 is 256 bytes, 5 is 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Introduction {
    /// GID of the sender.
    pub gid: Gid,
    /// QP number of the sender.
    pub qp: QpId,
    /// GID of the peer.
    pub to_gid: Gid,
    /// QP number of the peer.
    pub to_qp: QpId,
    /// Maximum number of unanswered requests that the sender accepts, excluding acknowledgement
    /// requests.
    pub ird: u16,
    /// Code of the minimum RNR NAK timer, 0 to 31.
    pub min_rnr_timer: u8,
    /// True for UC, which neither requests nor sends acknowledgements.
    pub unreliable: bool,
    /// Path MTU of the sender, in bytes.
    pub path_mtu: u16,
    /// First PSN that the sender expects, 24 bits.
    pub rq_psn: u32,
    /// First PSN that the sender uses, 24 bits; `None` before RTS.
    pub sq_psn: Option<u32>,
    /// Random number of this connection request, which a [`VerificationQuery`] repeats; zero in the
    /// reply.
    pub dial: u64,
    /// Instance number of the daemon that the request is for; zero if it is unknown.
    pub daemon: u64,
}

impl Introduction {
    /// Encoded length in bytes.
    pub const LEN: usize = 72;

    /// Returns the encoded introduction.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        emit_ends(&mut bytes, INTRODUCTION, [self.gid, self.to_gid], [self.qp, self.to_qp]);
        bytes[5..8].copy_from_slice(&self.sq_psn.unwrap_or(0).to_be_bytes()[1..]);
        bytes[48..50].copy_from_slice(&self.ird.to_be_bytes());
        bytes[50] = self.min_rnr_timer;
        let sends = if self.sq_psn.is_some() { SENDS } else { 0 };
        bytes[51] = u8::from(self.unreliable) | sends | mtu_code(self.path_mtu) << MTU_SHIFT;
        bytes[52..56].copy_from_slice(&self.rq_psn.to_be_bytes());
        bytes[56..64].copy_from_slice(&self.dial.to_be_bytes());
        bytes[64..].copy_from_slice(&self.daemon.to_be_bytes());
        bytes
    }

    /// Decodes an introduction. Ignores trailing bytes, which later versions may add. Returns
    /// `None` for a different magic or version, or if bytes are missing.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.first_chunk()?;
        let ends = parse_ends(bytes, INTRODUCTION)?;
        Some(Introduction {
            gid: ends.gid,
            qp: ends.qp,
            to_gid: ends.to_gid,
            to_qp: ends.to_qp,
            ird: u16::from_be_bytes([bytes[48], bytes[49]]),
            min_rnr_timer: bytes[50] & 31,
            unreliable: bytes[51] & 1 != 0,
            path_mtu: 128 << (bytes[51] >> MTU_SHIFT & MTU_CODES),
            rq_psn: word(bytes, 52) & 0xFF_FFFF,
            // The word at 4 includes the version.
            sq_psn: (bytes[51] & SENDS != 0).then(|| word(bytes, 4) & 0xFF_FFFF),
            dial: long(bytes, 56),
            daemon: long(bytes, 64),
        })
    }
}

/// Verification query: is this connection request pending? The daemon that received the request
/// sends the query to the daemon at the GID that the request claims to come from. That daemon
/// answers with an MPA Reject. All numbers are big-endian, and offsets are in bytes.
///
/// ```text
///  0  "RNWQ"                 24  GID of the caller        48  number of the request
///  4  version                40  QP number called
///  8  GID called             44  QP number of the caller
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerificationQuery {
    /// GID called, which belongs to the daemon that sends the query.
    pub gid: Gid,
    /// QP number called.
    pub qp: QpId,
    /// GID of the caller as claimed by the request, which belongs to the daemon that answers.
    pub to_gid: Gid,
    /// QP number of the caller as claimed by the request.
    pub to_qp: QpId,
    /// Number of the connection request, from its introduction.
    pub dial: u64,
}

impl VerificationQuery {
    /// Encoded length in bytes.
    pub const LEN: usize = 56;

    /// Returns the query about a connection request.
    pub fn about(dial: &Introduction) -> Self {
        let Introduction { gid, qp, to_gid, to_qp, dial, .. } = *dial;
        VerificationQuery { gid: to_gid, qp: to_qp, to_gid: gid, to_qp: qp, dial }
    }

    /// Returns the encoded query.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        emit_ends(&mut bytes, VERIFICATION_QUERY, [self.gid, self.to_gid], [self.qp, self.to_qp]);
        bytes[48..].copy_from_slice(&self.dial.to_be_bytes());
        bytes
    }

    /// Decodes a query, under the same rules as [`Introduction::parse`].
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.first_chunk()?;
        let Ends { gid, qp, to_gid, to_qp } = parse_ends(bytes, VERIFICATION_QUERY)?;
        Some(VerificationQuery { gid, qp, to_gid, to_qp, dial: long(bytes, 48) })
    }

    /// Returns the Private Data of the answer.
    pub fn answer(is_pending: bool) -> [u8; 6] {
        let mut bytes = [0; 6];
        bytes[..4].copy_from_slice(VERIFICATION_QUERY);
        bytes[4] = VERSION;
        bytes[5] = u8::from(is_pending);
        bytes
    }

    /// Returns true if these Private Data confirm the connection request.
    pub fn is_confirmed_by(answer: &[u8]) -> bool {
        answer.starts_with(&Self::answer(true))
    }
}

/// The fields at the same offsets in both messages.
struct Ends {
    gid: Gid,
    qp: QpId,
    to_gid: Gid,
    to_qp: QpId,
}

fn emit_ends(bytes: &mut [u8], magic: &[u8; 4], gids: [Gid; 2], qps: [QpId; 2]) {
    bytes[..4].copy_from_slice(magic);
    bytes[4] = VERSION;
    bytes[8..24].copy_from_slice(&gids[0].0);
    bytes[24..40].copy_from_slice(&gids[1].0);
    bytes[40..44].copy_from_slice(&qps[0].0.to_be_bytes());
    bytes[44..48].copy_from_slice(&qps[1].0.to_be_bytes());
}

/// Decodes the fields that both messages have. `bytes` must have at least 56 bytes.
fn parse_ends(bytes: &[u8], magic: &[u8; 4]) -> Option<Ends> {
    let gid = |at: usize| Gid(bytes[at..at + 16].try_into().unwrap_or_default());
    let is_one = bytes.starts_with(magic) && bytes[4] == VERSION;
    is_one.then(|| Ends {
        gid: gid(8),
        qp: QpId(word(bytes, 40)),
        to_gid: gid(24),
        to_qp: QpId(word(bytes, 44)),
    })
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap_or_default())
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap_or_default())
}

const INTRODUCTION: &[u8; 4] = b"RNWD";
const VERIFICATION_QUERY: &[u8; 4] = b"RNWQ";
/// Version of both messages. Version 1 had no verification query.
const VERSION: u8 = 2;
/// Flag of an introduction that contains the first PSN sent.
const SENDS: u8 = 2;
/// Position of the path MTU in the flags.
const MTU_SHIFT: u8 = 2;
/// Mask of the path MTU in the flags, after shifting.
const MTU_CODES: u8 = 7;

/// Returns the number of a path MTU (`ibv_mtu`): 1 to 5 for 256 to 4096 bytes, 0 for less.
fn mtu_code(bytes: u16) -> u8 {
    match bytes {
        0..256 => 0,
        256..512 => 1,
        512..1024 => 2,
        1024..2048 => 3,
        2048..4096 => 4,
        4096.. => 5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introduction() -> Introduction {
        Introduction {
            gid: Gid([1; 16]),
            qp: QpId(0x0102_0304),
            to_gid: Gid([2; 16]),
            to_qp: QpId(5),
            ird: 0x0607,
            min_rnr_timer: 8,
            unreliable: true,
            path_mtu: 1024,
            rq_psn: 0x09_0A0B,
            sq_psn: Some(0x0C_0D0E),
            dial: 0x1112_1314_1516_1718,
            daemon: 0x2122_2324_2526_2728,
        }
    }

    #[test]
    fn introduction_round_trips() {
        let sent = introduction();
        let bytes = sent.emit();
        assert_eq!(bytes[..8], *b"RNWD\x02\x0C\x0D\x0E");
        assert_eq!(bytes[8..40], [[1; 16], [2; 16]].concat());
        assert_eq!(bytes[40..56], [1, 2, 3, 4, 0, 0, 0, 5, 6, 7, 8, 3 | 3 << 2, 0, 9, 10, 11]);
        let numbers = [17, 18, 19, 20, 21, 22, 23, 24, 33, 34, 35, 36, 37, 38, 39, 40];
        assert_eq!(bytes[56..], numbers);
        assert_eq!(Introduction::parse(&bytes), Some(sent));
        let before_rts = Introduction { sq_psn: None, ..sent };
        assert_eq!(before_rts.emit()[5..8], [0; 3]);
        assert_eq!(Introduction::parse(&before_rts.emit()), Some(before_rts));
        for path_mtu in [256, 512, 2048, 4096] {
            let other = Introduction { path_mtu, ..sent };
            assert_eq!(Introduction::parse(&other.emit()), Some(other));
        }
    }

    #[test]
    fn ask_back_round_trips() {
        let question = VerificationQuery::about(&introduction());
        let bytes = question.emit();
        assert_eq!(bytes[..8], *b"RNWQ\x02\0\0\0");
        assert_eq!(bytes[8..40], [[2; 16], [1; 16]].concat());
        assert_eq!(bytes[40..48], [0, 0, 0, 5, 1, 2, 3, 4]);
        assert_eq!(bytes[48..], [17, 18, 19, 20, 21, 22, 23, 24]);
        assert_eq!(VerificationQuery::parse(&bytes), Some(question));
        assert_eq!(VerificationQuery::answer(true), *b"RNWQ\x02\x01");
        assert!(VerificationQuery::is_confirmed_by(&VerificationQuery::answer(true)));
        for other in [&VerificationQuery::answer(false)[..], b"", b"RNWQ\x02", b"RNWD\x02\x01"] {
            assert!(!VerificationQuery::is_confirmed_by(other), "{other:?}");
        }
    }

    #[test]
    fn other_bytes_are_neither_message() {
        let introduction = introduction().emit().to_vec();
        let ask_back = VerificationQuery::about(&self::introduction()).emit().to_vec();
        let is_either = |bytes: &[u8]| {
            Introduction::parse(bytes).is_some() || VerificationQuery::parse(bytes).is_some()
        };
        for message in [introduction, ask_back] {
            for cut in 0..message.len() {
                assert!(!is_either(&message[..cut]), "{cut}");
            }
            for at in [0, 3, 4] {
                let mut other = message.clone();
                other[at] ^= 1;
                assert!(!is_either(&other), "{at}");
            }
            // Later versions may add bytes.
            assert!(is_either(&[&message[..], &[9]].concat()));
        }
    }
}
