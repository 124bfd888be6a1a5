//! Shared receive queues: the order of receives, events, and the effects of a broken queue.

use super::requests::Wr;
use super::world::{QpShape, Wiring, World};
use rnic_abi::abi::queue::{QUEUE_HEADER_LEN, queue_header};
use rnic_abi::types::{QpId, QpState};

/// Receivers on an app with an SRQ, and senders on another app.
struct Bench {
    w: World,
    /// Senders and receivers, by connection.
    ends: Vec<[usize; 2]>,
    to: usize,
    srq: usize,
    /// Offset of the SRQ in its arena.
    at: usize,
}

impl Bench {
    /// Creates `qps` connections to QPs of one SRQ, distributed round-robin over the workers.
    fn new(wiring: Wiring, workers: u32, qps: usize, depth: u32, limit: u32) -> Self {
        Self::with(wiring, workers, qps, depth, limit, QpShape::default())
    }

    fn with(
        wiring: Wiring,
        workers: u32,
        qps: usize,
        depth: u32,
        limit: u32,
        shape: QpShape,
    ) -> Self {
        let mut w = World::new(if wiring.direct { &[3] } else { &[1, 3] });
        let from = w.app(0);
        let to = w.app(usize::from(!wiring.direct));
        let cq_from = w.cq(from, 512);
        let cq_to = w.cq(to, 512);
        let at = w.apps[to].next_offset();
        let srq = w.srq(to, depth, limit);
        let mut ends = Vec::new();
        for n in 0..qps {
            let sender = w.qp(from, cq_from, cq_from, QpShape { sq: 128, ..QpShape::default() });
            let receiver = w.qp(to, cq_to, cq_to, QpShape { srq: Some(srq), ..shape });
            let worker = n % workers as usize;
            let on = if wiring.direct { worker } else { 0 };
            w.connect_on(sender, on, receiver, worker, wiring);
            ends.push([sender, receiver]);
        }
        w.settle();
        w.events(ends[0][0]);
        w.events(ends[0][1]);
        Bench { w, ends, to, srq, at }
    }

    fn send(&mut self, connection: usize, ids: std::ops::Range<u64>) {
        let requests: Vec<Wr> = ids.map(|id| Wr::send(id, &[])).collect();
        self.w.post(self.ends[connection][0], &requests);
    }

    fn recv(&mut self, ids: std::ops::Range<u64>) {
        self.w.srq_recv(self.to, self.srq, ids);
        self.w.settle();
    }

    fn id(&self, connection: usize) -> QpId {
        self.w.qps[self.ends[connection][1]].id
    }

    fn received(&mut self) -> Vec<String> {
        self.w.poll_cq(self.to, 0, usize::MAX)
    }

    fn events(&mut self) -> Vec<String> {
        self.w.events(self.ends[0][1])
    }

    fn state(&self, connection: usize) -> QpState {
        self.w.state(self.ends[connection][1])
    }
}

fn numbers(ids: std::ops::Range<u64>) -> Vec<String> {
    ids.map(|id| format!("{id} Receive")).collect()
}

/// RDMAP-8.1.2-8, DDP-8.3.2-5a: the receives are shared, not divided among the QPs.
#[test]
fn one_qp_consumes_all_receives() {
    for wiring in Wiring::both() {
        for workers in [1, 3] {
            let mut b = Bench::new(wiring, workers, 2, 8, 0);
            b.recv(100..108);
            b.send(0, 0..8);
            assert_eq!(b.received(), numbers(100..108));
            b.send(1, 0..1);
            assert_eq!(b.received(), [""; 0], "none is left for the other");
            assert_eq!(b.events()[0..1], [format!("last receive of QP {}", b.id(1))]);
            assert_eq!([b.state(0), b.state(1)], [QpState::Rts, QpState::Error]);
        }
    }
}

/// A receive that was taken belongs to its QP. The others belong to no QP and stay.
#[test]
fn a_qp_in_error_flushes_only_taken_receives() {
    let mut b = Bench::new(Wiring::tcp(), 1, 2, 8, 0);
    let big = b.w.any_mr(b.ends[0][0], 3000);
    let into = b.w.any_mr(b.ends[0][1], 3000);
    let end = &mut b.w.apps[b.to].srqs[b.srq];
    end.producer.push(50, &[into.all()]).unwrap();
    end.producer.publish();
    b.recv(51..54);
    // After half a message the connection ends.
    b.w.links[0].pipes[0].window = 2000;
    b.w.push(b.ends[0][0], &[Wr::send(1, &[big.all()])]);
    b.w.round();
    b.w.links[0].pipes[0].window = 0;
    b.w.settle();
    b.w.abort(b.ends[0][1]);
    assert_eq!(b.received(), ["50 Receive WrFlush"]);
    // The event follows the flush and precedes the end of the connection.
    let last = format!("last receive of QP {}", b.id(0));
    assert_eq!(b.events(), [last, "aborted".to_owned()]);
    b.send(1, 1..4);
    assert_eq!(b.received(), numbers(51..54));
    assert_eq!(b.events(), [""; 0]);
}

