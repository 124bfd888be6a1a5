//! Tests the rows of the tables `queue` and `limit` in `tests/conformance/requirements.toml` that
//! concern DDP and RDMAP. An unknown row fails the test.

use super::raw::{Raw, add_of};
use super::requests::{Mr, Wr};
use super::world::{A, World};
use crate::conformance::table;
use crate::ddp::{self, Header, TaggedHeader, qn};
use crate::device::Memory;
use crate::rdmap::{
    ATOMIC_REQUEST_LEN, ATOMIC_RESPONSE_LEN, IMMEDIATE_LEN, Opcode, READ_REQUEST_LEN, ReadRequest,
    Terminate,
};
use rnic_abi::abi::queue::Sge;
use rnic_abi::shm::Mapping;
use rnic_abi::types::{ATOMIC_LEN, Access, QpState, Scope, Stag, TaggedOffset};

/// Sends a short complete message on this queue, with this MSN.
fn message(w: &mut World, raw: &mut Raw, queue: u32, msn: u32) {
    let (opcode, payload) = match queue {
        1 => (Opcode::ReadRequest, ReadRequest::parse(&[0; 28]).emit().to_vec()),
        2 => (Opcode::Terminate, vec![0x20, 0x02, 0, 0]),
        3 => (Opcode::AtomicResponse, vec![0; 12]),
        _ => (Opcode::Send, vec![]),
    };
    raw.segment(w, raw.untagged(opcode, queue, msn, 0, true), &payload);
}

/// Returns the MSN of the first message that a QP sends on a queue.
fn first_sent(queue: u32) -> u32 {
    let (mut w, mut raw) = World::raw();
    let any = w.any_mr(A, 1);
    match queue {
        0 => w.post(A, &[Wr::send(1, &[])]),
        1 => w.post(A, &[Wr::read(1, any.all(), &any, 0)]),
        2 => raw.send(&mut w, 1, b"without a receive"),
        _ => {
            let word = w.any_mr(A, 8);
            raw.atomic(&mut w, 1, &add_of(&word, 0));
        }
    }
    let sent = raw.segments(&mut w);
    let Header::Untagged(header) = sent[0].header else { panic!("{sent:?}") };
    assert_eq!(header.qn, queue);
    header.msn.0
}

//= DDP-4.3-7
//= DDP-4.3-8
//= DDP-7.1-1
//= DDP-7.1-9
//= 7306-4.1-6
//= 7306-5-9
//= 7306-10.2-1
#[test]
fn each_queue_starts_at_its_first_msn() {
    let rows = table("queue");
    for row in &rows {
        let queue = row.number("value") as u32;
        let first = row.number("first_msn") as u32;
        assert_eq!(first_sent(queue), first);
        // With a receive, and an operation that awaits its response.
        let ready = || {
            let (mut w, mut raw) = World::raw();
            let word = w.any_mr(A, 8);
            w.recv(A, 7, &[]);
            if queue == 3 {
                w.post(A, &[Wr::fetch_add(8, 1, word.all(), &word, 0)]);
                assert_eq!(raw.segments(&mut w).len(), 1);
            }
            (w, raw)
        };
        for wrong in [first.wrapping_sub(1), first + 1, first + 2, 1 << 31, u32::MAX] {
            let (mut w, mut raw) = ready();
            message(&mut w, &mut raw, queue, wrong);
            if queue == 2 {
                // A Terminate is never answered by a Terminate.
                assert_eq!(raw.segments(&mut w), []);
                assert!(w.events(A)[0].starts_with("lost: the peer sent a malformed Terminate"));
                continue;
            }
            assert_eq!(raw.expect_terminate(&mut w).0, "1/2/03", "message {wrong} on {queue}");
        }
        let (mut w, mut raw) = ready();
        message(&mut w, &mut raw, queue, first);
        let expected = if queue == 2 { QpState::Terminate } else { QpState::Rts };
        assert_eq!(w.state(A), expected, "message {first} on {queue}");
        match queue {
            0 => assert_eq!(w.completions(A), ["7 Receive"]),
            1 => assert_eq!(raw.segments(&mut w)[0].opcode(), Opcode::ReadResponse),
            3 => assert_eq!(w.completions(A), ["8 FetchAdd 8"]),
            _ => {
                raw.finish(&mut w);
                assert_eq!(w.events(A), ["terminated by peer 2/0/02"]);
            }
        }
    }
    // All other queues are invalid.
    let known = |queue| rows.iter().any(|row| row.number("value") == u64::from(queue));
    for queue in (0..10).chain([1 << 16, 1 << 31, u32::MAX]).filter(|queue| !known(*queue)) {
        let (mut w, mut raw) = World::raw();
        w.recv(A, 7, &[]);
        raw.segment(&mut w, raw.untagged(Opcode::Send, queue, 1, 0, true), b"x");
        assert_eq!(raw.expect_terminate(&mut w).0, "1/2/01", "queue {queue}");
    }
}

