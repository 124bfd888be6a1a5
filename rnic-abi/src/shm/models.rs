//! Loom models of all code in this module that depends on memory order. They cover every
//! interleaving, and every value that a relaxed load may return. The types are those of production,
//! with modelled words. Each model checks that no thread sleeps forever, or that no thread sees a
//! partial entry.
//!
//! Loom executes loads in program order, so it cannot show the effect of giving a slot back before
//! it was read. For the release stores of the consumer indices, see their comments instead.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use super::Mapping;
use super::doorbell::{DoorbellRinger, DoorbellScanner};
use super::parker::Parker;
use super::queue::{
    CompletionConsumer, CompletionProducer, CopyConsumer, CopyProducer, CopyTask, PublishError,
    PushError, QueueMemory, ReceiveConsumer, ReceiveProducer,
};
use crate::abi::queue::{ARM_NEXT, ARM_SOLICITED, Cqe, QueueKind, QueueShape, Sge};
use crate::types::{CompletionOpcode, CompletionStatus};

/// Explores `model`. The arena only provides offsets: the words of the queues are loom's.
fn explore(model: impl Fn(&Arc<Mapping>) + Sync + Send + 'static) {
    let (arena, _fd) = Mapping::create_arena("model", 16384).expect("memory for the arena");
    loom::model(move || model(&arena));
}

fn queue(arena: &Arc<Mapping>, kind: QueueKind, capacity: u32) -> QueueMemory {
    let stride = if kind == QueueKind::Completion { 64 } else { 32 };
    QueueMemory::format(arena.clone(), 0, kind, QueueShape { capacity, stride }, 1, 0)
        .expect("fits the arena")
}

fn receives(arena: &Arc<Mapping>, capacity: u32) -> (ReceiveProducer, ReceiveConsumer) {
    let queue = queue(arena, QueueKind::Receive, capacity);
    (ReceiveProducer::new(queue.clone()), ReceiveConsumer::new(queue))
}

fn completions(arena: &Arc<Mapping>, capacity: u32) -> (CompletionProducer, CompletionConsumer) {
    let queue = queue(arena, QueueKind::Completion, capacity);
    (CompletionProducer::new(queue.clone()), CompletionConsumer::new(queue))
}

fn completion(n: u64) -> Cqe {
    let cqe = Cqe::new(7, n, CompletionOpcode::Send, CompletionStatus::Success);
    Cqe { diagnosis_id: !n, ..cqe }
}

fn sge(n: u64) -> Sge {
    Sge { addr: !n, length: n as u32, lkey: 1 }
}

/// The engine takes, in order, the entries that the client wrote before it published. A slot is not
/// written again before the engine has finished with it.
#[test]
fn loom_ring_publish_and_take() {
    explore(|arena| {
        let (mut producer, mut consumer) = receives(arena, 1);
        let client = thread::spawn(move || {
            let mut posted = 0;
            for _ in 0..2 {
                match producer.push(posted, &[sge(posted)]) {
                    Ok(()) => {
                        producer.publish();
                        posted += 1;
                    }
                    Err(error) => assert_eq!(error, PushError::Full),
                }
            }
            posted
        });
        let mut taken = 0;
        let mut take = || {
            let Some(entry) = consumer.take().expect("an honest client") else { return false };
            assert_eq!((entry.wr_id, entry.sges[..].to_vec()), (taken, vec![sge(taken)]));
            taken += 1;
            true
        };
        take();
        let posted = client.join().expect("no panic");
        while take() {}
        assert_eq!(taken, posted);
    });
}

/// A completion is seen completely or not at all, and its slot is reused only after it was read.
#[test]
fn loom_completion_publish_and_poll() {
    explore(|arena| {
        let (mut producer, mut consumer) = completions(arena, 1);
        let engine = thread::spawn(move || {
            let mut written = 0;
            for _ in 0..2 {
                match producer.publish(&completion(written)) {
                    Ok(()) => written += 1,
                    Err(error) => assert_eq!(error, PublishError::Full),
                }
            }
            written
        });
        let mut read = 0;
        let mut poll = || {
            let Some(cqe) = consumer.poll() else { return false };
            assert_eq!(cqe, completion(read));
            read += 1;
            assert_eq!(consumer.release(), 0, "no worker waits in this model");
            true
        };
        poll();
        let written = engine.join().expect("no panic");
        while poll() {}
        assert_eq!(read, written);
    });
}

