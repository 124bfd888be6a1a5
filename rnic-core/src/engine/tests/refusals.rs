//! Requests that the peer may not send, and the exact Terminates that report them.

use super::raw::{Raw, read_of, ulpdu};
use super::requests::{Wr, pattern};
use super::world::{A, B, Wiring, World};
use crate::ddp::{Header, qn};
use crate::rdmap::{Opcode, ReadRequest};
use rnic_abi::abi::queue::Sge;
use rnic_abi::types::{Access, QpState, Scope, Stag, TaggedOffset};

/// Returns the length and DDP header of a segment, as a Terminate encloses them.
fn enclosed(header: &Header, payload: usize) -> Vec<u8> {
    let bytes = ulpdu(header, &[]);
    let len = (bytes.len() + payload) as u16;
    [&len.to_be_bytes()[..], &bytes].concat()
}

//= RDMAP-3.2-8
//= RDMAP-5.1-3
//= RDMAP-5.1-4
//= RDMAP-7.1-3
//= RDMAP-7.2-1
//= DDP-7.1-13
//= DDP-7.1-14
//= DDP-7.1-15
#[test]
fn writes_outside_of_a_region() {
    // RFC 5041 section 7.1.
    let top = u64::MAX - 99;
    let cases: &[(u64, i64, usize, Option<&str>)] = &[
        (0x1000, 0, 100, None),
        (0x1000, 99, 1, None),
        (0x1000, 100, 0, None),
        (0x1000, -1, 1, Some("1/1/01")),
        (0x1000, 100, 1, Some("1/1/01")),
        (0x1000, 1, 100, Some("1/1/01")),
        (top - 1, 0, 100, None),
        (top - 1, 1, 100, Some("1/1/03")),
        (top - 1, 6, 100, Some("1/1/03")),
        (0, -1, 2, Some("1/1/03")),
    ];
    for (iova, at, len, code) in cases {
        let (mut w, mut raw) = World::raw();
        let to = w.mr_at(A, 100, Access::REMOTE_WRITE, Scope::Pd, *iova);
        to.fill(0xEE);
        let offset = iova.wrapping_add_signed(*at);
        let payload = pattern(*len, 1);
        raw.write(&mut w, to.stag, offset, &payload);
        match code {
            None => {
                assert_eq!(to.bytes()[*at as usize..][..*len], payload);
                assert_eq!(w.state(A), QpState::Rts);
                assert_eq!(raw.segments(&mut w), []);
            }
            Some(code) => {
                let header = raw.tagged(Opcode::Write, to.stag, offset, true);
                let expected = ((*code).to_owned(), enclosed(&header, *len));
                assert_eq!(raw.expect_terminate(&mut w), expected, "{at} {len}");
                assert_eq!(to.bytes(), [0xEE; 100]);
                assert_eq!(w.state(A), QpState::Terminate);
                raw.close(&mut w);
                assert_eq!(w.state(A), QpState::Error);
                assert!(w.events(A)[0].starts_with(&format!("terminated {code}")));
            }
        }
    }
}

//= DDP-7.1-16
#[test]
fn segments_before_a_failed_one_are_placed() {
    let (mut w, mut raw) = World::raw();
    let to = w.mr(A, 10, Access::REMOTE_WRITE);
    raw.segment(&mut w, raw.tagged(Opcode::Write, to.stag, to.iova, false), b"12345");
    raw.segment(&mut w, raw.tagged(Opcode::Write, to.stag, to.iova + 5, true), b"678901");
    assert_eq!(raw.expect_terminate(&mut w).0, "1/1/01");
    assert_eq!(&to.bytes(), b"12345\0\0\0\0\0");
}

//= DDP-5.2-10
//= DDP-5.2-11
#[test]
fn a_zero_length_write_is_not_checked() {
    let (mut w, mut raw) = World::raw();
    for stag in [0, 0x1234_5678, u32::MAX] {
        raw.write(&mut w, Stag(stag), u64::MAX, b"");
    }
    assert_eq!(w.state(A), QpState::Rts);
    assert_eq!(w.completions(A), [""; 0]);
}

