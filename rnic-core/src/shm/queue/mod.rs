//! Send, receive and completion queues: rings in an arena, each with its two ends.
//!
//! Every end keeps its own index in private memory. The index of the other side is loaded with
//! acquire, kept until it is used up, and on the daemon's side refused if it is not within the
//! ring ([`QueueFault`]): "nothing there" and "nonsense there" are different answers. Entries are
//! copied out word by word, decoded, and only the copy is judged and used. An end is not shared
//! between threads; its owner puts a lock around it where needed. These types know the layout of an
//! entry and nothing of its meaning. The engine uses the daemon's ends ([`SendConsumer`],
//! [`ReceiveConsumer`], [`CompletionProducer`]), `rnic-client` the others.

mod completion_consumer;
mod completion_look;
mod completion_move;
mod completion_producer;
mod copies;
mod receive;
mod ring;
mod send;

use std::sync::Arc;

use arrayvec::ArrayVec;
pub use completion_consumer::CompletionConsumer;
pub use completion_look::CompletionLook;
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

/// Scatter/gather elements of one request, at most.
pub const MAX_SGE: usize = 16;
/// Entries of one queue, at most.
pub const MAX_CAPACITY: u32 = 1 << 24;

/// A queue's place in its arena, before it is known whose end this process holds.
#[derive(Clone, Debug)]
pub struct QueueMemory {
    view: View,
    /// Of the view in its mapping.
    offset: usize,
    kind: QueueKind,
    shape: QueueShape,
    doorbell: u32,
}

impl QueueMemory {
    /// Daemon: makes an empty queue at `offset`, with everything in it zero but its header.
    /// `doorbell` is the index under which the client rings for it.
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

    /// Client: finds the queue that the daemon made at `offset`.
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

    /// The index to ring for this queue.
    #[inline]
    pub fn doorbell(&self) -> u32 {
        self.doorbell
    }

    /// Capacity in entries and stride in bytes, as they were when the queue was made.
    pub fn shape(&self) -> QueueShape {
        self.shape
    }

    /// What the queue is for.
    pub fn kind(&self) -> QueueKind {
        self.kind
    }

    /// Daemon: the worker that owns the QP from now on. It scans the ring once after this.
    ///
    /// Pairs with [`worker`](Self::worker). Here: store the worker, fence, scan the ring. There:
    /// publish entries, load the worker and, if there is none, fence and load again. If the client
    /// still finds none, its fence came first and the scan finds the entries; else it rings.
    pub fn set_worker(&self, worker: u32) {
        self.view.u32(queue_header::WORKER).store(worker, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Client, after it published entries: the worker whose doorbell to ring; `None` before the QP
    /// is bound, when nobody needs to be told. See [`set_worker`](Self::set_worker).
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

    /// Mapping of the arena in which the queue lies.
    #[inline]
    pub fn mapping(&self) -> &Arc<Mapping> {
        self.view.mapping()
    }

    /// Whether the other one is the same queue in the same mapping.
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

    /// Offset in the view of the entry with this free-running index.
    #[inline]
    fn slot(&self, index: u32) -> usize {
        QUEUE_HEADER_LEN + (index & (self.shape.capacity - 1)) as usize * self.shape.stride as usize
    }
}

/// The elements of one request, in place.
pub type SgeList = ArrayVec<Sge, MAX_SGE>;

/// Why a queue cannot be made or found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// Capacity or stride is none that a queue of this kind can have.
    #[error("no queue of this kind has this capacity and stride")]
    Shape,
    /// The queue or doorbell page would not lie within its arena.
    #[error("the range is outside of the arena")]
    OutOfRange,
    /// It would not start on a cache line.
    #[error("a queue starts at a multiple of {CACHE_LINE} bytes")]
    Misaligned,
    /// There is no queue.
    #[error("there is no queue header")]
    Magic,
    /// There is a queue of another version.
    #[error("the queue has ABI version {found}, ours is {ABI_VERSION}")]
    Version {
        /// ABI version in the queue's header.
        found: u16,
    },
    /// There is another queue.
    #[error("the queue has another kind or shape than announced")]
    Mismatch,
}

/// The client broke the contract of a ring: this costs its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueFault {
    /// The producer claims more entries than the ring has room for, or took some back.
    #[error("producer index {found} is not within {capacity} entries after {retired}")]
    Producer {
        /// Producer index in the queue's header, free-running.
        found: u32,
        /// Where the consumer stands.
        retired: u32,
        /// Entries that the ring has.
        capacity: u32,
    },
    /// The consumer claims to have read what was not published, or has un-read something.
    #[error("consumer index {found} is not within {last} to {published}")]
    Consumer {
        /// Consumer index in the queue's header, free-running.
        found: u32,
        /// Consumer index that was accepted last.
        last: u32,
        /// Entries published so far, free-running.
        published: u32,
    },
}

