//! When bytes are placed, requests complete, messages are delivered and Reads are executed (RFC
//! 5040 section 5.5).

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::raw::Raw;
use super::requests::{Mr, Wr};
use super::world::{A, B, Wiring, World};
use crate::ddp::{Header, qn};
use crate::rdmap::{Opcode, ReadRequest};
use rnic_abi::types::{Access, Stag, TaggedOffset};

//= RDMAP-3.1-5
//= RDMAP-5.5-4
//= RDMAP-5.5-5
//= RDMAP-5.5-6
//= RDMAP-5.5-16
//= RDMAP-5.5-19
//= RDMAP-5.5-20b
/// Bytes are placed as their segments arrive, although applications must not rely on that. Only the
/// last segment delivers the message, with its full length, or completes the Read.
#[test]
fn bytes_are_placed_before_completion() {
    let (mut w, mut raw) = World::raw();
    let inbox = w.any_mr(A, 8);
    let region = w.any_mr(A, 8);
    let sink = w.any_mr(A, 8);
    w.recv(A, 7, &[inbox.all()]);
    w.post(A, &[Wr::read(8, sink.sge(0..6), &region, 0)]);
    raw.segments(&mut w);
    let quiet = |w: &mut World| assert_eq!((w.completions(A), w.events(A)), (vec![], vec![]));
    raw.segment(&mut w, raw.untagged(Opcode::Send, qn::SEND, 1, 0, false), b"sen");
    assert_eq!(&inbox.bytes(), b"sen\0\0\0\0\0");
    quiet(&mut w);
    raw.segment(&mut w, raw.untagged(Opcode::Send, qn::SEND, 1, 3, true), b"ding");
    assert_eq!(&inbox.bytes(), b"sending\0");
    assert_eq!(w.completions(A), ["7 Receive 7"]);
    raw.segment(&mut w, raw.tagged(Opcode::Write, region.stag, region.iova, false), b"wri");
    assert_eq!(&region.bytes(), b"wri\0\0\0\0\0");
    raw.segment(&mut w, raw.tagged(Opcode::Write, region.stag, region.iova + 3, true), b"ting");
    assert_eq!(&region.bytes(), b"writing\0");
    quiet(&mut w);
    raw.response(&mut w, sink.stag, sink.iova, b"rea", false);
    assert_eq!(&sink.bytes(), b"rea\0\0\0\0\0");
    quiet(&mut w);
    raw.response(&mut w, sink.stag, sink.iova + 3, b"din", true);
    assert_eq!(&sink.bytes(), b"readin\0\0");
    assert_eq!(w.completions(A), ["8 RdmaRead 6"]);
}

//= RDMAP-3.2-6
//= RDMAP-3.2-7
//= RDMAP-5.1-2
//= RDMAP-5.2.1-3
//= RDMAP-5.2.1-4
/// Writes and Reads, long and empty, are invisible at their target: no completion, no event, no
/// notification, and receives stay posted.
#[test]
fn writes_and_reads_are_invisible_at_the_target() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let near = w.any_mr(A, 5000);
        let there = w.any_mr(B, 5000);
        w.recv(B, 7, &[]);
        w.apps[1].cqs[0].consumer.arm(rnic_abi::abi::queue::ARM_NEXT);
        let bytes = near.pattern(1);
        let writes = [Wr::write(1, &[near.all()], &there, 0), Wr::write(2, &[], &there, 0)];
        w.post(A, &writes);
        near.fill(0);
        let nothing = near.sge(0..0);
        w.post(A, &[Wr::read(3, near.all(), &there, 0), Wr::read(4, nothing, &there, 0)]);
        assert_eq!(w.completions(A).len(), 4);
        assert_eq!((near.bytes(), there.bytes()), (bytes.clone(), bytes));
        assert_eq!((w.completions(B), w.events(B)), (vec![], vec![]), "{wiring:?}");
        assert_eq!(w.apps[1].notified, []);
        w.post(A, &[Wr::send(5, &[])]);
        assert_eq!(w.completions(B), ["7 Receive"]);
        assert_eq!(w.apps[1].notified, [w.apps[1].cqs[0].cq.id()]);
    }
}

