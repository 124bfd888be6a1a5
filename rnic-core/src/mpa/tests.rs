//! Tests framer and deframer against each other and with modified FPDUs.

use std::convert::Infallible;

use proptest::prelude::*;

use super::*;

/// Decodes hexadecimal digits; spaces are ignored.
pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .chars()
        .filter_map(|c| c.to_digit(16))
        .map(|d| u8::try_from(d).expect("a hexadecimal digit is below 16"))
        .collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Frames a ULPDU into a buffer of junk, and checks that the junk after the FPDU is unchanged.
pub(crate) fn frame(framer: &mut Framer, header: &[u8], payload: &[u8]) -> Vec<u8> {
    let len = framer.fpdu_len(header.len() + payload.len());
    let mut out = vec![0xAA; len + 8];
    let framed = framer.frame(&mut out, header, payload.len(), |at, block| {
        block.copy_from_slice(&payload[at..at + block.len()]);
        Ok::<_, Infallible>(())
    });
    assert_eq!(framed, Ok(len));
    assert_eq!(out.split_off(len), [0xAA; 8]);
    out
}

/// Returns bytes with a period of 251, so that no power of two is a period.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8).collect()
}

/// Receiver that collects bytes as they arrive and takes each FPDU as soon as it is complete.
struct Collector {
    deframer: Deframer,
    have: Vec<u8>,
    ulpdus: Vec<Vec<u8>>,
}

impl Collector {
    fn new(markers: bool, crc: bool) -> Self {
        let deframer = Deframer::new(markers, crc);
        Collector { deframer, have: Vec::new(), ulpdus: Vec::new() }
    }

    fn receive(&mut self, bytes: &[u8]) -> Result<(), MpaFault> {
        self.have.extend_from_slice(bytes);
        loop {
            let needed = self.deframer.needed(&self.have);
            if self.have.len() < needed {
                return Ok(());
            }
            let rest = self.have.split_off(needed);
            self.ulpdus.push(self.deframer.take(&mut self.have)?.to_vec());
            self.have = rest;
        }
    }
}

//= MPA-4.3-13
//= MPA-5.1-6
//= MPA-5.2-1
//= MPA-6-5
//= MPA-A.4-1
#[test]
fn fpdus_of_every_length_byte_by_byte() {
    let mut framer = Framer::new(true, true);
    let mut collector = Collector::new(true, true);
    for len in 0..=1100 {
        let ulpdu = pattern(len);
        let (header, payload) = ulpdu.split_at(len.min(18));
        for byte in frame(&mut framer, header, payload) {
            collector.receive(&[byte]).expect("valid FPDU");
        }
        assert_eq!(collector.ulpdus.pop().as_ref(), Some(&ulpdu), "length {len}");
        assert!(collector.have.is_empty());
    }
}

//= MPA-6-5
#[test]
fn fpdus_split_at_every_marker_phase() {
    for phase in (0..MARKER_INTERVAL).step_by(4) {
        for len in [0, 1, 2, 14, 18, 27, 500, 502, 506, 1016, 1100] {
            let ulpdu = pattern(len);
            let mut deframer = Deframer::at_phase(phase);
            let mut fpdu = frame(&mut Framer::at_phase(phase), &[], &ulpdu);
            for cut in 0..fpdu.len() {
                assert!(deframer.needed(&fpdu[..cut]) > cut, "phase {phase} cut {cut}");
            }
            assert_eq!(deframer.needed(&fpdu), fpdu.len());
            assert_eq!(deframer.take(&mut fpdu), Ok(&ulpdu[..]), "phase {phase} {len}");
        }
    }
}

//= MPA-4.2-3
//= MPA-4.2-5
//= MPA-4.3-8
#[test]
fn reserved_marker_bits_are_ignored() {
    let mut fpdu = frame(&mut Framer::new(true, true), &pattern(18), &pattern(600));
    for at in [0, 512] {
        fpdu[at] = 0xFF;
        fpdu[at + 1] = 0xFF;
        fpdu[at + 3] |= 3;
    }
    recompute_crc(&mut fpdu);
    let ulpdu = [pattern(18), pattern(600)].concat();
    assert_eq!(Deframer::new(true, true).take(&mut fpdu), Ok(&ulpdu[..]));
}

//= MPA-5.2-2
//= MPA-8-4
//= MPA-8-5
#[test]
fn wrong_marker_pointer_is_error_3() {
    for (at, crc) in [(0, true), (512, true), (0, false), (512, false)] {
        let mut fpdu = frame(&mut Framer::new(true, crc), &pattern(18), &pattern(600));
        fpdu[at + 3] ^= 4;
        recompute_crc(&mut fpdu);
        assert_eq!(Deframer::new(true, crc).take(&mut fpdu), Err(MpaFault::Marker));
    }
}

//= MPA-4.1-4
#[test]
fn nonzero_pad_is_accepted() {
    let mut fpdu = frame(&mut Framer::new(false, true), &pattern(15), &[]);
    let pad_at = 2 + 15;
    fpdu[pad_at..pad_at + 3].fill(0xEE);
    assert_eq!(Deframer::new(false, true).take(&mut fpdu.clone()), Err(MpaFault::Crc));
    recompute_crc(&mut fpdu);
    assert_eq!(Deframer::new(false, true).take(&mut fpdu), Ok(&pattern(15)[..]));
}

