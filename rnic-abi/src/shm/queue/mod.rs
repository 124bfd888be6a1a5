//! Send, receive and completion queues: rings in an arena, each with a producer and a consumer end.
//!
//! Each end keeps its own index in private memory. It loads the index of the other side with
//! acquire and uses it until it is exhausted. The daemon's end rejects an index outside the ring
//! ([`QueueFault`]), so that an empty ring and an invalid index give different results. Entries are
//! copied out word by word and decoded, and only the copy is checked and used. Threads that share
//! an end need a lock, which its owner provides. These types depend on the layout of an entry, not
//! its meaning. The engine uses the daemon's ends ([`SendConsumer`], [`ReceiveConsumer`],
//! [`CompletionProducer`], [`CopyProducer`]), `rnic-client` the others.

mod completion_check;
mod completion_consumer;
mod completion_move;
mod completion_producer;
mod copies;
mod receive;
mod ring;
mod send;

use std::sync::Arc;

use arrayvec::ArrayVec;
pub use completion_check::CompletionCheck;
pub use completion_consumer::CompletionConsumer;
pub use completion_move::{CompletionMove, MoveError};
pub use completion_producer::{CompletionProducer, PublishError};
pub use copies::{CopyConsumer, CopyOutcome, CopyProducer, CopyTask};
pub use receive::{ReceiveConsumer, ReceiveEntry, ReceiveProducer};
pub use send::{SendConsumer, SendEntry, SendProducer};

use super::Mapping;
use super::sync::{Ordering, fence};
use super::view::View;
use crate::abi::ABI_VERSION;
use crate::abi::queue::{
    CACHE_LINE, COMPLETION_LEN, QUEUE_HEADER_LEN, QUEUE_MAGIC, QueueKind, QueueShape,
    RECEIVE_HEADER_LEN, SEND_HEADER_LEN, SGE_LEN, Sge, WORKER_NONE, queue_header,
};

/// Maximum number of SGEs per request.
pub const MAX_SGE: usize = 16;
/// Maximum number of entries per queue.
pub const MAX_CAPACITY: u32 = 1 << 24;

/// A queue's location in its arena, from which either end can be created.
#[derive(Clone, Debug)]
pub struct QueueMemory {
    view: View,
    /// Offset of the view in its mapping.
    offset: usize,
    kind: QueueKind,
    shape: QueueShape,
    doorbell: u32,
}

impl QueueMemory {
    /// Creates an empty queue at `offset`: all zeros except for the header. Called by the daemon.
    /// `doorbell` is the index that the client rings for this queue.
    pub fn format(
        mapping: Arc<Mapping>,
        offset: usize,
        kind: QueueKind,
        shape: QueueShape,
        owner: u32,
        doorbell: u32,
    ) -> Result<Self, QueueError> {
        let queue = Self::place(mapping, offset, kind, shape, doorbell)?;
        queue.view.zero();
        let owner = u64::from(owner) | u64::from(doorbell) << 32;
        queue.view.store_words(queue_header::MAGIC, &[QUEUE_MAGIC, shape_word(kind, shape), owner]);
        queue.view.u32(queue_header::WORKER).store(WORKER_NONE, Ordering::Release);
        Ok(queue)
    }

    /// Opens the queue that the daemon created at `offset`. Called by the client.
    pub fn open(
        mapping: Arc<Mapping>,
        offset: usize,
        kind: QueueKind,
        shape: QueueShape,
    ) -> Result<Self, QueueError> {
        let mut queue = Self::place(mapping, offset, kind, shape, 0)?;
        let [magic, found, owner] = queue.view.load_words(queue_header::MAGIC);
        if magic != QUEUE_MAGIC {
            return Err(QueueError::Magic);
        }
        #[expect(clippy::cast_possible_truncation, reason = "the version is the low 16 bits")]
        let version = found as u16;
        if version != ABI_VERSION {
            return Err(QueueError::Version { found: version });
        }
        if found != shape_word(kind, shape) {
            return Err(QueueError::Mismatch);
        }
        queue.doorbell = (owner >> 32) as u32;
        Ok(queue)
    }