#[test]
fn last_wqe_waits_for_a_stalled_flush() {
    let mut w = World::new(&[1, 1]);
    let a = w.app(0);
    let to = w.app(1);
    let cq = w.cq(a, 64);
    let cq_to = w.cq(to, 1);
    let srq = w.srq(to, 8, 0);
    let sender = w.qp(a, cq, cq, QpShape::default());
    let receiver = w.qp(to, cq_to, cq_to, QpShape { srq: Some(srq), ..QpShape::default() });
    w.connect(sender, receiver, Wiring::tcp());
    w.settle();
    w.events(receiver);
    let big = w.any_mr(sender, 3000);
    let into = w.any_mr(receiver, 3000);
    let end = &mut w.apps[to].srqs[srq];
    end.producer.push(50, &[]).unwrap();
    end.producer.push(51, &[into.all()]).unwrap();
    end.producer.publish();
    w.post(sender, &[Wr::send(1, &[])]);
    w.links[0].pipes[0].window = 2000;
    w.push(sender, &[Wr::send(2, &[big.all()])]);
    w.round();
    w.links[0].pipes[0].window = 0;
    w.settle();
    w.abort(receiver);
    assert_eq!(w.events(receiver), [""; 0]);
    assert_eq!(w.poll_cq(to, cq_to, 9), ["50 Receive"]);
    w.settle();
    assert_eq!(w.poll_cq(to, cq_to, 9), ["51 Receive WrFlush"]);
    let last = format!("last receive of QP {}", w.qps[receiver].id);
    assert_eq!(w.events(receiver), [last, "aborted".to_owned()]);
}

#[test]
fn last_wqe_of_an_unconnected_qp() {
    let mut w = World::new(&[1]);
    let app = w.app(0);
    let cq = w.cq(app, 8);
    let srq = w.srq(app, 8, 0);
    w.srq_recv(app, srq, 0..4);
    let qp = w.qp(app, cq, cq, QpShape { srq: Some(srq), ..QpShape::default() });
    w.attach_in_error(qp);
    assert_eq!(w.events(qp), [format!("last receive of QP {}", w.qps[qp].id)]);
    assert_eq!(w.completions(qp), [""; 0]);
    assert_eq!(w.apps[app].srqs[srq].srq.usage().posted, 4);
}

#[test]
fn the_limit_can_be_armed_again() {
    for wiring in Wiring::both() {
        let mut b = Bench::new(wiring, 3, 2, 8, 2);
        b.recv(0..4);
        b.send(0, 0..2);
        assert_eq!(b.events(), [""; 0], "exactly the limit is left");
        b.send(1, 2..3);
        assert_eq!(b.events(), ["SRQ limit"]);
        b.send(0, 3..4);
        b.recv(4..8);
        b.send(0, 4..8);
        assert_eq!(b.events(), [""; 0], "it is disarmed");
        b.recv(8..12);
        assert_eq!(b.w.apps[b.to].srqs[b.srq].srq.arm(4), Ok(false));
        b.send(1, 8..9);
        assert_eq!(b.events(), ["SRQ limit"]);
    }
}

/// RFC 5042 section 6.4.3.1: a peer that takes more than its fair share is reported.
#[test]
fn an_unfair_peer_is_reported_once() {
    for wiring in Wiring::both() {
        for workers in [1, 3] {
            let mut b = Bench::new(wiring, workers, 2, 16, 0);
            let mut sent = 0;
            let mut shares = |b: &mut Bench, from: usize, n: u64| {
                for _ in 0..n {
                    b.recv(sent..sent + 1);
                    b.send(from, sent..sent + 1);
                    sent += 1;
                }
                b.received().len() as u64
            };
            // Equal shares are fair, and so is up to 48 of 64 for one of two QPs.
            for _ in 0..100 {
                shares(&mut b, 0, 1);
                shares(&mut b, 1, 1);
            }
            assert_eq!(b.events(), [""; 0]);
            assert_eq!(shares(&mut b, 1, 200), 200);
            assert_eq!(b.events(), [format!("QP {} took 49/64", b.id(1))]);
            assert_eq!(b.w.apps[b.to].srqs[b.srq].srq.usage().unfair, 1);
            // No QP is stopped by the report.
            assert_eq!(shares(&mut b, 0, 3), 3);
        }
    }
}

