//! Terminates, sent and received: their codes, all incoming layouts, and the end of all traffic
//! after a Terminate.

use super::raw::{Raw, read_of, ulpdu};
use super::requests::Wr;
use super::world::{A, B, Wiring, World};
use crate::conformance::table;
use crate::ddp::qn;
use crate::rdmap::{Opcode, codes};
use rnic_abi::types::{Access, QpState, Stag, TerminateCode};

//= RDMAP-4.8-3
//= RDMAP-4.8-13
/// Every code in the table has a name, including all codes of a local catastrophic error, and no
/// other code has one.
#[test]
fn codes_are_those_of_the_table() {
    let rows = table("terminate_code");
    for layer in 0..16u8 {
        for etype in 0..16u8 {
            for code in 0..=255u8 {
                let assigned = rows.iter().any(|row| {
                    row.number("layer") == u64::from(layer)
                        && row.number("etype") == u64::from(etype)
                        && row.find_number("code").is_none_or(|c| c == u64::from(code))
                });
                let code = TerminateCode { layer, etype, code };
                assert_eq!(codes::name(code).is_some(), assigned, "{code}");
            }
        }
    }
}

//= RDMAP-3.1-8
//= RDMAP-3.2-4
//= RDMAP-5.1-3
//= RDMAP-5.2.1-5
//= RDMAP-5.3-7
//= RDMAP-5.4-5
//= RDMAP-5.4-6
//= RDMAP-7.1-1
/// A Send, Write or Read Request that fails at the peer is reported to both applications, with its
/// headers.
#[test]
fn a_failed_message_is_reported_at_both_ends() {
    for wiring in Wiring::both() {
        for (what, code) in [("send", "1/2/05"), ("write", "1/1/01"), ("read", "0/1/02")] {
            let mut w = World::connected(wiring);
            let near = w.any_mr(A, 10);
            let there = w.mr(B, 10, Access::REMOTE_WRITE);
            let inbox = w.any_mr(B, 3);
            w.recv(B, 7, &[inbox.all()]);
            let (wr, header) = match what {
                "send" => {
                    (Wr::send(1, &[near.all()]), "001c414300000000000000000000000100000000".into())
                }
                "write" => (
                    Wr::write(1, &[near.all()], &there, 1),
                    format!("0018c140{:08x}{:016x}", there.stag.0, there.iova + 1),
                ),
                _ => (
                    Wr::read(1, near.all(), &there, 0),
                    format!(
                        "002e414100000000000000010000000100000000{:08x}{:016x}0000000a{:08x}{:016x}",
                        near.stag.0, near.iova, there.stag.0, there.iova
                    ),
                ),
            };
            w.post(A, &[wr]);
            assert_eq!(w.events(A), [format!("terminated by peer {code} {header}")], "{wiring:?}");
            assert_eq!(w.events(B), [format!("terminated {code} {header}")], "{wiring:?}");
            let receive = match what {
                "send" => "7 Receive LocalLength 1/2/05",
                _ => "7 Receive WrFlush",
            };
            assert_eq!(w.completions(B), [receive]);
            assert_eq!((there.bytes(), inbox.bytes()), (vec![0; 10], vec![0; 3]));
        }
    }
}

// --- Received ------------------------------------------------------------------------------------

/// Returns a Terminate with these flags about a tagged or an untagged segment, and the headers in
/// its event.
fn received(control: [u8; 4], flags: u8, tagged: bool) -> (Vec<u8>, String) {
    let length = [0x01, 0x23];
    let read = (0x40..0x40 + 28).collect::<Vec<u8>>();
    let header: Vec<u8> =
        if tagged { (0xC1..0xC1 + 14).collect() } else { (0x41..0x41 + 18).collect() };
    let mut behind = Vec::new();
    if flags & 0xC0 != 0 {
        behind.extend(length);
    }
    if flags & 0x40 != 0 {
        behind.extend(header);
    }
    if flags & 0x20 != 0 {
        behind.extend(read);
    }
    let hex: String = behind.iter().map(|o| format!("{o:02x}")).collect();
    let space = if hex.is_empty() { "" } else { " " };
    ([&control[..], &behind].concat(), format!("{space}{hex}"))
}

/// Returns the event at a QP that receives a Terminate, with a Read outstanding and no receive
/// posted. The QP sends nothing in reply.
fn event_of(payload: &[u8]) -> String {
    let (mut w, mut raw) = World::raw();
    let sink = w.any_mr(A, 4);
    let source = w.any_mr(A, 4);
    w.post(A, &[Wr::read(1, sink.all(), &source, 0)]);
    assert_eq!(raw.segments(&mut w).len(), 1);
    raw.terminate(&mut w, payload);
    assert_eq!(raw.segments(&mut w), [], "a Terminate is not answered");
    assert!(raw.fin || raw.reset);
    raw.finish(&mut w);
    let completions = w.completions(A);
    assert_eq!(completions.len(), 1);
    assert!(!completions[0].ends_with("RdmaRead 4"), "{completions:?}");
    let mut events = w.events(A);
    assert_eq!((events.len(), w.state(A)), (1, QpState::Error));
    events.remove(0)
}

