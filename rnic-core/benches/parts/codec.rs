//! Encodes and decodes one FPDU of an RDMA Write with its CRC.

use std::convert::Infallible;
use std::hint::black_box;

use rnic_abi::types::{Stag, TaggedOffset};
use rnic_core::ddp::{Header, TaggedHeader};
use rnic_core::mpa::{CRC_LEN, Deframer, Framer, LENGTH_LEN, MAX_MULPDU, MpaFault, mulpdu};
use rnic_core::rdmap::{Control, Opcode};

use crate::{Run, Subject, pattern};

pub(crate) fn subjects() -> Vec<Subject> {
    // A small payload, one that fills an Ethernet segment, and the longest that an FPDU carries.
    let payloads = [8, usize::from(mulpdu(1460, false)) - TaggedHeader::LEN, longest_payload()];
    let each = payloads.into_iter().flat_map(|len| {
        [
            Subject::counted("codec", format!("encode/{len}"), 1, move || encode(len)).moving(len),
            Subject::counted("codec", format!("decode/{len}"), 1, move || decode(len)).moving(len),
        ]
    });
    each.collect()
}

/// Returns the size of the longest payload of a Write's FPDU, in bytes.
pub(crate) fn longest_payload() -> usize {
    usize::from(MAX_MULPDU) - TaggedHeader::LEN
}

/// Writes the FPDU of a complete Write, and returns its length in bytes.
pub(crate) fn frame(framer: &mut Framer, out: &mut [u8], to: u64, payload: &[u8]) -> usize {
    let mut bytes = [0; TaggedHeader::LEN];
    header(to).emit(&mut bytes);
    let fill = |at: usize, block: &mut [u8]| {
        block.copy_from_slice(&payload[at..at + block.len()]);
        Ok::<_, Infallible>(())
    };
    framer.frame(out, &bytes, payload.len(), fill).expect("filling never fails")
}

fn header(to: u64) -> TaggedHeader {
    let rsvd_ulp = Control { rv: 1, opcode: Opcode::Write }.byte();
    TaggedHeader { last: true, dv: 1, rsvd_ulp, stag: Stag(0x1234_5678), to: TaggedOffset(to) }
}

fn encode(len: usize) -> Run {
    let payload = pattern(len);
    let mut framer = Framer::new(false, true);
    let mut out = vec![0; framer.fpdu_len(TaggedHeader::LEN + len)];
    let crc_at = out.len() - CRC_LEN;
    frame(&mut framer, &mut out, 64, &payload);
    // CRC of the same bytes, computed in one call.
    let crc = crc32c::crc32c(&out[..crc_at]).to_le_bytes();
    let payload_at = LENGTH_LEN + TaggedHeader::LEN;
    assert_eq!(out[payload_at..payload_at + len], payload);
    Box::new(move || {
        out[crc_at..].fill(0);
        let written = frame(&mut framer, black_box(&mut out), 64, black_box(&payload));
        assert_eq!((written, &out[crc_at..]), (out.len(), &crc[..]));
    })
}

fn decode(len: usize) -> Run {
    let payload = pattern(len);
    let mut framer = Framer::new(false, true);
    let mut fpdu = vec![0; framer.fpdu_len(TaggedHeader::LEN + len)];
    frame(&mut framer, &mut fpdu, 64, &payload);
    let mut deframer = Deframer::new(false, true);
    // A changed payload byte must cause a CRC mismatch.
    fpdu[LENGTH_LEN + TaggedHeader::LEN + len / 2] ^= 1;
    assert_eq!(deframer.take(&mut fpdu), Err(MpaFault::Crc));
    fpdu[LENGTH_LEN + TaggedHeader::LEN + len / 2] ^= 1;
    let expected = Header::Tagged(header(64));
    Box::new(move || {
        let fpdu = black_box(&mut fpdu[..]);
        assert_eq!(deframer.needed(fpdu), fpdu.len());
        let ulpdu = deframer.take(fpdu).expect("it is intact");
        let (header, found) = Header::parse(ulpdu).expect("it has a header");
        let control = Control::parse(header.rsvd_ulp());
        assert_eq!((header, control.opcode), (expected, Opcode::Write));
        assert_eq!((found.len(), found.last()), (payload.len(), payload.last()));
    })
}
