//! Copy queue, for clients whose memory the daemon cannot access.
//!
//! A worker writes a job into a ring that it shares with the client's library. The library copies
//! between the program's memory and the entry through the kernel ([`own`]), which refuses unmapped
//! and protected pages. Jobs complete in ring order. The daemon accepts a consumer index only
//! within the published entries, and treats the contents of an entry as untrusted.
//!
//! Threads of the program serve the ring one at a time: a thread that waits for jobs, and threads
//! that poll a CQ, because a copy often precedes a completion. The waiting thread sets the header's
//! `ARM` word before it sleeps. Both sides store, fence (SeqCst) and then load, so at least one
//! side sees the store of the other: the thread stores the `ARM` word and loads the producer index
//! (`prepare_sleep`, `serve`), the worker stores the producer index and loads the `ARM` word
//! (`push`, `sleeps`).

use std::sync::Arc;

use arrayvec::ArrayVec;
use parking_lot::Mutex;

use super::{MAX_SGE, QueueFault, QueueMemory};
use crate::abi::copies::{CopyHeader, CopyKind, MAX_COPY, copy_entry};
use crate::abi::queue::queue_header;
use crate::shm::own;
use crate::shm::sync::{AtomicBool, AtomicU32, Ordering, fence};
use crate::types::AtomicOperation;

/// Operation of a job.
#[derive(Clone, Copy, Debug)]
pub enum CopyTask<'b> {
    /// Copies the bytes of the pieces into the entry.
    Out,
    /// Copies bytes to the pieces.
    In {
        /// Bytes to copy: the total length of the pieces.
        bytes: &'b [u8],
        /// Writes the last word after the other bytes.
        tail_last: bool,
    },
    /// Applies an atomic operation to the only piece, an 8-byte word.
    Update(AtomicOperation),
}

/// Producer end, in the daemon.
#[derive(Debug)]
pub struct CopyProducer {
    queue: QueueMemory,
    /// Number of jobs published, free-running.
    tail: u32,
    /// Number of jobs retired, free-running.
    done: u32,
}

impl CopyProducer {
    /// Creates the producer end of a new queue.
    pub fn new(queue: QueueMemory) -> Self {
        CopyProducer { queue, tail: 0, done: 0 }
    }

    /// Publishes a job of at most [`MAX_COPY`] bytes. Returns false if the queue is full.
    pub fn push(&mut self, pieces: &[(u64, u32)], task: CopyTask<'_>) -> bool {
        if self.tail.wrapping_sub(self.done) >= self.queue.shape.capacity {
            return false;
        }
        let (kind, operation) = match task {
            CopyTask::Out => (CopyKind::Out, None),
            CopyTask::In { tail_last: false, .. } => (CopyKind::In, None),
            CopyTask::In { tail_last: true, .. } => (CopyKind::InTailLast, None),
            CopyTask::Update(operation) => (CopyKind::Update, Some(operation)),
        };
        let slot = self.queue.slot(self.tail);
        let view = &self.queue.view;
        let mut count = 0;
        for (address, len) in pieces.iter().take(MAX_SGE) {
            let at = slot + copy_entry::PIECES + 16 * usize::from(count);
            view.store_words(at, &[*address, u64::from(*len)]);
            count += 1;
        }
        let header = CopyHeader { kind, pieces: count, operation };
        view.store_words(slot + copy_entry::HEADER, &header.to_words());
        if let CopyTask::In { bytes, .. } = task {
            let bytes = bytes.get(..MAX_COPY).unwrap_or(bytes);
            // Cannot fail: the entry lies within the arena, which the daemon has allocated.
            let _ = self.queue.mapping().write(self.data(slot), bytes);
        }
        self.tail = self.tail.wrapping_add(1);
        // Release: pairs with the acquire in `CopyConsumer::do_job`.
        view.u32(queue_header::PRODUCER).store(self.tail, Ordering::Release);
        true
    }

    /// Returns true if the library's thread sleeps, so that the caller must [`wake`](Self::wake)
    /// it. Must be called after [`push`](Self::push).
    pub fn sleeps(&self) -> bool {
        fence(Ordering::SeqCst);
        self.queue.view.u32(queue_header::ARM).load(Ordering::Relaxed) != 0
    }

