//! A million sleeps and wake-ups through real shared memory. Two threads access the daemon's and
//! the client's end, each through its own mapping of a memfd. A thread that finds nothing sleeps
//! until it is woken. After a lost event, only the watchdog ends the sleep.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Mapping;
use super::doorbell::{DoorbellRinger, DoorbellScanner};
use super::queue::{
    CompletionCheck, CompletionConsumer, CompletionProducer, QueueMemory, ReceiveConsumer,
    ReceiveProducer, SendConsumer, SendProducer, SgeList,
};
use super::sync::Ordering;
use crate::abi::queue::{
    ARM_NEXT, Cqe, PAGE, QueueKind, QueueShape, SendHeader, SendOpcode, doorbell_offset,
};
use crate::types::{CompletionOpcode, CompletionStatus};

const CYCLES: u64 = 1_000_000;
/// Much longer than a million cycles take, even on a busy machine.
const WATCHDOG: Duration = Duration::from_secs(120);

/// Replaces the eventfd or channel message that wakes a sleeper in production.
fn bell() -> (Sender<()>, impl Fn(&str)) {
    let (ring, wait): (Sender<()>, Receiver<()>) = channel();
    (ring, move |who: &str| {
        assert!(wait.recv_timeout(WATCHDOG).is_ok(), "{who} was not woken");
    })
}

/// One arena, mapped twice.
fn arena() -> (Arc<Mapping>, Arc<Mapping>) {
    let len = doorbell_offset(1) + 4 * PAGE;
    let (daemon, fd) = Mapping::create_arena("test", len).expect("memory for the arena");
    let client = Mapping::map_arena(fd.as_fd(), len).expect("the daemon's arena");
    (daemon, client)
}

fn queue(kind: QueueKind, shape: QueueShape) -> (QueueMemory, QueueMemory) {
    let (daemon, client) = arena();
    let offset = doorbell_offset(1);
    let made = QueueMemory::format(daemon, offset, kind, shape, 1, 5).expect("fits");
    (made, QueueMemory::open(client, offset, kind, shape).expect("just made"))
}

/// The client arms, checks the queue and sleeps. The engine stalls until slots are free.
#[test]
fn a_million_completions_lose_no_event_or_slot() {
    let (daemon, client) = queue(QueueKind::Completion, QueueShape::completion(8));
    let (event, wait_for_event) = bell();
    let (space, wait_for_space) = bell();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut producer = CompletionProducer::new(daemon);
            for n in 0..CYCLES {
                while !producer.reserve().expect("an honest client") {
                    producer.set_waits(1);
                    if producer.reserve().expect("an honest client") {
                        producer.clear_waits(1);
                        break;
                    }
                    wait_for_space("the engine");
                    producer.clear_waits(1);
                }
                let cqe = Cqe::new(1, n, CompletionOpcode::Send, CompletionStatus::Success);
                producer.publish_reserved(&cqe);
                if producer.take_arm(false) {
                    event.send(()).expect("the client waits for all of them");
                }
            }
        });
        let mut consumer = CompletionConsumer::new(client);
        let mut read = 0;
        while read < CYCLES {
            consumer.arm(ARM_NEXT);
            if consumer.is_empty() {
                wait_for_event("the client");
            }
            while let Some(cqe) = consumer.poll() {
                assert_eq!(cqe.wr_id, read);
                read += 1;
                if consumer.release() != 0 {
                    // The engine may have finished, and dropped its receiver.
                    let _ = space.send(());
                }
            }
        }
    });
}

/// Threads share a consumer, and each checks the queue before it takes the lock. The producer
/// issues a permit for each completion that it writes, so a thread with a permit must find one.
#[test]
fn a_permit_guarantees_a_completion() {
    const READERS: u64 = 3;
    const EACH: u64 = 50_000;
    let (daemon, client) = queue(QueueKind::Completion, QueueShape::completion(2));
    let consumer = CompletionConsumer::new(client);
    let check = consumer.look();
    let consumer = Mutex::new(consumer);
    let permits = AtomicUsize::new(0);
    let mut read = std::thread::scope(|scope| {
        let reader = || (0..EACH).map(|_| read_one(&permits, &check, &consumer)).collect();
        let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(reader)).collect();
        let mut producer = CompletionProducer::new(daemon);
        for n in 0..READERS * EACH {
            let cqe = Cqe::new(1, n, CompletionOpcode::Send, CompletionStatus::Success);
            until("room", || producer.publish(&cqe).is_ok());
            permits.fetch_add(1, Ordering::Release);
        }
        readers
            .into_iter()
            .flat_map(|reader| -> Vec<u64> { reader.join().expect("no panic") })
            .collect::<Vec<_>>()
    });
    read.sort_unstable();
    assert!(read.into_iter().eq(0..READERS * EACH), "each is read once");
    assert!(check.is_empty());
}

