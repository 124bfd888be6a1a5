//! RC QPs: their timeouts, and the state that an earlier stream leaves for the next.

use std::time::Duration;

use super::requests::{Mr, Wr};
use super::world::{A, B, MemoryKind, QpEnd, QpShape, Wiring, World};
use crate::engine::PeerLimits;
use crate::engine::rc::ALL_RIGHTS;
use rnic_abi::abi::control;
use rnic_abi::abi::queue::{SendOpcode, Sge};
use rnic_abi::types::{Access, Gid, QpId, QpState};

/// Retries take a second before the first stream, and at least 200 ms after it.
pub(super) const SENDING: control::Sending =
    control::Sending { sq_psn: 0, timeout: 10, retry_count: 1, rnr_retry: 6, ord: 4 };

/// With [`SENDING`], six RNR retries, 655 ms apart.
pub(super) const LIMITS: PeerLimits = PeerLimits { ird: 4, min_rnr_timer: 0 };

/// Returns two QPs that are connected to each other, in RTS and without a stream.
fn unlinked(wiring: Wiring) -> World {
    unlinked_of(wiring, kept(QpShape::default()), 128)
}

/// Like [`unlinked`], with this shape and completion queues of this size.
pub(super) fn unlinked_of(wiring: Wiring, shape: QpShape, cq_entries: u32) -> World {
    unlinked_in(wiring, shape, cq_entries, QpState::Rts)
}

/// Like [`unlinked_of`], with B in RTR or RTS.
fn unlinked_in(wiring: Wiring, shape: QpShape, cq_entries: u32, state: QpState) -> World {
    let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
    for host in [0, usize::from(!wiring.direct)] {
        let app = w.app(host);
        let cq = w.cq(app, cq_entries);
        w.qp(app, cq, cq, shape);
    }
    wire(&mut w, A);
    w.attach_roce(B, WIRING);
    if state == QpState::Rts {
        w.move_to_rts(B, SENDING);
    }
    w.settle();
    w
}

/// Returns the shape with an RNR wait of an hour.
pub(super) fn kept(shape: QpShape) -> QpShape {
    QpShape { rnr_timeout: Some(Duration::from_secs(3600)), ..shape }
}

/// Like [`unlinked`], with QPs that accept this number of Reads and atomic operations.
fn unlinked_of_ird(wiring: Wiring, ird: u16) -> World {
    let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
    for (qp, host) in [A, B].into_iter().zip([0, usize::from(!wiring.direct)]) {
        let app = w.app(host);
        let cq = w.cq(app, 128);
        w.qp(app, cq, cq, kept(QpShape::default()));
        w.attach_roce(qp, control::Wiring { ird, ..WIRING });
        w.move_to_rts(qp, SENDING);
    }
    w.settle();
    w
}

/// Moves a QP to RTS.
pub(super) fn wire(w: &mut World, qp: usize) {
    w.attach_roce(qp, WIRING);
    w.move_to_rts(qp, SENDING);
}

const WIRING: control::Wiring = control::Wiring {
    local: Gid([1; 16]),
    remote: Gid([1; 16]),
    remote_qp: QpId(2),
    rq_psn: 0,
    path_mtu: 1024,
    min_rnr_timer: 0,
    ird: 4,
    rights: ALL_RIGHTS,
};

pub(super) fn linked(wiring: Wiring) -> World {
    let mut w = unlinked(wiring);
    w.link([A, B], wiring, LIMITS);
    w
}

pub(super) fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[test]
fn retries_start_when_the_stream_is_lost() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        w.post(A, &[Wr::send(1, &[])]);
        w.advance(ms(3900));
        assert!(w.completions(A).is_empty(), "{wiring:?}");
        w.unlink(B);
        w.advance(ms(150));
        assert!(w.completions(A).is_empty(), "{wiring:?}");
        w.advance(ms(100));
        assert_eq!(w.completions(A), ["1 Send TransportRetryExceeded"]);
    }
}

#[test]
fn a_write_completes_when_placed() {
    let mut w = linked(Wiring::direct());
    let a = w.any_mr(A, 100_000);
    w.kind = MemoryKind::ThroughCopier;
    let b = w.any_mr(B, 100_000);
    w.answer_copies = false;
    let bytes = a.pattern(1);
    w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
    while w.run_copy_job() {
        w.settle();
        let done = w.completions(A);
        assert_eq!(done.is_empty(), !w.copy_jobs.is_empty(), "{done:?}");
    }
    assert_eq!(b.bytes(), bytes);
}

