//! Full completion queues, and clients that write invalid data.

use super::rc::{LIMITS, unlinked_of};
use super::requests::Wr;
use super::world::{A, B, QpShape, Wiring, World};
use rnic_abi::abi::queue::{
    ARM_NEXT, ARM_SOLICITED, QUEUE_HEADER_LEN, SendFlags, Sge, doorbell, doorbell_offset,
    queue_header,
};
use rnic_abi::types::{QpState, Time};

/// Connects a pair. A completes its sends to a CQ of `send_entries` and its receives to another.
fn with_small_cq(wiring: Wiring, send_entries: u32, recv_entries: u32) -> World {
    let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
    let a = w.app(0);
    let b = w.app(usize::from(!wiring.direct));
    let send = w.cq(a, send_entries);
    let recv = w.cq(a, recv_entries);
    let cq_b = w.cq(b, 256);
    w.qp(a, send, recv, QpShape { sq: 64, rq: 64, ..QpShape::default() });
    w.qp(b, cq_b, cq_b, QpShape { rq: 128, sq: 128, ..QpShape::default() });
    w.connect(A, B, wiring);
    w.settle();
    w.events(A);
    w.events(B);
    w
}

#[test]
fn a_full_cq_stalls_the_send_queue() {
    for wiring in Wiring::both() {
        let mut w = with_small_cq(wiring, 4, 64);
        let to = w.any_mr(B, 1);
        let batch: Vec<Wr> =
            (0..20).map(|n| Wr::write(n, &[], &to, 0).inline(&[n as u8])).collect();
        w.post(A, &batch);
        let mut next = 0;
        while next < 20 {
            assert_eq!(to.bytes(), [(next + 3).min(19) as u8], "four at a time");
            // Long enough for the worker to sleep in between.
            w.advance(std::time::Duration::from_millis(10));
            let found = w.poll_cq(0, 0, 4);
            assert_eq!(found.len(), 4);
            for c in found {
                assert_eq!(c, format!("{next} RdmaWrite"));
                next += 1;
            }
            w.settle();
        }
        assert_eq!(w.apps[0].cqs[0].cq.usage(), (0, 0, 20));
        // No worker waits for a slot any more, so the client need not ring.
        w.post(A, &[Wr::write(1, &[], &to, 0)]);
        assert!(w.apps[0].cqs[0].consumer.poll().is_some());
        assert_eq!(w.apps[0].cqs[0].consumer.release(), 0);
    }
}

#[test]
fn unsignaled_requests_hold_no_slots() {
    // Two QPs on one CQ. The first QP has more requests in flight than the CQ has slots. Both
    // cases: one worker, and two workers.
    for on in [0, 1] {
        let mut w = World::new(&[2, 1]);
        let a = w.app(0);
        let b = w.app(1);
        let cq = w.cq(a, 8);
        let cq_b = w.cq(b, 64);
        for _ in 0..2 {
            w.qp(a, cq, cq, QpShape::default());
            w.qp(b, cq_b, cq_b, QpShape::default());
        }
        w.connect_on(0, 0, 1, 0, Wiring::tcp());
        w.connect_on(2, on, 3, 0, Wiring::tcp());
        w.settle();
        let one = w.any_mr(1, 1);
        let other = w.any_mr(3, 1);
        (0..6).for_each(|n| w.recv(0, n, &[]));
        w.links[0].pipes[0].window = 0;
        let silent: Vec<Wr> =
            (0..12).map(|n| Wr::write(n, &[], &one, 0).inline(b"x").unsignaled()).collect();
        w.post(0, &silent);
        assert_eq!(w.apps[0].cqs[0].cq.usage().1, 0);
        w.post(1, &(0..6).map(|n| Wr::send(n, &[])).collect::<Vec<_>>());
        w.post(2, &[Wr::write(9, &[], &other, 0).inline(b"y")]);
        let mut expected: Vec<_> = (0..6).map(|n| format!("{n} Receive")).collect();
        expected.push("9 RdmaWrite".to_owned());
        assert_eq!(w.completions(0), expected, "worker {on}");
        w.links[0].pipes[0].window = 1 << 20;
        w.settle();
        assert_eq!(w.apps[0].cqs[0].cq.usage(), (0, 0, 7));
        w.abort(0);
        assert_eq!(w.completions(0), [""; 0], "all have succeeded");
    }
}