#[test]
fn a_single_qp_is_never_unfair() {
    let mut b = Bench::new(Wiring::direct(), 1, 1, 16, 0);
    for n in 0..200 {
        b.recv(n..n + 1);
        b.send(0, n..n + 1);
    }
    assert_eq!(b.events(), [""; 0]);
}

#[test]
fn a_corrupted_ring_harms_only_its_owner() {
    for wiring in Wiring::both() {
        let mut b = Bench::new(wiring, 3, 3, 8, 0);
        let host = usize::from(!wiring.direct);
        // A pair of other apps on the same workers.
        let x = b.w.app(0);
        let y = b.w.app(host);
        let cx = b.w.cq(x, 16);
        let cy = b.w.cq(y, 16);
        let from = b.w.qp(x, cx, cx, QpShape::default());
        let to = b.w.qp(y, cy, cy, QpShape::default());
        b.w.connect(from, to, wiring);
        b.w.settle();
        b.recv(0..4);
        b.send(0, 0..1);
        let arena = b.w.apps[b.to].arena.clone();
        arena.store_u64(b.at + queue_header::PRODUCER, 77).unwrap();
        // Receives known to be posted are still taken. The next read of the index finds it invalid.
        b.send(1, 1..6);
        let session = b.w.apps[b.to].session;
        assert_eq!(b.w.misbehaved.len(), 1);
        assert_eq!(b.w.misbehaved[0].0, session);
        assert!(b.w.misbehaved[0].1.contains("shared receive queue"), "{:?}", b.w.misbehaved);
        assert_eq!(b.w.failed_srqs, [b.w.apps[b.to].srqs[b.srq].srq.id()]);
        assert_eq!(b.events()[0], "SRQ error");
        assert_eq!(b.state(1), QpState::Error);
        // Other QPs of the SRQ notice it with their next message, unless notified first.
        b.send(2, 6..7);
        assert_ne!(b.state(2), QpState::Rts);
        b.w.recv(to, 9, &[]);
        b.w.post(from, &[Wr::send(8, &[])]);
        assert_eq!(b.w.completions(to), ["9 Receive"]);
    }
}

#[test]
fn a_malformed_receive_ends_its_qp() {
    for wiring in Wiring::both() {
        let mut b = Bench::new(wiring, 3, 2, 8, 0);
        b.recv(20..22);
        let arena = b.w.apps[b.to].arena.clone();
        arena.store_u64(b.at + rnic_abi::abi::queue::QUEUE_HEADER_LEN, 1 << 9).unwrap();
        b.send(0, 0..1);
        assert_eq!(b.received(), ["20 Receive LocalQpOperation"]);
        b.send(1, 0..1);
        assert_eq!(b.received(), ["21 Receive"]);
        assert_ne!(b.state(0), QpState::Rts);
        assert_eq!(b.state(1), QpState::Rts);
    }
}

#[test]
fn completions_contain_the_srq() {
    let mut b = Bench::new(Wiring::direct(), 1, 1, 8, 0);
    b.recv(0..1);
    b.send(0, 0..1);
    let id = b.w.apps[b.to].srqs[b.srq].srq.id().0;
    assert_eq!(b.w.apps[b.to].cqs[0].consumer.poll().unwrap().srq, id);
}

mod held {
    use super::*;
    use std::time::Duration;

    fn bench(wiring: Wiring, workers: u32, qps: usize) -> Bench {
        let shape = QpShape { rnr_timeout: Some(Duration::from_secs(10)), ..QpShape::default() };
        Bench::with(wiring, workers, qps, 16, 0, shape)
    }

    #[test]
    fn waiting_qps_are_served_in_turn() {
        for wiring in Wiring::both() {
            for workers in [1, 3] {
                let mut b = bench(wiring, workers, 4);
                for connection in [2, 0, 3, 1] {
                    b.send(connection, 0..3);
                }
                assert_eq!(b.w.apps[b.to].srqs[b.srq].srq.usage().waiting, 4);
                let mut order = Vec::new();
                for id in 0..12 {
                    b.recv(id..id + 1);
                    let cqe = b.w.apps[b.to].cqs[0].consumer.poll().unwrap();
                    assert_eq!(cqe.wr_id, id);
                    order.push((0..4).position(|c| b.id(c).0 == cqe.qp).unwrap());
                }
                assert_eq!(order, [2, 0, 3, 1].repeat(3), "{wiring:?} {workers}");
                assert_eq!(b.w.apps[b.to].srqs[b.srq].srq.usage().waiting, 0);
            }
        }
    }

