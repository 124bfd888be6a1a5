//! Parameters negotiated at start-up, checked on the wire: CRCs, Markers, version, segment size.

use super::raw::{Raw, ulpdu};
use super::requests::Wr;
use super::world::{A, B, Wiring, World};
use crate::ddp::TaggedHeader;
use crate::mpa::{Deframer, MAX_ULPDU, MIN_MULPDU, mulpdu};
use crate::rdmap::Opcode;
use crate::stream::startup::Options;
use rnic_abi::types::{Access, QpState, Stag};

/// Returns options without the peer-to-peer model, so that no extra message is sent.
fn plain(change: impl Fn(&mut Options)) -> Options {
    let mut options = Wiring::tcp().a;
    options.peer_to_peer = false;
    change(&mut options);
    options
}

const BOTH: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

//= MPA-4.1-6
//= MPA-4.4-2
//= MPA-4.4-5
//= MPA-4.4-9
//= MPA-4.4-10
//= MPA-4.4-11
//= MPA-4.4-12
//= MPA-4.4-19
//= MPA-7.1.1-7
//= MPA-7.1.1-8
//= MPA-7.1.1-9
#[test]
fn crcs_are_checked_if_either_end_wants_them() {
    for initiator in [true, false] {
        for (ours, theirs) in BOTH {
            let what = format!("initiator {initiator}, C {ours} {theirs}");
            let on = ours || theirs;
            // Good FPDUs before an FPDU with a wrong CRC.
            for good_ones in [0, 1, 100] {
                let (mut w, mut raw) = World::against_raw(
                    initiator,
                    plain(|o| o.crc = ours),
                    plain(|o| o.crc = theirs),
                );
                let to = w.mr(A, 8, Access::REMOTE_WRITE);
                let header = raw.tagged(Opcode::Write, to.stag, to.iova, true);
                let with_crc = |bytes: Vec<u8>, flip: u8| {
                    let end = bytes.len() - 4;
                    let crc = crc32c::crc32c(&bytes[..end]) ^ u32::from(flip);
                    [&bytes[..end], &crc.to_le_bytes()].concat()
                };
                for n in 0..good_ones {
                    let fpdu = raw.fpdu(&ulpdu(&header, &[n; 8]));
                    raw.bytes(&mut w, &with_crc(fpdu, 0));
                    assert_eq!(to.bytes(), [n; 8], "{what}");
                }
                let before = to.bytes();
                let fpdu = raw.fpdu(&ulpdu(&header, b"wrong it"));
                raw.bytes(&mut w, &with_crc(fpdu, 1));
                if !on {
                    assert_eq!(&to.bytes(), b"wrong it", "{what}");
                    assert_eq!(w.state(A), QpState::Rts);
                    continue;
                }
                assert_eq!(to.bytes(), before, "{what}");
                if initiator || good_ones > 0 {
                    assert_eq!(raw.expect_terminate(&mut w).0, "2/0/02", "{what}");
                } else {
                    assert_eq!(w.state(A), QpState::Error, "{what}");
                }
            }
            // FPDUs of A have a CRC field, and it is correct if CRCs are in use.
            let (mut w, mut raw) =
                World::against_raw(initiator, plain(|o| o.crc = ours), plain(|o| o.crc = theirs));
            raw.write(&mut w, Stag(0), 0, b"");
            for _ in 0..3 {
                w.post(A, &[Wr::send(1, &[])]);
            }
            let log = &w.links[0].pipes[0].log;
            assert_eq!(log.len(), 3 * 24, "{what}");
            for fpdu in log.chunks(24) {
                assert_eq!(fpdu[..2], [0, 18]);
                let right = crc32c::crc32c(&fpdu[..20]).to_le_bytes();
                assert!(!on || fpdu[20..] == right, "{what}: {fpdu:02x?}");
            }
        }
    }
}

