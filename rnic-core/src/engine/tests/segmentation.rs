//! The segments of messages on the wire, byte for byte (RFC 5041 sections 4, 5.2 and 5.3). The
//! expected bytes are written here by hand.

use super::raw::Raw;
use super::requests::Wr;
use super::world::{A, B, Wiring, World};
use crate::engine::qp::Qp;
use crate::rdmap::ReadRequest;
use rnic_abi::abi::queue::SendFlags;
use rnic_abi::types::{Msn, Stag, TaggedOffset};

const LAST: u8 = 0x40;

/// Returns an untagged segment of DDP version 1.
fn untagged(last: u8, ulp: [u8; 5], qn: u32, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    let words = [qn, msn, mo].map(u32::to_be_bytes).concat();
    [&[last | 1][..], &ulp, &words, payload].concat()
}

/// Returns a tagged segment.
fn tagged(last: u8, ulp: u8, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    [&[0x80 | last | 1, ulp][..], &stag.to_be_bytes(), &to.to_be_bytes(), payload].concat()
}

fn qps(w: &mut World) -> impl Iterator<Item = &mut Qp> {
    w.engines.iter_mut().flat_map(|engine| engine.qps.iter_mut().flatten().map(|qp| &mut **qp))
}

/// Returns a peer and a QP with this MULPDU, which need not correspond to any EMSS.
fn with_mulpdu(mulpdu: usize) -> (World, Raw) {
    let (mut w, mut raw) = World::raw();
    // The QP sets its MULPDU only when the EMSS changes, here with the first message.
    let nowhere = w.any_mr(A, 1);
    w.post(A, &[Wr::write(0, &[], &nowhere, 0)]);
    assert_eq!(raw.segments(&mut w).len(), 1);
    assert_eq!(w.completions(A), ["0 RdmaWrite"]);
    for qp in qps(&mut w) {
        qp.link.tcp_mut().expect("the QP runs over TCP").set_mulpdu(mulpdu);
    }
    (w, raw)
}

//= DDP-4.1-3
//= DDP-4.1-4
//= DDP-4.1-5
//= DDP-4.1-6
//= DDP-4.1-8
//= DDP-4.1-10
//= DDP-4.2-2
//= DDP-4.2-4
//= DDP-4.2-6
//= DDP-4.2-8
//= DDP-4.2-9
//= DDP-4.3-2
//= DDP-4.3-4
//= DDP-4.3-6
//= DDP-4.3-10
//= DDP-4.3-11
//= DDP-5.2-1
//= DDP-5.2-2
//= DDP-5.2-4
//= DDP-5.2-6
//= DDP-5.2-7
//= DDP-5.2-8
//= DDP-5.3-2
//= DDP-5.3-3
#[test]
fn segments_of_2048_bytes_at_mulpdu_1500() {
    let (mut w, mut raw) = with_mulpdu(1500);
    let from = w.any_mr(A, 2048);
    let bytes = from.pattern(1);
    let stag = 0x1234_5678;
    w.post(
        A,
        &[
            Wr::send(1, &[from.all()]),
            Wr::write(2, &[from.all()], &from, 0).remote(Stag(stag), 16384),
            Wr::send_invalidate(3, &[from.all()], Stag(0xDEAD_BEEF)).with(SendFlags::SOLICITED),
        ],
    );
    let plain = [0x43, 0, 0, 0, 0];
    let invalidating = [0x46, 0xDE, 0xAD, 0xBE, 0xEF];
    let expected = [
        untagged(0, plain, 0, 1, 0, &bytes[..1482]),
        untagged(LAST, plain, 0, 1, 1482, &bytes[1482..]),
        tagged(0, 0x40, stag, 16384, &bytes[..1486]),
        tagged(LAST, 0x40, stag, 17870, &bytes[1486..]),
        untagged(0, invalidating, 0, 2, 0, &bytes[..1482]),
        untagged(LAST, invalidating, 0, 2, 1482, &bytes[1482..]),
    ];
    let sent = raw.ulpdus(&mut w);
    assert!(raw.has_whole_fpdus());
    assert_eq!(sent.iter().map(Vec::len).collect::<Vec<_>>(), [1500, 584, 1500, 576, 1500, 584]);
    assert!(sent == expected, "the bytes differ");

    // The response to a peer's Read Request goes to the sink in the request.
    let request = ReadRequest {
        sink_stag: Stag(stag),
        sink_to: TaggedOffset(16384),
        size: 2048,
        src_stag: from.stag,
        src_to: TaggedOffset(from.iova),
    };
    raw.read(&mut w, 1, &request);
    let expected = [
        tagged(0, 0x42, stag, 16384, &bytes[..1486]),
        tagged(LAST, 0x42, stag, 17870, &bytes[1486..]),
    ];
    assert!(raw.ulpdus(&mut w) == expected, "the bytes of the response differ");

    // A local Read Request goes to its own queue, with sink, size and source as posted.
    w.post(A, &[Wr::read(4, from.sge(8..24), &from, 0).remote(Stag(stag), 77)]);
    let header = [
        &from.stag.0.to_be_bytes()[..],
        &(from.iova + 8).to_be_bytes(),
        &16u32.to_be_bytes(),
        &stag.to_be_bytes(),
        &77u64.to_be_bytes(),
    ];
    let expected = untagged(LAST, [0x41, 0, 0, 0, 0], 1, 1, 0, &header.concat());
    assert_eq!(raw.ulpdus(&mut w), [expected]);
}