//= RDMAP-5.2.1-14
//= RDMAP-5.2.1-15
#[test]
fn a_zero_length_read_is_not_checked() {
    let (mut w, mut raw) = World::raw();
    let request = ReadRequest {
        sink_stag: Stag(77),
        sink_to: TaggedOffset(5),
        size: 0,
        src_stag: Stag(0xFFFF_FFFF),
        src_to: TaggedOffset(u64::MAX),
    };
    raw.read(&mut w, 1, &request);
    let answer = raw.segments(&mut w);
    assert_eq!(answer.len(), 1);
    assert_eq!(answer[0].header, raw.tagged(Opcode::ReadResponse, Stag(77), 5, true));
    assert_eq!(answer[0].payload, b"");
}

//= RDMAP-4.4-3
//= RDMAP-4.4-4
//= RDMAP-5.2.2-5
#[test]
fn a_response_may_wrap_at_2_to_the_64() {
    let (mut w, mut raw) = World::raw();
    w.emss = 200;
    let from = w.mr(A, 400, Access::REMOTE_READ);
    let bytes = from.pattern(1);
    let request = ReadRequest { sink_to: TaggedOffset(u64::MAX - 9), ..read_of(&from, 0, 400) };
    raw.read(&mut w, 1, &request);
    let mut got = Vec::new();
    for segment in raw.segments(&mut w) {
        let Header::Tagged(h) = segment.header else { panic!("{segment:?}") };
        assert_eq!(h.to.0, (u64::MAX - 9).wrapping_add(got.len() as u64));
        assert_eq!(h.stag, request.sink_stag);
        got.extend(segment.payload);
        assert_eq!(h.last, got.len() == 400);
    }
    assert_eq!(got, bytes);
}

//= RDMAP-5.3-4
#[test]
fn sends_without_a_receive_or_too_long_for_it() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.post(A, &[Wr::send(1, &[]).inline(b"x")]);
        assert_eq!(w.completions(A), ["1 Send"]);
        let header = "0013414300000000000000000000000100000000";
        assert_eq!(w.events(A), [format!("terminated by peer 1/2/02 {header}")]);
        assert!(w.events(B)[0].starts_with("terminated 1/2/02"));

        let mut w = World::connected(wiring);
        let to = w.any_mr(B, 20);
        w.recv(B, 7, &[to.sge(0..4), to.sge(10..14)]);
        w.recv(B, 8, &[to.sge(0..4), to.sge(10..14)]);
        w.recv(B, 9, &[to.all()]);
        w.post(A, &[Wr::send(1, &[]).inline(b"12345678")]);
        assert_eq!(&to.bytes()[..4], b"1234");
        assert_eq!(&to.bytes()[10..14], b"5678");
        to.fill(0);
        w.post(A, &[Wr::send(2, &[]).inline(b"123456789")]);
        assert_eq!(to.bytes(), [0; 20], "{wiring:?}");
        let flushed = ["7 Receive 8", "8 Receive LocalLength 1/2/05", "9 Receive WrFlush"];
        assert_eq!(w.completions(B), flushed);
        assert!(w.events(A)[0].starts_with("terminated by peer 1/2/05"));
    }
}

/// siw (`siw_proc_write`) and RC responders raise the same events.
#[test]
fn an_iwarp_responder_raises_events() {
    type Wrong = fn(&mut World) -> Wr;
    let cases: [(Wrong, &str); 6] = [
        (|w| Wr::write(1, &[w.any_mr(A, 8).all()], &w.mr(B, 8, Access::LOCAL_WRITE), 0), "Access"),
        (|w| Wr::write(1, &[w.any_mr(A, 8).all()], &w.any_mr(B, 8), 1), "Access"),
        (|w| Wr::read(1, w.any_mr(A, 8).all(), &w.mr(B, 8, Access::LOCAL_WRITE), 0), "Access"),
        (|w| Wr::send_invalidate(1, &[], w.any_mr(B, 8).stag), "Access"),
        (|w| Wr::fetch_add(1, 1, w.any_mr(A, 8).all(), &w.any_mr(B, 16), 4), "Request"),
        (|w| Wr::send(1, &[w.any_mr(A, 8).all()]), "Request"),
    ];
    for (wiring, (wrong, name)) in Wiring::both().into_iter().flat_map(|w| cases.map(|c| (w, c))) {
        let mut w = World::connected(wiring);
        w.recv(B, 7, &[]);
        let request = wrong(&mut w);
        w.post(A, &[request]);
        let raised = w.responder_errors(B);
        assert_eq!(raised.len(), 1, "{wiring:?}: {raised:?}");
        assert!(raised[0].starts_with(name), "{wiring:?}: {raised:?}");
        assert_eq!(w.responder_errors(A), [""; 0], "{wiring:?}");
        assert_eq!((w.state(A), w.state(B)), (QpState::Error, QpState::Error), "{wiring:?}");
    }
    // If there is no receive, the request is not at fault.
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.post(A, &[Wr::send(1, &[])]);
        assert_eq!(w.state(B), QpState::Error, "{wiring:?}");
        assert_eq!(w.responder_errors(B), [""; 0], "{wiring:?}");
    }
}