    #[test]
    fn a_freed_place_wakes_another_worker() {
        for wiring in Wiring::both() {
            let mut b = bench(wiring, 3, 2);
            b.send(0, 0..1);
            b.send(1, 0..1);
            // A receive is posted and a doorbell rung, but the first waiter is destroyed before its
            // worker polls it.
            let end = &mut b.w.apps[b.to].srqs[b.srq];
            end.producer.push(7, &[]).unwrap();
            end.producer.publish();
            let waiting = end.producer.waits();
            assert_eq!(waiting, 0b11);
            let index = end.srq.doorbell();
            b.w.ring(b.to, 1, index);
            for _ in 0..10 {
                b.w.round();
            }
            assert_eq!(b.received(), [""; 0], "the waiter in front is served first");
            b.w.destroy(b.ends[0][1]);
            assert_eq!(b.received(), numbers(7..8));
        }
    }

    #[test]
    fn a_malformed_receive_ends_a_held_message() {
        for wiring in Wiring::both() {
            let mut b = bench(wiring, 1, 1);
            b.send(0, 1..2);
            let end = &mut b.w.apps[b.to].srqs[b.srq];
            end.producer.push(77, &[]).unwrap();
            end.producer.publish();
            let arena = b.w.apps[b.to].arena.clone();
            arena.store_u64(b.at + QUEUE_HEADER_LEN, 1 << 8).unwrap();
            let index = b.w.apps[b.to].srqs[b.srq].srq.doorbell();
            b.w.ring(b.to, 0, index);
            b.w.settle();
            assert_eq!(b.received(), ["77 Receive LocalQpOperation"], "{wiring:?}");
            assert_eq!(b.w.completions(b.ends[0][0]), ["1 Send"], "{wiring:?}");
        }
    }

    /// A doorbell index is reused by a later queue.
    #[test]
    fn a_reused_doorbell_index_is_rung() {
        for wiring in Wiring::both() {
            let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
            let from = w.app(0);
            let to = w.app(usize::from(!wiring.direct));
            let cq_from = w.cq(from, 64);
            let cq_to = w.cq(to, 64);
            let at = w.apps[to].next_offset();
            let full = w.cq(to, 1);
            // A QP ends while it waits for a slot in its CQ.
            let waits = w.qp(to, full, full, QpShape::default());
            let more = u64::from(w.apps[to].cqs[full].cq.capacity()) + 1;
            (0..more).for_each(|id| w.recv(waits, id, &[]));
            w.attach_in_error(waits);
            let waiting = |w: &World| w.apps[to].arena.load_u64(at + queue_header::ENGINE_WAITS);
            assert_eq!(waiting(&w).unwrap(), 1, "the QP waits");
            w.destroy(waits);
            assert_eq!(waiting(&w).unwrap(), 0, "no QP waits any more");
            // Then an SRQ gets the CQ's index.
            let next = w.apps[to].next_doorbell;
            w.apps[to].next_doorbell = w.apps[to].cqs[full].cq.doorbell();
            let srq = w.srq(to, 8, 0);
            w.apps[to].next_doorbell = next;
            let rnr_timeout = Some(Duration::from_secs(10));
            let shape = QpShape { srq: Some(srq), rnr_timeout, ..QpShape::default() };
            let receiver = w.qp(to, cq_to, cq_to, shape);
            let sender = w.qp(from, cq_from, cq_from, QpShape::default());
            w.connect(sender, receiver, wiring);
            w.post(sender, &[Wr::send(1, &[])]);
            w.srq_recv(to, srq, 7..8);
            w.settle();
            assert_eq!(w.poll_cq(to, cq_to, 9), numbers(7..8), "{wiring:?}");
        }
    }

    #[test]
    fn a_corrupted_ring_ends_waiting_qps() {
        for wiring in Wiring::both() {
            let mut b = bench(wiring, 3, 2);
            b.send(0, 0..1);
            b.send(1, 0..1);
            let arena = b.w.apps[b.to].arena.clone();
            arena.store_u64(b.at + queue_header::PRODUCER, 77).unwrap();
            let index = b.w.apps[b.to].srqs[b.srq].srq.doorbell();
            for worker in 0..3 {
                b.w.ring(b.to, worker, index);
            }
            b.w.settle();
            assert_eq!(b.w.misbehaved.len(), 1);
            for connection in 0..2 {
                assert_ne!(b.state(connection), QpState::Rts);
            }
        }
    }
}
