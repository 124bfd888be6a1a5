//! Outgoing messages: all bytes of each kind, and the segments of long ones.

use super::raw::{Segment, add_of};
use super::requests::Wr;
use super::world::{A, B, Wiring, World};
use crate::conformance::table;
use crate::ddp::Header;
use crate::rdmap::{AtomicRequest, AtomicResponse, Opcode, ReadRequest};
use rnic_abi::abi::queue::SendFlags;
use rnic_abi::types::{Access, AtomicOperation, Scope, Stag, TaggedOffset};

const SINK: Stag = Stag(0xA1A2_A3A4);
const INVALIDATED: Stag = Stag(0xB1B2_B3B4);

/// Returns a message of every kind that a QP sends in a stream of this version, each with its
/// expected bytes.
fn all_kinds(version: u8) -> Vec<(Vec<u8>, Vec<u8>)> {
    let (mut w, mut raw) = World::raw_of_version(version);
    let near = w.any_mr(A, 16);
    let far = w.any_mr(A, 16);
    near.set(b"0123456789abcdef");
    // A plain Send does not send an STag to invalidate.
    let mut plain = Wr::send(1, &[]).inline(b"a");
    plain.header.inv_rkey = INVALIDATED.0;
    w.post(
        A,
        &[
            plain,
            Wr::send(2, &[near.sge(1..3)]).with(SendFlags::SOLICITED),
            Wr::send_invalidate(3, &[], INVALIDATED),
            Wr::send_invalidate(4, &[near.sge(4..5)], INVALIDATED).with(SendFlags::SOLICITED),
            Wr::write(5, &[near.sge(6..9)], &far, 7),
            Wr::read(6, near.sge(2..5), &far, 11),
        ],
    );
    let sent = ["1 Send", "2 Send", "3 Send", "4 Send", "5 RdmaWrite"];
    assert_eq!(w.completions(A), sent);
    let request = ReadRequest {
        sink_stag: SINK,
        sink_to: TaggedOffset(0x0102_0304_0506_0708),
        size: 2,
        src_stag: near.stag,
        src_to: TaggedOffset(near.iova + 10),
    };
    raw.read(&mut w, 1, &request);
    raw.response(&mut w, near.stag, near.iova + 2, b"xyz", true);
    assert_eq!(w.completions(A), ["6 RdmaRead 3"]);
    let word = w.any_mr(A, 8);
    word.set(&41u64.to_ne_bytes());
    let extended = version == 1;
    if extended {
        let immediate = |id, data| Wr::write(id, &[], &far, 1).immediate(data);
        w.post(
            A,
            &[
                Wr::fetch_add(7, 0x0102, near.sge(0..8), &far, 8),
                immediate(8, 0x1112_1314_1516_1718),
                immediate(9, 5).with(SendFlags::SOLICITED),
            ],
        );
        raw.atomic(&mut w, 2, &add_of(&word, 0));
        let header = raw.untagged(Opcode::AtomicResponse, 3, 1, 0, true);
        raw.segment(&mut w, header, &AtomicResponse { id: 0, original: 3 }.emit());
        assert_eq!(w.completions(A), ["7 FetchAdd 8", "8 RdmaWrite", "9 RdmaWrite"]);
    }
    // A local fault, whose Terminate encloses no headers.
    w.post(A, &[Wr::write(10, &[near.sge(0..17)], &far, 0)]);
    assert_eq!(w.completions(A), ["10 RdmaWrite LocalProtection"]);

    let bytes = raw.ulpdus(&mut w);
    assert!(raw.has_whole_fpdus() && raw.fin, "other data, or no FIN");
    let v = version;
    let untagged = |opcode: u8, stag: u32, queue: u8, msn: u8, payload: &[u8]| {
        let control = [0x40 | v, v << 6 | opcode];
        let numbers = [0, 0, 0, queue, 0, 0, 0, msn, 0, 0, 0, 0];
        [&control[..], &stag.to_be_bytes(), &numbers, payload].concat()
    };
    let tagged = |opcode: u8, stag: Stag, to: u64, payload: &[u8]| {
        let control = [0xC0 | v, v << 6 | opcode];
        [&control[..], &stag.0.to_be_bytes(), &to.to_be_bytes(), payload].concat()
    };
    let read = [
        &near.stag.0.to_be_bytes()[..],
        &(near.iova + 2).to_be_bytes(),
        &[0, 0, 0, 3],
        &far.stag.0.to_be_bytes(),
        &(far.iova + 11).to_be_bytes(),
    ]
    .concat();
    let mut expected = vec![
        untagged(3, 0, 0, 1, b"a"),
        untagged(5, 0, 0, 2, b"12"),
        untagged(4, INVALIDATED.0, 0, 3, b""),
        untagged(6, INVALIDATED.0, 0, 4, b"4"),
        tagged(0, far.stag, far.iova + 7, b"678"),
        untagged(1, 0, 1, 1, &read),
        tagged(2, SINK, 0x0102_0304_0506_0708, b"ab"),
    ];
    if extended {
        let operation = [
            &[0, 0, 0, 0, 0, 0, 0, 6][..],
            &far.stag.0.to_be_bytes(),
            &(far.iova + 8).to_be_bytes(),
            &[0, 0, 0, 0, 0, 0, 1, 2],
            &[0; 16],
            &[0xFF; 8],
        ]
        .concat();
        let empty = || tagged(0, far.stag, far.iova + 1, b"");
        expected.extend([
            untagged(10, 0, 1, 2, &operation),
            empty(),
            untagged(8, 0, 0, 5, &[0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]),
            empty(),
            untagged(9, 0, 0, 6, &[0, 0, 0, 0, 0, 0, 0, 5]),
            untagged(11, 0, 3, 1, &[0xA1, 0xA2, 0xA3, 0xA4, 0, 0, 0, 0, 0, 0, 0, 41]),
        ]);
    }
    expected.push(untagged(7, 0, 2, 1, &[0; 4]));
    assert_eq!(bytes.len(), expected.len());
    bytes.into_iter().zip(expected).collect()
}