/// A check without the consumer does not miss an unread completion while another thread reads the
/// completion before it and the engine overwrites that slot.
#[test]
fn loom_check_against_poll_and_publish() {
    explore(|arena| {
        let (mut producer, mut consumer) = completions(arena, 2);
        producer.publish(&completion(0)).expect("the ring is empty");
        producer.publish(&completion(1)).expect("there is room");
        let check = consumer.look();
        let reader = thread::spawn(move || {
            assert_eq!(consumer.poll(), Some(completion(0)));
            assert_eq!(consumer.release(), 0, "no worker waits in this model");
        });
        let engine = thread::spawn(move || match producer.publish(&completion(2)) {
            Ok(()) => {}
            Err(error) => assert_eq!(error, PublishError::Full),
        });
        assert!(!check.is_empty());
        reader.join().expect("no panic");
        engine.join().expect("no panic");
        assert!(!check.is_empty());
    });
}

/// Like the previous model, while the queue moves and its old location is overwritten.
#[test]
fn loom_check_against_move() {
    explore(|arena| {
        let here = queue(arena, QueueKind::Completion, 1);
        let mut producer = CompletionProducer::new(here.clone());
        let mut consumer = CompletionConsumer::new(here.clone());
        producer.publish(&completion(0)).expect("the ring is empty");
        assert!(consumer.poll().is_some());
        assert_eq!(consumer.release(), 0, "no worker waits in this model");
        let check = consumer.look();
        assert!(check.is_empty());
        producer.publish(&completion(1)).expect("there is room");
        let there = queue(arena, QueueKind::Completion, 2);
        let mover = thread::spawn(move || {
            assert_eq!(consumer.prepare_move(), 0, "no worker waits in this model");
            // The following three calls are the daemon's.
            let moving = producer.begin_move(there.clone()).expect("it fits");
            producer.finish_move(moving, 0).expect("it fits");
            CompletionProducer::new(here).publish(&completion(9)).expect("it looks empty");
            consumer.follow(there);
            consumer
        });
        assert!(!check.is_empty());
        let mut consumer = mover.join().expect("no panic");
        assert!(!check.is_empty());
        assert_eq!(consumer.poll(), Some(completion(1)));
    });
}

/// An engine that stalls for a slot is notified when the client gives one back.
#[test]
fn loom_release_against_waiting_engine() {
    explore(|arena| {
        let (mut producer, mut consumer) = completions(arena, 1);
        producer.publish(&completion(0)).expect("the ring is empty");
        let engine = thread::spawn(move || {
            let mut reserve = || producer.reserve().expect("an honest client");
            if reserve() {
                return false;
            }
            producer.set_waits(3);
            let stalls = !producer.reserve().expect("an honest client");
            if !stalls {
                producer.clear_waits(3);
            }
            stalls
        });
        assert!(consumer.poll().is_some());
        let ring = consumer.release();
        let stalls = engine.join().expect("no panic");
        assert!(!stalls || ring == 1 << 3);
    });
}

/// A client that arms, finds nothing and sleeps gets its event.
#[test]
fn loom_arm_against_publish() {
    // The thread that checks the queue has the consumer, or only a `CompletionCheck`.
    for (arm, without) in [(ARM_NEXT, false), (ARM_NEXT, true), (ARM_SOLICITED, false)] {
        explore(move |arena| {
            let (mut producer, mut consumer) = completions(arena, 2);
            let engine = thread::spawn(move || {
                producer.publish(&completion(0)).expect("there is room");
                let first = producer.take_arm(false);
                producer.publish(&completion(1)).expect("there is room");
                (first, producer.take_arm(true))
            });
            consumer.arm(arm);
            let sleeps = if without { consumer.look().is_empty() } else { consumer.is_empty() };
            let (first, second) = engine.join().expect("no panic");
            assert!(!(first && second), "one arm, one event");
            assert!(!first || arm == ARM_NEXT, "the first completion is not solicited");
            assert!(!sleeps || first || second);
        });
    }
}

/// A client that stops spinning, finds nothing and sleeps gets the event it armed for earlier.
#[test]
fn loom_stop_spinning_against_publish() {
    explore(|arena| {
        let (mut producer, mut consumer) = completions(arena, 1);
        consumer.set_spinning(true);
        consumer.arm(ARM_NEXT);
        let engine = thread::spawn(move || {
            producer.publish(&completion(0)).expect("there is room");
            producer.take_arm(false)
        });
        consumer.set_spinning(false);
        let sleeps = consumer.is_empty();
        let event = engine.join().expect("no panic");
        assert!(!sleeps || event);
    });
}

