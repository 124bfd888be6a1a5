//! The table of limits: each limit of RDMAP at its value and one beyond.

use super::raw::ulpdu;
use super::requests::{Mr, Wr};
use super::world::{A, QpShape, Wiring, World};
use crate::conformance::table;
use crate::ddp::{Header, qn};
use crate::device::Memory;
use crate::rdmap::{Opcode, ReadRequest};
use rnic_abi::abi::queue::Sge;
use rnic_abi::shm::Mapping;
use rnic_abi::types::{Access, QpState, Scope, Stag, TaggedOffset};

//= RDMAP-4.4-6
//= RDMAP-5.2.2-7
/// Every row has a test here, or is assigned to another layer.
#[test]
fn every_limit_of_rdmap_is_kept() {
    for row in table("limit") {
        let value = row.number("value");
        match row.text("name") {
            "ULP message length, maximum" => message_length(value),
            "RDMA Read size, maximum" => read_size(value),
            "RDMA Read Request header" => read_request_header(value as usize),
            "Terminate header, maximum" => terminate_header(value as usize),
            "first MSN of each queue" => first_msn(value as u32),
            "DDP tagged header" => assert_eq!(crate::ddp::TaggedHeader::LEN as u64, value),
            "DDP untagged header" => assert_eq!(crate::ddp::UntaggedHeader::LEN as u64, value),
            name if row.text("source").starts_with("RFC 5044") => assert!(!name.is_empty()),
            name if row.text("source").starts_with("RFC 6581") => assert!(!name.is_empty()),
            // Headers and lengths of fixed size: ddp_limits.rs.
            name if row.text("source").starts_with("RFC 7306") => assert!(!name.is_empty()),
            other => panic!("no test of: {other}"),
        }
    }
}

/// Installs a region of this length. Only its first page exists.
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
fn message_length(most: u64) {
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
}

/// The longest Read is requested. A responder begins its response if the region is long enough.
fn read_size(most: u64) {
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
    // The lower limit is a size of 0.
    let (mut w, mut raw) = World::raw();
    raw.read(&mut w, 1, &ReadRequest::parse(&[0; 28]));
    assert_eq!(raw.segments(&mut w).len(), 1);
}

/// A message one byte shorter or longer is not a Read Request.
fn read_request_header(len: usize) {
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
    assert_eq!(raw.segments(&mut w)[0].payload.len(), len);
}

/// The longest Terminate reports a Read Request, and is accepted in one piece.
fn terminate_header(most: usize) {
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
}

/// Every queue begins with this MSN, in both directions.
fn first_msn(first: u32) {
    let (mut w, mut raw) = World::raw();
    let region = w.any_mr(A, 1);
    w.recv(A, 7, &[]);
    w.post(A, &[Wr::send(1, &[]), Wr::read(2, region.all(), &region, 0)]);
    raw.send(&mut w, first, b"");
    raw.read(&mut w, first, &ReadRequest::parse(&[0; 28]));
    raw.write(&mut w, Stag(0), 0, b"x");
    let mut numbers = Vec::new();
    for segment in raw.segments(&mut w) {
        if let Header::Untagged(h) = segment.header {
            numbers.push((h.qn, h.msn.0));
        }
    }
    assert_eq!(numbers, [(0, first), (1, first), (2, first)]);
    assert!(w.completions(A).contains(&"7 Receive".to_owned()));
    // Checks that a Terminate with this MSN is accepted.
    let (mut w, mut raw) = World::raw();
    let header = raw.untagged(Opcode::Terminate, qn::TERMINATE, first, 0, true);
    raw.ulpdu(&mut w, &ulpdu(&header, &[0; 4]));
    raw.finish(&mut w);
    assert_eq!(w.events(A), ["terminated by peer 0/0/00"]);
}

//= RDMAP-5.2.2-2
//= RDMAP-6.1-3
//= RDMAP-6.1-4
//= RDMAP-6.1-6
//= RDMAP-6.1-7
/// With small and large values of IRD and ORD, exactly the negotiated number of Reads are
/// outstanding in each direction.
#[test]
fn outstanding_reads_obey_ird_and_ord() {
    for agreed in [1, 2, 3, 16, 200] {
        // The peer requests more than this side accepts, and accepts less than this side requests.
        let options = |ird, ord| {
            let wiring = Wiring::tcp().with(|o| {
                o.peer_to_peer = false;
                o.ird = ird;
                o.ord = ord;
            });
            wiring.a
        };
        let ours = options(agreed + 2, agreed + 5);
        let theirs = options(agreed, agreed + 2);
        let mut w = World::new(&[1]);
        let app = w.app(0);
        let cq = w.cq(app, 512);
        let qp = w.qp(app, cq, cq, QpShape { sq: 256, ..QpShape::default() });
        let mut raw = w.connect_raw(qp, true, ours, theirs);
        assert_eq!(w.events(qp), [format!("established {}/{agreed}", agreed + 2)]);
        let region = w.any_mr(qp, 4);
        let reads: Vec<Wr> =
            (0..u64::from(agreed) + 3).map(|n| Wr::read(n, region.all(), &region, 0)).collect();
        w.post(qp, &reads);
        assert_eq!(raw.segments(&mut w).len(), usize::from(agreed));
        // A message blocks the stream, so waiting requests use all slots.
        w.links[0].pipes[0].window = 0;
        w.post(qp, &[Wr::send(900, &[])]);
        let request = ReadRequest {
            sink_stag: Stag(1),
            sink_to: TaggedOffset(0),
            size: 4,
            src_stag: region.stag,
            src_to: TaggedOffset(region.iova),
        };
        let mut taken = 0;
        while w.state(qp) == QpState::Rts {
            assert!(taken < 2 * u32::from(agreed) + 10, "all are taken");
            taken += 1;
            raw.read(&mut w, taken, &request);
        }
        let header = raw.untagged(Opcode::ReadRequest, qn::READ_REQUEST, taken, 0, true);
        w.links[0].pipes[0].window = 1 << 30;
        w.settle();
        let sent = raw.segments(&mut w);
        let answered = sent.iter().filter(|s| s.opcode() == Opcode::ReadResponse).count();
        let told = &sent.last().unwrap().payload;
        assert_eq!(told[..4], [0x12, 0x02, 0xC0, 0]);
        assert_eq!(told[6..], ulpdu(&header, &[]));
        // A response that was passed to TCP frees its slot, even if TCP has not sent it.
        let waiting = taken - 1 - answered as u32;
        assert_eq!(waiting, u32::from(agreed) + 2, "of {taken}");
    }
}