//= DDP-4.1-10
#[test]
fn an_rdmac_peer_gets_version_0() {
    let mut w = World::pair(Wiring { rdmac: true, ..Wiring::tcp() });
    w.recv(B, 7, &[]);
    w.post(A, &[Wr::send(1, &[])]);
    assert_eq!(w.completions(B), ["7 Receive"]);
    // The FPDU after the RTR message, and after the first Marker.
    let log = &w.links[0].pipes[0].log;
    let at = log.len() - 4 - 18;
    assert_eq!(log[at..at + 2], [0x40, 0x03], "DV and RV are 0: {log:02x?}");
}

//= DDP-4.1-3
//= DDP-4.1-4
//= DDP-5.2-2
//= DDP-5.2-4
#[test]
fn lengths_around_segment_multiples() {
    for mulpdu in [128, 1500, 64_768] {
        let (mut w, mut raw) = with_mulpdu(mulpdu);
        let from = w.any_mr(A, 4 * mulpdu);
        let bytes = from.pattern(2);
        let mut reads = 0;
        for (what, header) in [("Send", 18), ("Write", 14), ("Read Response", 14)] {
            let whole = mulpdu - header;
            for len in [1, whole - 1, whole, whole + 1, 2 * whole, 3 * whole - 1, 3 * whole + 1] {
                match what {
                    "Send" => w.post(A, &[Wr::send(1, &[from.sge(0..len)])]),
                    "Write" => w.post(A, &[Wr::write(1, &[from.sge(0..len)], &from, 0)]),
                    _ => {
                        reads += 1;
                        let request = ReadRequest {
                            sink_stag: from.stag,
                            sink_to: TaggedOffset(from.iova),
                            size: len as u32,
                            src_stag: from.stag,
                            src_to: TaggedOffset(from.iova),
                        };
                        raw.read(&mut w, reads, &request);
                    }
                }
                w.completions(A);
                let sent = raw.ulpdus(&mut w);
                assert_eq!(sent.len(), len.div_ceil(whole), "{what} of {len} in {mulpdu}");
                let mut at = 0;
                for (n, ulpdu) in (1..).zip(&sent) {
                    assert!(ulpdu.len() <= mulpdu, "{what} of {len}: {} bytes", ulpdu.len());
                    let last = ulpdu[0] & LAST != 0;
                    assert_eq!(last, n == sent.len(), "{what} of {len} in {mulpdu}");
                    let offset = match header {
                        18 => u64::from(u32::from_be_bytes(ulpdu[14..18].try_into().unwrap())),
                        _ => u64::from_be_bytes(ulpdu[6..14].try_into().unwrap()) - from.iova,
                    };
                    assert_eq!(offset, at as u64, "{what} of {len} in {mulpdu}");
                    let payload = &ulpdu[header..];
                    assert!(payload == &bytes[at..at + payload.len()], "{what} of {len}");
                    at += payload.len();
                }
                assert_eq!(at, len, "{what} in {mulpdu}");
            }
        }
    }
}

//= DDP-4.4-1
//= DDP-5.2-9
#[test]
fn an_empty_message_is_one_segment() {
    let (mut w, mut raw) = World::raw();
    let any = w.any_mr(A, 8);
    w.post(
        A,
        &[
            Wr::send(1, &[]),
            Wr::send(2, &[any.sge(3..3), any.sge(4..4)]),
            Wr::write(3, &[], &any, 0).remote(Stag(9), 5),
            Wr::send(4, &[]).inline(b""),
        ],
    );
    raw.read(&mut w, 1, &ReadRequest::parse(&[0; 28]));
    let plain = [0x43, 0, 0, 0, 0];
    let expected = [
        untagged(LAST, plain, 0, 1, 0, b""),
        untagged(LAST, plain, 0, 2, 0, b""),
        tagged(LAST, 0x40, 9, 5, b""),
        untagged(LAST, plain, 0, 3, 0, b""),
        tagged(LAST, 0x42, 0, 0, b""),
    ];
    assert_eq!(raw.ulpdus(&mut w), expected);
}

/// Returns queue and MSN of each untagged segment.
fn numbers(raw: &mut Raw, w: &mut World) -> Vec<(u32, u32)> {
    let word = |u: &[u8], at: usize| u32::from_be_bytes(u[at..at + 4].try_into().unwrap());
    raw.ulpdus(w).iter().map(|u| (word(u, 6), word(u, 10))).collect()
}

