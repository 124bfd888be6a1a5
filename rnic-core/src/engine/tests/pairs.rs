//! RFC 5040 appendix B, row by row: what is guaranteed between two operations of one stream, and
//! what is left open. Each cell that says something has a scenario here, found by what it says.

use super::link::Cuts;
use super::messages::{messages, opcode_of};
use super::raw::Raw;
use super::requests::{Mr, Wr};
use super::world::{A, B, Wiring, World};
use crate::conformance::{Row, table};
use crate::ddp::{Header, qn};
use crate::rdmap::{Opcode, ReadRequest};
use crate::types::{Access, Stag, TaggedOffset};

const COLUMNS: [&str; 3] = ["placement_remote", "placement_local", "ordering_remote"];

/// Shows what a cell says of a pair of operations.
type Scenario = fn(first: Kind, later: Kind);

/// A cell's text and the scenario for it.
const SCENARIOS: &[(&str, &str, Scenario)] = &[
    ("placement_remote", "no guarantee", every_interleaving_arrives),
    (
        "placement_remote",
        "no guarantee between Send payload and Read Request header",
        every_interleaving_arrives,
    ),
    (
        "placement_remote",
        "no guarantee between Write payload and Read Request header",
        every_interleaving_arrives,
    ),
    (
        "placement_remote",
        "no guarantee between Read Request header and Send payload",
        every_interleaving_arrives,
    ),
    (
        "placement_remote",
        "no guarantee between Read Request header and Write payload",
        every_interleaving_arrives,
    ),
    (
        "placement_remote",
        "no guarantee between the two Read Request headers, nor that the source buffers are read \
         in order",
        every_interleaving_arrives,
    ),
    (
        "placement_local",
        "Read Response payload is not placed locally before the Send payload is placed remotely",
        a_read_shows_what_went_before,
    ),
    (
        "placement_local",
        "Read Response payload is not placed locally before the Write payload is placed remotely",
        a_read_shows_what_went_before,
    ),
    (
        "placement_local",
        "Send payload may be placed remotely before the Read Response is generated",
        a_response_may_be_overtaken,
    ),
    (
        "placement_local",
        "Write payload may be placed remotely before the Read Response is generated",
        a_response_may_be_overtaken,
    ),
    (
        "placement_local",
        "no guarantee between the two Read Response payloads",
        sinks_fill_as_responses_come,
    ),
    ("ordering_remote", "completed in order", sends_complete_in_order),
    (
        "ordering_remote",
        "Read Response is not generated before the Send has completed",
        a_read_shows_what_went_before,
    ),
    (
        "ordering_remote",
        "second Read Response is not generated before the first",
        responses_leave_in_order,
    ),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Send,
    Write,
    Read,
}

impl Kind {
    fn of(row: &Row, key: &str) -> Kind {
        match row.text(key) {
            "Send" => Kind::Send,
            "RDMA Write" => Kind::Write,
            "RDMA Read" => Kind::Read,
            other => panic!("{other}"),
        }
    }
}

//= RDMAP-5.5-3
//= RDMAP-5.5-12
//= RDMAP-5.5-12a
//= RDMAP-5.5-18
/// Every cell that is not "not applicable" is shown, and no scenario stands for nothing.
#[test]
fn every_pair_of_operations_is_ordered_as_the_table_says_and_no_further() {
    // Those of RFC 5040.
    let mut rows = table("ordering_pair");
    rows.retain(|row| row.number("rfc") == 5040);
    let mut used = vec![false; SCENARIOS.len()];
    let mut pairs = Vec::new();
    for row in &rows {
        let (first, later) = (Kind::of(row, "first"), Kind::of(row, "later"));
        pairs.push((first, later));
        for column in COLUMNS {
            let says = row.text(column);
            if says == "not applicable" {
                continue;
            }
            let found = SCENARIOS.iter().position(|(c, text, _)| *c == column && *text == says);
            let found =
                found.unwrap_or_else(|| panic!("no scenario shows {first:?} {later:?}: {says}"));
            SCENARIOS[found].2(first, later);
            used[found] = true;
        }
    }
    assert!(used.iter().all(|used| *used), "{used:?}");
    let all = [Kind::Send, Kind::Write, Kind::Read];
    let all = all.iter().flat_map(|first| all.map(|later| (*first, later)));
    assert!(all.into_iter().all(|pair| pairs.contains(&pair)), "{pairs:?}");
}

/// One operation that arrives in two segments, and what it leaves behind.
struct Incoming {
    kind: Kind,
    segments: [(Header, Vec<u8>); 2],
    place: Mr,
}