//= RDMAP-5.5-9
//= RDMAP-5.5-14
/// A request completes when TCP has taken its last byte: not earlier, and not only on arrival.
#[test]
fn a_completion_means_tcp_has_the_data() {
    let mut w = World::connected(Wiring::tcp());
    let near = w.any_mr(A, 3000);
    let there = w.any_mr(B, 3000);
    near.fill(1);
    w.recv(B, 7, &[]);
    w.links[0].pipes[0].window = 0;
    // Nothing arrives until the clock advances by a second.
    w.links[0].pipes[0].latency = 1_000_000_000;
    w.push(A, &[Wr::write(1, &[near.all()], &there, 0), Wr::send(2, &[])]);
    let mut taken = Vec::new();
    let mut completed_at = Vec::new();
    for bytes in 0.. {
        w.links[0].pipes[0].window = bytes;
        while w.round() {}
        let found = w.completions(A);
        if !found.is_empty() {
            completed_at.push(w.links[0].pipes[0].sent);
            taken.extend(found);
        }
        if taken.len() == 2 {
            break;
        }
    }
    assert_eq!(taken, ["1 RdmaWrite", "2 Send"]);
    assert_eq!(there.bytes(), vec![0; 3000], "nothing has been placed yet");
    assert_eq!(w.completions(B), [""; 0]);
    w.links[0].pipes[0].window = 1 << 20;
    w.settle();
    // The last FPDU is that of the Send, which has no payload.
    let end = w.links[0].pipes[0].sent;
    assert_eq!(completed_at, [end - 24, end]);
    assert_eq!(there.bytes(), vec![1; 3000]);
    assert_eq!(w.completions(B), ["7 Receive"]);
}

//= RDMAP-5.5-12
//= RDMAP-5.5-17
/// Memory is read when the complete request has arrived, not when its first bytes have. The same
/// holds for an empty request.
#[test]
fn a_read_begins_when_its_request_is_complete() {
    for size in [6, 0] {
        let (mut w, mut raw) = World::raw();
        let from = w.mr(A, 6, Access::REMOTE_READ);
        from.set(b"before");
        let request = read_of(&from, size).emit();
        let header = |raw: &Raw, mo, last| raw.untagged(Opcode::ReadRequest, 1, 1, mo, last);
        raw.segment(&mut w, header(&raw, 0, false), &request[..27]);
        assert_eq!(raw.segments(&mut w), [], "{size}");
        from.set(b"behind");
        raw.segment(&mut w, header(&raw, 27, true), &request[27..]);
        let answer = raw.segments(&mut w);
        assert_eq!(answer.len(), 1);
        assert_eq!(answer[0].payload, &b"behind"[..size as usize]);
    }
}

fn read_of(from: &Mr, size: u32) -> ReadRequest {
    ReadRequest {
        sink_stag: Stag(9),
        sink_to: TaggedOffset(0),
        size,
        src_stag: from.stag,
        src_to: TaggedOffset(from.iova),
    }
}

//= RDMAP-5.2.1-8
//= RDMAP-5.2.2-6
//= RDMAP-5.5-20
/// The requests are for different regions. Some have length 0, some are posted while others are
/// answered.
#[test]
fn reads_are_answered_in_request_order() {
    let (mut w, mut raw) = World::raw();
    let regions: Vec<Mr> = (0..4).map(|_| w.mr(A, 2000, Access::REMOTE_READ)).collect();
    let mut order = Vec::new();
    for n in 1..=40u32 {
        let from = &regions[n as usize * 7 % 4];
        let request = ReadRequest {
            sink_stag: Stag(n),
            sink_to: TaggedOffset(u64::from(n)),
            ..read_of(from, n % 5 * 500)
        };
        w.links[0].pipes[0].window = if n % 4 == 0 { 1 << 20 } else { 0 };
        raw.read(&mut w, n, &request);
        w.settle();
        for segment in raw.segments(&mut w) {
            assert_eq!(segment.opcode(), Opcode::ReadResponse);
            let Header::Tagged(h) = segment.header else { panic!("{segment:?}") };
            if h.last {
                order.push(h.stag.0);
            }
        }
    }
    assert_eq!(order, (1..=40).collect::<Vec<_>>());
}