#[test]
fn a_placed_send_completes_though_the_peer_ends() {
    let mut w = linked(Wiring::direct());
    let a = w.any_mr(A, 64);
    w.kind = MemoryKind::ThroughCopier;
    let b = w.any_mr(B, 64);
    w.answer_copies = false;
    w.recv(B, 1, &[b.all()]);
    w.post(A, &[Wr::send(2, &[a.all()])]);
    assert!(w.run_copy_job());
    w.destroy(B);
    assert_eq!(w.completions(A), ["2 Send"]);
}

#[test]
fn a_new_stream_waits_for_the_copier() {
    for (wiring, end) in Wiring::both().into_iter().flat_map(|w| [(w, A), (w, B)]) {
        let mut w = linked(wiring);
        let a = w.any_mr(A, 64);
        w.kind = MemoryKind::ThroughCopier;
        let b = w.any_mr(B, 64);
        w.answer_copies = false;
        w.recv(B, 1, &[b.all()]);
        w.post(A, &[Wr::send(2, &[a.all()])]);
        w.unlink(end);
        assert_eq!(w.unlinked, [w.qps[A].id], "{wiring:?}");
        w.answer_copies = true;
        w.settle();
        assert_eq!(w.unlinked, [w.qps[A].id, w.qps[B].id]);
        assert_eq!(w.state(B), QpState::Rts);
    }
}

/// An adapter sends once and then `retry_cnt` times more, each time waiting for `timeout`.
#[test]
fn retries_count_on_top_of_the_first_try() {
    for retry_count in [0, 1, 7] {
        let mut w = linked(Wiring::direct());
        // 4.096 us * 2^20 is 4.3 s.
        w.move_to_rts(A, control::Sending { timeout: 20, retry_count, ..SENDING });
        w.unlink(B);
        w.post(A, &[Wr::send(1, &[])]);
        let once = Duration::from_nanos(4096 << 20);
        w.advance(once * (u32::from(retry_count) + 1) - ms(1));
        assert_eq!(w.completions(A), [""; 0], "{retry_count}");
        w.advance(ms(2));
        assert_eq!(w.completions(A), ["1 Send TransportRetryExceeded"], "{retry_count}");
    }
}

#[test]
fn the_first_message_in_rtr_raises_comm_est() {
    type Make = fn(&Mr, &Mr) -> Wr;
    let first: [Make; 3] = [
        |a, b| Wr::write(1, &[a.sge(0..8)], b, 0),
        |a, b| Wr::write(1, &[a.all()], b, 0),
        |a, _| Wr::send(1, &[a.all()]),
    ];
    for (wiring, make) in Wiring::both().into_iter().flat_map(|w| first.map(|make| (w, make))) {
        let mut w = unlinked_in(wiring, kept(QpShape::default()), 128, QpState::Rtr);
        let a = w.any_mr(A, 100_000);
        let b = w.any_mr(B, 100_000);
        w.recv(B, 2, &[b.all()]);
        w.link([A, B], wiring, LIMITS);
        w.events(B);
        let request = make(&a, &b);
        w.post(A, std::slice::from_ref(&request));
        w.post(A, &[request]);
        let events = w.events(B);
        assert_eq!(events.len(), 1, "{wiring:?}: {events:?}");
        assert!(events[0].starts_with("CommunicationEstablished"), "{wiring:?}: {events:?}");
    }
}

#[test]
fn the_first_message_is_reported_once() {
    for (wiring, state) in
        Wiring::both().into_iter().flat_map(|w| [QpState::Rtr, QpState::Rts].map(|s| (w, s)))
    {
        let mut w = unlinked_in(wiring, kept(QpShape::default()), 128, state);
        let a = w.any_mr(A, 8);
        let b = w.any_mr(B, 8);
        w.link([A, B], wiring, LIMITS);
        assert_eq!(w.established, [], "{wiring:?} {state:?}");
        for n in 1..=2 {
            w.post(A, &[Wr::write(n, &[a.all()], &b, 0)]);
        }
        let own = w.qps[B].id;
        // The other end may have received an answer.
        w.established.retain(|qp| *qp == own);
        assert_eq!(w.established, [own], "{wiring:?} {state:?}");
    }
}

