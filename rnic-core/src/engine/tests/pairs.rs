//! RFC 5040 appendix B and RFC 7306 section 7, row by row: the guarantees between two operations of
//! one stream, and their limits. Each cell of the tables has a scenario here, selected by its text.

use super::link::Cuts;
use super::messages::{messages, opcode_of};
use super::raw::{Raw, add_of};
use super::requests::{Mr, Wr};
use super::world::{A, B, MemoryKind, Wiring, World};
use crate::conformance::{Row, table};
use crate::ddp::{Header, qn};
use crate::rdmap::{AtomicRequest, AtomicResponse, Opcode, ReadRequest};
use rnic_abi::types::{Access, AtomicOperation, Stag, TaggedOffset};

const COLUMNS: [&str; 3] = ["placement_remote", "placement_local", "ordering_remote"];

/// Checks a cell for a pair of operations.
type Scenario = fn(first: Kind, later: Kind);

/// Returns the scenario of a cell, by its column and text.
fn scenario(column: &str, says: &str) -> Option<Scenario> {
    let starts = |text: &str| says.starts_with(text);
    let found: Scenario = match column {
        "placement_remote" if starts("no guarantee") => every_interleaving_arrives,
        "placement_remote" if says == "placed in order" => operations_take_effect_in_order,
        "placement_local" if starts("Read Response payload is not placed locally before the") => {
            a_read_shows_what_went_before
        }
        "placement_local" if starts("Atomic Response is not placed locally before the") => {
            an_operation_shows_what_went_before
        }
        "placement_local" if says.contains("may be placed remotely before the") => {
            a_response_may_be_overtaken
        }
        "placement_local" if says == "no guarantee between the two Read Response payloads" => {
            sinks_fill_as_responses_come
        }
        "placement_local" if starts("no guarantee between") => results_come_as_responses_do,
        "ordering_remote" => match says {
            "completed in order" => sends_complete_in_order,
            "second Read Response is not generated before the first" => responses_leave_in_order,
            "Read Response is not generated before the Atomic Response"
            | "Atomic Response is not generated before the Read Response" => answers_leave_in_order,
            _ if starts("second Atomic Request is not processed before") => answers_leave_in_order,
            _ if starts("Read Response is not generated before the") => {
                a_read_shows_what_went_before
            }
            _ if starts("Atomic Response is not generated before the") => {
                an_operation_shows_what_went_before
            }
            _ if starts("Immediate Data is completed after the Write payload") => {
                immediate_data_complete_after_their_write
            }
            _ => return None,
        },
        _ => return None,
    };
    Some(found)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Send,
    Write,
    Read,
    Immediate,
    Atomic,
}

impl Kind {
    fn of(row: &Row, key: &str) -> Kind {
        match row.text(key) {
            "Send" => Kind::Send,
            "RDMA Write" => Kind::Write,
            "RDMA Read" => Kind::Read,
            "Immediate Data" => Kind::Immediate,
            "Atomic" => Kind::Atomic,
            other => panic!("{other}"),
        }
    }

    /// Returns the queue of its message, or `None` for a tagged message.
    fn queue(self) -> Option<u32> {
        match self {
            Kind::Send | Kind::Immediate => Some(qn::SEND),
            Kind::Write => None,
            Kind::Read | Kind::Atomic => Some(qn::READ_REQUEST),
        }
    }
}

//= RDMAP-5.5-3
//= RDMAP-5.5-12
//= RDMAP-5.5-12a
//= RDMAP-5.5-18
//= 7306-5.4-5
//= 7306-5.4-7
//= 7306-5.4-10
//= 7306-6.4-1
//= 7306-7-1
//= 7306-7-2
//= 7306-7-3
//= 7306-7-4
//= 7306-7-5
//= 7306-7-6
//= 7306-7-7
//= 7306-7-8
//= 7306-7-9
//= 7306-7-10
//= 7306-7-11
//= 7306-7-12
//= 7306-7-13
//= 7306-5.2.1-20
//= 7306-5.2.2-12
//= 7306-5.4-9
//= 7306-5.4-6
/// Every cell other than "not applicable" has a scenario.
#[test]
fn every_pair_of_operations_in_the_table() {
    let rows = table("ordering_pair");
    let mut pairs = Vec::new();
    for row in &rows {
        let first = Kind::of(row, "first");
        let later = Kind::of(row, "later");
        pairs.push((first, later));
        for column in COLUMNS {
            let says = row.text(column);
            if says == "not applicable" {
                continue;
            }
            let check = scenario(column, says);
            let check =
                check.unwrap_or_else(|| panic!("no scenario shows {first:?} {later:?}: {says}"));
            check(first, later);
        }
    }
    let all = [Kind::Send, Kind::Write, Kind::Read, Kind::Immediate, Kind::Atomic];
    let all = all.iter().flat_map(|first| all.map(|later| (*first, later)));
    assert!(all.into_iter().all(|pair| pairs.contains(&pair)), "{pairs:?}");
}