/// A published entry that is no valid request. It counts as taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("entry {index} (request {wr_id:#x}): {malformed}")]
pub struct EntryError {
    /// Of the entry, free-running.
    pub index: u32,
    /// The application's name for the request, as it stands there.
    pub wr_id: u64,
    /// The operation as it stands there; 0 in a receive queue.
    pub opcode: u8,
    /// What is wrong with the entry's form.
    pub malformed: Malformed,
}

/// What can be wrong with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A spare bit is set.
    #[error("a spare bit is set")]
    SpareBits,
    /// More elements than the stride or [`MAX_SGE`] allows.
    #[error("more elements than an entry holds")]
    TooManyElements,
    /// More inline data than the stride allows.
    #[error("more inline data than an entry holds")]
    InlineTooLong,
    /// Elements beside inline data, or a length of inline data without its flag.
    #[error("both elements and inline data")]
    Mixed,
}

/// Why nothing was taken although the ring is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// The ring itself is broken.
    #[error(transparent)]
    Queue(#[from] QueueFault),
    /// One entry is; it counts as taken.
    #[error(transparent)]
    Entry(#[from] EntryError),
}

/// Why a request was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// All entries are in use.
    #[error("the queue is full")]
    Full,
    /// More elements or inline bytes than an entry of this queue holds.
    #[error("the request is longer than an entry of this queue")]
    TooLong,
    /// Inline bytes without the flag, or elements beside them.
    #[error("a request has either elements or inline data")]
    Mixed,
}

/// A worker in the set of those that wait for something of a queue.
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

/// Enough for a header and as much inline data as its 16-bit length can say.
const MAX_STRIDE: usize = 1 << 17;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const SHAPE: QueueShape = QueueShape { capacity: 4, stride: 64 };

    fn arena() -> Arc<Mapping> {
        let (arena, _fd) = Mapping::create_arena("test", 1 << 16).expect("a little memory");
        arena
    }

    #[test]
    fn a_queue_that_was_made_can_be_found() {
        let arena = arena();
        arena.fill(0, arena.len(), 0xFF).expect("in range");
        let made = QueueMemory::format(arena.clone(), 640, QueueKind::Completion, SHAPE, 7, 9)
            .expect("fits");
        let found = QueueMemory::open(arena.clone(), 640, QueueKind::Completion, SHAPE)
            .expect("it is there");
        assert_eq!((made.doorbell(), found.doorbell()), (9, 9));
        assert_eq!((found.shape(), found.kind()), (SHAPE, QueueKind::Completion));
        assert_eq!(found.mapping().address(), arena.address());
        let mut bytes = vec![0; SHAPE.bytes() + 2];
        arena.read(639, &mut bytes).expect("in range");
        assert_eq!((bytes[0], bytes[bytes.len() - 1]), (0xFF, 0xFF), "neighbours are intact");
        assert!(bytes[1 + 64..bytes.len() - 1].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn no_worker_until_one_is_set() {
        let queue = QueueMemory::format(arena(), 0, QueueKind::Send, SHAPE, 1, 2).expect("fits");
        assert_eq!(queue.worker(), None);
        queue.set_worker(0);
        assert_eq!(queue.worker(), Some(0));
    }

    #[test]
    fn shapes_that_no_queue_can_have_are_refused() {
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
    fn places_outside_of_the_arena_or_between_lines_are_refused() {
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
    fn anything_but_the_announced_queue_is_refused() {
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