//= MPA-4.3-2
//= MPA-4.3-9
//= MPA-7.1-2
//= MPA-7.1.1-5
//= MPA-7.1.1-6
//= MPA-7.1.2-7
#[test]
fn markers_go_only_to_the_end_that_wants_them() {
    for initiator in [true, false] {
        for (ours, theirs) in BOTH {
            let what = format!("initiator {initiator}, M {ours} {theirs}");
            let (mut w, mut raw) = World::against_raw(
                initiator,
                plain(|o| o.markers = ours),
                plain(|o| o.markers = theirs),
            );
            let to = w.mr(A, 1000, Access::REMOTE_WRITE);
            let from = w.any_mr(A, 1000);
            let bytes = from.pattern(9);
            raw.write(&mut w, to.stag, to.iova, &bytes);
            assert_eq!(to.bytes(), bytes, "{what}");
            let said = w.links[0].pipes[1].log.len();
            assert_eq!(said, 2 + 14 + 1000 + 4 + if ours { 12 } else { 0 }, "{what}");

            w.post(A, &[Wr::send(1, &[from.all()])]);
            let log = &w.links[0].pipes[0].log;
            if theirs {
                assert_eq!(log[..8], [0, 0, 0, 0, 0x03, 0xFA, 0x41, 0x43], "{what}");
                assert_eq!(log[512..516], [0, 0, 0x01, 0xFC], "{what}");
                assert_eq!(log[1024..1028], [0, 0, 0x03, 0xFC], "{what}");
                assert_eq!(log.len(), 2 + 18 + 1000 + 4 + 12, "{what}");
                assert_eq!(log[24..512], bytes[..488]);
                assert_eq!(log[516..1024], bytes[488..996]);
                assert_eq!(log[1028..1032], bytes[996..]);
            } else {
                assert_eq!(log[..4], [0x03, 0xFA, 0x41, 0x43], "{what}");
                assert_eq!(log[20..1020], bytes, "{what}");
                assert_eq!(log.len(), 2 + 18 + 1000 + 4, "{what}");
            }
        }
    }
}

//= MPA-3-13
//= MPA-C.1-1
//= MPA-C.1-3
#[test]
fn segments_have_the_negotiated_version() {
    for (rdmac, version) in [(false, 1), (true, 0)] {
        let mut w = World::connected(Wiring { rdmac, ..Wiring::tcp() });
        let a = w.any_mr(A, 30);
        let b = w.any_mr(B, 30);
        w.recv(B, 1, &[b.all()]);
        w.post(A, &[Wr::write(2, &[a.all()], &b, 0), Wr::read(3, a.all(), &b, 0)]);
        w.post(A, &[Wr::send(4, &[a.all()])]);
        for pipe in 0..2 {
            let mut rest = w.links[0].pipes[pipe].log.clone();
            let mut deframer = Deframer::new(rdmac, true);
            let mut segments = 0;
            while !rest.is_empty() {
                let mut fpdu: Vec<u8> = rest.drain(..deframer.needed(&rest)).collect();
                let ulpdu = deframer.take(&mut fpdu).unwrap();
                assert_eq!((ulpdu[0] & 3, ulpdu[1] >> 6), (version, version));
                segments += 1;
            }
            // The RTR message, a Write, a Read Request and a Send. In the other direction a
            // response.
            assert_eq!(segments, [4, 1][pipe]);
        }
    }
    // DV and RV must be those negotiated at start-up.
    for (byte, code) in [(0, "1/2/06"), (1, "0/2/05")] {
        let (mut w, mut raw) = World::raw();
        w.recv(A, 1, &[]);
        let mut segment = ulpdu(&raw.untagged(Opcode::Send, 0, 1, 0, true), b"");
        segment[byte] ^= if byte == 0 { 1 } else { 0x40 };
        raw.ulpdu(&mut w, &segment);
        assert_eq!(raw.expect_terminate(&mut w).0, code);
    }
}