//= RDMAP-3.1-1
//= RDMAP-3.1-4
//= RDMAP-3.1-6
//= RDMAP-3.2-1
//= RDMAP-3.2-2
//= RDMAP-3.2-5
//= RDMAP-4.1-1
//= RDMAP-4.1-2
//= RDMAP-4.1-5
//= RDMAP-4.1-7
//= RDMAP-4.1-9
//= RDMAP-4.4-1
//= RDMAP-4.4-2
//= RDMAP-4.4-3
//= RDMAP-5.3-12
//= RDMAP-6.1-1
//= 7306-4.1-1
//= 7306-4.1-3
//= 7306-4.1-7
//= 7306-5-8
//= 7306-5.2-3
//= 7306-5.2.2-6
//= 7306-5.2.2-7
//= 7306-A-1
/// All messages of RFC 5040 in a DDP stream of either version, and those of RFC 7306 in a version 1
/// stream.
#[test]
fn every_kind_of_message_byte_by_byte() {
    for version in [1, 0] {
        for (bytes, expected) in all_kinds(version) {
            assert_eq!(bytes, expected, "version {version}");
        }
    }
}

//= RDMAP-3.1-2
//= RDMAP-4.1-3
//= RDMAP-4.1-4
//= RDMAP-4.2-1
//= RDMAP-5.1-1
//= RDMAP-5.2.1-1
//= RDMAP-5.2.1-6
//= RDMAP-5.2.2-1
//= RDMAP-5.3-1
//= RDMAP-5.3-8
//= RDMAP-5.4-1
//= RDMAP-5.4-2
//= 7306-4.1-2
//= 7306-4.1-5
//= 7306-4.2-1
//= 7306-5.2-4
//= 7306-5.2.1-13
//= 7306-6.3-1
/// T, queue number, and the length after the DDP header, for each opcode.
#[test]
fn every_kind_of_message_matches_the_table() {
    let sent = all_kinds(1);
    for row in table("opcode").iter().filter(|row| [5040, 7306].contains(&row.number("rfc"))) {
        let name = row.text("name");
        let (bytes, _) = sent
            .iter()
            .find(|(bytes, _)| u64::from(bytes[1] & 0x0F) == row.number("value"))
            .unwrap_or_else(|| panic!("no {name} was sent"));
        let tagged = bytes[0] & 0x80 != 0;
        assert_eq!(Some(tagged), row.find_bool("tagged"), "{name}");
        if !tagged {
            let queue = u32::from_be_bytes(bytes[6..10].try_into().unwrap());
            assert_eq!(Some(u64::from(queue)), row.find_number("queue"), "{name}");
        }
        let behind = bytes.len() - if tagged { 14 } else { 18 };
        let payload = row.find_bool("ulp_payload").unwrap();
        match (row.text("header"), payload) {
            ("none", true) => assert!(behind < 4, "{name}"),
            ("Read Request, 28 octets", false) => assert_eq!(behind, 28, "{name}"),
            ("Terminate, 4 to 52 octets", false) => assert_eq!(behind, 4, "{name}"),
            ("8 octets of data", false) => assert_eq!(behind, 8, "{name}"),
            ("Atomic Request, 52 octets", false) => assert_eq!(behind, 52, "{name}"),
            ("Atomic Response, 12 octets", false) => assert_eq!(behind, 12, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

/// Assembles segments into messages with their payload. Checks that they are in order.
pub(super) fn messages(segments: &[Segment]) -> Vec<(Header, Vec<u8>)> {
    let mut found: Vec<(Header, Vec<u8>)> = Vec::new();
    let mut open = false;
    for Segment { header, payload } in segments {
        if !open {
            found.push((*header, Vec::new()));
        }
        let (first, bytes) = found.last_mut().unwrap();
        let at = bytes.len() as u64;
        let last = match (*first, *header) {
            (Header::Tagged(f), Header::Tagged(h)) => {
                assert_eq!((h.rsvd_ulp, h.stag), (f.rsvd_ulp, f.stag));
                assert_eq!(h.to.0, f.to.0 + at);
                h.last
            }
            (Header::Untagged(f), Header::Untagged(h)) => {
                assert_eq!((h.rsvd_ulp, h.inv_stag), (f.rsvd_ulp, f.inv_stag));
                assert_eq!((h.qn, h.msn, u64::from(h.mo)), (f.qn, f.msn, at));
                h.last
            }
            other => panic!("a message of both models: {other:?}"),
        };
        bytes.extend(payload);
        open = !last;
    }
    assert!(!open, "a message without an end");
    found
}

pub(super) fn opcode_of(header: &Header) -> Opcode {
    crate::rdmap::Control::parse(header.rsvd_ulp()).opcode
}

//= RDMAP-3.1-3
//= RDMAP-5.1-8
//= RDMAP-5.2-1
//= RDMAP-5.2.2-8
/// The number of segments is arbitrary; opcode, buffer and MSN stay the same, and only the last
/// segment has L set.
#[test]
fn one_message_of_rdmap_is_one_of_ddp() {
    let (mut w, mut raw) = World::raw();
    let near = w.any_mr(A, 5000);
    let far = w.any_mr(A, 5000);
    let bytes = near.pattern(1);
    w.post(
        A,
        &[
            Wr::write(1, &[near.sge(0..2500), near.sge(2500..5000)], &far, 0),
            Wr::send_invalidate(2, &[near.all()], INVALIDATED),
            Wr::send(3, &[near.sge(0..0)]),
            Wr::read(4, near.all(), &far, 0),
        ],
    );
    let request = ReadRequest {
        sink_stag: SINK,
        sink_to: TaggedOffset(3),
        size: 5000,
        src_stag: near.stag,
        src_to: TaggedOffset(near.iova),
    };
    raw.read(&mut w, 1, &request);
    let segments = raw.segments(&mut w);
    assert!(segments.len() > 10, "each long message takes several segments");
    let found = messages(&segments);
    let kinds: Vec<Opcode> = found.iter().map(|(header, _)| opcode_of(header)).collect();
    use Opcode::{ReadRequest as Request, ReadResponse as Response, Send, SendInvalidate, Write};
    assert_eq!(kinds, [Write, SendInvalidate, Send, Request, Response]);
    for long in [0, 1, 4] {
        assert_eq!(found[long].1, bytes, "{}", kinds[long]);
    }
    // A Read is answered by one message, and causes no other.
    raw.response(&mut w, near.stag, near.iova, &[7; 5000], true);
    assert_eq!(w.completions(A), ["1 RdmaWrite", "2 Send", "3 Send", "4 RdmaRead 5000"]);
    assert_eq!(raw.segments(&mut w), []);
}

//= RDMAP-5.1-8
//= RDMAP-5.2.1-9
/// Two regions with adjacent addresses are still two buffers.
#[test]
fn a_message_reaches_one_buffer() {
    for wiring in Wiring::both() {
        let neighbours = || {
            let mut w = World::connected(wiring);
            let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
            let left = w.mr_at(B, 10, access, Scope::Pd, 0x1000);
            let right = w.mr_at(B, 10, access, Scope::Pd, 0x100A);
            left.fill(b'l');
            right.fill(b'r');
            let near = w.any_mr(A, 20);
            near.fill(b'n');
            (w, near, left, right)
        };
        let (mut w, near, left, _) = neighbours();
        w.post(A, &[Wr::read(1, near.sge(0..11), &left, 0)]);
        assert_eq!(w.completions(A), ["1 RdmaRead RemoteAccess 0/1/01"], "{wiring:?}");
        let (mut w, near, left, right) = neighbours();
        w.post(A, &[Wr::write(1, &[near.sge(0..11)], &left, 0)]);
        assert!(w.events(B)[0].starts_with("terminated 1/1/01"), "{wiring:?}");
        assert_eq!((left.bytes(), right.bytes()), (vec![b'l'; 10], vec![b'r'; 10]));
        // Two messages of each kind reach both.
        let (mut w, near, left, right) = neighbours();
        w.post(
            A,
            &[
                Wr::write(1, &[near.sge(0..1)], &left, 9),
                Wr::write(2, &[near.sge(0..1)], &right, 0),
                Wr::read(3, near.sge(0..10), &left, 0),
                Wr::read(4, near.sge(10..20), &right, 0),
            ],
        );
        assert_eq!(near.bytes(), b"lllllllllnnrrrrrrrrr");
        assert_eq!(w.completions(A).len(), 4, "{wiring:?}");
    }
}

//= RDMAP-5.1-6
//= RDMAP-5.2.1-7
//= RDMAP-5.3-9
//= RDMAP-5.5-13
//= 7306-5.2.1-19
//= 7306-6.3-6
/// Requests of many kinds, in an arbitrary order.
#[test]
fn messages_are_sent_in_posting_order() {
    let (mut w, mut raw) = World::raw();
    w.emss = 500;
    let near = w.any_mr(A, 900);
    let far = w.any_mr(A, 64);
    let long = near.sge(0..900);
    let batch = [
        Wr::read(0, near.sge(0..1), &far, 10),
        Wr::write(1, &[long], &far, 11),
        Wr::send(2, &[near.sge(0..2)]),
        Wr::read(3, near.sge(0..3), &far, 13),
        Wr::write(31, &[near.sge(0..5)], &far, 14).immediate(3),
        Wr::fetch_add(32, 7, near.sge(0..8), &far, 16),
        Wr::send(4, &[long]),
        Wr::write(5, &[], &far, 15),
        Wr::write(6, &[near.sge(0..4)], &far, 16),
        Wr::send(7, &[near.sge(0..0)]),
        Wr::read(8, near.sge(0..8), &far, 18),
    ];
    w.post(A, &batch);
    let found = messages(&raw.segments(&mut w));
    let order: Vec<String> = found
        .iter()
        .map(|(header, payload)| match header {
            Header::Tagged(h) => format!("write {}", h.to.0 - far.iova),
            Header::Untagged(h) if opcode_of(header) == Opcode::Send => {
                format!("send {} of {}", h.msn.0, payload.len())
            }
            Header::Untagged(h) if opcode_of(header) == Opcode::Immediate => {
                format!("immediate {} of {payload:?}", h.msn.0)
            }
            Header::Untagged(h) if opcode_of(header) == Opcode::AtomicRequest => {
                let request = AtomicRequest::parse(payload[..].try_into().unwrap()).unwrap();
                let add = AtomicOperation::FetchAdd { add: 7, boundaries: 0 };
                assert_eq!(request.operation, add);
                format!("add {} at {}", h.msn.0, request.to.0 - far.iova)
            }
            Header::Untagged(h) => {
                let request = ReadRequest::parse(payload[..].try_into().unwrap());
                format!("read {} at {}", h.msn.0, request.src_to.0 - far.iova)
            }
        })
        .collect();
    let expected = [
        "read 1 at 10",
        "write 11",
        "send 1 of 2",
        "read 2 at 13",
        "write 14",
        "immediate 2 of [0, 0, 0, 0, 0, 0, 0, 3]",
        "add 3 at 16",
        "send 3 of 900",
        "write 15",
        "write 16",
        "send 4 of 0",
        "read 4 at 18",
    ];
    assert_eq!(order, expected);
    assert!(raw.has_whole_fpdus());
}
