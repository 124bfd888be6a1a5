//! Memory that is revoked by its owner, by a request or by the peer, during transfers.

use super::raw::ulpdu;
use super::requests::Wr;
use super::world::{A, B, Wiring, World};
use crate::engine::state::Peer;
use crate::rdmap::{Opcode, ReadRequest};
use rnic_abi::types::{Access, Stag, TaggedOffset};

//= RDMAP-4.8-12
#[test]
fn a_revoked_response_stops_at_a_segment() {
    // RFC 5040 section 4.8: the returned header is advanced by the number of bytes sent.
    let (mut w, mut raw) = World::raw();
    w.one_segment_at_a_time();
    let from = w.mr(A, 10_000, Access::REMOTE_READ);
    w.links[0].pipes[0].window = 3000;
    let request = ReadRequest {
        sink_stag: Stag(0xA1A2_A3A4),
        sink_to: TaggedOffset(0x10),
        size: 10_000,
        src_stag: from.stag,
        src_to: TaggedOffset(from.iova),
    };
    raw.read(&mut w, 1, &request);
    w.revoke(A, from.stag);
    w.links[0].pipes[0].window = 1 << 20;
    w.settle();
    let segments = raw.segments(&mut w);
    let (last, sent) = segments.split_last().unwrap();
    let bytes: usize = sent.iter().map(|s| s.payload.len()).sum();
    assert!(bytes > 0 && bytes < 10_000, "{bytes}");
    assert_eq!(last.opcode(), Opcode::Terminate);
    let t = crate::rdmap::Terminate::parse(&last.payload).unwrap();
    assert_eq!(t.code.number(), "0/1/00");
    let header = raw.untagged(Opcode::ReadRequest, 1, 1, 0, true);
    assert_eq!(t.ddp_header, Some(&ulpdu(&header, &[])[..]));
    let rest = ReadRequest {
        sink_to: TaggedOffset(0x10 + bytes as u64),
        size: 10_000 - bytes as u32,
        src_to: TaggedOffset(from.iova + bytes as u64),
        ..request
    };
    assert_eq!(ReadRequest::parse(t.read_request.unwrap()), rest);
    assert!(raw.fin);
}

#[test]
fn a_revoked_source_ends_the_request() {
    let (mut w, mut raw) = World::raw();
    w.one_segment_at_a_time();
    let from = w.any_mr(A, 10_000);
    w.links[0].pipes[0].window = 3000;
    w.post(A, &[Wr::write(1, &[from.all()], &from, 0)]);
    w.revoke(A, from.stag);
    w.links[0].pipes[0].window = 1 << 20;
    w.settle();
    let segments = raw.segments(&mut w);
    assert!(segments.len() < 8);
    assert_eq!(segments.last().unwrap().payload, [0, 0, 0, 0], "Terminate 0/0/00, no headers");
    assert_eq!(w.completions(A), ["1 RdmaWrite LocalProtection"]);
}

#[test]
fn a_sink_revoked_during_its_read() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        if !wiring.direct {
            w.links[0].pipes[0].latency = 1_000_000;
        }
        let sink = w.any_mr(A, 10);
        let from = w.any_mr(B, 10);
        w.push(A, &[Wr::read(1, sink.all(), &from, 0)]);
        if wiring.direct {
            // Only the request has arrived at the peer.
            let now = w.now;
            w.engines[0].poll_doorbells(now);
            let key = w.engines[0].by_id[&w.qps[A].id];
            assert_eq!(w.engines[0].state.schedule.pop(), Some(key));
            let mut a = w.engines[0].qps[key as usize].take().unwrap();
            a.core.turn.scheduled = false;
            a.core.turn.deficit = 1;
            let id = w.qps[B].id;
            let peer = Peer { key: w.engines[0].by_id[&id], id };
            w.engines[0].hand_over(&mut a, peer);
            w.engines[0].qps[key as usize] = Some(a);
        } else {
            w.round();
        }
        w.revoke(A, sink.stag);
        w.settle();
        assert_eq!(w.completions(A), ["1 RdmaRead LocalAccess 1/1/00"], "{wiring:?}");
        assert_eq!(sink.bytes(), [0; 10]);
        assert!(w.events(B)[0].starts_with("terminated by peer 1/1/00"));
    }
}

