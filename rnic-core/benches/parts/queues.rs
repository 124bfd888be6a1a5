//! Both ends of the queues in shared memory, without an engine: every posted entry is taken.
//!
//! One thread uses both ends, so no cache line moves between CPUs.

use std::sync::Arc;

use rnic_abi::abi::queue::{Cqe, QueueKind, QueueShape, SendFlags, SendHeader, SendOpcode, Sge};
use rnic_abi::shm::Mapping;
use rnic_abi::shm::queue::{
    CompletionConsumer, CompletionProducer, QueueMemory, ReceiveConsumer, ReceiveEntry,
    ReceiveProducer, SendConsumer, SendProducer, SgeList,
};
use rnic_abi::types::{CompletionOpcode, CompletionStatus};

use crate::{Run, Subject};

/// Number of entries per run.
const ENTRIES: u64 = 32;
/// Capacity of a queue.
const CAPACITY: u32 = 64;

pub(crate) fn subjects() -> Vec<Subject> {
    let mut all = Vec::new();
    // Number of entries that are published, and then taken, together.
    for (how, batch) in [("batch", ENTRIES), ("single", 1)] {
        let mut add = |queue: &str, prepare: fn(u64) -> Run| {
            let what = format!("{queue}/{how}");
            all.push(Subject::counted("queues", what, ENTRIES, move || prepare(batch)));
        };
        add("send", send);
        add("receive", receive);
        add("completion", completion);
    }
    all
}

/// Creates a queue in its own arena and returns the daemon's and the client's end.
fn queue(kind: QueueKind, shape: QueueShape) -> [QueueMemory; 2] {
    let (arena, _fd) = Mapping::create_arena("bench", shape.bytes()).expect("memory for the arena");
    let daemons = QueueMemory::format(Arc::clone(&arena), 0, kind, shape, 1, 1);
    let clients = QueueMemory::open(arena, 0, kind, shape);
    [daemons.expect("it fits"), clients.expect("it was just made")]
}

fn sge(n: u64) -> Sge {
    Sge { addr: n * 8, length: 8, lkey: 0x1234_5678 }
}

fn send(batch: u64) -> Run {
    let [daemons, clients] = queue(QueueKind::Send, QueueShape::send(CAPACITY, 1, 0));
    let mut consumer = SendConsumer::new(daemons);
    let mut producer = SendProducer::new(clients);
    let mut posted = 0;
    let mut taken = 0;
    let mut sges = SgeList::new();
    Box::new(move || {
        for _ in 0..ENTRIES / batch {
            for _ in 0..batch {
                posted += 1;
                producer.push(&write(posted), &[sge(posted)], &[]).expect("there is room");
            }
            producer.publish();
            while let Some(entry) = consumer.take(&mut sges).expect("they are well-formed") {
                taken += 1;
                assert_eq!((entry.header.wr_id, &sges[..]), (taken, &[sge(taken)][..]));
            }
            consumer.retire(batch as u32);
        }
        assert_eq!(taken, posted);
    })
}

fn write(wr_id: u64) -> SendHeader {
    SendHeader {
        opcode: SendOpcode::Write as u8,
        num_sge: 0,
        flags: SendFlags::SIGNALED.bits(),
        inline_len: 0,
        wr_id,
        remote_addr: 0x1000,
        rkey: 0x8765_4321,
        inv_rkey: 0,
        params: [0; 4],
        reserved_is_zero: true,
    }
}

fn receive(batch: u64) -> Run {
    let [daemons, clients] = queue(QueueKind::Receive, QueueShape::receive(CAPACITY, 1));
    let mut consumer = ReceiveConsumer::new(daemons);
    let mut producer = ReceiveProducer::new(clients);
    let mut posted = 0;
    let mut taken = 0;
    let mut entry = ReceiveEntry::default();
    Box::new(move || {
        for _ in 0..ENTRIES / batch {
            for _ in 0..batch {
                posted += 1;
                producer.push(posted, &[sge(posted)]).expect("there is room");
            }
            producer.publish();
            while consumer.take_into(&mut entry).expect("they are well-formed") {
                taken += 1;
                assert_eq!((entry.wr_id, &entry.sges[..]), (taken, &[sge(taken)][..]));
            }
        }
        assert_eq!(taken, posted);
    })
}

fn completion(batch: u64) -> Run {
    let [daemons, clients] = queue(QueueKind::Completion, QueueShape::completion(CAPACITY));
    let mut producer = CompletionProducer::new(daemons);
    let mut consumer = CompletionConsumer::new(clients);
    let mut written = 0;
    let mut read = 0;
    Box::new(move || {
        for _ in 0..ENTRIES / batch {
            for _ in 0..batch {
                written += 1;
                assert_eq!(producer.reserve(), Ok(true));
                producer.publish_reserved(&success(written));
            }
            while let Some(cqe) = consumer.poll() {
                read += 1;
                assert_eq!(cqe, success(read));
            }
            assert_eq!(consumer.release(), 0, "no worker waits for a slot");
        }
        assert_eq!(read, written);
    })
}

fn success(wr_id: u64) -> Cqe {
    Cqe::new(7, wr_id, CompletionOpcode::RdmaWrite, CompletionStatus::Success)
}