/// Rows of `limit` that other tests check, and their location.
const ELSEWHERE: [(&str, &str); 6] = [
    ("MPA Private Data, maximum", "mpa/limits.rs"),
    ("MPA startup frame header", "mpa/limits.rs"),
    ("enhanced connection data inside Private Data", "mpa/limits.rs"),
    ("IRD and ORD, maximum negotiable (0x3FFF means not negotiated)", "mpa/limits.rs"),
    ("Marker interval", "mpa/limits.rs"),
    ("first MSN of each queue", "the table `queue`, in this file"),
];

//= DDP-4.2-1
//= DDP-4.3-1
//= DDP-5.2-3
//= RDMAP-4.4-6
//= RDMAP-5.2.2-7
//= 7306-4-1
#[test]
fn each_ddp_limit_of_the_table() {
    use crate::mpa::mulpdu;
    for row in table("limit") {
        let name = row.text("name");
        let value = u32::try_from(row.number("value")).unwrap();
        let found = match name {
            "ULP message length, maximum" => message_length(value),
            "RDMA Read size, maximum" => read_size(value),
            "MULPDU, minimum" => {
                assert_eq!(mulpdu(0, true), mulpdu(100, false));
                mulpdu(0, false).into()
            }
            "MULPDU and ULPDU sent, maximum" => {
                assert_eq!(mulpdu(65_535, true), mulpdu(65_535, false));
                longest_ulpdu_sent()
            }
            "ULPDU_Length field, maximum" => longest_ulpdu_taken(value),
            "DDP tagged header" => shortest_ulpdu(0xC1, 0x40),
            "DDP untagged header" => shortest_ulpdu(0x41, 0x43),
            "RDMA Read Request header" => read_request_header(),
            "Atomic Request header" => ATOMIC_REQUEST_LEN as u32,
            "Atomic Response header" => ATOMIC_RESPONSE_LEN as u32,
            "atomic target, length and alignment" => ATOMIC_LEN,
            "Immediate Data" => IMMEDIATE_LEN as u32,
            "Terminate header, maximum" => terminate_header(),
            _ => match ELSEWHERE.iter().find(|(elsewhere, _)| *elsewhere == name) {
                Some((_, where_else)) => {
                    assert!(!where_else.is_empty());
                    continue;
                }
                None => panic!("nothing checks the limit {name:?}"),
            },
        };
        assert_eq!(found, value, "{name}");
    }
}

fn longest_ulpdu_sent() -> u32 {
    let (mut w, mut raw) = World::raw();
    w.emss = 1 << 20;
    let from = w.any_mr(A, 200_000);
    w.post(A, &[Wr::write(1, &[from.all()], &from, 0)]);
    raw.ulpdus(&mut w).iter().map(|ulpdu| ulpdu.len() as u32).max().unwrap()
}

/// Returns `most` if a segment of `most` bytes is placed.
fn longest_ulpdu_taken(most: u32) -> u32 {
    let (mut w, mut raw) = World::raw();
    let payload = vec![7; most as usize - TaggedHeader::LEN];
    let to = w.any_mr(A, payload.len());
    raw.write(&mut w, to.stag, to.iova, &payload);
    assert!(to.bytes() == payload);
    most
}

/// Returns the minimum length of a segment that begins with these bytes.
fn shortest_ulpdu(control: u8, rdmap: u8) -> u32 {
    let enough = |len: &usize| {
        let (mut w, mut raw) = World::raw();
        w.recv(A, 7, &[]);
        let mut ulpdu = vec![0; *len];
        ulpdu[..2].copy_from_slice(&[control, rdmap]);
        if let Some(msn) = ulpdu.get_mut(13).filter(|_| control == 0x41) {
            *msn = 1;
        }
        raw.ulpdu(&mut w, &ulpdu);
        w.state(A) == QpState::Rts
    };
    (2..=ddp::MAX_HEADER_LEN).find(enough).unwrap() as u32
}

/// Installs a region of this length. Only its first 64 KiB exist.
fn long_region(w: &mut World, len: u64) -> Mr {
    let (mapping, _fd) = Mapping::create_arena("mr", 1 << 16).unwrap();
    let memory = Memory::Shared { mapping: mapping.clone(), offset: 0 };
    let iova = 0x10_0000;
    let len = len as usize;
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let (stag, windows) = w.install(A, memory, len, access, Scope::Pd, iova);
    Mr { stag, iova, len, mapping, windows }
}

