//! Compares framer and deframer with an independent encoder, which follows RFC 5044 byte by byte.

use super::tests::{frame, pattern};
use super::*;

/// Computes CRC32c bit by bit, as iSCSI defines it (RFC 3720 section 12.1).
fn crc(bytes: &[u8]) -> [u8; 4] {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 };
        }
    }
    (!crc).to_le_bytes()
}

/// One direction of a connection, with its position in the stream.
struct Encoder {
    position: u64,
    markers: bool,
    crc: bool,
}

impl Encoder {
    fn fpdu(&mut self, ulpdu: &[u8]) -> Vec<u8> {
        let mut plain = (ulpdu.len() as u16).to_be_bytes().to_vec();
        plain.extend(ulpdu);
        while !plain.len().is_multiple_of(4) {
            plain.push(0);
        }
        let mut out = Vec::new();
        let mut length_at = None;
        for byte in plain {
            self.marker(&mut out, length_at);
            length_at.get_or_insert(self.position);
            out.push(byte);
            self.position += 1;
        }
        // The CRC also covers a Marker between pad and CRC.
        self.marker(&mut out, length_at);
        let crc = if self.crc { crc(&out) } else { [0; 4] };
        out.extend(crc);
        self.position += 4;
        out
    }

    /// Writes a Marker if one is due at this position (section 4.3).
    fn marker(&mut self, out: &mut Vec<u8>, length_at: Option<u64>) {
        if self.markers && self.position.is_multiple_of(512) {
            let back = length_at.map_or(0, |at| self.position - at);
            assert_eq!(back % 4, 0);
            out.extend([0, 0, (back >> 8) as u8, back as u8]);
            self.position += 4;
        }
    }
}

//= MPA-3-1
//= MPA-4.1-1
//= MPA-4.1-2
//= MPA-4.1-3
//= MPA-4.1-5
//= MPA-4.1-7
//= MPA-4.2-1
//= MPA-4.2-2
//= MPA-4.2-4
//= MPA-4.2-6
//= MPA-4.3-1
//= MPA-4.3-4
//= MPA-4.3-5
//= MPA-4.3-7
//= MPA-4.3-9
//= MPA-4.3-10
//= MPA-4.3-11
//= MPA-4.3-12
//= MPA-4.4-1
//= MPA-4.4-12
//= MPA-4.4-13
//= MPA-4.4-14
//= MPA-4.4-15
//= MPA-4.4-16
//= MPA-4.4-17
#[test]
fn framer_matches_reference_encoder() {
    for (markers, crc) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut encoder = Encoder { position: 0, markers, crc };
        let mut framer = Framer::new(markers, crc);
        for len in (0..1100).chain([1442, 1454, 8954, 30_001, 64_768]) {
            let ulpdu = pattern(len);
            let (header, payload) = ulpdu.split_at(len.min(14));
            let expected = encoder.fpdu(&ulpdu);
            assert_eq!(frame(&mut framer, header, payload), expected, "{len} {markers} {crc}");
            assert!(expected.len() >= 6 + len && expected.len().is_multiple_of(4));
        }
    }
}

//= MPA-4.3-6
//= MPA-4.3-7
//= MPA-4.3-10
//= MPA-4.3-14
//= MPA-4.4-18
//= MPA-5.2-1
//= MPA-6-2
//= MPA-6-4
#[test]
fn deframer_reads_reference_at_every_phase() {
    for len in [0, 1, 2, 14, 18, 27, 240, 498, 502, 506, 700, 1100, 5000] {
        let ulpdu = pattern(len);
        // All phases, including where TCP's sequence numbers wrap.
        for position in (0..512).chain((1 << 32) - 512..1 << 32).step_by(4) {
            let mut encoder = Encoder { position, markers: true, crc: true };
            let mut fpdus = [encoder.fpdu(&ulpdu), encoder.fpdu(b"and the next")];
            let mut deframer = Deframer::at_phase((position % 512) as usize);
            for (fpdu, expected) in fpdus.iter_mut().zip([&ulpdu[..], b"and the next"]) {
                assert_eq!(deframer.needed(fpdu), fpdu.len());
                assert_eq!(deframer.take(fpdu), Ok(expected), "{len} bytes at {position}");
            }
        }
    }
}