#[test]
fn a_failed_unsignaled_request_waits_for_room() {
    for wiring in Wiring::both() {
        let mut w = with_small_cq(wiring, 4, 64);
        let to = w.any_mr(B, 1);
        w.post(A, &(0..4).map(|n| Wr::write(n, &[], &to, 0)).collect::<Vec<_>>());
        let invalid = Sge { addr: 0, length: 1, lkey: 1 };
        let requests = [(5, &[invalid][..]), (6, &[])];
        w.post(A, &requests.map(|(n, sges)| Wr::write(n, sges, &to, 0).unsignaled()));
        let mut found = w.poll_cq(0, 0, 4);
        w.advance(std::time::Duration::from_millis(10));
        w.settle();
        found.extend(w.poll_cq(0, 0, 4));
        let mut expected: Vec<_> = (0..4).map(|n| format!("{n} RdmaWrite")).collect();
        expected.extend(["5 RdmaWrite LocalProtection", "6 RdmaWrite WrFlush"].map(str::to_owned));
        assert_eq!(found, expected, "{wiring:?}");
    }
}

#[test]
fn a_destroyed_qp_frees_slots_for_waiters() {
    let mut w = World::new(&[2, 1]);
    let a = w.app(0);
    let b = w.app(1);
    let cq = w.cq(a, 4);
    let cq_b = w.cq(b, 64);
    for _ in 0..2 {
        w.qp(a, cq, cq, QpShape::default());
        w.qp(b, cq_b, cq_b, QpShape::default());
    }
    w.connect_on(0, 0, 1, 0, Wiring::tcp());
    w.connect_on(2, 1, 3, 0, Wiring::tcp());
    w.settle();
    let to = w.any_mr(3, 1);
    w.links[0].pipes[0].window = 0;
    w.post(0, &(0..4).map(|n| Wr::write(n, &[], &to, 0)).collect::<Vec<_>>());
    w.post(2, &[Wr::write(9, &[], &to, 0).inline(b"y")]);
    assert_eq!(to.bytes(), [0]);
    w.destroy(0);
    assert_eq!(to.bytes(), *b"y");
}

#[test]
fn an_overflow_kills_only_its_cq() {
    for wiring in Wiring::both() {
        let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
        let a = w.app(0);
        let b = w.app(usize::from(!wiring.direct));
        let tiny = w.cq(a, 2);
        let roomy = w.cq(a, 64);
        let cq_b = w.cq(b, 64);
        // Three connections: one overflows, one shares its CQ, one does not.
        for (send, recv) in [(roomy, tiny), (tiny, roomy), (roomy, roomy)] {
            w.qp(a, send, recv, QpShape::default());
            w.qp(b, cq_b, cq_b, QpShape::default());
        }
        for n in [0, 2, 4] {
            w.connect(n, n + 1, wiring);
        }
        w.settle();
        w.events(0);
        w.events(1);
        for n in 0..4 {
            w.recv(0, n, &[]);
        }
        w.post(1, &(0..3).map(|n| Wr::send(n, &[])).collect::<Vec<_>>());
        let events = w.events(0);
        assert_eq!(events.iter().filter(|e| *e == "CQ error").count(), 1, "{events:?}");
        let fatal = "fatal: its completion queue is dead";
        assert_eq!(events.iter().filter(|e| *e == fatal).count(), 2, "{events:?}");
        let ended = events.iter().filter(|e| *e == "terminated 0/0/00").count();
        assert_eq!(ended, 2, "{events:?} {wiring:?}");
        assert_eq!(w.failed_cqs.len(), 1);
        assert!(w.misbehaved.is_empty());
        assert_eq!(
            [w.state(0), w.state(2), w.state(4)],
            [QpState::Error, QpState::Error, QpState::Rts]
        );
        assert_eq!(w.poll_cq(0, tiny, 99), ["0 Receive", "1 Receive"]);
        w.post(4, &[Wr::write(8, &[], &unused_region(), 0)]);
        assert!(w.poll_cq(0, roomy, 99).contains(&"8 RdmaWrite".to_owned()), "the third works");
        // Requests posted to a QP of the dead CQ stay in the queue.
        w.post(2, &[Wr::send(1, &[])]);
        assert_eq!(w.poll_cq(0, tiny, 99), [""; 0]);
    }
}