#[test]
fn a_receive_with_bad_memory_fails() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let good = w.any_mr(B, 10);
        let read_only = w.mr(B, 10, Access::REMOTE_READ);
        w.recv(B, 7, &[good.sge(0..5), read_only.all()]);
        w.post(A, &[Wr::send(1, &[]).inline(b"0123456789")]);
        assert_eq!(w.completions(B), ["7 Receive LocalProtection"]);
        assert_eq!(w.events(A), ["terminated by peer 0/0/00"]);
        assert_eq!(w.events(B), ["terminated 0/0/00"]);
        assert_eq!(good.bytes(), [0; 10], "nothing is placed unless all can be");
    }
}

//= RDMAP-5.3-7
//= DDP-5.4-2
#[test]
fn segments_of_a_send_in_any_order() {
    let send = |raw: &Raw, mo, last| raw.untagged(Opcode::Send, qn::SEND, 1, mo, last);
    let (mut w, mut raw) = World::raw();
    let to = w.any_mr(A, 12);
    w.recv(A, 7, &[to.sge(0..5), to.sge(5..12)]);
    raw.segment(&mut w, send(&raw, 4, false), b"4567");
    raw.segment(&mut w, send(&raw, 0, false), b"0123");
    raw.segment(&mut w, send(&raw, 8, true), b"89");
    assert_eq!(w.completions(A), ["7 Receive 10"]);
    assert_eq!(&to.bytes(), b"0123456789\0\0");

    // The last segment is not the highest. A gap. An overlap. Beyond the buffer.
    type Parts = &'static [(u32, &'static [u8])];
    let bad: &[(Parts, &str)] = &[
        (&[(4, b"4567"), (0, b"0123")], "1/2/04"),
        (&[(0, b"0123"), (5, b"5")], "1/2/04"),
        (&[(0, b"0123"), (2, b"234567")], "1/2/04"),
        (&[(13, b"")], "1/2/04"),
        (&[(0, b"0123"), (12, b"x")], "1/2/05"),
    ];
    for (parts, code) in bad {
        let (mut w, mut raw) = World::raw();
        let to = w.any_mr(A, 12);
        w.recv(A, 7, &[to.all()]);
        for (n, (mo, bytes)) in (1..).zip(*parts) {
            raw.segment(&mut w, send(&raw, *mo, n == parts.len()), bytes);
        }
        assert_eq!(raw.expect_terminate(&mut w).0, *code, "{parts:?}");
        assert!(w.completions(A)[0].starts_with("7 Receive "), "completes once, in error");
    }
}