#[test]
fn a_refused_request_raises_a_responder_event() {
    type Wrong = fn(&mut World) -> Wr;
    let cases: [(Wrong, &str); 4] = [
        (|w| Wr::write(1, &[w.any_mr(A, 8).all()], &w.mr(B, 8, Access::LOCAL_WRITE), 0), ACCESS),
        (|w| Wr::read(1, w.any_mr(A, 8).all(), &w.mr(B, 8, Access::LOCAL_WRITE), 0), ACCESS),
        (|w| Wr::fetch_add(1, 1, w.any_mr(A, 8).all(), &w.any_mr(B, 16), 4), REQUEST),
        (|w| Wr::send(1, &[w.any_mr(A, 8).all()]), REQUEST),
    ];
    for (wiring, (wrong, event)) in Wiring::both().into_iter().flat_map(|w| cases.map(|c| (w, c))) {
        let mut w = linked(wiring);
        w.recv(B, 7, &[]);
        let request = wrong(&mut w);
        w.post(A, &[request]);
        let events = w.responder_errors(B);
        assert_eq!(events.len(), 1, "{wiring:?}: {events:?}");
        assert!(events[0].starts_with(event), "{wiring:?}: {events:?}");
        assert_eq!(w.state(B), QpState::Error);
        assert_eq!([w.events(A), w.responder_errors(A)].concat(), [""; 0], "{wiring:?}");
    }
}

/// An operation that the QP does not allow is an invalid request, even if its region allows it
/// (`qp_access_flags`).
#[test]
fn an_operation_that_is_not_enabled_is_invalid() {
    type Make = fn(&mut World) -> Wr;
    let all: [(Make, &str); 3] = [
        (|w| Wr::write(1, &[w.any_mr(A, 8).all()], &w.any_mr(B, 8), 0), "RdmaWrite"),
        (|w| Wr::read(1, w.any_mr(A, 8).all(), &w.any_mr(B, 8), 0), "RdmaRead"),
        (|w| Wr::fetch_add(1, 1, w.any_mr(A, 8).all(), &w.any_mr(B, 8), 0), "FetchAdd"),
    ];
    for (wiring, (make, name)) in Wiring::both().into_iter().flat_map(|w| all.map(|m| (w, m))) {
        let mut w = linked(wiring);
        w.change(B, control::QpChange::Rights(Access::empty()));
        let request = make(&mut w);
        w.post(A, &[request]);
        let done = w.completions(A);
        let expected = format!("1 {name} RemoteInvalidRequest");
        assert!(done.len() == 1 && done[0].starts_with(&expected), "{wiring:?}: {done:?}");
        let events = w.responder_errors(B);
        assert!(events.len() == 1 && events[0].starts_with(REQUEST), "{wiring:?}: {events:?}");
    }
}

const ACCESS: &str = "AccessError";
const REQUEST: &str = "RequestError";

/// Neither end reports a fault when one program has finished, and data in flight arrive.
#[test]
fn destroying_a_linked_qp_is_an_ordinary_end() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        let from = w.any_mr(A, 100);
        let to = w.any_mr(B, 100);
        w.recv(B, 1, &[to.all()]);
        from.pattern(1);
        w.push(A, &[Wr::send(2, &[from.all()])]);
        w.destroy(A);
        assert_eq!(w.completions(B), ["1 Receive 100"], "{wiring:?}");
        assert_eq!(w.state(B), QpState::Rts);
        assert!(w.diagnoses(B).is_empty(), "{wiring:?}: {:?}", w.diagnoses(B));
        assert!(w.diagnoses(A).is_empty(), "{wiring:?}: {:?}", w.diagnoses(A));
        // The other end notices when it sends.
        w.post(B, &[Wr::send(3, &[])]);
        w.advance(ms(300));
        assert_eq!(w.completions(B), ["3 Send TransportRetryExceeded"]);
        let why = w.diagnosis(B).text;
        assert!(!why.contains("catastrophic"), "{wiring:?}: {why}");
    }
}