/// Takes a permit, then reads a completion.
fn read_one(
    permits: &AtomicUsize,
    check: &CompletionCheck,
    consumer: &Mutex<CompletionConsumer>,
) -> u64 {
    let take = || {
        let one_less = |permits: usize| permits.checked_sub(1);
        permits.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_less).is_ok()
    };
    until("completion", take);
    assert!(!check.is_empty(), "the check missed the completion");
    let mut consumer = consumer.lock();
    let cqe = consumer.poll().expect("one for each permit");
    assert_eq!(consumer.release(), 0, "the engine does not stall");
    cqe.wr_id
}

/// Repeats `done` until it returns true, and yields between the calls.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < WATCHDOG, "no {what}");
        std::thread::yield_now();
    }
}

/// The client posts and rings. The worker sleeps whenever it finds no request.
#[test]
fn a_million_posts_lose_no_doorbell() {
    let (daemon_arena, client_arena) = arena();
    let shape = QueueShape::send(8, 0, 0);
    let offset = doorbell_offset(1);
    let daemon = QueueMemory::format(daemon_arena.clone(), offset, QueueKind::Send, shape, 1, 700);
    let daemon = daemon.expect("fits");
    let client = QueueMemory::open(client_arena.clone(), offset, QueueKind::Send, shape);
    let client = client.expect("just made");
    let mut scanner = DoorbellScanner::new(daemon_arena, 0).expect("within the arena");
    let ringer = DoorbellRinger::new(client_arena, 0).expect("within the arena");
    daemon.set_worker(0);
    let (eventfd, wait_for_eventfd) = bell();
    let (space, wait_for_space) = bell();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut consumer = SendConsumer::new(daemon);
            let mut taken = 0;
            while taken < CYCLES {
                scanner.scan(|index| {
                    assert_eq!(index, 700);
                    while let Some(entry) =
                        consumer.take(&mut SgeList::new()).expect("an honest client")
                    {
                        assert_eq!(entry.header.wr_id, taken);
                        taken += 1;
                        consumer.retire(1);
                        // The client may have finished posting, and dropped its receiver.
                        let _ = space.send(());
                    }
                });
                if taken < CYCLES && scanner.prepare_sleep() {
                    wait_for_eventfd("the worker");
                    scanner.awake();
                }
            }
        });
        let mut producer = SendProducer::new(client);
        let mut header = SendHeader::from_words([0; 8]);
        header.opcode = SendOpcode::Send as u8;
        for wr_id in 0..CYCLES {
            header.wr_id = wr_id;
            while producer.push(&header, &[], &[]).is_err() {
                wait_for_space("the client");
            }
            producer.publish();
            let worker = producer.queue().worker();
            assert_eq!(worker, Some(0));
            if ringer.ring(producer.queue().doorbell()) {
                eventfd.send(()).expect("the worker waits for all of them");
            }
        }
    });
}

/// The engine waits for each receive. The client rings only if `waits` is not empty.
#[test]
fn a_million_receives_wake_every_message() {
    let (daemon, client) = queue(QueueKind::Receive, QueueShape::receive(8, 1));
    let (doorbell, wait_for_doorbell) = bell();
    let (space, wait_for_space) = bell();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut consumer = ReceiveConsumer::new(daemon);
            for wr_id in 0..CYCLES {
                let entry = loop {
                    if let Some(entry) = consumer.take().expect("an honest client") {
                        break entry;
                    }
                    consumer.set_waits(0);
                    if consumer.pending().expect("an honest client") == 0 {
                        wait_for_doorbell("the engine");
                    }
                    consumer.clear_waits(0);
                };
                assert_eq!(entry.wr_id, wr_id);
                // The client may have finished posting, and dropped its receiver.
                let _ = space.send(());
            }
        });
        let mut producer = ReceiveProducer::new(client);
        for wr_id in 0..CYCLES {
            while producer.push(wr_id, &[]).is_err() {
                wait_for_space("the client");
            }
            producer.publish();
            if producer.waits() != 0 {
                // The engine may have found the last one without a doorbell.
                let _ = doorbell.send(());
            }
        }
    });
}