//= RDMAP-5.2.2-4
//= RDMAP-5.2.2-7
//= DDP-4.2-7
#[test]
fn unrequested_responses() {
    // (STag or `None` for the sink's, offset, bytes, last), then the Terminate code.
    type Part = (Option<u32>, i64, usize, bool);
    let cases: &[(&[Part], &str)] = &[
        (&[(Some(0x77), 0, 10, true)], "1/1/00"),
        (&[(None, -1, 10, true)], "1/1/01"),
        (&[(None, 1, 10, true)], "1/1/01"),
        (&[(None, 0, 11, true)], "1/1/01"),
        (&[(None, 0, 9, true)], "1/1/01"),
        (&[(None, 0, 5, false), (None, 0, 5, false), (None, 5, 5, true)], "1/1/01"),
        (&[(None, 0, 0, true)], "1/1/01"),
        (&[(None, 0, 10, true), (None, 0, 10, true)], "0/2/06"),
    ];
    for (parts, code) in cases {
        let (mut w, mut raw) = World::raw();
        let sink = w.any_mr(A, 30);
        let source = w.any_mr(A, 1);
        w.post(A, &[Wr::read(1, sink.sge(10..20), &source, 0)]);
        assert_eq!(raw.segments(&mut w).len(), 1);
        for (stag, at, len, last) in *parts {
            let stag = stag.map_or(sink.stag, Stag);
            let to = (sink.iova + 10).wrapping_add_signed(*at);
            raw.response(&mut w, stag, to, &vec![0xAB; *len], *last);
        }
        assert_eq!(raw.expect_terminate(&mut w).0, *code, "{parts:?}");
        assert_eq!(sink.bytes()[..10], [0; 10]);
        assert_eq!(sink.bytes()[20..], [0; 10]);
        match *code {
            "0/2/06" => assert_eq!(w.completions(A), ["1 RdmaRead 10"]),
            code => assert_eq!(w.completions(A), [format!("1 RdmaRead BadResponse {code}")]),
        }
    }
    let (mut w, mut raw) = World::raw();
    raw.response(&mut w, Stag(1), 0, b"", true);
    assert_eq!(raw.expect_terminate(&mut w).0, "0/2/06");
}

//= RDMAP-6.2.1-1
//= DDP-3-6
//= MPA-6-1
//= MPA-8-1
//= MPA-8-9
//= MPA-8-10
#[test]
fn a_flipped_bit_ends_the_stream() {
    let (mut w, mut raw) = World::raw();
    let to = w.mr(A, 8, Access::REMOTE_WRITE);
    let header = raw.tagged(Opcode::Write, to.stag, to.iova, true);
    let fpdu = raw.fpdu(&ulpdu(&header, b"evil"));
    for bit in 0..fpdu.len() * 8 {
        let (mut w, mut raw) = World::raw();
        let to = w.mr(A, 8, Access::REMOTE_WRITE);
        let header = raw.tagged(Opcode::Write, to.stag, to.iova, true);
        let mut bytes = raw.fpdu(&ulpdu(&header, b"evil"));
        bytes[bit / 8] ^= 0x80 >> (bit % 8);
        // Valid FPDUs follow in the same segment. If the flipped bit makes the ULPDU longer, they
        // are a part of it.
        for _ in 0..3000 {
            bytes.extend(raw.fpdu(&ulpdu(&header, b"also")));
        }
        raw.bytes(&mut w, &bytes);
        assert_eq!(raw.expect_terminate(&mut w), ("2/0/02".to_owned(), vec![]), "bit {bit}");
        assert_eq!(to.bytes(), [0; 8], "bit {bit}");
        // The peer must end the connection.
        assert!(!raw.reset && !raw.is_closed(&w), "bit {bit}");
    }
}

//= MPA-4.2-3
//= MPA-4.2-5
//= MPA-8-4
//= MPA-8-10
#[test]
fn markers_are_checked_after_the_crc() {
    for (byte, xor, code) in [(0, 0xFF, ""), (1, 0xFF, ""), (3, 0x03, ""), (3, 0x04, "2/0/03")] {
        let wiring = Wiring::tcp().with(|o| {
            o.peer_to_peer = false;
            o.markers = true;
        });
        let options = wiring.a;
        let (mut w, mut raw) = World::against_raw(true, options, options);
        w.recv(A, 1, &[]);
        let mut bytes = raw.fpdu(&ulpdu(&raw.untagged(Opcode::Send, 0, 1, 0, true), b""));
        bytes[byte] ^= xor;
        let end = bytes.len() - 4;
        let crc = crc32c::crc32c(&bytes[..end]);
        bytes[end..].copy_from_slice(&crc.to_le_bytes());
        raw.bytes(&mut w, &bytes);
        if code.is_empty() {
            assert_eq!(w.completions(A), ["1 Receive"]);
        } else {
            assert_eq!(raw.expect_terminate(&mut w), (code.to_owned(), vec![]));
            assert!(!raw.reset && !raw.is_closed(&w));
        }
    }
}