#[test]
fn nothing_changes_after_a_revocation() {
    // At every point of a stream of Writes.
    for wiring in Wiring::both() {
        for rounds in 0..12 {
            let mut w = World::connected(wiring);
            w.one_segment_at_a_time();
            let from = w.any_mr(A, 50_000);
            let to = w.any_mr(B, 50_000);
            from.fill(0xAB);
            w.push(A, &[Wr::write(1, &[from.all()], &to, 0), Wr::write(2, &[from.all()], &to, 0)]);
            for _ in 0..rounds {
                w.round();
            }
            w.revoke(B, to.stag);
            to.fill(0);
            w.settle();
            assert_eq!(to.bytes(), vec![0; 50_000], "after {rounds} rounds");
        }
    }
}

#[test]
fn local_invalidate_of_own_region_is_immediate() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let own = w.own_mr(A, 10, Access::REMOTE_WRITE);
        w.post(A, &[Wr::local_invalidate(1, own.stag), Wr::send(2, &[])]);
        assert_eq!(w.completions(A)[0], "1 LocalInvalidate");
        let mut w = World::connected(wiring);
        let own = w.own_mr(A, 10, Access::REMOTE_WRITE);
        w.post(A, &[Wr::local_invalidate(1, own.stag)]);
        w.post(B, &[Wr::write(2, &[], &own, 0).inline(b"x")]);
        assert!(w.events(B)[1..].is_empty() && w.events(A)[0].starts_with("terminated 1/1/00"));
        // Twice, or with an STag of another owner: refused.
        for what in ["twice", "unknown", "foreign"] {
            let mut w = World::connected(wiring);
            let stag = match what {
                "twice" => {
                    let own = w.own_mr(A, 10, Access::REMOTE_WRITE);
                    w.post(A, &[Wr::local_invalidate(1, own.stag)]);
                    w.completions(A);
                    own.stag
                }
                "unknown" => Stag(7),
                _ => w.any_mr(B, 1).stag,
            };
            w.post(A, &[Wr::local_invalidate(2, stag)]);
            assert_eq!(w.completions(A), ["2 LocalInvalidate LocalProtection"], "{what}");
        }
    }
}

#[test]
fn local_invalidate_waits_for_every_worker() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.answer_changes = false;
        let shared = w.any_mr(A, 10);
        let second = w.any_mr(A, 10);
        w.recv(B, 7, &[]);
        w.post(
            A,
            &[
                Wr::local_invalidate(1, shared.stag),
                Wr::local_invalidate(2, second.stag),
                Wr::send(3, &[]),
            ],
        );
        assert_eq!(w.completions(A), [""; 0]);
        assert_eq!(w.completions(B), [""; 0], "nothing overtakes it");
        assert_eq!(w.changes.len(), 1);
        assert_eq!(w.changes[0].2.revoked(), Some(shared.stag));
        w.answer();
        w.settle();
        assert_eq!(w.completions(A), ["1 LocalInvalidate"]);
        assert_eq!(w.changes[0].2.revoked(), Some(second.stag));
        w.answer();
        w.settle();
        assert_eq!(w.completions(A), ["2 LocalInvalidate", "3 Send"], "{wiring:?}");
        assert_eq!(w.completions(B), ["7 Receive"]);
        // A reply after the stream has ended is ignored.
        let third = w.any_mr(A, 10);
        w.post(A, &[Wr::local_invalidate(4, third.stag)]);
        w.abort(A);
        assert_eq!(w.completions(A), ["4 LocalInvalidate WrFlush"]);
        w.answer();
        w.settle();
        assert_eq!(w.completions(A), [""; 0]);
    }
}

#[test]
fn invalidations_that_overlap_are_all_answered() {
    // A read with invalidate completes while a local invalidate waits for its reply.
    let (mut w, mut raw) = World::raw();
    w.answer_changes = false;
    let sink = w.any_mr(A, 1);
    let other = w.any_mr(A, 1);
    let source = w.any_mr(A, 1);
    w.post(
        A,
        &[Wr::read_invalidate(1, sink.all(), &source, 0), Wr::local_invalidate(2, other.stag)],
    );
    assert_eq!(w.changes.len(), 1);
    raw.response(&mut w, sink.stag, sink.iova, b"x", true);
    assert_eq!(w.completions(A), [""; 0]);
    w.answer();
    w.settle();
    assert_eq!(w.completions(A), [""; 0], "the Read is first, and its sink is still valid");
    w.answer();
    w.settle();
    assert_eq!(w.completions(A), ["1 RdmaRead 1", "2 LocalInvalidate"]);
    assert_eq!(w.engines[0].state.stags.len(), 1);
}