/// Connects two pairs. The first QPs of both complete their sends to a CQ of four entries, which
/// sends overrun.
fn with_overrun(wiring: Wiring) -> World {
    let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
    let a = w.app(0);
    let b = w.app(usize::from(!wiring.direct));
    let tiny = w.cq_overrun_by_sends(a, 4);
    let roomy = w.cq(a, 64);
    let cq_b = w.cq(b, 64);
    for _ in 0..2 {
        w.qp(a, tiny, roomy, QpShape { sq: 64, ..QpShape::default() });
        w.qp(b, cq_b, cq_b, QpShape::default());
    }
    w.connect(0, 1, wiring);
    w.connect(2, 3, wiring);
    w.settle();
    (0..4).for_each(|qp| drop(w.events(qp)));
    w
}

#[test]
fn sends_overrun_a_cq_on_request() {
    for wiring in Wiring::both() {
        let mut w = with_overrun(wiring);
        let to = w.any_mr(1, 32 * 1024);
        // Short and long Writes, which the direct path executes differently. Requests in flight may
        // outnumber the entries, and unsignaled requests need none.
        let from = w.any_mr(0, 20_000);
        for round in 0..3 {
            let mut requests: Vec<Wr> =
                (0..20).map(|n| Wr::write(n, &[], &to, 0).inline(b"x").unsignaled()).collect();
            requests.extend((20..22).map(|n| Wr::write(n, &[], &to, 0).inline(b"x")));
            requests.extend((22..24).map(|n| Wr::write(n, &[from.sge(0..20_000)], &to, 0)));
            w.post(0, &requests);
            let expected: Vec<String> = (20..24).map(|n| format!("{n} RdmaWrite")).collect();
            assert_eq!(w.poll_cq(0, 0, 99), expected, "round {round} {wiring:?}");
        }
        assert_eq!(w.events(0), [""; 0], "{wiring:?}");
        w.post(0, &(0..5).map(|n| Wr::write(n, &[], &to, 0).inline(b"y")).collect::<Vec<_>>());
        w.settle();
        let events = w.events(0);
        let count = |wanted: &str| events.iter().filter(|event| *event == wanted).count();
        assert_eq!(count("CQ error"), 1, "{events:?} {wiring:?}");
        assert_eq!(count("fatal: its completion queue is dead"), 2, "{events:?} {wiring:?}");
        assert_eq!([w.state(0), w.state(2)], [QpState::Error; 2]);
        let expected: Vec<String> = (0..4).map(|n| format!("{n} RdmaWrite")).collect();
        assert_eq!(w.poll_cq(0, 0, 99), expected);
        assert!(w.misbehaved.is_empty());
    }
}

#[test]
fn flushed_sends_overrun_a_cq_on_request() {
    for wiring in Wiring::both() {
        let mut w = with_overrun(wiring);
        w.abort(0);
        w.push(0, &(0..5).map(|n| Wr::send(n, &[])).collect::<Vec<_>>());
        w.settle();
        let events = w.events(0);
        assert!(events.iter().any(|event| event == "CQ error"), "{events:?} {wiring:?}");
        assert_eq!(w.state(2), QpState::Error);
    }
}