    /// Wakes the library's thread.
    pub fn wake(&self) {
        let word = self.queue.view.u32(queue_header::ARM);
        word.store(0, Ordering::Relaxed);
        own::futex_wake(word);
    }

    /// Returns the outcome of the oldest completed job that was not [retired](Self::retire).
    pub fn poll(&self) -> Result<Option<CopyOutcome>, QueueFault> {
        // Acquire: pairs with the release in `CopyConsumer::do_job`.
        let found = self.queue.view.u32(queue_header::CONSUMER).load(Ordering::Acquire);
        let last = self.done;
        let published = self.tail;
        if found.wrapping_sub(last) > published.wrapping_sub(last) {
            return Err(QueueFault::Consumer { found, last, published });
        }
        if found == last {
            return Ok(None);
        }
        let slot = self.queue.slot(last);
        let [flags, old] = self.queue.view.load_words(slot + copy_entry::OUTCOME);
        let copied = flags & copy_entry::COPIED != 0;
        let by_poller = flags & copy_entry::BY_POLLER != 0;
        Ok(Some(CopyOutcome { slot, copied, by_poller, old }))
    }

    /// Reads the first bytes of a completed job.
    pub fn read(&self, outcome: &CopyOutcome, bytes: &mut [u8]) {
        let len = bytes.len().min(MAX_COPY);
        // Cannot fail, as in `push`.
        let _ = self.queue.mapping().read(self.data(outcome.slot), &mut bytes[..len]);
    }

    /// Frees the entry of the oldest job, which must have completed.
    pub fn retire(&mut self) {
        self.done = self.done.wrapping_add(1);
    }

    /// Returns the offset of an entry's bytes in the mapping.
    fn data(&self, slot: usize) -> usize {
        self.queue.offset + slot + copy_entry::DATA
    }
}

/// Outcome of a job.
#[derive(Clone, Copy, Debug)]
pub struct CopyOutcome {
    slot: usize,
    /// True if all bytes were copied.
    pub copied: bool,
    /// True if a thread that polled a CQ executed the job.
    pub by_poller: bool,
    /// Original value of an atomic operation.
    pub old: u64,
}

/// Consumer end, in the client's library.
#[derive(Debug)]
pub struct CopyConsumer {
    queue: QueueMemory,
    /// Number of jobs completed, free-running. Written under `serving` only.
    head: AtomicU32,
    serving: Mutex<()>,
    /// Held during an atomic operation, because several queues may access the same word.
    changing: Arc<Mutex<()>>,
    /// Set when no further job may be started. Never reset.
    ended: AtomicBool,
}

impl CopyConsumer {
    /// Creates the consumer end of a new queue. All queues of a session share `changing`.
    pub fn new(queue: QueueMemory, changing: Arc<Mutex<()>>) -> Self {
        let head = AtomicU32::new(0);
        let ended = AtomicBool::new(false);
        CopyConsumer { queue, head, serving: Mutex::new(()), changing, ended }
    }

    /// Returns the doorbell index to ring after a job.
    pub fn doorbell(&self) -> u32 {
        self.queue.doorbell()
    }