/// A thread that is about to sleep sees a new job, or the worker sees that it sleeps.
#[test]
fn loom_copy_push_against_prepare_sleep() {
    let shape = QueueShape::copies();
    let (arena, _fd) = Mapping::create_arena("model", shape.bytes()).expect("memory for the arena");
    loom::model(move || {
        let queue = QueueMemory::format(arena.clone(), 0, QueueKind::Copies, shape, 1, 0);
        let queue = queue.expect("fits the arena");
        let mut producer = CopyProducer::new(queue.clone());
        let consumer = CopyConsumer::new(queue, Arc::default());
        let daemon = thread::spawn(move || {
            assert!(producer.push(&[], CopyTask::Out));
            producer.sleeps()
        });
        consumer.prepare_sleep();
        let seen = consumer.is_wanted();
        let woken = daemon.join().expect("no panic");
        assert!(seen || woken);
    });
}

/// A thread that is about to sleep sees the end of its session, or its sleep ends at once.
#[test]
fn loom_copy_end_against_prepare_sleep() {
    let shape = QueueShape::copies();
    let (arena, _fd) = Mapping::create_arena("model", shape.bytes()).expect("memory for the arena");
    loom::model(move || {
        let queue = QueueMemory::format(arena.clone(), 0, QueueKind::Copies, shape, 1, 0);
        let queue = queue.expect("fits the arena");
        let consumer = Arc::new(CopyConsumer::new(queue, Arc::default()));
        let session = thread::spawn({
            let consumer = consumer.clone();
            move || consumer.end()
        });
        consumer.prepare_sleep();
        let seen = consumer.has_ended();
        session.join().expect("no panic");
        // If the thread missed the end, its `ARM` word has been cleared.
        assert!(seen || !consumer.is_asleep());
    });
}

/// A worker that stops scanning a page is woken by a ring that it did not see.
#[test]
fn loom_doorbell_ring_against_prepare_sleep() {
    explore(|arena| {
        let ringer = DoorbellRinger::new(arena.clone(), 0).expect("fits the arena");
        let mut scanner = DoorbellScanner::sharing(&ringer);
        let clients = [3, 70].map(|index| {
            let ringer = ringer.clone();
            thread::spawn(move || ringer.ring(index))
        });
        let sleeps = scanner.prepare_sleep();
        let written = clients.map(|client| client.join().expect("no panic"));
        assert!(!sleeps || written.iter().filter(|&&written| written).count() == 1);
        let mut rung = Vec::new();
        scanner.scan(|index| rung.push(index));
        assert_eq!(rung, [3, 70]);
    });
}

/// A concurrent scan loses no ring, and the thread that finds the bit sees the earlier post.
#[test]
fn loom_doorbell_ring_against_scan() {
    for posts in [1, 2] {
        explore(move |arena| ring_against_scan(arena, posts));
    }
}

fn ring_against_scan(arena: &Arc<Mapping>, posts: u32) {
    let ringer = DoorbellRinger::new(arena.clone(), 0).expect("fits the arena");
    let mut scanner = DoorbellScanner::sharing(&ringer);
    let posted = Arc::new(AtomicU32::new(0));
    let client = thread::spawn({
        let posted = posted.clone();
        move || {
            for n in 1..=posts {
                posted.store(n, Ordering::Relaxed);
                assert!(!ringer.ring(5), "no worker sleeps in this model");
            }
        }
    });
    let mut seen = 0;
    let mut scan = || {
        scanner.scan(|index| {
            assert_eq!(index, 5);
            seen = posted.load(Ordering::Relaxed);
            assert_ne!(seen, 0);
        })
    };
    scan();
    client.join().expect("no panic");
    scan();
    assert_eq!(seen, posts);
}

/// An engine with a message that waits for a receive is notified when a receive is posted.
#[test]
fn loom_post_against_waiting_engine() {
    explore(|arena| {
        let (mut producer, mut consumer) = receives(arena, 2);
        let client = thread::spawn(move || {
            producer.push(0, &[]).expect("there is room");
            producer.publish();
            producer.waits()
        });
        consumer.set_waits(3);
        let stalls = consumer.peek().expect("an honest client") == 0;
        let rings = client.join().expect("no panic");
        assert!(!stalls || rings == 1 << 3);
    });
}