//= RDMAP-5.3-13
//= RDMAP-5.3-14
//= RDMAP-7.2-4
//= RDMAP-7.2-5
#[test]
fn invalidation_by_the_peer() {
    for wiring in Wiring::both() {
        // An STag of this stream.
        let mut w = World::connected(wiring);
        let own = w.own_mr(B, 10, Access::REMOTE_WRITE);
        w.recv(B, 1, &[]);
        w.post(A, &[Wr::send_invalidate(1, &[], own.stag)]);
        assert_eq!(w.completions(B), [format!("1 Receive invalidated {:#x}", own.stag.0)]);

        // An unknown STag is refused, as are STags of the domain or of another stream, which stay
        // valid.
        for (what, code) in [("domain", "0/2/09"), ("sibling", "0/1/09"), ("none", "0/1/09")] {
            let mut w = World::connected(wiring);
            let app = w.qps[B].app;
            let cq = w.cq(app, 8);
            let sibling = w.qp(app, cq, cq, Default::default());
            let mr = match what {
                "domain" => w.any_mr(B, 10),
                _ => w.own_mr(sibling, 10, Access::LOCAL_WRITE),
            };
            let stag = if what == "none" { Stag(5) } else { mr.stag };
            w.recv(B, 1, &[]);
            w.post(A, &[Wr::send_invalidate(1, &[], stag)]);
            assert_eq!(w.completions(B), ["1 Receive RemoteInvalidRequest"]);
            let event = &w.events(A)[0];
            assert!(event.starts_with(&format!("terminated by peer {code} 00124144")), "{event}");
            let engine = w.qps[B].engine;
            let known = w.engines[engine].state.stags.len();
            w.revoke(B, mr.stag);
            assert_eq!(
                w.engines[engine].state.stags.len(),
                known - 1,
                "{what}: it must still be valid"
            );
        }
    }
}

#[test]
fn an_ungatherable_send_is_not_sent() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        // The missing receive is not reported.
        w.post(A, &[Wr::send(1, &[Sge { addr: 0, length: 1, lkey: 3 }])]);
        assert_eq!(w.completions(A), ["1 Send LocalProtection"], "{wiring:?}");
        assert_eq!(w.events(B), ["terminated by peer 0/0/00"]);
    }
}

//= RDMAP-4.8-10
//= RDMAP-7.1-2
#[test]
fn invalid_local_requests() {
    for wiring in Wiring::both() {
        for (what, status) in [
            ("lkey", "LocalProtection"),
            ("range", "LocalProtection"),
            ("long range", "LocalProtection"),
            ("sink right", "LocalProtection"),
            ("flags", "LocalQpOperation"),
            ("params", "LocalQpOperation"),
            ("two sinks", "LocalQpOperation"),
            ("window", "LocalQpOperation"),
            ("opcode", "LocalQpOperation"),
        ] {
            let mut w = World::connected(wiring);
            let a = w.any_mr(A, 2000);
            let b = w.any_mr(B, 2000);
            let read_only = w.mr(A, 10, Access::empty());
            b.fill(0xEE);
            let mut wr = Wr::write(1, &[a.sge(0..4)], &b, 0);
            match what {
                "lkey" => wr.sges[0].lkey ^= 0x0F0F_0000,
                "range" => wr.sges[0].addr += 1997,
                "long range" => wr.sges = vec![a.sge(0..1500), a.sge(1990..2001)],
                "sink right" => wr = Wr::read(1, read_only.all(), &b, 0),
                "flags" => wr.header.flags |= 0x100,
                "params" => wr.header.params[1] = 1,
                "two sinks" => {
                    wr = Wr::read(1, a.sge(0..4), &b, 0);
                    wr.sges.push(a.sge(4..8));
                }
                "window" => wr.header.opcode = 8,
                _ => wr.header.opcode = 99,
            }
            w.recv(A, 5, &[]);
            w.post(A, &[wr, Wr::write(2, &[a.sge(0..4)], &b, 0)]);
            let name = match what {
                "sink right" | "two sinks" => "RdmaRead",
                "window" => "BindMw",
                "opcode" => "Send",
                _ => "RdmaWrite",
            };
            let expected = [
                format!("1 {name} {status}"),
                "2 RdmaWrite WrFlush".into(),
                "5 Receive WrFlush".into(),
            ];
            assert_eq!(w.completions(A), expected, "{what} {wiring:?}");
            assert_eq!(w.events(B), ["terminated by peer 0/0/00"]);
            assert_eq!(w.events(A), ["terminated 0/0/00"]);
            assert_eq!(b.bytes(), vec![0xEE; 2000], "no byte was sent: {what}");
        }
    }
}