#[test]
fn a_waiting_flush_ends_with_its_cq() {
    for wiring in Wiring::both() {
        let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
        let a = w.app(0);
        let b = w.app(usize::from(!wiring.direct));
        let tiny = w.cq(a, 4);
        let roomy = w.cq(a, 64);
        let cq_b = w.cq(b, 64);
        for _ in 0..2 {
            w.qp(a, roomy, tiny, QpShape { rq: 64, ..QpShape::default() });
            w.qp(b, cq_b, cq_b, QpShape::default());
        }
        w.connect(0, 1, wiring);
        w.connect(2, 3, wiring);
        w.settle();
        for n in 0..50 {
            w.recv(0, n, &[]);
        }
        w.recv(2, 99, &[]);
        w.abort(0);
        w.settle();
        let events = w.events(0);
        assert!(!events.iter().any(|e| e == "aborted"), "its flush is not done: {events:?}");
        // The four completions that fit have not been read.
        w.post(3, &[Wr::send(7, &[])]);
        let events = w.events(0);
        assert!(events.iter().any(|e| e == "CQ error"), "{events:?}");
        assert!(events.iter().any(|e| e == "aborted"), "{events:?}");
    }
}

#[test]
fn a_flush_follows_unsignaled_requests() {
    let shape = QpShape { sq: 64, ..QpShape::default() };
    let mut w = World::pair_alone(shape, 256);
    // A request fails after more requests have completed than one flush handles.
    let mut requests: Vec<Wr> =
        (0..40).map(|n| Wr::write(n, &[], &unused_region(), 0).unsignaled()).collect();
    requests.push(Wr::send(40, &[Sge { addr: 0, length: 1, lkey: 1 }]));
    requests.extend((41..50).map(|n| Wr::send(n, &[])));
    w.post(A, &requests);
    let mut expected = vec!["40 Send LocalProtection".to_owned()];
    expected.extend((41..50).map(|n| format!("{n} Send WrFlush")));
    assert_eq!(w.completions(A), expected);
    assert_eq!(w.events(A), ["terminated 0/0/00"]);
}

/// Returns a region that is never accessed, for zero-length requests.
fn unused_region() -> super::requests::Mr {
    let (mapping, _fd) = rnic_abi::shm::Mapping::create_arena("none", 1).unwrap();
    super::requests::Mr {
        stag: rnic_abi::types::Stag(1),
        iova: 0,
        len: 0,
        mapping,
        windows: Default::default(),
    }
}

#[test]
fn a_flush_waits_for_room() {
    for wiring in Wiring::both() {
        let mut w = with_small_cq(wiring, 4, 4);
        for n in 100..150 {
            w.recv(A, n, &[]);
        }
        w.abort(A);
        w.push(A, &(0..50).map(|n| Wr::send(n, &[])).collect::<Vec<_>>());
        // The flush takes several turns. Without free slots, no worker is busy with it.
        w.settle();
        assert_eq!(w.events(A), [""; 0], "its flush is not done");
        let mut sends = Vec::new();
        let mut receives = Vec::new();
        while sends.len() < 50 || receives.len() < 50 {
            let s = w.poll_cq(0, 0, 3);
            let r = w.poll_cq(0, 1, 2);
            assert!(!s.is_empty() || !r.is_empty(), "{sends:?} {receives:?}");
            sends.extend(s);
            receives.extend(r);
            w.settle();
        }
        assert_eq!(sends, (0..50).map(|n| format!("{n} Send WrFlush")).collect::<Vec<_>>());
        let flushed = (100..150).map(|n| format!("{n} Receive WrFlush")).collect::<Vec<_>>();
        assert_eq!(receives, flushed);
        assert_eq!(w.events(A), ["aborted"]);
        assert!(w.failed_cqs.is_empty(), "a flush never overflows");
        assert_eq!(w.next_timeout(), None);
    }
}

#[test]
fn a_terminate_does_not_wait_forever() {
    for wiring in Wiring::both() {
        let mut w = with_small_cq(wiring, 4, 4);
        for n in 0..10 {
            w.recv(A, n, &[]);
        }
        w.abort(A);
        assert_eq!(w.events(A), [""; 0]);
        w.advance(std::time::Duration::from_secs(11));
        assert_eq!(w.events(A), ["aborted"]);
        assert_eq!(w.poll_cq(0, 1, 99).len(), 4);
        w.settle();
        assert_eq!(w.poll_cq(0, 1, 99).len(), 4, "the flush goes on");
        assert_eq!(w.events(A), [""; 0]);
    }
}