/// An adapter acknowledges a Send before its receive completes. Over TCP the request for the
/// acknowledgement may arrive after the program has ended the QP.
#[test]
fn a_received_send_succeeds_though_the_receiver_leaves() {
    for (wiring, destroys) in Wiring::both().into_iter().flat_map(|w| [(w, true), (w, false)]) {
        let mut w = linked(wiring);
        let a = w.any_mr(A, 100);
        let b = w.any_mr(B, 100);
        w.recv(B, 1, &[b.all()]);
        w.recv(B, 2, &[b.all()]);
        w.one_segment_at_a_time();
        let last = [Wr::write(4, &[a.all()], &b, 0), Wr::send(5, &[a.all()])];
        w.push(A, &[[Wr::send(3, &[a.all()])].as_slice(), &last].concat());
        let mut received = 0;
        while received < 2 {
            w.round();
            received += w.completions(B).len();
        }
        let sent = w.completions(A);
        if destroys {
            w.destroy(B);
        } else {
            w.abort(B);
        }
        w.advance(ms(300));
        let all = [sent, w.completions(A)].concat();
        assert_eq!(all, ["3 Send", "4 RdmaWrite", "5 Send"], "{wiring:?} {destroys}");
        assert_eq!(w.state(A), QpState::Rts, "{wiring:?} {destroys}");
    }
}

/// An adapter acknowledges a message before its program receives it.
#[test]
fn a_send_completes_before_its_answer() {
    type Make = fn(u64, &Mr, &Mr) -> Wr;
    let messages: [Make; 2] = [
        |wr_id, _, _| Wr::send(wr_id, &[]),
        |wr_id, from, to| Wr::write(wr_id, &[from.all()], to, 0).immediate(1),
    ];
    for (question, answer) in messages.into_iter().flat_map(|q| messages.map(|a| (q, a))) {
        let mut w = linked(Wiring::tcp());
        let a = w.any_mr(A, 8);
        let b = w.any_mr(B, 8);
        w.recv(A, 10, &[]);
        w.recv(B, 20, &[]);
        w.recv(B, 21, &[]);
        // The acknowledgement of the first message is under way, so A requests no other.
        w.links[0].pipes[1].latency = 1_000_000;
        let last = vec![Wr::write(2, &[a.all()], &b, 0), question(3, &a, &b)];
        for requests in [vec![question(1, &a, &b)], last] {
            w.push(A, &requests);
            while w.completions(B).is_empty() {
                w.round();
            }
        }
        assert_eq!(w.completions(A), [""; 0]);
        w.post(B, &[answer(4, &b, &a)]);
        let done = w.completions(A);
        let numbers: Vec<&str> = done.iter().filter_map(|c| c.split(' ').next()).collect();
        assert_eq!(numbers, ["1", "2", "3", "10"], "{done:?}");
    }
}

#[test]
fn an_answer_follows_the_response_without_a_notice() {
    let mut w = linked(Wiring::tcp());
    w.recv(A, 10, &[]);
    w.recv(B, 20, &[]);
    let sent = |w: &World| w.qps[B].shared.counters().segments_sent;
    let before = sent(&w);
    w.post(A, &[Wr::send(1, &[])]);
    assert_eq!(sent(&w), before + 1, "a Read Response");
    w.post(B, &[Wr::send(2, &[])]);
    assert_eq!(sent(&w), before + 3, "a Send and a Read Request");
}

#[test]
fn a_write_length_starts_with_its_stream() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        let a = w.any_mr(A, 500_000);
        let b = w.any_mr(B, 500_000);
        w.one_segment_at_a_time();
        w.push(A, &[Wr::write(1, &[a.all()], &b, 0)]);
        while w.qps[B].shared.counters().bytes_received == 0 {
            w.round();
        }
        w.destroy(A);
        // A's program creates another QP and connects it.
        let QpEnd { app, send_cq, recv_cq, .. } = w.qps[A];
        let c = w.qp(app, send_cq, recv_cq, kept(QpShape::default()));
        wire(&mut w, c);
        w.link([c, B], wiring, LIMITS);
        w.recv(B, 2, &[]);
        w.post(c, &[Wr::write(3, &[a.sge(0..7)], &b, 0).immediate(4)]);
        let received = w.completions(B);
        assert_eq!(received, ["2 Receive 7 immediate 0x4"], "{wiring:?}");
    }
}

