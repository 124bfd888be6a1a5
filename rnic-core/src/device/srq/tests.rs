//! Tests of an SRQ with several QPs: the order of receives and of waiting QPs.

use std::sync::Arc;

use super::*;
use rnic_abi::abi::queue::{QueueKind, QueueShape, queue_header};
use rnic_abi::shm::Mapping;
use rnic_abi::shm::queue::ReceiveProducer;

const NOW: Time = Time(5);

fn srq(depth: u32, limit: u32) -> (Srq, ReceiveProducer, Arc<Mapping>) {
    let shape = QueueShape::receive(depth, 1);
    let (arena, _fd) = Mapping::create_arena("test", shape.bytes()).expect("memory for the arena");
    let queue = QueueMemory::format(arena.clone(), 0, QueueKind::SharedReceive, shape, 3, 9)
        .expect("it fits");
    let client = ReceiveProducer::new(queue.clone());
    let srq = Srq::new(SrqId(3), SessionId(1), 7, limit, queue);
    srq.qps.store(2, Relaxed);
    (srq, client, arena)
}

fn post(client: &mut ReceiveProducer, ids: std::ops::Range<u64>) -> u64 {
    for id in ids {
        client.push(id, &[]).expect("room");
    }
    client.publish();
    client.waits()
}

/// Takes a receive for a QP and returns its `wr_id`.
fn take(srq: &Srq, qp: u32, turn: TakeMode) -> Option<u64> {
    let mut entry = ReceiveEntry::default();
    let (got, _) = srq.take(QpId(qp), turn, NOW, &mut entry).expect("an honest client");
    (got == TakeOutcome::Receive).then_some(entry.wr_id)
}

fn wait(srq: &Srq, qp: u32, worker: u32) -> Result<WaiterPlace, u64> {
    let mut entry = ReceiveEntry::default();
    let waiter = Waiter { qp: QpId(qp), worker, key: qp };
    let (got, _) = srq.take_or_wait(waiter, NOW, &mut entry).expect("an honest client");
    got.map_or_else(Ok, |_| Err(entry.wr_id))
}

fn called(srq: &Srq, worker: u32) -> Vec<u32> {
    let mut keys = Vec::new();
    srq.ready(worker, |key| keys.push(key));
    keys
}

#[test]
fn accessors_return_construction_values() {
    let (srq, mut client, _arena) = srq(8, 2);
    assert_eq!((srq.id(), srq.session(), srq.doorbell()), (SrqId(3), SessionId(1), 9));
    assert_eq!((srq.capacity(), client.free(), srq.is_dead()), (8, 8, false));
    assert_eq!(format!("{srq:?}"), "Srq { id: SrqId(3), dead: false }");
}

#[test]
fn the_limit_event_occurs_once() {
    let (srq, mut client, _arena) = srq(8, 3);
    let mut entry = ReceiveEntry::default();
    let mut limits = Vec::new();
    post(&mut client, 0..5);
    for _ in 0..5 {
        let (_, notices) = srq.take(QpId(1), TakeMode::AtOnce, NOW, &mut entry).expect("posted");
        limits.push(notices.limit);
    }
    // The third take leaves 2 receives, fewer than the limit of 3.
    assert_eq!(limits, [false, false, true, false, false]);
    assert_eq!(srq.usage().limit, 0);
    post(&mut client, 5..8);
    assert_eq!(srq.arm(3), Ok(false));
    assert_eq!(srq.usage().limit, 3);
    assert_eq!(srq.arm(4), Ok(true), "only 3 receives are posted");
    assert_eq!(srq.usage().limit, 0);
    assert_eq!(srq.arm(0), Ok(false));
}

#[test]
fn waiters_are_served_in_order() {
    let (srq, mut client, _arena) = srq(8, 0);
    let places: Vec<_> = [(1, 0), (2, 5), (3, 0)]
        .map(|(qp, w)| wait(&srq, qp, w).expect("nothing is posted"))
        .into();
    assert_eq!(srq.usage().waiting, 3);
    assert_eq!(called(&srq, 0), []);
    assert_eq!(post(&mut client, 0..2), 1 | 1 << 5, "the workers of the waiting QPs");
    // A new QP queues after them, unless it does not wait.
    assert_eq!(take(&srq, 4, TakeMode::InTurn), None);
    assert_eq!(take(&srq, 3, TakeMode::Waited(places[2])), None, "QP 3 was not called");
    assert_eq!(called(&srq, 5), [2]);
    assert_eq!(called(&srq, 0), [1]);
    assert_eq!(take(&srq, 2, TakeMode::Waited(places[1])), Some(0));
    assert_eq!(take(&srq, 1, TakeMode::Waited(places[0])), Some(1));
    assert_eq!(post(&mut client, 2..3), 1, "no QP of worker 5 waits any more");
    assert_eq!(take(&srq, 9, TakeMode::AtOnce), Some(2));
    assert_eq!(called(&srq, 0), []);
    post(&mut client, 3..5);
    assert_eq!(take(&srq, 4, TakeMode::InTurn), Some(3), "a receive is left for QP 3");
    assert_eq!(called(&srq, 0), [3]);
    assert_eq!(take(&srq, 3, TakeMode::Waited(places[2])), Some(4));
    assert_eq!(post(&mut client, 5..6), 0);
    assert_eq!(wait(&srq, 3, 0), Err(5), "a receive was posted before the QP began to wait");
    assert_eq!(srq.usage().waiting, 0);
}