#[test]
fn a_partial_receive_is_flushed() {
    let (mut w, mut raw) = World::raw();
    let app = w.app(0);
    let send = w.cq(app, 8);
    let recv = w.cq(app, 1);
    let qp = w.qp(app, send, recv, QpShape::default());
    let options = Wiring::tcp().with(|o| o.peer_to_peer = false).a;
    let mut second = w.connect_raw(qp, true, options, options);
    let to = w.any_mr(qp, 10);
    w.recv(qp, 1, &[]);
    w.recv(qp, 2, &[to.all()]);
    second.send(&mut w, 1, b"");
    let header = second.untagged(crate::rdmap::Opcode::Send, 0, 2, 0, false);
    second.segment(&mut w, header, b"half");
    second.finish(&mut w);
    assert!(w.failed_cqs.is_empty());
    assert_eq!(w.poll_cq(app, recv, 9), ["1 Receive"]);
    w.settle();
    assert_eq!(w.poll_cq(app, recv, 9), ["2 Receive WrFlush"]);
    raw.collect(&mut w);
}

//= RDMAP-5.3-6
#[test]
fn events_are_sent_only_when_armed() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let to = w.any_mr(B, 1);
        let id = w.apps[1].cqs[0].cq.id();
        let mut next = 0;
        let mut send = |w: &mut World, flags: SendFlags| {
            next += 1;
            w.recv(B, next, &[to.all()]);
            w.post(A, &[Wr::send(next, &[]).with(flags)]);
            std::mem::take(&mut w.apps[1].notified)
        };
        assert_eq!(send(&mut w, SendFlags::empty()), []);
        w.apps[1].cqs[0].consumer.arm(ARM_NEXT);
        assert_eq!(send(&mut w, SendFlags::empty()), [id]);
        assert_eq!(send(&mut w, SendFlags::empty()), [], "one event per arm");
        w.apps[1].cqs[0].consumer.arm(ARM_SOLICITED);
        assert_eq!(send(&mut w, SendFlags::empty()), []);
        assert_eq!(send(&mut w, SendFlags::SOLICITED), [id]);
        w.apps[1].cqs[0].consumer.arm(ARM_SOLICITED);
        w.recv(B, 99, &[]);
        w.abort(B);
        assert_eq!(w.apps[1].notified, [id], "a failure counts as solicited");
    }
}

// --- Invalid data in shared memory ---------------------------------------------------------------

fn poke(w: &World, app: usize, at: usize, word: u64) {
    w.apps[app].arena.store_u64(at, word).unwrap();
}

/// Returns the arena offset of the next queue.
fn offset_of_next(w: &World, app: usize) -> usize {
    w.apps[app].next_offset()
}

/// Unlike a failed request, a queue fault ends a UC QP even in SQE.
#[test]
fn a_send_queue_fault_in_sqe_ends_the_qp() {
    const ENTRIES: u32 = 128;
    // The queues of the first QP are at the same offsets as here.
    let mut same = World::new(&[1]);
    let app = same.app(0);
    same.cq(app, ENTRIES);
    let at_sq = offset_of_next(&same, app);
    let shape = QpShape { unreliable: true, ..QpShape::default() };
    let mut w = unlinked_of(Wiring::direct(), shape, ENTRIES);
    w.link([A, B], Wiring::direct(), LIMITS);
    w.post(A, &[Wr::send(1, &[Sge { addr: 0, length: 8, lkey: 0 }])]);
    assert_eq!((w.state(A), w.completions(A).len()), (QpState::Sqe, 1));
    poke(&w, w.qps[A].app, at_sq + queue_header::PRODUCER, 1000);
    let app = w.qps[A].app;
    let bell = w.qps[A].doorbell;
    w.ring(app, 0, bell);
    w.settle();
    assert_eq!((w.state(A), w.misbehaved.len()), (QpState::Error, 1));
}

