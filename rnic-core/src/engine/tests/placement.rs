//! Incoming segments: the buffer they are placed in, when a message is delivered, and the effects
//! of a fault (RFC 5041 sections 4.1, 5.3, 5.4, 6.2 and 7.1).

use std::time::Duration;

use super::raw::{Raw, ulpdu};
use super::requests::Wr;
use super::world::{A, B, MemoryKind, Wiring, World};
use crate::ddp::{Header, qn};
use crate::rdmap::{Opcode, ReadRequest};
use rnic_abi::types::{QpState, Stag};

/// Returns the header of a segment of the first Send.
fn part(raw: &Raw, mo: u32, last: bool) -> Header {
    raw.untagged(Opcode::Send, qn::SEND, 1, mo, last)
}

//= DDP-4.1-7
//= DDP-5.2-5
//= DDP-5.3-1
//= DDP-5.3-7
//= DDP-5.4-2
//= DDP-5.4-3
#[test]
fn the_last_segment_delivers_a_message() {
    let (mut w, mut raw) = World::raw();
    let region = w.any_mr(A, 9);
    let buffer = w.any_mr(A, 12);
    w.recv(A, 7, &[buffer.sge(0..12)]);
    w.recv(A, 8, &[]);
    let header = raw.tagged(Opcode::Write, region.stag, region.iova, false);
    raw.segment(&mut w, header, b"wri");
    for (mo, bytes) in [(4, b"4567"), (0, b"0123")] {
        raw.segment(&mut w, part(&raw, mo, false), bytes);
        assert_eq!(w.completions(A), [""; 0]);
    }
    let header = raw.tagged(Opcode::Write, region.stag, region.iova + 3, true);
    raw.segment(&mut w, header, b"te");
    assert_eq!(w.completions(A), [""; 0], "a Write is not delivered");
    raw.segment(&mut w, part(&raw, 8, true), b"89");
    assert_eq!(w.completions(A), ["7 Receive 10"]);
    assert_eq!(&region.bytes(), b"write\0\0\0\0");
    assert_eq!(&buffer.bytes(), b"0123456789\0\0");
    raw.send(&mut w, 2, b"");
    assert_eq!(w.completions(A), ["8 Receive"]);
}

//= DDP-4.1-7
//= DDP-5.4-2
#[test]
fn delivery_waits_for_earlier_placement() {
    let (mut w, mut raw) = World::raw();
    w.kind = MemoryKind::ThroughCopier;
    let region = w.any_mr(A, 8);
    w.kind = MemoryKind::Shared;
    let buffer = w.any_mr(A, 8);
    w.recv(A, 7, &[buffer.all()]);
    w.recv(A, 8, &[]);
    // A copier places the data with a delay.
    w.answer_copies = false;
    raw.write(&mut w, region.stag, region.iova, b"earlier!");
    raw.send(&mut w, 1, b"later");
    raw.send(&mut w, 2, b"");
    assert_eq!(w.completions(A), [""; 0]);
    assert_eq!(region.bytes(), [0; 8]);
    while w.run_copy_job() {
        w.settle();
    }
    assert_eq!(&region.bytes(), b"earlier!");
    assert_eq!(w.completions(A), ["7 Receive 5", "8 Receive"]);
}

//= DDP-5.3-6
#[test]
fn a_repeated_message_is_delivered_once() {
    for between in [0, 1] {
        let (mut w, mut raw) = World::raw();
        let buffer = w.any_mr(A, 8);
        for n in 0..4 {
            w.recv(A, n, &[buffer.sge(2 * n as usize..2 * n as usize + 2)]);
        }
        raw.send(&mut w, 1, b"ab");
        for n in 0..between {
            raw.send(&mut w, 2 + n, b"cd");
        }
        raw.send(&mut w, 1, b"XX");
        assert_eq!(raw.expect_terminate(&mut w).0, "1/2/03");
        let log = w.completions(A);
        let delivered = log.iter().filter(|c| !c.ends_with("WrFlush")).count();
        assert_eq!((delivered, log.len()), (1 + between as usize, 4), "{log:?}");
        assert!(!buffer.bytes().contains(&b'X'));
    }
}