/// An operation that arrives in two segments, and its effects.
struct Incoming {
    segments: [(Header, Vec<u8>); 2],
    place: Mr,
    /// Contents of `place` afterwards.
    left: [u8; 8],
    /// Start and end of its completion.
    told: Option<(String, &'static str)>,
    /// Its response.
    answer: Option<Vec<u8>>,
}

impl Incoming {
    /// Creates the `nth` operation of its kind.
    fn new(w: &mut World, raw: &Raw, kind: Kind, nth: u32) -> Self {
        let place = w.any_mr(A, 8);
        let number = 1 + nth;
        let untagged = |opcode, qn, mo, last| raw.untagged(opcode, qn, number, mo, last);
        let mut told = None;
        let mut answer = None;
        let mut left = *b"placed\0\0";
        let segments = match kind {
            Kind::Send => {
                w.recv(A, u64::from(number), &[place.all()]);
                told = Some((format!("{number} Receive"), " 6"));
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
                answer = Some(b"placed".to_vec());
                let header = read_of(&place, 0, 6, u64::from(number)).emit();
                let queue = qn::READ_REQUEST;
                [
                    (untagged(Opcode::ReadRequest, queue, 0, false), header[..10].to_vec()),
                    (untagged(Opcode::ReadRequest, queue, 10, true), header[10..].to_vec()),
                ]
            }
            Kind::Immediate => {
                w.recv(A, u64::from(number), &[]);
                // The length of a partially arrived Write, if any, is printed in between.
                told = Some((format!("{number} Receive"), " immediate 0x102030405060708"));
                left = [0; 8];
                [
                    (untagged(Opcode::Immediate, qn::SEND, 0, false), vec![1, 2, 3]),
                    (untagged(Opcode::Immediate, qn::SEND, 3, true), vec![4, 5, 6, 7, 8]),
                ]
            }
            Kind::Atomic => {
                place.set(&7u64.to_ne_bytes());
                left = 8u64.to_ne_bytes();
                let request = add_of(&place, 0);
                answer = Some(AtomicResponse { id: request.id, original: 7 }.emit().to_vec());
                let header = request.emit();
                let queue = qn::READ_REQUEST;
                [
                    (untagged(Opcode::AtomicRequest, queue, 0, false), header[..10].to_vec()),
                    (untagged(Opcode::AtomicRequest, queue, 10, true), header[10..].to_vec()),
                ]
            }
        };
        Incoming { segments, place, left, told, answer }
    }
}

/// Returns a Read with this sink offset, which identifies its response.
fn read_of(from: &Mr, at: u64, size: u32, sink_to: u64) -> ReadRequest {
    ReadRequest {
        sink_stag: Stag(0xA1A2_A3A4),
        sink_to: TaggedOffset(sink_to),
        size,
        src_stag: from.stag,
        src_to: TaggedOffset(from.iova + at),
    }
}

/// No order of placement is guaranteed: with every order of segments that DDP allows a sender
/// (messages of one queue, and tagged messages, do not interleave), both operations take effect.
fn every_interleaving_arrives(first: Kind, later: Kind) {
    let same_queue = first.queue() == later.queue();
    let orders: &[[usize; 4]] = if same_queue {
        &[[0, 0, 1, 1]]
    } else {
        &[[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0]]
    };
    for order in orders {
        let (mut w, mut raw) = World::raw();
        let nth = u32::from(same_queue);
        let both = [Incoming::new(&mut w, &raw, first, 0), Incoming::new(&mut w, &raw, later, nth)];
        let mut next = [0, 0];
        for which in order {
            let (header, payload) = &both[*which].segments[next[*which]];
            raw.segment(&mut w, *header, payload);
            next[*which] += 1;
        }
        let what = format!("{first:?} {later:?} {order:?}");
        let told: Vec<_> = both.iter().filter_map(|op| op.told.as_ref()).collect();
        let completions = w.completions(A);
        assert_eq!(completions.len(), told.len(), "{what}");
        for (completion, (start, end)) in completions.iter().zip(told) {
            let is_it = completion.starts_with(start) && completion.ends_with(end);
            assert!(is_it, "{what}: {completion}");
        }
        let answers: Vec<_> =
            messages(&raw.segments(&mut w)).into_iter().map(|(_, payload)| payload).collect();
        let expected: Vec<_> = both.iter().filter_map(|op| op.answer.clone()).collect();
        assert_eq!(answers, expected, "{what}");
        for op in &both {
            assert_eq!(op.place.bytes(), op.left, "{what}");
        }
    }
}

/// Runs both engines round by round until they are idle. Calls `look` after each round.
fn step_by_step(w: &mut World, mut look: impl FnMut(&mut World)) {
    while w.round() {
        look(w);
    }
    w.settle();
    look(w);
}

/// A Read fetches all bytes that the Send or Write before it placed in the same memory. A Send or
/// Immediate Data has completed before the response of a later Read.
fn a_read_shows_what_went_before(first: Kind, _: Kind) {
    shows_what_went_before(first, |sink, there| {
        (Wr::read(2, sink.all(), there, 0), format!("2 RdmaRead {LEN}"))
    });
}

/// Like the previous scenario, with an atomic operation on the last word.
fn an_operation_shows_what_went_before(first: Kind, _: Kind) {
    shows_what_went_before(first, |sink, there| {
        let at = LEN - 8;
        (Wr::fetch_add(2, 0, sink.sge(at..LEN), there, at as u64), "2 FetchAdd 8".to_owned())
    });
}

/// Length of the first operation.
const LEN: usize = 20_000;

/// Checks that `second`, with this sink and this source, observes the first request. `second`
/// returns the request and its completion.
fn shows_what_went_before(first: Kind, second: fn(&Mr, &Mr) -> (Wr, String)) {
    for wiring in Wiring::both() {
        for seed in 0..5 {
            let mut w = World::connected(wiring);
            w.one_segment_at_a_time();
            if let (Some(link), 1..) = (w.links.first_mut(), seed) {
                link.pipes.iter_mut().for_each(|pipe| pipe.cuts = Cuts::Random(seed));
            }
            let near = w.any_mr(A, LEN);
            let sink = w.any_mr(A, LEN);
            let there = w.any_mr(B, LEN);
            let bytes = near.pattern(seed as u8);
            there.fill(0xEE);
            w.recv(B, 1, &[there.all()]);
            let before = match first {
                Kind::Send => Wr::send(1, &[near.all()]),
                Kind::Immediate => Wr::write(1, &[near.all()], &there, 0).immediate(1),
                _ => Wr::write(1, &[near.all()], &there, 0),
            };
            let (second, done) = second(&sink, &there);
            w.push(A, &[before, second]);
            let mut received = Vec::new();
            step_by_step(&mut w, |w| {
                received.extend(w.completions(B));
                if sink.bytes() != vec![0; LEN] {
                    assert_eq!(there.bytes(), bytes, "{first:?} {wiring:?}");
                    assert_eq!(received.len(), usize::from(first != Kind::Write));
                }
            });
            assert_eq!(sink.bytes()[LEN - 8..], bytes[LEN - 8..], "{first:?} {wiring:?}");
            let name = if first == Kind::Send { "1 Send" } else { "1 RdmaWrite" };
            assert_eq!(w.completions(A), [name.to_owned(), done]);
        }
    }
}

/// Receives complete in the order of their messages, in any mixture of kinds.
fn sends_complete_in_order(first: Kind, later: Kind) {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.one_segment_at_a_time();
        let near = w.any_mr(A, 9000);
        let there = w.any_mr(B, 9000);
        near.pattern(1);
        let lengths = [9000, 0, 1, 5000, 17, 0, 2000];
        let mut messages = Vec::new();
        let mut expected = Vec::new();
        for (n, len) in (0u64..).zip(lengths) {
            w.recv(B, n, &[there.all()]);
            let length = if len == 0 { String::new() } else { format!(" {len}") };
            let immediate = [first, later][n as usize % 2] == Kind::Immediate;
            if immediate {
                messages.push(Wr::write(n, &[near.sge(0..len)], &there, 0).immediate(n));
                expected.push(format!("{n} Receive{length} immediate {n:#x}"));
            } else {
                messages.push(Wr::send(n, &[near.sge(0..len)]));
                expected.push(format!("{n} Receive{length}"));
            }
        }
        w.push(A, &messages);
        let mut received = Vec::new();
        step_by_step(&mut w, |w| received.extend(w.completions(B)));
        assert_eq!(received, expected, "{first:?} {later:?} {wiring:?}");
    }
}