impl Incoming {
    /// The `nth` of its kind.
    fn new(w: &mut World, raw: &Raw, kind: Kind, nth: u32) -> Self {
        let place = w.any_mr(A, 8);
        let number = 1 + nth;
        let untagged = |opcode, qn, mo, last| raw.untagged(opcode, qn, number, mo, last);
        let segments = match kind {
            Kind::Send => {
                w.recv(A, u64::from(number), &[place.all()]);
                [
                    (untagged(Opcode::Send, qn::SEND, 0, false), b"plac".to_vec()),
                    (untagged(Opcode::Send, qn::SEND, 4, true), b"ed".to_vec()),
                ]
            }
            Kind::Write => [
                (raw.tagged(Opcode::Write, place.stag, place.iova, false), b"plac".to_vec()),
                (raw.tagged(Opcode::Write, place.stag, place.iova + 4, true), b"ed".to_vec()),
            ],
            Kind::Read => {
                place.set(b"placed\0\0");
                let header = read_of(&place, 0, 6, u64::from(number)).emit();
                let queue = qn::READ_REQUEST;
                [
                    (untagged(Opcode::ReadRequest, queue, 0, false), header[..10].to_vec()),
                    (untagged(Opcode::ReadRequest, queue, 10, true), header[10..].to_vec()),
                ]
            }
        };
        Incoming { kind, segments, place }
    }
}

/// A Read that names this sink offset, by which its response is known.
fn read_of(from: &Mr, at: u64, size: u32, sink_to: u64) -> ReadRequest {
    ReadRequest {
        sink_stag: Stag(0xA1A2_A3A4),
        sink_to: TaggedOffset(sink_to),
        size,
        src_stag: from.stag,
        src_to: TaggedOffset(from.iova + at),
    }
}

/// No order of placement may be relied on: whatever order of segments DDP allows a sender (messages
/// of one queue, or tagged ones, do not interleave), both operations do what they are for.
fn every_interleaving_arrives(first: Kind, later: Kind) {
    let orders: &[[usize; 4]] = match first == later {
        true => &[[0, 0, 1, 1]],
        false => {
            &[[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0]]
        }
    };
    for order in orders {
        let (mut w, mut raw) = World::raw();
        let nth = u32::from(first == later);
        let both = [Incoming::new(&mut w, &raw, first, 0), Incoming::new(&mut w, &raw, later, nth)];
        let mut next = [0, 0];
        for which in order {
            let (header, payload) = &both[*which].segments[next[*which]];
            raw.segment(&mut w, *header, payload);
            next[*which] += 1;
        }
        let completions = w.completions(A);
        let responses = messages(&raw.segments(&mut w));
        let count = |kind| both.iter().filter(|op| op.kind == kind).count();
        assert_eq!(completions.len(), count(Kind::Send), "{first:?} {later:?} {order:?}");
        assert!(completions.iter().all(|c| c.ends_with(" Receive 6")), "{completions:?}");
        assert_eq!(responses.len(), count(Kind::Read), "{first:?} {later:?} {order:?}");
        assert!(responses.iter().all(|(_, payload)| payload == b"placed"), "{responses:?}");
        for op in &both {
            assert_eq!(&op.place.bytes(), b"placed\0\0", "{first:?} {later:?} {order:?}");
        }
    }
}

/// Turns both engines one round at a time, looking after each, until nothing happens any more.
fn step_by_step(w: &mut World, mut look: impl FnMut(&mut World)) {
    while w.round() {
        look(w);
    }
    w.settle();
    look(w);
}

/// A Read fetches what the Send or Write before it has placed, in the same memory, every byte of
/// it; and a Send has completed before its Read shows anything.
fn a_read_shows_what_went_before(first: Kind, _: Kind) {
    const LEN: usize = 20_000;
    for wiring in Wiring::both() {
        for seed in 0..5 {
            let mut w = World::connected(wiring);
            w.one_segment_at_a_time();
            if let (Some(link), 1..) = (w.links.first_mut(), seed) {
                link.pipes.iter_mut().for_each(|pipe| pipe.cuts = Cuts::Random(seed));
            }
            let (near, sink, there) = (w.any_mr(A, LEN), w.any_mr(A, LEN), w.any_mr(B, LEN));
            let bytes = near.pattern(seed as u8);
            there.fill(0xEE);
            w.recv(B, 1, &[there.all()]);
            let before = match first {
                Kind::Send => Wr::send(1, &[near.all()]),
                _ => Wr::write(1, &[near.all()], &there, 0),
            };
            w.push(A, &[before, Wr::read(2, sink.all(), &there, 0)]);
            let mut received = Vec::new();
            step_by_step(&mut w, |w| {
                received.extend(w.completions(B));
                if sink.bytes() != vec![0; LEN] {
                    assert_eq!(there.bytes(), bytes, "{first:?} {wiring:?}");
                    assert_eq!(received.len(), usize::from(first == Kind::Send));
                }
            });
            assert_eq!(sink.bytes(), bytes, "{first:?} {wiring:?}");
            let name = if first == Kind::Send { "1 Send" } else { "1 RdmaWrite" };
            assert_eq!(w.completions(A), [name.to_owned(), format!("2 RdmaRead {LEN}")]);
        }
    }
}