#[test]
fn a_close_inside_a_message_unlinks() {
    let mut w = linked(Wiring::tcp());
    // The kernel has sent part of a message when the process is killed.
    w.links[0].pipes[0].send(&[0, 100, 0xC1, 0x40], w.now).unwrap();
    w.links[0].pipes[0].finish(w.now);
    w.settle();
    assert_eq!((w.state(B), w.unlinked.contains(&w.qps[B].id)), (QpState::Rts, true));
}

#[test]
fn linking_with_an_ended_qp_unlinks() {
    let mut w = unlinked(Wiring::direct());
    w.abort(A);
    w.link([A, B], Wiring::direct(), LIMITS);
    assert_eq!(w.unlinked, [w.qps[B].id]);
}

#[test]
fn a_new_timeout_applies_to_waiting_requests() {
    let mut w = unlinked(Wiring::direct());
    w.move_to_rts(A, control::Sending { timeout: 31, ..SENDING });
    w.post(A, &[Wr::send(1, &[])]);
    w.move_to_rts(A, SENDING);
    w.settle();
    w.advance(ms(1100));
    assert_eq!(w.completions(A), ["1 Send TransportRetryExceeded"]);
}

#[test]
fn signaled_requests_request_an_ack_at_once() {
    let mut w = linked(Wiring::tcp());
    for wr_id in 1..=20 {
        w.recv(B, wr_id, &[]);
    }
    let sent = |w: &World| w.qps[A].shared.counters().segments_sent;
    w.post(A, &[Wr::send(1, &[])]);
    assert_eq!((w.completions(A), sent(&w)), (vec!["1 Send".to_owned()], 2));
    // Unsignaled requests cause no immediate acknowledgement request.
    w.post(A, &[Wr::send(2, &[]).unsignaled()]);
    assert_eq!(sent(&w), 3);
    w.advance(Duration::from_micros(900));
    w.post(A, &[Wr::send(3, &[]).unsignaled()]);
    assert_eq!(sent(&w), 4);
    w.advance(Duration::from_micros(200));
    assert_eq!(sent(&w), 5);
    // As many requests as half the queue holds cause one at once.
    let many: Vec<Wr> = (4..20).map(|wr_id| Wr::send(wr_id, &[]).unsignaled()).collect();
    w.post(A, &many);
    assert!(sent(&w) > 5 + 16, "{}", sent(&w));
    // A request that fails is still reported.
    w.post(A, &[Wr::send(20, &[])]);
    assert_eq!(w.completions(A), ["20 Send"]);
    w.post(A, &[Wr::send(21, &[]).unsignaled()]);
    w.advance(ms(10));
    assert!(w.completions(A).is_empty());
    w.advance(ms(4000));
    assert_eq!(w.completions(A), ["21 Send ReceiverNotReady"]);
}

/// The length is the total of the SGE list, and segments may end anywhere in the list.
#[test]
fn a_read_may_be_scattered() {
    for wiring in Wiring::both() {
        for kind in [MemoryKind::Shared, MemoryKind::Attached, MemoryKind::ThroughCopier] {
            let mut w = linked(wiring);
            let there = w.any_mr(B, 300_000);
            w.kind = kind;
            let first = w.any_mr(A, 200_000);
            let second = w.any_mr(A, 200_000);
            let bytes = there.pattern(11);
            let list = [
                second.sge(1..100_001),
                first.sge(0..0),
                first.sge(7..8),
                first.sge(100_000..200_000),
            ];
            w.post(A, &[Wr::new(SendOpcode::Read, 1, &list).remote(there.stag, there.iova)]);
            assert_eq!(w.completions(A), ["1 RdmaRead 200001"], "{wiring:?} {kind:?}");
            assert_eq!(second.bytes()[1..100_001], bytes[..100_000]);
            assert_eq!(first.bytes()[7], bytes[100_000]);
            assert_eq!(first.bytes()[100_000..], bytes[100_001..200_001]);
            assert_eq!((first.bytes()[6], first.bytes()[8], second.bytes()[0]), (0, 0, 0));
        }
    }
}