    /// Returns the doorbell index of this queue.
    #[inline]
    pub fn doorbell(&self) -> u32 {
        self.doorbell
    }

    /// Returns the capacity in entries and the stride in bytes, as set at creation.
    pub fn shape(&self) -> QueueShape {
        self.shape
    }

    /// Returns the kind of the queue.
    pub fn kind(&self) -> QueueKind {
        self.kind
    }

    /// Sets the worker that owns the QP from now on. Called by the daemon. The worker must scan the
    /// ring once after this call.
    ///
    /// Pairs with [`worker`](Self::worker). Here: store the worker, fence, scan the ring. There:
    /// publish entries, load the worker and, if there is none, fence and load again. If the client
    /// still finds none, its fence came first and the scan finds the entries. Otherwise the client
    /// rings.
    pub fn set_worker(&self, worker: u32) {
        self.view.u32(queue_header::WORKER).store(worker, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Returns the worker whose doorbell the client must ring after publishing entries. `None`
    /// before the QP is bound, when no doorbell is needed. See [`set_worker`](Self::set_worker).
    #[inline]
    pub fn worker(&self) -> Option<u32> {
        let word = self.view.u32(queue_header::WORKER);
        let mut worker = word.load(Ordering::Acquire);
        if worker == WORKER_NONE {
            fence(Ordering::SeqCst);
            worker = word.load(Ordering::Acquire);
        }
        (worker != WORKER_NONE).then_some(worker)
    }

    /// Returns the mapping of the queue's arena.
    #[inline]
    pub fn mapping(&self) -> &Arc<Mapping> {
        self.view.mapping()
    }

    /// Returns true if `other` is the same queue, in the same mapping.
    fn is_at(&self, other: &QueueMemory) -> bool {
        Arc::ptr_eq(self.mapping(), other.mapping())
            && (self.offset, self.shape) == (other.offset, other.shape)
    }

    fn place(
        mapping: Arc<Mapping>,
        offset: usize,
        kind: QueueKind,
        shape: QueueShape,
        doorbell: u32,
    ) -> Result<Self, QueueError> {
        let stride = shape.stride as usize;
        let stride_fits = match kind {
            QueueKind::Send => stride >= SEND_HEADER_LEN,
            QueueKind::Receive | QueueKind::SharedReceive => stride >= RECEIVE_HEADER_LEN,
            QueueKind::Completion => stride == COMPLETION_LEN,
            QueueKind::Copies => shape == QueueShape::copies(),
        };
        let capacity_fits = shape.capacity.is_power_of_two() && shape.capacity <= MAX_CAPACITY;
        if !stride_fits || !capacity_fits || !stride.is_multiple_of(SGE_LEN) || stride > MAX_STRIDE
        {
            return Err(QueueError::Shape);
        }
        if !offset.is_multiple_of(CACHE_LINE) {
            return Err(QueueError::Misaligned);
        }
        // No overflow: at most 2^24 entries of at most 2^17 bytes.
        let view = View::new(mapping, offset, shape.bytes()).ok_or(QueueError::OutOfRange)?;
        Ok(QueueMemory { view, offset, kind, shape, doorbell })
    }

    /// Returns the offset, in the view, of the entry with this free-running index.
    #[inline]
    fn slot(&self, index: u32) -> usize {
        QUEUE_HEADER_LEN + (index & (self.shape.capacity - 1)) as usize * self.shape.stride as usize
    }
}

/// SGEs of one request.
pub type SgeList = ArrayVec<Sge, MAX_SGE>;

/// Reason why a queue cannot be created or opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// A queue of this kind cannot have this capacity or stride.
    #[error("invalid capacity or stride for a queue of this kind")]
    Shape,
    /// The queue or doorbell page is not within its arena.
    #[error("the range is outside the arena")]
    OutOfRange,
    /// The queue does not start on a cache line.
    #[error("the queue's offset is not a multiple of {CACHE_LINE} bytes")]
    Misaligned,
    /// There is no queue at this offset.
    #[error("no queue header at this offset")]
    Magic,
    /// The queue has a different ABI version.
    #[error("the queue has ABI version {found} instead of {ABI_VERSION}")]
    Version {
        /// ABI version in the queue's header.
        found: u16,
    },
    /// The queue has a different kind or shape.
    #[error("the queue does not have the announced kind and shape")]
    Mismatch,
}

/// The client violated the contract of a ring. The daemon ends its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueFault {
    /// The producer index is beyond the free entries of the ring, or decreased.
    #[error("producer index {found} is not within {capacity} entries after {retired}")]
    Producer {
        /// Producer index in the queue's header, free-running.
        found: u32,
        /// Entries given back by the consumer, free-running.
        retired: u32,
        /// Number of entries of the ring.
        capacity: u32,
    },
    /// The consumer index is beyond the published entries, or decreased.
    #[error("consumer index {found} is not within {last} to {published}")]
    Consumer {
        /// Consumer index in the queue's header, free-running.
        found: u32,
        /// Last accepted consumer index.
        last: u32,
        /// Entries published so far, free-running.
        published: u32,
    },
}