/// The longest Send and Write are sent. A longer one is refused before any of its bytes are sent.
fn message_length(longest: u32) -> u32 {
    let most = u64::from(longest);
    for beyond in [0, 1] {
        for write in [false, true] {
            let (mut w, mut raw) = World::raw();
            let from = long_region(&mut w, most);
            w.links[0].pipes[0].window = 4000;
            let element = |at: u64, length: u64| Sge {
                addr: from.iova + at,
                length: u32::try_from(length).unwrap(),
                lkey: from.stag.0,
            };
            let list = [element(0, most - 1000), element(0, 1000 + beyond)];
            let wr = if write { Wr::write(1, &list, &from, 0) } else { Wr::send(1, &list) };
            w.post(A, &[wr]);
            let sent = raw.segments(&mut w);
            if beyond == 0 {
                assert!(sent.iter().any(|s| s.payload.len() > 1000));
                assert_eq!(w.completions(A), [""; 0], "the message is still being sent");
            } else {
                let name = if write { "RdmaWrite" } else { "Send" };
                assert_eq!(w.completions(A), [format!("1 {name} LocalLength")]);
                assert_eq!((sent.len(), sent[0].opcode()), (1, Opcode::Terminate));
            }
        }
    }
    longest
}

/// The longest Read is requested. A responder begins its response if the region is long enough.
fn read_size(longest: u32) -> u32 {
    let most = u64::from(longest);
    let (mut w, mut raw) = World::raw();
    let sink = long_region(&mut w, most);
    let element = Sge { addr: sink.iova, length: most as u32, lkey: sink.stag.0 };
    w.post(A, &[Wr::read(1, element, &sink, 0)]);
    let sent = raw.segments(&mut w);
    assert_eq!(sent[0].payload[12..16], (most as u32).to_be_bytes());
    assert_eq!(w.state(A), QpState::Rts);
    for missing in [0, 1] {
        let (mut w, mut raw) = World::raw();
        let from = long_region(&mut w, most - missing);
        w.links[0].pipes[0].window = 4000;
        let request = ReadRequest {
            sink_stag: Stag(1),
            sink_to: TaggedOffset(0),
            size: most as u32,
            src_stag: from.stag,
            src_to: TaggedOffset(from.iova),
        };
        raw.read(&mut w, 1, &request);
        let sent = raw.segments(&mut w);
        let expected = [Opcode::ReadResponse, Opcode::Terminate][missing as usize];
        assert_eq!(sent[0].opcode(), expected);
    }
    // A peer that repeats bytes is detected even when the count no longer fits into 32 bits.
    let (mut w, mut raw) = World::raw();
    let sink = long_region(&mut w, most);
    let element = Sge { addr: sink.iova, length: most as u32, lkey: sink.stag.0 };
    w.post(A, &[Wr::read(1, element, &sink, 0)]);
    raw.segments(&mut w);
    let qp = w.engines[0].qps.iter_mut().flatten().next().unwrap();
    qp.requester.set_received(most - 2);
    raw.response(&mut w, sink.stag, sink.iova, b"repeated", true);
    assert_eq!(raw.expect_terminate(&mut w).0, "1/1/01");
    assert_eq!(w.completions(A), ["1 RdmaRead BadResponse 1/1/01"]);
    longest
}

/// A message one byte shorter or longer is not a Read Request.
fn read_request_header() -> u32 {
    let len = READ_REQUEST_LEN;
    for (bytes, code) in [(len - 1, "0/2/FF"), (len, ""), (len + 1, "1/2/05")] {
        let (mut w, mut raw) = World::raw();
        let header = raw.untagged(Opcode::ReadRequest, qn::READ_REQUEST, 1, 0, true);
        raw.segment(&mut w, header, &vec![0; bytes]);
        match code {
            "" => assert_eq!(raw.segments(&mut w)[0].opcode(), Opcode::ReadResponse),
            code => assert_eq!(raw.expect_terminate(&mut w).0.to_uppercase(), code),
        }
    }
    let (mut w, mut raw) = World::raw();
    let sink = w.any_mr(A, 1);
    w.post(A, &[Wr::read(1, sink.all(), &sink, 0)]);
    raw.segments(&mut w)[0].payload.len() as u32
}

/// The longest Terminate reports a Read Request, and is accepted in one piece.
fn terminate_header() -> u32 {
    let most = Terminate::MAX_LEN;
    let (mut w, mut raw) = World::raw();
    let request = ReadRequest { size: 1, ..ReadRequest::parse(&[7; 28]) };
    raw.read(&mut w, 1, &request);
    let sent = raw.segments(&mut w);
    assert_eq!((sent[0].opcode(), sent[0].payload.len()), (Opcode::Terminate, most));
    let (mut again, mut peer) = World::raw();
    peer.terminate(&mut again, &sent[0].payload);
    peer.finish(&mut again);
    let events = again.events(A);
    assert!(events[0].starts_with("terminated by peer 0/1/00"), "{events:?}");
    let told = events[0].split(' ').next_back().unwrap();
    assert_eq!(told.len(), 2 * (most - 4));
    most as u32
}