#[test]
fn invalid_indices_end_the_session() {
    for wiring in Wiring::both() {
        for queue in ["sq", "rq", "cq"] {
            let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
            let a = w.app(0);
            let b = w.app(usize::from(!wiring.direct));
            let at_cq = offset_of_next(&w, a);
            let cq = w.cq(a, 4);
            let at_sq = offset_of_next(&w, a);
            let shape = QpShape::default();
            let cq_b = w.cq(b, 64);
            w.qp(a, cq, cq, shape);
            let at_rq = at_sq
                + rnic_abi::abi::queue::QueueShape::send(shape.sq, shape.sges, shape.inline)
                    .bytes()
                    .next_multiple_of(64);
            w.qp(b, cq_b, cq_b, shape);
            w.connect(A, B, wiring);
            w.settle();
            w.events(A);
            w.events(B);
            match queue {
                "sq" => poke(&w, a, at_sq + queue_header::PRODUCER, 1000),
                "rq" => poke(&w, a, at_rq + queue_header::PRODUCER, u64::from(u32::MAX)),
                _ => poke(&w, a, at_cq + queue_header::CONSUMER, 77),
            }
            let app = w.qps[A].app;
            let bell = w.qps[A].doorbell;
            if queue == "cq" {
                let batch: Vec<Wr> = (0..8).map(|n| Wr::send(n, &[])).collect();
                for n in 0..8 {
                    w.recv(B, n, &[]);
                }
                w.push(A, &batch);
            }
            if queue == "rq" {
                w.push(B, &[Wr::send(1, &[])]);
            }
            w.ring(app, 0, bell);
            w.settle();
            assert_eq!(w.misbehaved.len(), 1, "{queue}: {:?}", w.misbehaved);
            assert_eq!(w.misbehaved[0].0, w.apps[0].session);
            assert_eq!(w.state(A), QpState::Error, "{queue} {wiring:?}");
            let at_b = w.events(B);
            assert_eq!(at_b, ["terminated by peer 0/0/00"], "{queue}");
            assert_eq!(w.state(B), QpState::Error);
            // The client rings repeatedly, but is reported only once.
            for _ in 0..3 {
                w.ring(app, 0, bell);
                w.settle();
            }
            assert_eq!(w.misbehaved.len(), 1);
        }
    }
}

#[test]
fn malformed_entries_fail_by_name() {
    for wiring in Wiring::both() {
        for (word, value) in [
            (0, 1 << 48),
            (7, 1),
            (0, 17 << 8),
            (0, 5 << 8),
            (0, u64::from(SendFlags::INLINE.bits()) << 16 | 100 << 32),
            (0, 7 << 32),
        ] {
            let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
            let a = w.app(0);
            let b = w.app(usize::from(!wiring.direct));
            let cq = w.cq(a, 64);
            let cq_b = w.cq(b, 64);
            let at = offset_of_next(&w, a) + QUEUE_HEADER_LEN;
            w.qp(a, cq, cq, QpShape::default());
            w.qp(b, cq_b, cq_b, QpShape::default());
            w.connect(A, B, wiring);
            w.settle();
            w.events(A);
            let q = &mut w.qps[A];
            let wr = Wr::send(3, &[]);
            q.sq.push(&wr.header, &[], &[]).unwrap();
            let old = w.apps[a].arena.load_u64(at + word * 8).unwrap();
            poke(&w, a, at + word * 8, old | value);
            w.push(A, &[Wr::send(4, &[])]);
            w.settle();
            let expected = ["3 Send LocalQpOperation", "4 Send WrFlush"];
            assert_eq!(w.completions(A), expected, "{word} {value:#x}");
            assert!(w.misbehaved.is_empty(), "only the QP fails, not the session");
        }
    }
}