//= RDMAP-5.2.2-3
//= RDMAP-5.5-11
//= RDMAP-5.5-15
/// Requests complete in the order of posting, although a Send and a Write finish long before the
/// Read ahead of them.
#[test]
fn operations_complete_in_posting_order() {
    let (mut w, mut raw) = World::raw();
    let sink = w.any_mr(A, 4);
    let source = w.any_mr(A, 4);
    w.post(
        A,
        &[
            Wr::send(1, &[]),
            Wr::read(2, sink.sge(0..1), &source, 0),
            Wr::write(3, &[source.all()], &source, 0),
            Wr::send(4, &[]),
            Wr::read(5, sink.sge(1..2), &source, 0),
            Wr::write(6, &[], &source, 0),
        ],
    );
    assert_eq!(raw.segments(&mut w).len(), 6, "all were sent");
    assert_eq!(w.completions(A), ["1 Send"]);
    raw.response(&mut w, sink.stag, sink.iova, b"a", true);
    assert_eq!(w.completions(A), ["2 RdmaRead 1", "3 RdmaWrite", "4 Send"]);
    raw.response(&mut w, sink.stag, sink.iova + 1, b"b", true);
    assert_eq!(w.completions(A), ["5 RdmaRead 1", "6 RdmaWrite"]);
    assert_eq!(&sink.bytes(), b"ab\0\0");
}

//= RDMAP-5.5-2
/// Requests of one end complete while all requests of the other are still in flight.
#[test]
fn the_two_directions_are_independent() {
    let mut w = World::connected(Wiring::tcp());
    let a = w.any_mr(A, 8);
    let b = w.any_mr(B, 8);
    w.recv(A, 7, &[]);
    w.recv(B, 7, &[]);
    w.links[0].pipes[0].latency = 1_000_000_000;
    w.push(A, &[Wr::write(1, &[], &b, 0).inline(b"from a"), Wr::send(2, &[])]);
    while w.round() {}
    w.push(B, &[Wr::write(1, &[], &a, 0).inline(b"from b"), Wr::send(2, &[])]);
    while w.round() {}
    // Posted later, delivered earlier.
    assert_eq!(w.completions(A), ["1 RdmaWrite", "2 Send", "7 Receive"]);
    assert_eq!(w.completions(B), ["1 RdmaWrite", "2 Send"]);
    assert_eq!((&a.bytes()[..6], b.bytes()), (&b"from b"[..], vec![0; 8]));
    w.settle();
    assert_eq!(w.completions(B), ["7 Receive"]);
    assert_eq!(&b.bytes()[..6], b"from a");
}

//= RDMAP-5.5-8
/// An application that writes to a buffer during sending changes the data, never the framing: the
/// CRC is that of the bytes sent.
#[test]
fn changing_memory_does_not_break_the_stream() {
    let (mut w, mut raw) = World::raw();
    w.emss = 65483;
    let from = w.mr(A, 200_000, Access::REMOTE_READ);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Stops the thread even if an assertion fails, because the scope waits for it.
        let _stop = Stop(&done);
        scope.spawn(|| {
            for byte in (0..=u8::MAX).cycle() {
                if done.load(Relaxed) {
                    break;
                }
                from.fill(byte);
            }
        });
        for n in 1..30 {
            w.post(A, &[Wr::write(1, &[from.all()], &from, 0)]);
            raw.read(&mut w, n, &read_of(&from, 200_000));
            // Deframing checks the CRCs.
            let bytes: usize = raw.segments(&mut w).iter().map(|s| s.payload.len()).sum();
            assert_eq!(bytes, 400_000);
            assert_eq!(w.completions(A), ["1 RdmaWrite"]);
        }
    });
}

/// Sets a flag when it is dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}