//= DDP-4.3-5
#[test]
fn reserved_bytes_may_differ_between_segments() {
    let (mut w, mut raw) = World::raw();
    let buffer = w.any_mr(A, 6);
    w.recv(A, 7, &[buffer.all()]);
    for (mo, stag, bytes) in [(0, 0, b"ab"), (2, 0xFFFF_FFFF, b"cd"), (4, 0x1234, b"ef")] {
        let Header::Untagged(mut header) = part(&raw, mo, mo == 4) else { unreachable!() };
        header.inv_stag = Stag(stag);
        raw.segment(&mut w, Header::Untagged(header), bytes);
    }
    assert_eq!(w.completions(A), ["7 Receive 6"]);
    assert_eq!(&buffer.bytes(), b"abcdef");
}

//= DDP-5.2-12
#[test]
fn write_segments_may_come_in_any_order() {
    let (mut w, mut raw) = World::raw();
    let region = w.any_mr(A, 10);
    w.recv(A, 7, &[]);
    // In reverse order, with a gap, and twice to the same place.
    for (at, bytes, last) in [(7, b"xy", false), (2, b"AB", false), (2, b"CD", true)] {
        let header = raw.tagged(Opcode::Write, region.stag, region.iova + at, last);
        raw.segment(&mut w, header, bytes);
    }
    raw.send(&mut w, 1, b"");
    assert_eq!(w.completions(A), ["7 Receive"]);
    assert_eq!(&region.bytes(), b"\0\0CD\0\0\0xy\0");
}

//= DDP-4.1-11
#[test]
fn a_version_change_in_mid_stream_is_refused() {
    for dv in [0, 2, 3] {
        for tagged in [false, true] {
            for inside in [false, true] {
                let (mut w, mut raw) = World::raw();
                let region = w.any_mr(A, 8);
                w.recv(A, 7, &[region.all()]);
                w.recv(A, 8, &[region.all()]);
                let header = |raw: &Raw, last, n: u32| {
                    if tagged {
                        raw.tagged(Opcode::Write, region.stag, region.iova, last)
                    } else {
                        raw.untagged(Opcode::Send, 0, n, 0, last)
                    }
                };
                raw.segment(&mut w, header(&raw, !inside, 1), b"good");
                let mut bytes = ulpdu(&header(&raw, true, 2 - u32::from(inside)), b"evil");
                bytes[0] = bytes[0] & !3 | dv;
                raw.ulpdu(&mut w, &bytes);
                let code = if tagged { "1/1/04" } else { "1/2/06" };
                assert_eq!(raw.expect_terminate(&mut w).0, code, "DV {dv}");
                assert_eq!(&region.bytes()[..4], b"good");
            }
        }
    }
}

//= DDP-7.1-8
#[test]
fn a_send_must_fit_its_buffer() {
    for parts in [&[8][..], &[5, 3]] {
        for too_much in [0, 1] {
            let (mut w, mut raw) = World::raw();
            let region = w.any_mr(A, 12);
            region.fill(0xEE);
            w.recv(A, 7, &[region.sge(0..8)]);
            let mut at = 0;
            for (n, len) in (1..).zip(parts) {
                let last = n == parts.len();
                let len = len + if last { too_much } else { 0 };
                raw.segment(&mut w, part(&raw, at as u32, last), &[n as u8; 9][..len]);
                at += len;
            }
            assert_eq!(region.bytes()[8..], [0xEE; 4], "nothing is written after the buffer");
            if too_much == 0 {
                assert_eq!(w.completions(A), ["7 Receive 8"]);
                continue;
            }
            assert_eq!(raw.expect_terminate(&mut w).0, "1/2/05");
            assert_eq!(w.completions(A), ["7 Receive LocalLength 1/2/05"]);
            let before = at - parts[parts.len() - 1] - 1;
            assert!(region.bytes()[before..].iter().all(|o| *o == 0xEE), "no byte is placed");
        }
    }
}