/// A published entry is not a valid request. It counts as taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("entry {index} (request {wr_id:#x}): {malformed}")]
pub struct EntryError {
    /// Index of the entry, free-running.
    pub index: u32,
    /// `wr_id` of the request, as found in the entry.
    pub wr_id: u64,
    /// Opcode as found in the entry, 0 in a receive queue.
    pub opcode: u8,
    /// Defect of the entry.
    pub malformed: Malformed,
}

/// Defect of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A reserved bit is set.
    #[error("a reserved bit is set")]
    ReservedBits,
    /// More SGEs than the stride or [`MAX_SGE`] allows.
    #[error("more SGEs than an entry can hold")]
    TooManySges,
    /// More inline data than the stride allows.
    #[error("more inline data than an entry can hold")]
    InlineTooLong,
    /// SGEs in addition to inline data, or a length of inline data without the inline flag.
    #[error("both SGEs and inline data, or inline data without the inline flag")]
    Mixed,
}

/// Reason why no entry was taken although the ring is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// The ring is broken.
    #[error(transparent)]
    Queue(#[from] QueueFault),
    /// The entry is malformed. It counts as taken.
    #[error(transparent)]
    Entry(#[from] EntryError),
}

/// Reason why a request was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// All entries are in use.
    #[error("the queue is full")]
    Full,
    /// More SGEs or inline bytes than an entry of this queue can hold.
    #[error("the request is longer than an entry of this queue")]
    TooLong,
    /// Inline data without the inline flag, or SGEs in addition to inline data.
    #[error("both SGEs and inline data, or inline data without the inline flag")]
    Mixed,
}

/// Returns the bit of a worker in the set of workers that wait on a queue.
fn worker_bit(worker: u32) -> u64 {
    debug_assert!(worker < u64::BITS, "at most 64 workers");
    1 << (worker % u64::BITS)
}

fn shape_word(kind: QueueKind, shape: QueueShape) -> u64 {
    u64::from(ABI_VERSION)
        | (kind as u64) << 16
        | u64::from(shape.capacity.trailing_zeros()) << 24
        | u64::from(shape.stride) << 32
}