//= RDMAP-3.2-9
//= RDMAP-4.8-1
//= RDMAP-4.8-2
//= RDMAP-4.8-6
//= RDMAP-4.8-8
//= RDMAP-4.8-11
//= RDMAP-5.4-3
//= RDMAP-5.4-6
/// All combinations of M, D and R, for tagged and untagged segments, with any code. The event
/// depends on the flags. Linux siw's layout is converted. A Terminate needs no receive.
#[test]
fn terminates_of_every_layout_are_reported() {
    for code in ["1/2/05", "0/1/00", "0/0/77", "e/e/77"] {
        let number = |at| u8::from_str_radix(&code[at], 16).unwrap();
        let first = number(0..1) << 4 | number(2..3);
        for flags in (0..8).map(|n: u8| n << 5) {
            for tagged in [false, true] {
                // Reserved bits are ignored.
                for reserved in [[0, 0], [0x1F, 0xFF]] {
                    let control = [first, number(4..6), flags | reserved[0], reserved[1]];
                    let (payload, headers) = received(control, flags, tagged);
                    // D implies a length, so the event is the same as if M were set.
                    let told = event_of(&payload);
                    assert_eq!(told, format!("terminated by peer {code}{headers}"), "{flags:#x}");
                }
            }
        }
    }
    for (control, flags, code) in [
        ([0x21, 0x02, 0x03, 0], 0xC0, "1/2/02"),
        ([0x10, 0x00, 0x07, 0], 0xE0, "0/1/00"),
        ([0x11, 0x01, 0x01, 0], 0x80, "1/1/01"),
        ([0x02, 0x02, 0x00, 0], 0x00, "2/0/02"),
    ] {
        let (payload, headers) = received(control, flags, false);
        assert_eq!(event_of(&payload), format!("terminated by peer {code}{headers}"));
    }
}

//= RDMAP-5.4-7
/// Truncated anywhere, in segments, or with a wrong MSN: reported as malformed, and not answered.
#[test]
fn a_malformed_terminate_is_reported() {
    for flags in (0..8).map(|n: u8| n << 5) {
        let (payload, _) = received([0x12, 5, flags, 0], flags, false);
        for cut in 0..payload.len() {
            let told = event_of(&payload[..cut]);
            let expected = "lost: the peer sent a malformed Terminate: Terminate too short";
            assert!(told.starts_with(expected), "{flags:#x} cut at {cut}: {told}");
        }
    }
    for (msn, mo, last) in [(0, 0, true), (2, 0, true), (1, 4, true), (1, 0, false)] {
        let (mut w, mut raw) = World::raw();
        w.recv(A, 7, &[]);
        let header = raw.untagged(Opcode::Terminate, qn::TERMINATE, msn, mo, last);
        raw.segment(&mut w, header, &[0x12, 5, 0, 0]);
        assert_eq!(raw.segments(&mut w), []);
        assert_eq!(w.completions(A), ["7 Receive WrFlush"]);
        let events = w.events(A);
        assert!(events[0].starts_with("lost: the peer sent a malformed Terminate"), "{events:?}");
    }
}

//= RDMAP-5.4-8
//= RDMAP-5.4-10
//= RDMAP-6.2.1-2
/// Requests that wait for a response, for the socket or in the queue, and receives: each completes
/// once, and nothing more is sent.
#[test]
fn a_received_terminate_flushes_everything() {
    let (mut w, mut raw) = World::raw();
    let near = w.any_mr(A, 3000);
    let far = w.any_mr(A, 3000);
    w.recv(A, 50, &[]);
    w.recv(A, 51, &[]);
    w.post(A, &[Wr::read(1, near.sge(0..8), &far, 0), Wr::send(2, &[])]);
    assert_eq!(raw.segments(&mut w).len(), 2);
    w.links[0].pipes[0].window = 100;
    let mut batch: Vec<Wr> = (3..20).map(|n| Wr::write(n, &[near.all()], &far, 0)).collect();
    batch.push(Wr::send(20, &[]).unsignaled());
    w.post(A, &batch);
    let sent = w.links[0].pipes[0].sent;
    raw.terminate(&mut w, &[0x20, 0x02, 0, 0]);
    w.links[0].pipes[0].window = 1 << 20;
    w.settle();
    w.post(A, &[Wr::send(21, &[])]);
    raw.collect(&mut w);
    assert!(raw.fin && !raw.reset);
    assert_eq!(w.links[0].pipes[0].sent, sent, "bytes that TCP had not accepted are not sent");
    raw.finish(&mut w);
    let mut expected = vec!["1 RdmaRead WrFlush".to_owned(), "2 Send".to_owned()];
    expected.extend((3..20).map(|n| format!("{n} RdmaWrite WrFlush")));
    expected.push("20 Send WrFlush".to_owned());
    expected.extend([50, 51].map(|n| format!("{n} Receive WrFlush")));
    expected.push("21 Send WrFlush".to_owned());
    assert_eq!(w.completions(A), expected);
    assert_eq!(w.events(A), ["terminated by peer 2/0/02"]);
}