/// The FPDUs that end A sends, read from the wire.
struct Wire {
    deframer: Deframer,
    at: usize,
}

impl Wire {
    fn new(markers: bool) -> Self {
        Wire { deframer: Deframer::new(markers, true), at: 0 }
    }

    /// Returns the length of each FPDU since the last call, in bytes.
    fn fpdus(&mut self, w: &World) -> Vec<usize> {
        let log = &w.links[0].pipes[0].log;
        let mut lengths = Vec::new();
        while self.at < log.len() {
            let len = self.deframer.needed(&log[self.at..]);
            assert!(self.deframer.take(&mut log[self.at..self.at + len].to_vec()).is_ok());
            self.at += len;
            lengths.push(len);
        }
        lengths
    }
}

//= MPA-3-2
//= MPA-3-3
//= MPA-4.5-5
//= MPA-4.5-6
//= MPA-4.5-8
//= MPA-5.1-1
#[test]
fn no_fpdu_exceeds_the_segment_size() {
    for (markers, emss) in [(false, 536), (true, 536), (true, 1460), (false, 1461), (true, 8960)] {
        let mut w = World::pair(Wiring::tcp().with(|o| o.markers = markers));
        let a = w.any_mr(A, 40_000);
        let b = w.any_mr(B, 40_000);
        let room = usize::from(mulpdu(emss, markers)) - TaggedHeader::LEN;
        let mut wire = Wire::new(markers);
        w.emss = emss;
        wire.fpdus(&w);
        // Small messages before the long one shift the Marker positions, and with them the room in
        // each segment.
        for small in (0..125).map(|n| n * 4 + 1) {
            let before = Wr::write(1, &[a.sge(0..small)], &b, 0);
            w.post(A, &[before, Wr::write(2, &[a.all()], &b, 0)]);
            let lengths = wire.fpdus(&w);
            assert!(lengths.iter().all(|len| *len <= emss), "EMSS {emss}: {lengths:?}");
            // The long message takes the minimum number of FPDUs.
            assert_eq!(lengths.len(), 1 + 40_000_usize.div_ceil(room), "EMSS {emss}");
            assert_eq!(w.completions(A).len(), 2);
        }
    }
}

//= MPA-4.5-7
#[test]
fn a_small_emss_does_not_lower_the_mulpdu() {
    for markers in [false, true] {
        let mut w = World::pair(Wiring::tcp().with(|o| o.markers = markers));
        let a = w.any_mr(A, 10_000);
        let b = w.any_mr(B, 10_000);
        let bytes = a.pattern(3);
        for emss in [0, 1, 40, 127] {
            b.fill(0);
            w.emss = emss;
            let before = w.qps[A].shared.counters().segments_sent;
            w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
            assert_eq!(b.bytes(), bytes);
            let segments = (w.qps[A].shared.counters().segments_sent - before) as usize;
            let most = usize::from(MIN_MULPDU) - TaggedHeader::LEN;
            assert_eq!(segments, 10_000_usize.div_ceil(most), "EMSS {emss}");
        }
    }
}

//= MPA-3-5
#[test]
fn no_segment_exceeds_64768_bytes() {
    let mut w = World::pair(Wiring::tcp());
    w.emss = 65_532;
    let a = w.any_mr(A, 200_000);
    let b = w.any_mr(B, 200_000);
    w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
    // After the RTR message.
    assert_eq!(Wire::new(false).fpdus(&w)[1..4], [64_768 + 8; 3]);
}

