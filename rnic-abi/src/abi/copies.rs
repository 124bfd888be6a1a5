//! Copy queue: jobs from a worker for the library of a client whose memory the daemon cannot
//! access.

use super::queue::{QueueShape, SendOpcode};
use crate::types::{AtomicOperation, numbered};

/// Number of entries of a copy queue.
pub const COPY_ENTRIES: u32 = 8;
/// Maximum number of bytes copied by a job.
pub const MAX_COPY: usize = 64 * 1024;

impl QueueShape {
    /// Returns the shape of a copy queue.
    #[expect(clippy::cast_possible_truncation, reason = "it is 65,856")]
    pub fn copies() -> Self {
        QueueShape { capacity: COPY_ENTRIES, stride: (copy_entry::DATA + MAX_COPY) as u32 }
    }
}

/// Byte offsets in an entry.
pub mod copy_entry {
    /// [`super::CopyHeader`].
    pub const HEADER: usize = 0;
    /// Outcome, written by the library: a word of flags ([`COPIED`], [`BY_POLLER`]), then the
    /// original value of an atomic operation.
    pub const OUTCOME: usize = 40;
    /// Written by the daemon: 16 ranges of the client's memory, each an address and a length.
    pub const PIECES: usize = 64;
    /// Bytes of all ranges, written by the side that supplies them.
    pub const DATA: usize = PIECES + 16 * 16;

    /// Flag of an outcome: all bytes were copied.
    pub const COPIED: u64 = 1;
    /// Flag of an outcome: the job was executed by a thread that polled a CQ.
    pub const BY_POLLER: u64 = 2;
}

numbered! {
    /// Operation of a copy job.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum CopyKind: u8, from_u8 {
        /// Copies from the client's memory to the entry.
        Out = 0,
        /// Copies from the entry to the client's memory.
        In = 1,
        /// Like `In`, but writes the last word after the other bytes.
        InTailLast = 2,
        /// Applies an atomic operation to the only range, an 8-byte word.
        Update = 3,
    }
}

/// Header of an entry: a word with the kind (bits 0 to 7), the number of ranges (8 to 15) and the
/// opcode of the atomic operation as in a send queue (16 to 23), then the operation's four
/// parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyHeader {
    /// Operation of the job.
    pub kind: CopyKind,
    /// Number of ranges.
    pub pieces: u8,
    /// Atomic operation of an [`Update`](CopyKind::Update).
    pub operation: Option<AtomicOperation>,
}

impl CopyHeader {
    /// Encodes the header.
    pub fn to_words(self) -> [u64; 5] {
        let (opcode, params) = self.operation.map_or((0, [0; 4]), |operation| {
            let (opcode, params) = SendOpcode::of_operation(operation);
            (opcode as u64, params)
        });
        let first = self.kind as u64 | u64::from(self.pieces) << 8 | opcode << 16;
        [first, params[0], params[1], params[2], params[3]]
    }

    /// Decodes a header. Returns `None` for an unknown kind or operation.
    #[expect(clippy::cast_possible_truncation, reason = "the fields of a word")]
    pub fn from_words([first, params @ ..]: [u64; 5]) -> Option<Self> {
        let kind = CopyKind::from_u8(first as u8)?;
        let operation = match kind {
            CopyKind::Update => Some(SendOpcode::from_u8((first >> 16) as u8)?.operation(params)?),
            _ => None,
        };
        Some(CopyHeader { kind, pieces: (first >> 8) as u8, operation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A released layout never changes.
    #[test]
    fn copy_entry_layout() {
        assert_eq!(QueueShape::copies(), QueueShape { capacity: 8, stride: 65_856 });
        assert_eq!([copy_entry::OUTCOME, copy_entry::PIECES, copy_entry::DATA], [40, 64, 320]);
        assert_eq!([copy_entry::COPIED, copy_entry::BY_POLLER], [1, 2]);
        let add = AtomicOperation::FetchAdd { add: 7, boundaries: 9 };
        let (opcode, params) = SendOpcode::of_operation(add);
        let kinds = [(CopyKind::Out, 0), (CopyKind::In, 1), (CopyKind::InTailLast, 2)];
        for (kind, number) in kinds {
            let header = CopyHeader { kind, pieces: 3, operation: None };
            assert_eq!(header.to_words(), [number | 3 << 8, 0, 0, 0, 0]);
            assert_eq!(CopyHeader::from_words(header.to_words()), Some(header));
        }
        let header = CopyHeader { kind: CopyKind::Update, pieces: 1, operation: Some(add) };
        let first = 3 | 1 << 8 | (opcode as u64) << 16;
        assert_eq!(header.to_words(), [first, params[0], params[1], params[2], params[3]]);
        assert_eq!(CopyHeader::from_words(header.to_words()), Some(header));
        assert_eq!(CopyHeader::from_words([4, 0, 0, 0, 0]), None);
    }
}