/// Sufficient for a header and the maximum inline data, whose length has 16 bits.
const MAX_STRIDE: usize = 1 << 17;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const SHAPE: QueueShape = QueueShape { capacity: 4, stride: 64 };

    fn arena() -> Arc<Mapping> {
        let (arena, _fd) = Mapping::create_arena("test", 1 << 16).expect("memory for the arena");
        arena
    }

    #[test]
    fn a_formatted_queue_can_be_opened() {
        let arena = arena();
        arena.fill(0, arena.len(), 0xFF).expect("in range");
        let made = QueueMemory::format(arena.clone(), 640, QueueKind::Completion, SHAPE, 7, 9)
            .expect("fits");
        let found = QueueMemory::open(arena.clone(), 640, QueueKind::Completion, SHAPE)
            .expect("the formatted queue");
        assert_eq!((made.doorbell(), found.doorbell()), (9, 9));
        assert_eq!((found.shape(), found.kind()), (SHAPE, QueueKind::Completion));
        assert_eq!(found.mapping().address(), arena.address());
        let mut bytes = vec![0; SHAPE.bytes() + 2];
        arena.read(639, &mut bytes).expect("in range");
        assert_eq!((bytes[0], bytes[bytes.len() - 1]), (0xFF, 0xFF), "neighbours are intact");
        assert!(bytes[1 + 64..bytes.len() - 1].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn worker_is_none_until_set() {
        let queue = QueueMemory::format(arena(), 0, QueueKind::Send, SHAPE, 1, 2).expect("fits");
        assert_eq!(queue.worker(), None);
        queue.set_worker(0);
        assert_eq!(queue.worker(), Some(0));
    }

    #[test]
    fn invalid_shapes_are_refused() {
        let arena = arena();
        let format = |kind, capacity, stride| {
            let shape = QueueShape { capacity, stride };
            QueueMemory::format(arena.clone(), 0, kind, shape, 0, 0).err()
        };
        use QueueKind::{Completion, Receive, Send, SharedReceive};
        for (kind, capacity, stride) in [
            (Send, 0, 64),
            (Send, 3, 64),
            (Send, 1 << 25, 64),
            (Send, 4, 48),
            (Send, 4, 72),
            (Send, 4, 0),
            (Send, 4, 1 << 18),
            (Receive, 4, 0),
            (SharedReceive, 4, 8),
            (Completion, 4, 128),
            (Completion, 4, 48),
        ] {
            assert_eq!(format(kind, capacity, stride), Some(QueueError::Shape));
        }
        assert_eq!(format(Send, MAX_CAPACITY, 64), Some(QueueError::OutOfRange));
        assert_eq!(format(Receive, 4, 16), None);
    }

    #[test]
    fn invalid_offsets_are_refused() {
        let arena = arena();
        let format =
            |offset| QueueMemory::format(arena.clone(), offset, QueueKind::Send, SHAPE, 0, 0).err();
        let last = arena.len() - SHAPE.bytes();
        assert_eq!(format(last), None);
        assert_eq!(format(last + 64), Some(QueueError::OutOfRange));
        assert_eq!(format(usize::MAX & !63), Some(QueueError::OutOfRange));
        assert_eq!(format(32), Some(QueueError::Misaligned));
    }

    #[test]
    fn only_the_announced_queue_is_opened() {
        let arena = arena();
        let open = |kind, shape| QueueMemory::open(arena.clone(), 0, kind, shape).err();
        assert_eq!(open(QueueKind::Send, SHAPE), Some(QueueError::Magic));
        QueueMemory::format(arena.clone(), 0, QueueKind::Send, SHAPE, 0, 0).expect("fits");
        assert_eq!(open(QueueKind::Send, SHAPE), None);
        assert_eq!(open(QueueKind::Receive, SHAPE), Some(QueueError::Mismatch));
        let other = QueueShape { capacity: 8, ..SHAPE };
        assert_eq!(open(QueueKind::Send, other), Some(QueueError::Mismatch));
        let shape = arena.load_u64(queue_header::SHAPE).expect("in range");
        arena.store_u64(queue_header::SHAPE, shape + 1).expect("in range");
        let newer = ABI_VERSION + 1;
        assert_eq!(open(QueueKind::Send, SHAPE), Some(QueueError::Version { found: newer }));
    }
}