#[test]
fn a_corrupted_ring_is_a_fault_for_all() {
    let (srq, _client, arena) = srq(8, 0);
    let place = wait(&srq, 1, 0).expect("nothing is posted");
    arena.store_u64(queue_header::PRODUCER, 99).expect("in range");
    let mut entry = ReceiveEntry::default();
    let waiter = Waiter { qp: QpId(2), worker: 0, key: 2 };
    assert!(matches!(srq.arm(1), Err(SrqFault::BadIndex(_))));
    assert!(matches!(srq.take_or_wait(waiter, NOW, &mut entry), Err(SrqFault::BadIndex(_))));
    assert_eq!(srq.usage().waiting, 1);
    assert_eq!(called(&srq, 0), [1], "the waiting QP must detect the fault");
    for turn in [TakeMode::AtOnce, TakeMode::InTurn, TakeMode::Waited(place)] {
        called(&srq, 0);
        let taken = srq.take(QpId(1), turn, NOW, &mut entry);
        assert!(matches!(taken, Err(SrqFault::BadIndex(_))), "{turn:?}: {taken:?}");
    }
    assert!(srq.kill());
    assert!(!srq.kill());
    assert_eq!(srq.take(QpId(1), TakeMode::AtOnce, NOW, &mut entry), Err(SrqFault::Dead));
    assert_eq!(srq.arm(1), Err(SrqFault::Dead));
}

mod model {
    use std::collections::{BTreeMap, VecDeque};

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Post(u64),
        /// A message begins on a QP that waits if no receive is available to it.
        Message(u32),
        /// A message begins on a QP that never waits.
        AtOnce,
        /// A worker handles its doorbell and calls QPs, which take receives.
        Rung(u32),
        /// A waiting QP is destroyed.
        Gone(u32),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => (1..4u64).prop_map(Op::Post),
            4 => (0..9u32).prop_map(Op::Message),
            1 => Just(Op::AtOnce),
            3 => (0..3u32).prop_map(Op::Rung),
            1 => (0..9u32).prop_map(Op::Gone),
        ]
    }

    proptest! {
        /// Every receive is taken once and in order, waiting QPs are served in order, and after all
        /// notified workers have checked, no QP waits while there is a receive for it.
        #[test]
        fn no_qp_waits_while_a_receive_is_posted(ops in prop::collection::vec(op(), 0..200)) {
            let (srq, mut client, _arena) = srq(16, 0);
            let mut posted = 0;
            let mut taken = 0;
            let mut waiting: VecDeque<u32> = VecDeque::new();
            let mut places: BTreeMap<u32, WaiterPlace> = BTreeMap::new();
            // Workers that were rung or notified, and have not checked yet.
            let mut rung = 0u64;
            for op in ops {
                match op {
                    Op::Post(n) => {
                        let n = n.min(u64::from(client.free()));
                        rung |= post(&mut client, posted..posted + n);
                        posted += n;
                    }
                    Op::Message(qp) if places.contains_key(&qp) => {}
                    Op::Message(qp) => {
                        let spare = posted - taken > waiting.len() as u64;
                        match take(&srq, qp, TakeMode::InTurn) {
                            Some(id) => {
                                prop_assert!(spare);
                                prop_assert_eq!(id, taken);
                                taken += 1;
                            }
                            None => {
                                prop_assert!(!spare);
                                places.insert(qp, wait(&srq, qp, qp % 3).expect("none to spare"));
                                waiting.push_back(qp);
                            }
                        }
                    }
                    Op::AtOnce => {
                        let found = take(&srq, 99, TakeMode::AtOnce);
                        prop_assert_eq!(found, (posted > taken).then_some(taken));
                        taken += u64::from(found.is_some());
                    }
                    Op::Rung(worker) => {
                        rung &= !(1 << worker);
                        for qp in called(&srq, worker) {
                            let first = waiting.iter().position(|w| *w == qp).expect("it waits");
                            prop_assert!((first as u64) < posted - taken);
                            let id = take(&srq, qp, TakeMode::Waited(places[&qp]));
                            prop_assert_eq!(id, Some(taken));
                            taken += 1;
                            waiting.remove(first);
                            let place = places.remove(&qp).expect("it waits");
                            prop_assert_eq!(srq.leave(place), 0, "the QP no longer waits");
                        }
                    }
                    Op::Gone(qp) => {
                        if let Some(place) = places.remove(&qp) {
                            waiting.retain(|w| *w != qp);
                            rung |= srq.leave(place);
                        }
                    }
                }
                // If a waiting QP may take a receive, its worker was notified and will check.
                for qp in waiting.iter().take((posted - taken) as usize) {
                    prop_assert!(rung >> (qp % 3) & 1 == 1, "QP {} is forgotten", qp);
                }
                prop_assert_eq!(srq.usage().posted as u64, posted - taken);
                prop_assert_eq!(srq.usage().waiting as usize, waiting.len());
            }
        }
    }
}