    /// Returns true if jobs are probably waiting.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        let tail = self.queue.view.u32(queue_header::PRODUCER).load(Ordering::Relaxed);
        tail != self.head.load(Ordering::Relaxed)
    }

    /// Executes the oldest job. Returns false if there is none. For the thread that sleeps on the
    /// queue: waits while another thread is in [`try_copy`](Self::try_copy), because that thread
    /// may have missed the newest job.
    pub fn serve(&self) -> bool {
        let _serving = self.serving.lock();
        self.do_job(false)
    }

    /// Like [`serve`](Self::serve), for a thread that polls a CQ. Returns false while another
    /// thread serves the queue.
    pub fn try_copy(&self) -> bool {
        self.serving.try_lock().is_some_and(|_serving| self.do_job(true))
    }

    /// Executes the oldest job. Must be called with `serving` held.
    fn do_job(&self, by_poller: bool) -> bool {
        // Acquire: pairs with the release in `CopyProducer::push`.
        let tail = self.queue.view.u32(queue_header::PRODUCER).load(Ordering::Acquire);
        let head = self.head.load(Ordering::Relaxed);
        if tail == head || self.has_ended() {
            return false;
        }
        self.carry_out(self.queue.slot(head), by_poller);
        let head = head.wrapping_add(1);
        self.head.store(head, Ordering::Relaxed);
        // Release: pairs with the acquire in `CopyProducer::poll`.
        self.queue.view.u32(queue_header::CONSUMER).store(head, Ordering::Release);
        true
    }

    fn carry_out(&self, slot: usize, by_poller: bool) {
        let view = &self.queue.view;
        let result = CopyHeader::from_words(view.load_words(slot + copy_entry::HEADER))
            .and_then(|header| self.copy(slot, &header));
        let copied = if result.is_some() { copy_entry::COPIED } else { 0 };
        let by_poller = if by_poller { copy_entry::BY_POLLER } else { 0 };
        let outcome = [copied | by_poller, result.unwrap_or(0)];
        view.store_words(slot + copy_entry::OUTCOME, &outcome);
    }

    /// Executes a job. Returns the original value of an atomic operation, otherwise 0, or `None` if
    /// an address is not mapped or the job is invalid.
    fn copy(&self, slot: usize, header: &CopyHeader) -> Option<u64> {
        let mut pieces: ArrayVec<(u64, u32), MAX_SGE> = ArrayVec::new();
        for n in 0..usize::from(header.pieces).min(MAX_SGE) {
            let [address, len] = self.queue.view.load_words(slot + copy_entry::PIECES + 16 * n);
            pieces.push((address, u32::try_from(len).ok()?));
        }
        let mapping = self.queue.mapping();
        let data = self.queue.offset + slot + copy_entry::DATA;
        if pieces.iter().map(|(_, len)| u64::from(*len)).sum::<u64>() > MAX_COPY as u64 {
            return None;
        }
        match header.kind {
            CopyKind::Out => own::read(mapping, data, &pieces).then_some(0),
            CopyKind::In => own::write(mapping, data, &pieces, false).then_some(0),
            CopyKind::InTailLast => own::write(mapping, data, &pieces, true).then_some(0),
            CopyKind::Update => {
                let [(address, _)] = pieces[..] else { return None };
                //= 7306-5-1, 7306-5.3-1, 7306-5.4-2
                let _changing = self.changing.lock();
                own::update(mapping, data, address, header.operation?)
            }
        }
    }

    /// Announces that the calling thread is about to sleep. It must check for jobs once more
    /// ([`serve`](Self::serve)) before it calls [`sleep`](Self::sleep).
    pub fn prepare_sleep(&self) {
        self.queue.view.u32(queue_header::ARM).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Sleeps until a job is published. May return spuriously.
    pub fn sleep(&self) {
        own::futex_wait(self.queue.view.u32(queue_header::ARM), 1);
    }

    /// Prevents further jobs from being started, and wakes the sleeping thread. A job may still be
    /// in progress: see [`await_end`](Self::await_end).
    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        // Pairs with the fence in `prepare_sleep`: the thread sees `ended`, or this store clears
        // its `ARM` word.
        fence(Ordering::SeqCst);
        let word = self.queue.view.u32(queue_header::ARM);
        word.store(0, Ordering::Relaxed);
        own::futex_wake(word);
    }

    /// Returns true after [`end`](Self::end). Must be checked between
    /// [`prepare_sleep`](Self::prepare_sleep) and [`sleep`](Self::sleep).
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Returns true if [`sleep`](Self::sleep) would block.
    #[cfg(all(test, loom))]
    pub(in crate::shm) fn is_asleep(&self) -> bool {
        self.queue.view.u32(queue_header::ARM).load(Ordering::Relaxed) == 1
    }

    /// Waits until no job is in progress. Must be called after [`end`](Self::end).
    pub fn await_end(&self) {
        drop(self.serving.lock());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::queue::{QueueKind, QueueShape};
    use crate::shm::Mapping;

    fn ends() -> (CopyProducer, CopyConsumer, Arc<Mapping>) {
        let shape = QueueShape::copies();
        let (arena, _fd) =
            Mapping::create_arena("test", shape.bytes()).expect("memory for the arena");
        let queue = QueueMemory::format(arena.clone(), 0, QueueKind::Copies, shape, 1, 2);
        let queue = queue.expect("fits");
        (CopyProducer::new(queue.clone()), CopyConsumer::new(queue, Arc::default()), arena)
    }

    /// Returns the address of bytes that copies may change.
    fn program(bytes: &mut [u8]) -> u64 {
        bytes.as_mut_ptr().expose_provenance() as u64
    }

    fn done(producer: &mut CopyProducer, bytes: &mut [u8]) -> CopyOutcome {
        let outcome = producer.poll().expect("an honest library").expect("a completed job");
        producer.read(&outcome, bytes);
        producer.retire();
        outcome
    }

    #[test]
    fn copies_out_and_in() {
        let (mut producer, consumer, _arena) = ends();
        let mut memory = *b"abcdefgh";
        let at = program(&mut memory);
        assert!(!consumer.is_wanted() && !consumer.serve());
        assert!(producer.push(&[(at + 6, 2), (at, 3)], CopyTask::Out));
        assert!(producer.poll().expect("an honest library").is_none());
        assert!(consumer.is_wanted() && consumer.serve() && !consumer.is_wanted());
        let mut read = [0; 5];
        let outcome = done(&mut producer, &mut read);
        assert_eq!((outcome.copied, outcome.by_poller, &read), (true, false, b"ghabc"));
        let task = CopyTask::In { bytes: b"12345", tail_last: true };
        assert!(producer.push(&[(at + 1, 2), (at + 4, 3)], task));
        assert!(consumer.try_copy());
        let outcome = done(&mut producer, &mut []);
        assert!(outcome.copied && outcome.by_poller);
        assert_eq!(&std::hint::black_box(memory), b"a12d345h");
    }

    #[test]
    fn a_copy_of_max_copy_bytes() {
        let (mut producer, consumer, _arena) = ends();
        let mut memory: Vec<u8> = (0..MAX_COPY).map(|n| (n % 251) as u8).collect();
        let at = program(&mut memory);
        assert!(producer.push(&[(at, MAX_COPY as u32)], CopyTask::Out));
        assert!(consumer.serve());
        let mut read = vec![0; MAX_COPY];
        assert!(done(&mut producer, &mut read).copied);
        assert_eq!(read, memory);
        // The daemon never requests more bytes. The library copies nothing.
        assert!(producer.push(&[(at, MAX_COPY as u32), (at, 1)], CopyTask::Out));
        assert!(consumer.serve());
        assert!(!done(&mut producer, &mut []).copied);
    }

    #[test]
    fn atomic_operations_on_a_word() {
        let (mut producer, consumer, _arena) = ends();
        let mut word = 40u64.to_ne_bytes();
        let at = program(&mut word);
        let add = AtomicOperation::FetchAdd { add: 2, boundaries: 0 };
        for before in [40, 42] {
            assert!(producer.push(&[(at, 8)], CopyTask::Update(add)));
            assert!(consumer.serve());
            let outcome = done(&mut producer, &mut []);
            assert_eq!((outcome.copied, outcome.old), (true, before));
        }
        assert_eq!(u64::from_ne_bytes(std::hint::black_box(word)), 44);
    }

    #[test]
    fn an_address_that_is_not_mapped_is_an_error() {
        let (mut producer, consumer, _arena) = ends();
        let mut memory = [7; 16];
        let there = (program(&mut memory), 8);
        let add = AtomicOperation::FetchAdd { add: 2, boundaries: 0 };
        // Below mmap_min_addr, and above the addresses of programs.
        for nowhere in [(8, 8), (1 << 60, 8), (u64::MAX - 3, 8)] {
            for pieces in [[there, nowhere], [nowhere, there]] {
                for tail_last in [false, true] {
                    let task = CopyTask::In { bytes: &[7; 16], tail_last };
                    assert!(producer.push(&pieces, task));
                    assert!(consumer.serve());
                    assert!(!done(&mut producer, &mut []).copied);
                }
                assert!(producer.push(&pieces, CopyTask::Out) && consumer.serve());
                assert!(!done(&mut producer, &mut []).copied);
            }
            assert!(producer.push(&[nowhere], CopyTask::Update(add)) && consumer.serve());
            assert!(!done(&mut producer, &mut []).copied);
        }
    }

    #[test]
    fn jobs_are_done_in_order() {
        let (mut producer, consumer, _arena) = ends();
        let mut memory: Vec<u8> = (0..100).collect();
        let at = program(&mut memory);
        let mut pushed = 0u8;
        let mut over = 0u8;
        while over < 100 {
            while pushed < 100 && producer.push(&[(at + u64::from(pushed), 1)], CopyTask::Out) {
                pushed += 1;
            }
            assert!(pushed == 100 || u32::from(pushed - over) == QueueShape::copies().capacity);
            for _ in 0..3.min(pushed - over) {
                assert!(consumer.serve());
                let mut read = [0];
                assert!(done(&mut producer, &mut read).copied);
                assert_eq!(read, [over]);
                over += 1;
            }
        }
        assert!(producer.poll().expect("an honest library").is_none());
    }

    #[test]
    fn a_consumer_index_out_of_range_is_refused() {
        let (mut producer, consumer, arena) = ends();
        assert!(producer.push(&[], CopyTask::Out));
        let scribble = |index: u32| {
            arena.write(queue_header::CONSUMER, &index.to_ne_bytes()).expect("within the arena");
        };
        for found in [2, u32::MAX] {
            scribble(found);
            let fault = QueueFault::Consumer { found, last: 0, published: 1 };
            assert_eq!(producer.poll().map(drop), Err(fault));
        }
        scribble(0);
        assert!(consumer.serve());
        assert!(done(&mut producer, &mut []).copied);
    }

    /// The library fails jobs that it cannot decode.
    #[test]
    fn an_undecodable_job_fails() {
        let (mut producer, consumer, arena) = ends();
        let header = crate::abi::queue::QUEUE_HEADER_LEN;
        for word in [9u64, 3, 3 | 0xFF << 16, 255 << 8, u64::MAX] {
            assert!(producer.push(&[(8, 8)], CopyTask::Out));
            let slot = ((jobs(&producer) - 1) as usize % 8) * QueueShape::copies().stride as usize;
            arena.write(header + slot, &word.to_ne_bytes()).expect("within the arena");
            assert!(consumer.serve());
            // The library treats 255 ranges as 16, of which only the first has bytes.
            let copied = done(&mut producer, &mut []).copied;
            assert!(!copied, "{word:#x}");
        }
    }

    /// Returns the number of jobs published.
    fn jobs(producer: &CopyProducer) -> u32 {
        producer.tail
    }

    #[test]
    fn a_sleeper_is_woken_by_a_job_and_by_the_end() {
        let (mut producer, consumer, _arena) = ends();
        assert!(!producer.sleeps());
        std::thread::scope(|scope| {
            let library = scope.spawn(|| {
                let mut served = 0;
                while served < 1000 {
                    consumer.prepare_sleep();
                    if consumer.serve() {
                        served += 1;
                    } else {
                        consumer.sleep();
                    }
                }
            });
            for _ in 0..1000 {
                assert!(producer.push(&[], CopyTask::Out));
                if producer.sleeps() {
                    producer.wake();
                }
                while producer.poll().expect("an honest library").is_none() {
                    std::thread::yield_now();
                }
                producer.retire();
            }
            library.join().expect("no panic");
        });
        // The end of a session wakes the thread, and later jobs are ignored.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    consumer.prepare_sleep();
                    if consumer.has_ended() {
                        break;
                    }
                    consumer.sleep();
                }
            });
            consumer.end();
        });
        assert!(producer.push(&[], CopyTask::Out));
        assert!(!consumer.serve() && !consumer.try_copy());
    }
}
