//! Receive slabs, and unread bytes that a QP keeps in a slab.

use std::sync::Arc;

/// Bytes of a receive slab, the maximum that one call reads.
pub(in crate::engine) const RX_SLAB: usize = 128 * 1024;
/// Maximum number of free slabs, not counting the engine's own.
const SPARE: usize = 4;

/// Free slabs for receiving.
#[derive(Default)]
pub(in crate::engine) struct Slabs(Vec<Vec<u8>>);

impl Slabs {
    /// Takes a free slab, or allocates one.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.0.pop().unwrap_or_else(|| vec![0; RX_SLAB])
    }

    /// Returns a slab that a QP has kept.
    pub(super) fn give(&mut self, slab: Vec<u8>) {
        if self.0.len() < SPARE {
            self.0.push(slab);
        }
    }
}

/// Bytes that were read and not yet parsed.
pub(super) struct Unread {
    pub bytes: Vec<u8>,
    pub from: usize,
    pub to: usize,
    /// Held while `bytes` is a slab, to count the slabs of the user.
    pub slab: Option<Arc<()>>,
}