//= RDMAP-6.2.1-3
//= RDMAP-7-4
/// A peer may close the connection as soon as it has sent or received a Terminate.
#[test]
fn a_peer_may_close_right_after_a_terminate() {
    for ours in [false, true] {
        for how in ["fin", "close", "reset"] {
            let (mut w, mut raw) = World::raw();
            w.recv(A, 7, &[]);
            let code = if ours {
                raw.write(&mut w, Stag(5), 0, b"x");
                "terminated 1/1/00"
            } else {
                raw.terminate(&mut w, &[0x20, 0x02, 0, 0]);
                "terminated by peer 2/0/02"
            };
            match how {
                "fin" => raw.finish(&mut w),
                "close" => raw.close(&mut w),
                _ => raw.reset(&mut w),
            }
            assert_eq!(w.completions(A), ["7 Receive WrFlush"], "{how}");
            let events = w.events(A);
            assert!(events.len() == 1 && events[0].starts_with(code), "{how}: {events:?}");
            assert!(raw.is_closed(&w), "{how}");
            assert_eq!(w.next_timeout(), None, "no deadline is left");
        }
    }
}

// --- After a Terminate ---------------------------------------------------------------------------

//= RDMAP-5.4-4
//= RDMAP-5.4-9
//= RDMAP-7.1-5
//= RDMAP-7-3
/// After a Terminate of either side, valid and invalid messages are dropped alike: nothing is
/// placed, read, invalidated, delivered or sent.
#[test]
fn nothing_after_a_terminate_has_an_effect() {
    for ours in [false, true] {
        let (mut w, mut raw) = World::raw();
        let region = w.any_mr(A, 8);
        let sink = w.any_mr(A, 8);
        let own = w.own_mr(A, 8, Access::REMOTE_WRITE);
        w.recv(A, 7, &[region.all()]);
        w.post(A, &[Wr::read(8, sink.all(), &region, 0)]);
        assert_eq!(raw.segments(&mut w).len(), 1);
        let mut invalidate =
            ulpdu(&raw.untagged(Opcode::SendInvalidate, qn::SEND, 1, 0, true), b"x");
        invalidate[2..6].copy_from_slice(&own.stag.0.to_be_bytes());
        let terminate = |raw: &Raw, code: [u8; 4]| {
            ulpdu(&raw.untagged(Opcode::Terminate, qn::TERMINATE, 1, 0, true), &code)
        };
        let read = raw.untagged(Opcode::ReadRequest, qn::READ_REQUEST, 1, 0, true);
        let first = if ours {
            ulpdu(&raw.tagged(Opcode::Write, region.stag, region.iova + 1, true), &[9; 8])
        } else {
            terminate(&raw, [0x12, 5, 0, 0])
        };
        let behind = [
            ulpdu(&raw.tagged(Opcode::Write, region.stag, region.iova, true), b"written!"),
            ulpdu(&raw.tagged(Opcode::ReadResponse, sink.stag, sink.iova, true), b"response"),
            ulpdu(&raw.untagged(Opcode::Send, qn::SEND, 1, 0, true), b"sent"),
            invalidate,
            ulpdu(&read, &read_of(&region, 0, 8).emit()),
            ulpdu(&raw.tagged(Opcode::Write, Stag(1), 0, true), b"fault"),
            terminate(&raw, [0x20, 2, 0, 0]),
            vec![0x41],
        ];
        // Both in one call to the socket, and each in a separate call.
        let mut bytes = raw.fpdu(&first);
        for ulpdu in &behind {
            bytes.extend(raw.fpdu(ulpdu));
        }
        raw.bytes(&mut w, &bytes);
        for ulpdu in &behind {
            raw.ulpdu(&mut w, ulpdu);
        }
        let code = if ours { "terminated 1/1/01" } else { "terminated by peer 1/2/05" };
        if ours {
            assert_eq!(raw.expect_terminate(&mut w).0, "1/1/01");
        } else {
            assert_eq!((raw.segments(&mut w), raw.fin), (vec![], true));
        }
        raw.finish(&mut w);
        assert_eq!((region.bytes(), sink.bytes()), (vec![0; 8], vec![0; 8]));
        assert!(w.engines[0].state.stags.get(own.stag).is_some());
        assert_eq!(w.completions(A), ["8 RdmaRead WrFlush", "7 Receive WrFlush"]);
        let events = w.events(A);
        assert!(events.len() == 1 && events[0].starts_with(code), "{events:?}");
        assert!(raw.segments(&mut w).is_empty() && !raw.reset);
    }
}
