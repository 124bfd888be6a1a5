//! Ordering: fences, ORD, completions in order, and responses between requests.

use super::raw::Raw;
use super::requests::Wr;
use super::world::{A, B, Wiring, World};
use crate::ddp::{Header, qn};
use crate::rdmap::{Opcode, ReadRequest};
use rnic_abi::abi::queue::SendFlags;
use rnic_abi::types::{Access, Stag, TaggedOffset};

fn opcodes(raw: &mut Raw, w: &mut World) -> Vec<Opcode> {
    raw.segments(w).iter().map(super::raw::Segment::opcode).collect()
}

#[test]
fn at_most_ord_reads_complete_in_order() {
    // ORD is 4.
    let (mut w, mut raw) = World::raw();
    let sink = w.any_mr(A, 100);
    let source = w.any_mr(A, 1);
    let mut batch: Vec<Wr> =
        (0..10).map(|n| Wr::read(n, sink.sge(n as usize..n as usize + 1), &source, 0)).collect();
    batch.push(Wr::send(10, &[]));
    w.post(A, &batch);
    assert_eq!(opcodes(&mut raw, &mut w), [Opcode::ReadRequest; 4]);
    for n in 0..10u64 {
        assert_eq!(w.completions(A), [""; 0]);
        raw.response(&mut w, sink.stag, sink.iova + n, &[n as u8], true);
        let sent = opcodes(&mut raw, &mut w);
        match n {
            0..5 => assert_eq!(sent, [Opcode::ReadRequest]),
            5 => assert_eq!(sent, [Opcode::ReadRequest, Opcode::Send]),
            _ => assert_eq!(sent, []),
        }
        match n {
            9 => assert_eq!(w.completions(A), ["9 RdmaRead 1", "10 Send"]),
            n => assert_eq!(w.completions(A), [format!("{n} RdmaRead 1")]),
        }
    }
    assert_eq!(sink.bytes()[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

#[test]
fn a_fence_waits_for_reads_only() {
    let (mut w, mut raw) = World::raw();
    let sink = w.any_mr(A, 10);
    let source = w.any_mr(A, 10);
    w.post(
        A,
        &[
            Wr::read(1, sink.sge(0..1), &source, 0),
            Wr::read(2, sink.sge(1..2), &source, 0),
            Wr::send(3, &[]),
            Wr::write(4, &[], &source, 0).inline(b"w").with(SendFlags::FENCE),
            Wr::send(5, &[]),
        ],
    );
    let before = [Opcode::ReadRequest, Opcode::ReadRequest, Opcode::Send];
    assert_eq!(opcodes(&mut raw, &mut w), before);
    raw.response(&mut w, sink.stag, sink.iova, b"1", true);
    assert_eq!(opcodes(&mut raw, &mut w), []);
    assert_eq!(w.completions(A), ["1 RdmaRead 1"]);
    raw.response(&mut w, sink.stag, sink.iova + 1, b"2", true);
    assert_eq!(opcodes(&mut raw, &mut w), [Opcode::Write, Opcode::Send]);
    assert_eq!(w.completions(A), ["2 RdmaRead 1", "3 Send", "4 RdmaWrite", "5 Send"]);
}

//= RDMAP-5.5-12a
#[test]
fn a_fenced_write_follows_earlier_reads() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let sink = w.any_mr(A, 8);
        let place = w.any_mr(B, 8);
        for n in 0..200u64 {
            w.post(
                A,
                &[
                    Wr::write(1, &[], &place, 0).inline(&n.to_be_bytes()),
                    Wr::read(2, sink.all(), &place, 0),
                    Wr::write(3, &[], &place, 0).inline(&[0xFF; 8]).with(SendFlags::FENCE),
                ],
            );
            assert_eq!(sink.bytes(), n.to_be_bytes(), "{wiring:?}");
            assert_eq!(place.bytes(), [0xFF; 8]);
            assert_eq!(w.completions(A), ["1 RdmaWrite", "2 RdmaRead 8", "3 RdmaWrite"]);
        }
    }
}

#[test]
fn responses_and_requests_alternate_by_message() {
    let (mut w, mut raw) = World::raw();
    let from = w.mr(A, 5000, Access::REMOTE_READ);
    w.links[0].pipes[0].window = 0;
    let nowhere = w.any_mr(A, 1);
    w.push(A, &[Wr::send(1, &[])]);
    w.settle();
    let request = ReadRequest {
        sink_stag: Stag(1),
        sink_to: TaggedOffset(0),
        size: 5000,
        src_stag: from.stag,
        src_to: TaggedOffset(from.iova),
    };
    for msn in 1..=3 {
        raw.read(&mut w, msn, &request);
    }
    let batch: Vec<Wr> = (2..6).map(|n| Wr::write(n, &[], &nowhere, 0).inline(b"x")).collect();
    w.push(A, &batch);
    w.links[0].pipes[0].window = 1 << 20;
    w.settle();
    // Messages are not interleaved. Responses are complete and in the order of their requests.
    let segments = raw.segments(&mut w);
    let mut messages = Vec::new();
    for s in &segments {
        let last = match s.header {
            Header::Tagged(h) => h.last,
            Header::Untagged(h) => h.last,
        };
        if last {
            messages.push(s.opcode());
        } else {
            assert_eq!(s.opcode(), Opcode::ReadResponse);
        }
    }
    use Opcode::{ReadResponse as R, Send, Write as W};
    assert_eq!(messages, [Send, R, W, R, W, R, W, W]);
}

#[test]
fn a_sent_response_frees_its_read_slot() {
    for wiring in Wiring::both() {
        let mut w = World::pair(wiring.with(|o| {
            o.ird = 1;
            o.ord = 1;
        }));
        let a = w.any_mr(A, 64);
        let b = w.any_mr(B, 64);
        let pa = a.pattern(1);
        let pb = b.pattern(2);
        let sa = w.any_mr(A, 64);
        let sb = w.any_mr(B, 64);
        for _ in 0..20 {
            let batch = |sink: &super::requests::Mr, source: &super::requests::Mr| -> Vec<Wr> {
                (0..8)
                    .map(|n| {
                        Wr::read(n, sink.sge(n as usize * 8..n as usize * 8 + 8), source, n * 8)
                    })
                    .collect()
            };
            w.push(A, &batch(&sa, &b));
            w.push(B, &batch(&sb, &a));
            w.settle();
            assert_eq!(w.completions(A).len(), 8);
            assert_eq!(w.completions(B).len(), 8);
        }
        assert_eq!((sa.bytes(), sb.bytes()), (pb, pa));
    }
}

#[test]
fn a_qp_without_read_slots_refuses_reads() {
    for wiring in Wiring::both() {
        let mut w = World::pair(wiring.with(|o| o.ord = 0));
        let a = w.any_mr(A, 1);
        let b = w.any_mr(B, 1);
        w.post(A, &[Wr::read(1, a.all(), &b, 0)]);
        assert_eq!(w.completions(A), ["1 RdmaRead LocalQpOperation"]);
    }
}

//= RDMAP-5.5-1
#[test]
fn one_busy_qp_does_not_delay_others() {
    // 64 MiB on one QP, with small messages of other QPs and another session in between.
    for direct in [true, false] {
        let mut w = World::new(if direct { &[1] } else { &[1, 1] });
        let here = 0;
        let there = usize::from(!direct);
        let busy = w.app(here);
        let calm = w.app(here);
        let mut ends = Vec::new();
        for app in [busy, busy, calm] {
            let other = w.app(there);
            let cq_a = w.cq(app, 64);
            let cq_b = w.cq(other, 64);
            let a = w.qp(app, cq_a, cq_a, Default::default());
            let b = w.qp(other, cq_b, cq_b, Default::default());
            w.connect(a, b, if direct { Wiring::direct() } else { Wiring::tcp() });
            ends.push((a, b));
        }
        w.settle();
        w.emss = 65483;
        let big = w.any_mr(ends[0].0, 16 << 20);
        let sink = w.any_mr(ends[0].1, 16 << 20);
        let batch: Vec<Wr> = (0..4).map(|n| Wr::write(n, &[big.all()], &sink, 0)).collect();
        w.push(ends[0].0, &batch);
        for _ in 0..3 {
            w.round();
        }
        for (a, b) in &ends[1..] {
            let to = w.any_mr(*b, 1);
            w.push(*a, &[Wr::write(9, &[], &to, 0).inline(b"x")]);
            let mut rounds = 0;
            while to.bytes() != b"x" {
                assert!(w.round());
                rounds += 1;
            }
            assert!(rounds <= 3, "waited for {rounds} rounds");
        }
        assert!(w.completions(ends[0].0).len() < 4, "the long message is not done");
        w.settle();
    }
}

//= DDP-4.2-2
//= DDP-4.3-2
//= DDP-5.2-7
//= DDP-5.3-2
#[test]
fn requests_go_out_in_the_order_of_the_queue() {
    let (mut w, mut raw) = World::raw();
    let any = w.any_mr(A, 4);
    w.post(
        A,
        &[
            Wr::send(1, &[]).inline(b"a"),
            Wr::write(2, &[any.all()], &any, 9),
            Wr::send_invalidate(3, &[], Stag(0xDEAD_BEEF)).with(SendFlags::SOLICITED),
            Wr::send(4, &[any.sge(0..1), any.sge(3..4)]),
        ],
    );
    let sent = raw.segments(&mut w);
    assert_eq!(sent[0].header, raw.untagged(Opcode::Send, qn::SEND, 1, 0, true));
    assert_eq!(sent[0].payload, b"a");
    assert_eq!(sent[1].header, raw.tagged(Opcode::Write, any.stag, any.iova + 9, true));
    let Header::Untagged(third) = sent[2].header else { panic!("{sent:?}") };
    assert_eq!(sent[2].opcode(), Opcode::SendSolicitedInvalidate);
    assert_eq!((third.msn.0, third.inv_stag), (2, Stag(0xDEAD_BEEF)));
    let Header::Untagged(fourth) = sent[3].header else { panic!("{sent:?}") };
    assert_eq!((fourth.msn.0, fourth.inv_stag), (3, Stag(0)));
    assert_eq!(sent[3].payload.len(), 2);
}