//= MPA-3-8
//= MPA-4.3-14
//= MPA-A.5.2-1
#[test]
fn the_longest_ulpdu_in_any_pieces() {
    for markers in [false, true] {
        let options = plain(|o| o.markers = markers);
        let (mut w, mut raw) = World::against_raw(true, options, options);
        let payload = MAX_ULPDU - TaggedHeader::LEN;
        let to = w.mr(A, payload, Access::REMOTE_WRITE);
        let from = w.any_mr(A, payload);
        let bytes = from.pattern(7);
        let header = raw.tagged(Opcode::Write, to.stag, to.iova, true);
        for pieces in [1, 700, 65_535] {
            to.fill(0);
            let fpdu = raw.fpdu(&ulpdu(&header, &bytes));
            if pieces == 1 {
                // Single bytes at the start and at the end, the rest at once.
                let (front, rest) = fpdu.split_at(600);
                let (middle, end) = rest.split_at(rest.len() - 600);
                front.iter().for_each(|o| raw.bytes(&mut w, &[*o]));
                raw.bytes(&mut w, middle);
                end.iter().for_each(|o| raw.bytes(&mut w, &[*o]));
            } else {
                fpdu.chunks(pieces).for_each(|piece| raw.bytes(&mut w, piece));
            }
            assert!(to.bytes() == bytes, "pieces of {pieces}, Markers {markers}");
        }
    }
}

//= MPA-3-1
//= MPA-4.3-13
//= MPA-5.1-5
#[test]
fn fpdus_in_one_segment_are_separated() {
    let (mut w, mut raw) = World::raw();
    let to = w.any_mr(A, 64);
    for n in 0..3 {
        w.recv(A, n, &[to.all()]);
    }
    let sends: Vec<u8> = [&b"one"[..], b"", b"three"]
        .iter()
        .zip(1..)
        .flat_map(|(bytes, msn)| {
            let header = raw.untagged(Opcode::Send, 0, msn, 0, true);
            raw.fpdu(&ulpdu(&header, bytes))
        })
        .collect();
    raw.bytes(&mut w, &sends);
    assert_eq!(w.completions(A), ["0 Receive 3", "1 Receive", "2 Receive 5"]);
    // A's FPDUs share a TCP segment as well, with one DDP segment in each.
    w.push(A, &[Wr::send(7, &[to.sge(0..5)]), Wr::send(8, &[]), Wr::send(9, &[to.sge(0..1)])]);
    w.settle();
    let payloads: Vec<_> = raw.segments(&mut w).iter().map(|s| s.payload.len()).collect();
    assert_eq!(payloads, [5, 0, 1]);
}

//= MPA-8-1
//= MPA-8-3
//= MPA-8-9
#[test]
fn data_after_an_error_are_ignored() {
    type Play = fn(&mut World, &mut Raw, &[u8]);
    let crc: Play = |w, raw, later| {
        let mut bytes = raw.fpdu(&ulpdu(&raw.untagged(Opcode::Send, 0, 1, 0, true), b"x"));
        bytes[5] ^= 1;
        bytes.extend_from_slice(later);
        raw.bytes(w, &bytes);
        raw.bytes(w, later);
    };
    let reset: Play = |w, raw, later| {
        let half = raw.fpdu(&ulpdu(&raw.untagged(Opcode::Send, 0, 1, 0, true), b"x"));
        raw.bytes(w, &half[..9]);
        raw.reset(w);
        raw.bytes(w, later);
    };
    let cut: Play = |w, raw, later| {
        raw.bytes(w, &later[..later.len() - 1]);
        raw.finish(w);
    };
    for (play, end) in [(crc, "terminated 2/0/02"), (reset, "lost: "), (cut, "lost: ")] {
        let (mut w, mut raw) = World::raw();
        let to = w.mr(A, 4, Access::REMOTE_WRITE);
        w.recv(A, 1, &[to.all()]);
        let later = raw.fpdu(&ulpdu(&raw.tagged(Opcode::Write, to.stag, to.iova, true), b"late"));
        play(&mut w, &mut raw, &later);
        raw.finish(&mut w);
        assert_eq!(w.completions(A), ["1 Receive WrFlush"]);
        assert_eq!(to.bytes(), [0; 4]);
        let events = w.events(A);
        assert!(events.len() == 1 && events[0].starts_with(end), "{events:?}");
    }
}