/// The region need not be that long, because the length is checked first. iWARP has no such limit.
#[test]
fn a_roce_message_has_at_most_max_msg_sz_bytes() {
    const MOST: u32 = 1 << 30;
    let all = [SendOpcode::Send, SendOpcode::Write, SendOpcode::Read];
    for (wiring, opcode) in Wiring::both().into_iter().flat_map(|w| all.map(|o| (w, o))) {
        for (lengths, roce, status) in [
            (vec![MOST], true, "LocalProtection"),
            (vec![MOST + 1], true, "LocalLength"),
            (vec![MOST, 1], true, "LocalLength"),
            (vec![MOST + 1], false, "LocalProtection"),
        ] {
            let mut w = if roce { linked(wiring) } else { World::connected(wiring) };
            let a = w.any_mr(A, 64);
            let b = w.any_mr(B, 64);
            let sges: Vec<Sge> =
                lengths.iter().map(|&length| Sge { length, ..a.sge(0..1) }).collect();
            w.post(A, &[Wr::new(opcode, 1, &sges).remote(b.stag, b.iova)]);
            let done = w.completions(A);
            assert!(done[0].ends_with(status), "{wiring:?} {opcode:?} {lengths:?}: {done:?}");
        }
    }
}

/// `max_dest_rd_atomic` of the peer is 0, `max_rd_atomic` of this side is not.
#[test]
fn a_peer_that_takes_no_reads_refuses_them() {
    let limits = PeerLimits { ird: 0, ..LIMITS };
    for (wiring, atomic) in Wiring::both().into_iter().flat_map(|w| [(w, false), (w, true)]) {
        let mut w = unlinked_of_ird(wiring, 0);
        w.link([A, B], wiring, limits);
        let there = w.any_mr(B, 64);
        let here = w.any_mr(A, 64);
        w.recv(B, 7, &[]);
        w.responder_errors(B);
        let request = if atomic {
            Wr::fetch_add(2, 1, here.sge(0..8), &there, 0)
        } else {
            Wr::read(2, here.all(), &there, 0)
        };
        w.post(A, &[Wr::send(1, &[]), request, Wr::send(3, &[])]);
        let done = w.completions(A);
        let opcode = if atomic { "FetchAdd" } else { "RdmaRead" };
        assert_eq!(done[0], "1 Send", "{wiring:?}: {done:?}");
        let expected = format!("2 {opcode} RemoteInvalidRequest");
        assert!(done[1].starts_with(&expected), "{wiring:?}: {done:?}");
        assert!(done[2].starts_with("3 Send WrFlush"), "{wiring:?}: {done:?}");
        assert_eq!(w.state(B), QpState::Error, "{wiring:?}");
        let events = w.responder_errors(B);
        assert!(events.len() == 1 && events[0].starts_with(REQUEST), "{wiring:?}: {events:?}");
    }
}

#[test]
fn a_read_into_a_revoked_region_fails() {
    for (wiring, atomic) in Wiring::both().into_iter().flat_map(|w| [(w, false), (w, true)]) {
        let mut w = linked(wiring);
        let here = w.any_mr(A, 64);
        // The response waits for the copier.
        w.kind = MemoryKind::ThroughCopier;
        let there = w.any_mr(B, 64);
        w.answer_copies = false;
        let request = if atomic {
            Wr::fetch_add(1, 1, here.sge(0..8), &there, 0)
        } else {
            Wr::read(1, here.all(), &there, 0)
        };
        w.post(A, &[request]);
        w.revoke(A, here.stag);
        w.answer_copies = true;
        w.settle();
        let done = w.completions(A);
        let opcode = if atomic { "FetchAdd" } else { "RdmaRead" };
        let expected = format!("1 {opcode} LocalProtection");
        assert!(done.len() == 1 && done[0].starts_with(&expected), "{wiring:?}: {done:?}");
    }
}

#[test]
fn a_read_needs_writable_elements() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        let there = w.any_mr(B, 64);
        let here = w.any_mr(A, 64);
        there.pattern(1);
        let readable = w.mr(A, 64, Access::REMOTE_READ);
        let list = [here.sge(0..8), readable.sge(0..8)];
        w.post(A, &[Wr::new(SendOpcode::Read, 1, &list).remote(there.stag, there.iova)]);
        assert_eq!(w.completions(A), ["1 RdmaRead LocalProtection"], "{wiring:?}");
        assert_eq!(here.bytes(), [0; 64], "{wiring:?}");
    }
}