//= DDP-4.3-7
//= DDP-4.3-8
//= DDP-4.3-9
#[test]
fn msns_start_at_1_and_wrap() {
    let (mut w, mut raw) = World::raw();
    let any = w.any_mr(A, 8);
    let read = |n| Wr::read(n, any.sge(0..1), &any, 0);
    w.post(A, &[Wr::send(1, &[]), read(2), Wr::send(3, &[]), read(4), Wr::send(5, &[])]);
    assert_eq!(numbers(&mut raw, &mut w), [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3)]);
    // The Terminate is the first message of its queue, and the last message of all.
    raw.send(&mut w, 9, b"");
    assert_eq!(numbers(&mut raw, &mut w), [(2, 1)]);

    let (mut w, mut raw) = World::raw();
    let any = w.any_mr(A, 8);
    for qp in qps(&mut w) {
        qp.requester.set_next_msn(Msn(u32::MAX - 1), Msn(u32::MAX));
    }
    let read = |n| Wr::read(n, any.sge(0..1), &any, 0);
    w.post(A, &[Wr::send(1, &[]), read(2), Wr::send(3, &[]), read(4), Wr::send(5, &[])]);
    let expected = [(0, u32::MAX - 1), (1, u32::MAX), (0, u32::MAX), (1, 0), (0, 0)];
    assert_eq!(numbers(&mut raw, &mut w), expected);
}

//= DDP-4.3-9
#[test]
fn both_ends_wrap_msns_alike() {
    let mut w = World::connected(Wiring::tcp());
    let a = w.any_mr(A, 10);
    let b = w.any_mr(B, 10);
    let bytes = b.pattern(3);
    for qp in qps(&mut w) {
        qp.requester.set_next_msn(Msn(u32::MAX), Msn(u32::MAX));
        qp.link.tcp_mut().expect("the QP runs over TCP").number_inbound_from(Msn(u32::MAX));
    }
    for n in 0..3u64 {
        w.recv(B, n, &[]);
        let at = n as usize;
        w.post(A, &[Wr::send(10 + n, &[]), Wr::read(20 + n, a.sge(at..at + 1), &b, n)]);
        assert_eq!(w.completions(B), [format!("{n} Receive")]);
        assert_eq!(w.completions(A), [format!("1{n} Send"), format!("2{n} RdmaRead 1")]);
    }
    assert_eq!(a.bytes()[..3], bytes[..3]);
}

//= DDP-5.4-1
#[test]
fn a_message_completes_when_tcp_has_it() {
    let (mut w, mut raw) = World::raw();
    let from = w.any_mr(A, 500);
    w.links[0].pipes[0].window = 400;
    w.post(A, &[Wr::send(1, &[from.all()]), Wr::write(2, &[from.all()], &from, 0)]);
    assert_eq!(w.completions(A), [""; 0], "part of the first is not yet accepted");
    w.links[0].pipes[0].window = 600;
    w.settle();
    assert_eq!(w.completions(A), ["1 Send"]);
    w.links[0].pipes[0].window = 4000;
    w.settle();
    // The peer has read nothing.
    assert_eq!(w.completions(A), ["2 RdmaWrite"]);
    assert_eq!(raw.segments(&mut w).len(), 2);
}

//= DDP-3-3
#[test]
fn unsent_messages_do_not_succeed() {
    for end in ["reset", "abort"] {
        let (mut w, mut raw) = World::raw();
        let from = w.any_mr(A, 500);
        w.links[0].pipes[0].window = 1000;
        let batch = [1, 2, 3, 4].map(|n| Wr::send(n, &[from.all()]));
        w.post(A, &batch);
        // TCP has a part of the second message. All have been framed.
        assert_eq!(w.completions(A), ["1 Send"], "{end}");
        match end {
            "reset" => raw.reset(&mut w),
            _ => w.abort(A),
        }
        let failed = ["2 Send WrFlush", "3 Send WrFlush", "4 Send WrFlush"];
        assert_eq!(w.completions(A), failed, "{end}");
    }
}

//= DDP-3-1
//= DDP-3-2
#[test]
fn a_smaller_mulpdu_keeps_queued_segments() {
    let (mut w, mut raw) = World::raw();
    let from = w.any_mr(A, 10_000);
    let bytes = from.pattern(4);
    w.links[0].pipes[0].window = 2000;
    w.post(A, &[Wr::write(1, &[from.all()], &from, 0)]);
    w.emss = 536;
    w.push(A, &[Wr::write(2, &[from.all()], &from, 0)]);
    w.links[0].pipes[0].window = 1 << 20;
    w.settle();
    assert_eq!(w.completions(A), ["1 RdmaWrite", "2 RdmaWrite"]);
    let sent = raw.ulpdus(&mut w);
    let first = sent.iter().position(|u| u[0] & LAST != 0).unwrap() + 1;
    // The EMSS less length field and CRC, and less padding to a multiple of four.
    for (message, most) in [(&sent[..first], 1454), (&sent[first..], 530)] {
        let (last, rest) = message.split_last().unwrap();
        assert!(rest.iter().all(|u| u.len() == most) && last.len() <= most, "{most}");
        let payload: Vec<u8> = message.iter().flat_map(|u| &u[14..]).copied().collect();
        assert!(payload == bytes, "the bytes differ");
    }
}