//= MPA-4.4-18
//= MPA-4.4-19
//= MPA-6-1
//= MPA-6-3
#[test]
fn any_flipped_bit_is_detected() {
    for markers in [false, true] {
        let mut framer = Framer::new(markers, true);
        let fpdu = frame(&mut framer, &pattern(14), &pattern(520));
        let behind = frame(&mut framer, &pattern(14), &pattern(40));
        for bit in 0..fpdu.len() * 8 {
            let mut stream = [&fpdu[..], &behind].concat();
            stream[bit / 8] ^= 0x80 >> (bit % 8);
            let mut collector = Collector::new(markers, true);
            // A longer ULPDU_Length may require more bytes. Every other flip is a fault.
            let waits = collector.receive(&stream).is_ok();
            assert!(!waits || collector.deframer.needed(&stream) > stream.len(), "bit {bit}");
            assert!(collector.ulpdus.is_empty(), "bit {bit}");
        }
    }
}

//= MPA-4.1-6
//= MPA-4.4-12
//= MPA-7.1.1-9
#[test]
fn crc_field_is_ignored_without_crc() {
    let mut fpdu = frame(&mut Framer::new(false, false), &pattern(18), &pattern(24));
    assert_eq!(fpdu.len(), 2 + 42 + 4);
    fpdu[44..].copy_from_slice(&[1, 2, 3, 4]);
    let ulpdu = [pattern(18), pattern(24)].concat();
    assert_eq!(Deframer::new(false, false).take(&mut fpdu), Ok(&ulpdu[..]));
}

#[test]
fn ulpdu_stays_in_place_without_markers() {
    let mut fpdu = frame(&mut Framer::new(false, true), &pattern(18), &pattern(5000));
    let place = fpdu[2..].as_ptr();
    let ulpdu = Deframer::new(false, true).take(&mut fpdu).map(<[u8]>::as_ptr);
    assert_eq!(ulpdu, Ok(place));
}

#[test]
fn length_and_trailer_match_frame() {
    let framer = Framer::new(false, false);
    for len in 0..=40 {
        let (prefix, trailer) = framer.length_and_trailer(len).expect("neither CRCs nor Markers");
        let ulpdu = pattern(usize::from(len));
        let whole = frame(&mut Framer::new(false, false), &ulpdu, &[]);
        assert_eq!([&prefix[..], &ulpdu, trailer].concat(), whole);
    }
    assert_eq!(Framer::new(true, false).length_and_trailer(4), None);
    assert_eq!(Framer::new(false, true).length_and_trailer(4), None);
}

#[test]
fn failed_fill_keeps_the_stream_position() {
    for markers in [false, true] {
        let mut framer = Framer::new(markers, true);
        frame(&mut framer, &pattern(18), &pattern(30));
        let mut expected = Framer::new(markers, true);
        frame(&mut expected, &pattern(18), &pattern(30));
        let mut calls = 0;
        let mut out = vec![0; 40_000];
        let result = framer.frame(&mut out, &pattern(14), 30_000, |_, _| {
            calls += 1;
            if calls == 3 { Err("revoked") } else { Ok(()) }
        });
        assert_eq!(result, Err("revoked"));
        let again = frame(&mut framer, &pattern(14), &pattern(700));
        assert_eq!(again, frame(&mut expected, &pattern(14), &pattern(700)));
    }
}

#[test]
fn largest_ulpdu_round_trips() {
    for (markers, crc) in [(false, false), (false, true), (true, false), (true, true)] {
        let ulpdu = pattern(MAX_ULPDU);
        let mut fpdu = frame(&mut Framer::new(markers, crc), &ulpdu[..14], &ulpdu[14..]);
        assert!(fpdu.len() <= MAX_FPDU);
        assert_eq!(Deframer::new(markers, crc).take(&mut fpdu), Ok(&ulpdu[..]));
    }
}

#[test]
fn payload_is_filled_in_ordered_blocks() {
    for markers in [false, true] {
        let mut framer = Framer::new(markers, true);
        let mut out = vec![0; MAX_FPDU];
        let mut next = 0;
        let result = framer.frame(&mut out, &pattern(18), 60_000, |at, block| {
            assert_eq!(at, next);
            assert!(!block.is_empty() && block.len() <= framer::BLOCK + 8);
            next += block.len();
            Ok::<_, Infallible>(())
        });
        assert!(result.is_ok());
        assert_eq!(next, 60_000);
    }
}

fn recompute_crc(fpdu: &mut [u8]) {
    let at = fpdu.len() - CRC_LEN;
    let crc = crc32c::crc32c(&fpdu[..at]);
    fpdu[at..].copy_from_slice(&crc.to_le_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_messages_round_trip_in_any_pieces(
        lens in prop::collection::vec((0usize..=60, 0usize..20_000), 1..8),
        cuts in prop::collection::vec(1usize..3000, 1..64),
        markers: bool,
        crc: bool,
        misalign in 0usize..8,
    ) {
        let mut framer = Framer::new(markers, crc);
        let mut stream = vec![0; misalign];
        let mut expected = Vec::new();
        for (header, payload) in lens {
            let header = pattern(header);
            let payload = pattern(payload);
            stream.extend(frame(&mut framer, &header, &payload));
            expected.push([header, payload].concat());
        }
        let mut collector = Collector::new(markers, crc);
        let mut rest = &stream[misalign..];
        for cut in cuts.into_iter().cycle() {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            prop_assert_eq!(collector.receive(now), Ok(()));
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(collector.ulpdus, expected);
        prop_assert!(collector.have.is_empty());
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..3000),
        markers: bool,
        crc: bool,
    ) {
        let mut collector = Collector::new(markers, crc);
        let _ = collector.receive(&bytes);
    }
}