#[test]
fn a_malformed_receive_fails_by_name() {
    for wiring in Wiring::both() {
        let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
        let a = w.app(0);
        let b = w.app(usize::from(!wiring.direct));
        let cq = w.cq(a, 64);
        let cq_b = w.cq(b, 64);
        w.qp(a, cq, cq, QpShape::default());
        let before = offset_of_next(&w, b);
        let shape = QpShape::default();
        w.qp(b, cq_b, cq_b, shape);
        let sq = rnic_abi::abi::queue::QueueShape::send(shape.sq, shape.sges, shape.inline);
        let at = before + sq.bytes().next_multiple_of(64) + QUEUE_HEADER_LEN;
        w.connect(A, B, wiring);
        w.settle();
        w.events(A);
        w.recv(B, 5, &[]);
        w.recv(B, 6, &[]);
        poke(&w, b, at, 1 << 9);
        w.post(A, &[Wr::send(1, &[])]);
        assert_eq!(w.completions(B), ["5 Receive LocalQpOperation", "6 Receive WrFlush"]);
        assert_eq!(w.events(A), ["terminated by peer 0/0/00"]);
    }
}

#[test]
fn every_doorbell_may_ring() {
    let mut w = World::connected(Wiring::direct());
    for index in (0..doorbell::INDICES).step_by(7).chain([doorbell::INDICES - 1]) {
        w.ring(0, 0, index);
        w.round();
    }
    poke(&w, 0, doorbell_offset(0) + doorbell::SUMMARY, u64::MAX);
    w.settle();
    let to = w.any_mr(B, 1);
    w.post(A, &[Wr::write(1, &[], &to, 0)]);
    assert_eq!(w.completions(A), ["1 RdmaWrite"]);
}

#[test]
fn invalid_elements() {
    for wiring in Wiring::both() {
        for sge in [
            Sge { addr: u64::MAX, length: u32::MAX, lkey: 0 },
            Sge { addr: 0, length: u32::MAX, lkey: u32::MAX },
            Sge { addr: u64::MAX - 3, length: 8, lkey: 1 },
        ] {
            let mut w = World::connected(wiring);
            let to = w.any_mr(B, 1);
            let list = [sge, sge, sge, sge];
            let status = match sge.length {
                u32::MAX => "LocalLength",
                _ => "LocalProtection",
            };
            w.post(A, &[Wr::write(1, &list, &to, 0)]);
            assert_eq!(w.completions(A), [format!("1 RdmaWrite {status}")]);
            let mut w = World::connected(wiring);
            w.recv(B, 2, &list);
            w.post(A, &[Wr::send(1, &[]).inline(b"x")]);
            assert_eq!(w.completions(B), ["2 Receive LocalProtection"]);
        }
    }
}

#[test]
fn memory_that_vanishes_costs_its_owner_only() {
    rnic_abi::shm::fault::install().unwrap();
    for wiring in Wiring::both() {
        for side in ["source", "sink"] {
            let mut w = World::connected(wiring);
            let all = rnic_abi::types::Access::all();
            let owner = if side == "source" { A } else { B };
            let (mapping, fd) = rnic_abi::shm::Mapping::create_shared_buffer(8192).unwrap();
            let scope = rnic_abi::types::Scope::Pd;
            let bad = w.mr_over(owner, mapping, 8192, all, scope, 0x10_0000);
            let good = w.any_mr(1 - owner, 8192);
            rustix::fs::ftruncate(&fd, 0).unwrap();
            let (from, to) = if side == "source" { (&bad, &good) } else { (&good, &bad) };
            w.post(A, &[Wr::write(1, &[from.all()], to, 0)]);
            assert_eq!(w.misbehaved.len(), 1, "{side} {wiring:?}");
            assert_eq!(w.misbehaved[0].0, w.apps[owner].session, "{side} {wiring:?}");
            assert_eq!([w.state(A), w.state(B)], [QpState::Error, QpState::Error]);
        }
    }
}

#[test]
fn the_clock_may_stop_or_jump() {
    let mut w = World::connected(Wiring::tcp());
    let to = w.any_mr(B, 1);
    for now in [Time(0), Time(u64::MAX), Time(5)] {
        w.now = now;
        w.post(A, &[Wr::write(1, &[], &to, 0)]);
        assert_eq!(w.completions(A), ["1 RdmaWrite"]);
    }
}