/// Immediate Data completes when every byte of the Write before it is in place.
fn immediate_data_complete_after_their_write(_: Kind, _: Kind) {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.one_segment_at_a_time();
        let near = w.any_mr(A, LEN);
        let there = w.any_mr(B, LEN);
        let bytes = near.pattern(1);
        w.recv(B, 1, &[]);
        w.push(A, &[Wr::write(1, &[near.all()], &there, 0).immediate(5)]);
        let mut received = Vec::new();
        step_by_step(&mut w, |w| {
            received.extend(w.completions(B));
            assert!(received.is_empty() || there.bytes() == bytes, "{wiring:?}");
        });
        assert_eq!(received, [format!("1 Receive {LEN} immediate 0x5")]);
    }
}

/// While a response waits for the socket, data after its request are placed and delivered, and the
/// response contains them. To prevent this, the application must fence the later operation.
fn a_response_may_be_overtaken(first: Kind, later: Kind) {
    let (mut w, mut raw) = World::raw();
    let place = w.any_mr(A, 8);
    place.set(b"before..");
    w.recv(A, 7, &[place.all()]);
    // Other data fill the socket.
    let other = w.any_mr(A, 4000);
    w.links[0].pipes[0].window = 100;
    w.post(A, &[Wr::write(1, &[other.all()], &other, 0)]);
    match first {
        Kind::Atomic => raw.atomic(&mut w, 1, &add_of(&place, 0)),
        _ => raw.read(&mut w, 1, &read_of(&place, 0, 8, 0)),
    }
    let mut shown = b"behind..";
    match later {
        Kind::Send => {
            raw.send(&mut w, 1, b"behind..");
            assert_eq!(w.completions(A), ["7 Receive 8"], "delivered before the response");
        }
        Kind::Immediate => {
            shown = b"before..";
            raw.segment(&mut w, raw.untagged(Opcode::Immediate, 0, 1, 0, true), &[0; 8]);
            assert_eq!(w.completions(A), ["7 Receive immediate 0x0"]);
        }
        _ => raw.write(&mut w, place.stag, place.iova, b"behind.."),
    }
    assert_eq!(&place.bytes(), shown);
    w.links[0].pipes[0].window = 1 << 20;
    w.settle();
    let found = messages(&raw.segments(&mut w));
    let response = found.iter().find(|(header, _)| opcode_of(header).is_response()).unwrap();
    if first == Kind::Atomic {
        let original = u64::from_ne_bytes(*shown);
        assert_eq!(response.1[4..], original.to_be_bytes(), "{later:?}");
        assert_eq!(place.bytes(), (original + 1).to_ne_bytes());
    } else {
        assert_eq!(response.1, shown, "{later:?}");
    }
}