/// Like the previous model, for an SRQ with consumers on two workers under one lock. A worker that
/// finds nothing at its last check and waits is rung: no receive stays in the queue while a worker
/// waits without having been rung.
#[test]
fn loom_post_against_two_waiting_workers() {
    explore(|arena| {
        let (mut producer, consumer) = receives(arena, 2);
        let consumer = Arc::new(loom::sync::Mutex::new(consumer));
        let other = thread::spawn({
            let consumer = consumer.clone();
            move || worker_awaits(&consumer, 5)
        });
        let client = thread::spawn(move || {
            producer.push(0, &[]).expect("there is room");
            producer.publish();
            producer.waits()
        });
        let waits = [worker_awaits(&consumer, 0), other.join().expect("no panic")];
        let rung = client.join().expect("no panic");
        // One receive for two workers: one gets it at once, or both wait and both are rung.
        assert!(waits[0] || waits[1]);
        if waits[0] && waits[1] {
            assert_eq!(rung, 1 | 1 << 5);
            let mut consumer = consumer.lock().expect("no panic");
            assert_eq!(consumer.peek().expect("an honest client"), 1);
        }
    });
}

/// Acts like `Srq::take_or_wait`. Returns true if the worker waits.
fn worker_awaits(consumer: &loom::sync::Mutex<ReceiveConsumer>, worker: u32) -> bool {
    let mut consumer = consumer.lock().expect("no panic");
    consumer.set_waits(worker);
    if consumer.peek().expect("an honest client") == 0 {
        return true;
    }
    consumer.clear_waits(worker);
    assert!(consumer.take().expect("an honest client").is_some());
    false
}

/// Requests posted while the QP is being bound are found by the scan, or the client rings.
#[test]
fn loom_post_against_bind() {
    explore(|arena| {
        let queue = queue(arena, QueueKind::Receive, 2);
        let mut producer = ReceiveProducer::new(queue.clone());
        let client = thread::spawn(move || {
            producer.push(0, &[]).expect("there is room");
            producer.publish();
            producer.queue().worker()
        });
        queue.set_worker(2);
        let found = ReceiveConsumer::new(queue).pending().expect("an honest client");
        match client.join().expect("no panic") {
            None => assert_eq!(found, 1),
            Some(worker) => assert_eq!(worker, 2),
        }
    });
}

/// A revocation that was acknowledged for a sleeping worker takes effect before that worker touches
/// memory again, and after its earlier accesses.
#[test]
fn loom_parker_against_revocation() {
    explore(|_| {
        let parker = Arc::new(Parker::new());
        let revoked = Arc::new(AtomicU32::new(0));
        let memory = Arc::new(UnsafeCell::new(()));
        let control = thread::spawn({
            let parker = parker.clone();
            let revoked = revoked.clone();
            let memory = memory.clone();
            move || {
                revoked.store(1, Ordering::Relaxed);
                let acknowledged = parker.is_parked();
                if acknowledged {
                    // Another user now owns the range. Loom reports a concurrent access.
                    memory.with_mut(|_| ());
                }
                acknowledged
            }
        });
        let is_revoked = || revoked.load(Ordering::Relaxed) != 0;
        memory.with(|_| ());
        let parked = parker.park(|| !is_revoked());
        if parked {
            parker.unpark();
        }
        let seen = is_revoked();
        if !seen {
            memory.with(|_| ());
        }
        let acknowledged = control.join().expect("no panic");
        assert!(seen || !acknowledged);
        assert!(parked || seen, "a worker that may not park has a command to see");
    });
}

/// A worker never sleeps while a command has not been acknowledged for it.
#[test]
fn loom_parker_against_command() {
    explore(|_| {
        let parker = Arc::new(Parker::new());
        let command = Arc::new(AtomicU32::new(0));
        let control = thread::spawn({
            let parker = parker.clone();
            let command = command.clone();
            move || {
                command.store(1, Ordering::Relaxed);
                parker.is_parked()
            }
        });
        let sleeps = parker.park(|| command.load(Ordering::Relaxed) == 0);
        let acknowledged = control.join().expect("no panic");
        assert!(!sleeps || acknowledged);
    });
}
