//! What two queue pairs that are wired by hand tell each other in the Private Data of MPA start-up:
//! who they are, whom they mean, and what the other has to keep to.

use crate::types::{Gid, QpId};

/// One end introduces itself. All numbers are big-endian.
///
/// ```text
///  0  "RNWD"           40  own number            50  minimum RNR NAK timer
///  4  version          44  number of the other   51  flags
///  5  PSN sent from    48  inbound reads         52  PSN awaited
///  8  own GID
/// 24  GID of the other
/// ```
///
/// Flags are 1 without acknowledgements, and 2 with a PSN at 5, which is zero otherwise. Bits 2 to 4
/// have the path MTU as verbs number it: 1 is 256 bytes, 5 is 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Introduction {
    /// GID of the end that speaks.
    pub gid: Gid,
    /// Its number.
    pub qp: QpId,
    /// GID of the end that is meant.
    pub to_gid: Gid,
    /// Its number.
    pub to_qp: QpId,
    /// Requests that the end that speaks takes without an answer, the one that asks for an
    /// acknowledgement aside.
    pub ird: u16,
    /// Code of its minimum RNR NAK timer.
    pub min_rnr_timer: u8,
    /// It neither wants nor gives acknowledgements.
    pub unreliable: bool,
    /// Path MTU of the end that speaks, in bytes.
    pub path_mtu: u16,
    /// PSN that it awaits first, 24 bits.
    pub rq_psn: u32,
    /// The one that it sends from, likewise; none if it has not been told (RTS).
    pub sq_psn: Option<u32>,
}

impl Introduction {
    /// Bytes of it.
    pub const LEN: usize = 56;

    /// Its bytes.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..4].copy_from_slice(MAGIC);
        bytes[4] = VERSION;
        bytes[5..8].copy_from_slice(&self.sq_psn.unwrap_or(0).to_be_bytes()[1..]);
        bytes[8..24].copy_from_slice(&self.gid.0);
        bytes[24..40].copy_from_slice(&self.to_gid.0);
        bytes[40..44].copy_from_slice(&self.qp.0.to_be_bytes());
        bytes[44..48].copy_from_slice(&self.to_qp.0.to_be_bytes());
        bytes[48..50].copy_from_slice(&self.ird.to_be_bytes());
        bytes[50] = self.min_rnr_timer;
        let sends = if self.sq_psn.is_some() { SENDS } else { 0 };
        bytes[51] = u8::from(self.unreliable) | sends | mtu_code(self.path_mtu) << MTU_SHIFT;
        bytes[52..].copy_from_slice(&self.rq_psn.to_be_bytes());
        bytes
    }

    /// From its bytes; what follows them is of later versions. None if they are none of it.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.first_chunk()?;
        let word = |at: usize| {
            let word: [u8; 4] = bytes[at..at + 4].try_into().unwrap_or_default();
            u32::from_be_bytes(word)
        };
        let gid = |at: usize| Gid(bytes[at..at + 16].try_into().unwrap_or_default());
        let is_one = bytes.starts_with(MAGIC) && bytes[4] == VERSION;
        is_one.then(|| Introduction {
            gid: gid(8),
            qp: QpId(word(40)),
            to_gid: gid(24),
            to_qp: QpId(word(44)),
            ird: u16::from_be_bytes([bytes[48], bytes[49]]),
            min_rnr_timer: bytes[50] & 31,
            unreliable: bytes[51] & 1 != 0,
            path_mtu: 128 << (bytes[51] >> MTU_SHIFT & MTU_CODES),
            rq_psn: word(52) & 0xFF_FFFF,
            // Behind the version.
            sq_psn: (bytes[51] & SENDS != 0).then(|| word(4) & 0xFF_FFFF),
        })
    }
}

const MAGIC: &[u8; 4] = b"RNWD";
const VERSION: u8 = 1;
/// The flag of one that has been told from which PSN it sends.
const SENDS: u8 = 2;
/// Place of the path MTU among the flags.
const MTU_SHIFT: u8 = 2;
/// Largest number of a path MTU there.
const MTU_CODES: u8 = 7;

/// Number of a path MTU (`ibv_mtu`): its logarithm, 128 bytes being 0.
fn mtu_code(bytes: u16) -> u8 {
    (bytes.checked_ilog2().unwrap_or(0) as u8).saturating_sub(7) & MTU_CODES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_as_it_was_written_and_nothing_else_is() {
        let said = Introduction {
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
        };
        let bytes = said.emit();
        assert_eq!(bytes[5..8], [12, 13, 14]);
        assert_eq!(bytes[40..], [1, 2, 3, 4, 0, 0, 0, 5, 6, 7, 8, 3 | 3 << 2, 0, 9, 10, 11]);
        assert_eq!(Introduction::parse(&bytes), Some(said));
        let earlier = Introduction { sq_psn: None, ..said };
        assert_eq!(earlier.emit()[5..8], [0; 3]);
        assert_eq!(Introduction::parse(&earlier.emit()), Some(earlier));
        for path_mtu in [256, 512, 2048, 4096] {
            let other = Introduction { path_mtu, ..said };
            assert_eq!(Introduction::parse(&other.emit()), Some(other));
        }
        let mut longer = bytes.to_vec();
        longer.push(9);
        assert_eq!(Introduction::parse(&longer), Some(said));
        assert_eq!(Introduction::parse(&bytes[..Introduction::LEN - 1]), None);
        for at in [0, 4] {
            let mut other = bytes;
            other[at] ^= 1;
            assert_eq!(Introduction::parse(&other), None);
        }
    }
}