/// Bytes of a response are placed as they arrive, before the read completes. The second read does
/// not complete before the first.
fn sinks_fill_as_responses_come(_: Kind, _: Kind) {
    let (mut w, mut raw) = World::raw();
    let one = w.any_mr(A, 4);
    let two = w.any_mr(A, 4);
    let source = w.any_mr(A, 4);
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

/// Responses are sent completely and in the order of their requests, whatever their lengths.
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

/// Each sink is written when its own response arrives, and the second operation does not complete
/// before the first.
fn results_come_as_responses_do(first: Kind, later: Kind) {
    let (mut w, mut raw) = World::raw();
    let sinks = [w.any_mr(A, 8), w.any_mr(A, 8)];
    let source = w.any_mr(A, 8);
    let kinds = [first, later];
    let request = |n: usize| match kinds[n] {
        Kind::Atomic => Wr::fetch_add(n as u64, 1, sinks[n].all(), &source, 0),
        _ => Wr::read(n as u64, sinks[n].all(), &source, 0),
    };
    w.post(A, &[request(0), request(1)]);
    raw.segments(&mut w);
    let mut msn = 0;
    for n in 0..2 {
        assert_eq!(w.completions(A), [""; 0]);
        assert!(sinks[n..].iter().all(|sink| sink.bytes() == [0; 8]));
        let value = 5 + n as u64;
        let sink = &sinks[n];
        let name = match kinds[n] {
            Kind::Atomic => {
                msn += 1;
                let header = raw.untagged(Opcode::AtomicResponse, 3, msn, 0, true);
                let response = AtomicResponse { id: n as u32, original: value };
                raw.segment(&mut w, header, &response.emit());
                "FetchAdd"
            }
            _ => {
                raw.response(&mut w, sink.stag, sink.iova, &value.to_ne_bytes(), true);
                "RdmaRead"
            }
        };
        assert_eq!(w.completions(A), [format!("{n} {name} 8")]);
        assert_eq!(sink.bytes(), value.to_ne_bytes());
    }
}

/// Of two atomic operations on a word, the later one finds the result of the first.
fn operations_take_effect_in_order(_: Kind, _: Kind) {
    for kind in [MemoryKind::Shared, MemoryKind::Attached, MemoryKind::ThroughCopier] {
        let (mut w, mut raw) = World::raw();
        w.kind = kind;
        let word = w.any_mr(A, 8);
        w.links[0].pipes[0].window = 0;
        raw.atomic(&mut w, 1, &add_of(&word, 0));
        let operation = AtomicOperation::CompareSwap {
            swap: 10,
            swap_mask: u64::MAX,
            compare: 1,
            compare_mask: u64::MAX,
        };
        raw.atomic(&mut w, 2, &AtomicRequest { operation, id: 2, ..add_of(&word, 0) });
        w.links[0].pipes[0].window = 1 << 20;
        w.settle();
        let found: Vec<_> =
            raw.segments(&mut w).into_iter().map(|s| (s.header, s.payload)).collect();
        let response = |msn, id, original| {
            let header = raw.untagged(Opcode::AtomicResponse, 3, msn, 0, true);
            (header, AtomicResponse { id, original }.emit().to_vec())
        };
        assert_eq!(found, [response(1, add_of(&word, 0).id, 0), response(2, 2, 1)], "{kind:?}");
        assert_eq!(word.bytes(), 10u64.to_ne_bytes());
    }
}

/// Responses of both kinds are sent in the order of their requests. A Read returns the results of
/// the operations before it and of none after it.
fn answers_leave_in_order(first: Kind, later: Kind) {
    for kind in [MemoryKind::Shared, MemoryKind::Attached, MemoryKind::ThroughCopier] {
        let (mut w, mut raw) = World::raw();
        w.kind = kind;
        let word = w.any_mr(A, 8);
        w.links[0].pipes[0].window = 0;
        let mut expected = Vec::new();
        let mut value = 0u64;
        for (msn, asked) in (1..).zip([first, later, first, later]) {
            if asked == Kind::Atomic {
                let request = add_of(&word, 0);
                raw.atomic(&mut w, msn, &request);
                expected.push(AtomicResponse { id: request.id, original: value }.emit().to_vec());
                value += 1;
            } else {
                raw.read(&mut w, msn, &read_of(&word, 0, 8, 0));
                expected.push(value.to_ne_bytes().to_vec());
            }
        }
        w.links[0].pipes[0].window = 1 << 20;
        w.settle();
        let found: Vec<_> =
            messages(&raw.segments(&mut w)).into_iter().map(|(_, payload)| payload).collect();
        assert_eq!(found, expected, "{first:?} {later:?} {kind:?}");
        assert_eq!(word.bytes(), value.to_ne_bytes());
    }
}