/// Receives fill in the order of their Sends: none is complete before those ahead of it.
fn sends_complete_in_order(_: Kind, _: Kind) {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.one_segment_at_a_time();
        let (near, there) = (w.any_mr(A, 9000), w.any_mr(B, 9000));
        near.pattern(1);
        let lengths = [9000, 0, 1, 5000, 17, 0, 2000];
        for n in 0..lengths.len() {
            w.recv(B, n as u64, &[there.all()]);
        }
        let sends: Vec<Wr> =
            (0..).zip(lengths).map(|(n, len)| Wr::send(n, &[near.sge(0..len)])).collect();
        w.push(A, &sends);
        let mut received = Vec::new();
        step_by_step(&mut w, |w| received.extend(w.completions(B)));
        let expected: Vec<String> = (0..)
            .zip(lengths)
            .map(|(n, len): (u64, usize)| match len {
                0 => format!("{n} Receive"),
                len => format!("{n} Receive {len}"),
            })
            .collect();
        assert_eq!(received, expected, "{wiring:?}");
    }
}

/// While a response waits for the socket, what came behind its request is placed and delivered, and
/// is what the response shows. Who does not want that fences the later operation.
fn a_response_may_be_overtaken(_: Kind, later: Kind) {
    let (mut w, mut raw) = World::raw();
    let place = w.any_mr(A, 6);
    place.set(b"before");
    w.recv(A, 7, &[place.all()]);
    // The socket is full of something else.
    let other = w.any_mr(A, 4000);
    w.links[0].pipes[0].window = 100;
    w.post(A, &[Wr::write(1, &[other.all()], &other, 0)]);
    raw.read(&mut w, 1, &read_of(&place, 0, 6, 0));
    match later {
        Kind::Send => {
            raw.send(&mut w, 1, b"behind");
            assert_eq!(w.completions(A), ["7 Receive 6"], "delivered before the response");
        }
        _ => raw.write(&mut w, place.stag, place.iova, b"behind"),
    }
    assert_eq!(&place.bytes(), b"behind");
    w.links[0].pipes[0].window = 1 << 20;
    w.settle();
    let found = messages(&raw.segments(&mut w));
    let response = found.iter().find(|(header, _)| opcode_of(header) == Opcode::ReadResponse);
    assert_eq!(response.unwrap().1, b"behind", "{later:?}");
}

/// Bytes of a response are in place as they come, before the read they belong to is done; nothing
/// is said of the second while the first is not complete.
fn sinks_fill_as_responses_come(_: Kind, _: Kind) {
    let (mut w, mut raw) = World::raw();
    let (one, two, source) = (w.any_mr(A, 4), w.any_mr(A, 4), w.any_mr(A, 4));
    w.post(A, &[Wr::read(1, one.all(), &source, 0), Wr::read(2, two.all(), &source, 0)]);
    raw.response(&mut w, one.stag, one.iova, b"on", false);
    assert_eq!((one.bytes(), two.bytes()), (b"on\0\0".to_vec(), vec![0; 4]));
    assert_eq!(w.completions(A), [""; 0]);
    raw.response(&mut w, one.stag, one.iova + 2, b"e!", true);
    raw.response(&mut w, two.stag, two.iova, b"tw", false);
    assert_eq!(w.completions(A), ["1 RdmaRead 4"]);
    assert_eq!(two.bytes(), b"tw\0\0");
    raw.response(&mut w, two.stag, two.iova + 2, b"o!", true);
    assert_eq!(w.completions(A), ["2 RdmaRead 4"]);
    assert_eq!((one.bytes(), two.bytes()), (b"one!".to_vec(), b"two!".to_vec()));
}

/// Responses leave whole and in the order of their requests, whatever their lengths.
fn responses_leave_in_order(_: Kind, _: Kind) {
    let (mut w, mut raw) = World::raw();
    w.one_segment_at_a_time();
    let from = w.mr(A, 9000, Access::REMOTE_READ);
    let bytes = from.pattern(3);
    w.links[0].pipes[0].window = 500;
    let sizes = [9000, 0, 7, 3000];
    for (n, size) in (1..).zip(sizes) {
        raw.read(&mut w, n, &read_of(&from, u64::from(n), size - size.min(n), u64::from(n) << 32));
    }
    w.links[0].pipes[0].window = 1 << 20;
    w.settle();
    let found = messages(&raw.segments(&mut w));
    assert_eq!(found.len(), sizes.len());
    for ((n, size), (header, payload)) in (1..).zip(sizes).zip(found) {
        let Header::Tagged(h) = header else { panic!("{header:?}") };
        assert_eq!(h.to.0, u64::from(n) << 32);
        let from = n as usize;
        assert_eq!(payload, bytes[from..from + (size - size.min(n)) as usize]);
    }
}