//= DDP-3-8
//= DDP-3-8a
//= DDP-6.2.2-2
//= DDP-6.2.2-3
//= DDP-7.1-5
//= DDP-7.1-6
//= DDP-7.1-18
//= DDP-7.1-19
#[test]
fn after_a_fault_only_the_terminate_is_sent() {
    for window in [1 << 20, 0] {
        let (mut w, mut raw) = World::raw();
        let region = w.any_mr(A, 8);
        let sink = w.any_mr(A, 8);
        w.post(A, &[Wr::read(1, sink.all(), &region, 0)]);
        assert_eq!(raw.segments(&mut w).len(), 1);
        // The Terminate is sent at once or later.
        w.links[0].pipes[0].window = window;
        // There is a receive only for the later Sends.
        raw.send(&mut w, 1, b"");
        w.recv(A, 7, &[region.all()]);
        w.recv(A, 8, &[region.all()]);
        for msn in [1, 2] {
            raw.send(&mut w, msn, b"late");
            raw.write(&mut w, region.stag, region.iova, b"late");
            raw.response(&mut w, sink.stag, sink.iova, b"too late", true);
        }
        raw.read(&mut w, 1, &ReadRequest::parse(&[0; 28]));
        w.post(A, &[Wr::send(2, &[]), Wr::write(3, &[region.all()], &region, 0)]);
        let mut log = w.completions(A);
        log.sort();
        let flushed = ["1 RdmaRead", "2 Send", "3 RdmaWrite", "7 Receive", "8 Receive"];
        assert_eq!(log, flushed.map(|what| format!("{what} WrFlush")), "window {window}");
        w.links[0].pipes[0].window = 1 << 20;
        w.settle();
        assert_eq!(raw.expect_terminate(&mut w).0, "1/2/02");
        assert_eq!((region.bytes(), sink.bytes()), (vec![0; 8], vec![0; 8]));
        raw.close(&mut w);
        assert_eq!(w.state(A), QpState::Error);
        let events = w.events(A);
        assert!(events.len() == 1 && events[0].starts_with("terminated 1/2/02"), "{events:?}");
        assert_eq!(w.completions(A), [""; 0]);
    }
}

//= DDP-7.1-3
//= DDP-7.1-6
#[test]
fn a_send_without_a_receive_ends_one_stream() {
    let (mut w, mut raw) = World::raw();
    let cq = w.cq(0, 16);
    let other = w.qp(0, cq, cq, Default::default());
    let options = Wiring::tcp().with(|o| o.peer_to_peer = false).a;
    let mut neighbour = w.connect_raw(other, true, options, options);
    let region = w.any_mr(A, 8);
    w.recv(other, 7, &[region.all()]);
    raw.send(&mut w, 1, b"nobody");
    assert_eq!(raw.expect_terminate(&mut w).0, "1/2/02");
    neighbour.send(&mut w, 1, b"somebody");
    assert_eq!(w.completions(other), ["7 Receive 8"]);
    assert_eq!(&region.bytes(), b"somebody");
    assert_eq!((w.state(A), w.state(other)), (QpState::Terminate, QpState::Rts));
}

//= DDP-3-10
//= DDP-6.2.2-3
//= DDP-6.2.2-4
#[test]
fn a_faulty_stream_stays_open_for_its_terminate() {
    let (mut w, mut raw) = World::raw();
    w.links[0].pipes[0].window = 0;
    raw.write(&mut w, Stag(1), 0, b"x");
    assert_eq!(w.state(A), QpState::Terminate);
    w.advance(Duration::from_secs(1));
    raw.collect(&mut w);
    assert!(!raw.fin && !raw.reset && !raw.is_closed(&w));
    w.links[0].pipes[0].window = 1 << 20;
    w.settle();
    assert_eq!(raw.expect_terminate(&mut w).0, "1/1/00");
    assert!(!raw.is_closed(&w), "the peer has not finished");
    raw.finish(&mut w);
    assert!(raw.is_closed(&w));
}

//= DDP-6.2-1
#[test]
fn a_stream_does_not_end_by_age() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.advance(Duration::from_secs(100 * 86_400));
        assert_eq!((w.events(A), w.events(B)), (vec![], vec![]));
        w.recv(B, 7, &[]);
        w.post(A, &[Wr::send(1, &[])]);
        assert_eq!(w.completions(B), ["7 Receive"], "{wiring:?}");
    }
    // Nor does a stream end because a message stays incomplete.
    let (mut w, mut raw) = World::raw();
    let buffer = w.any_mr(A, 4);
    w.recv(A, 7, &[buffer.all()]);
    raw.segment(&mut w, part(&raw, 0, false), b"ab");
    w.advance(Duration::from_secs(100 * 86_400));
    raw.segment(&mut w, part(&raw, 2, true), b"cd");
    assert_eq!(w.completions(A), ["7 Receive 4"]);
    assert_eq!(w.events(A), [""; 0]);
}
