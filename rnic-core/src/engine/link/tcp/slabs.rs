//! Slabs for receiving, and what a QP keeps of one.

use std::sync::Arc;

/// Bytes of a receive slab: as many as one call takes in.
pub(in crate::engine) const RX_SLAB: usize = 128 * 1024;
/// Slabs at hand beside the engine's own.
const SPARE: usize = 4;

/// Slabs for receiving at hand.
#[derive(Default)]
pub(in crate::engine) struct Slabs(Vec<Vec<u8>>);

impl Slabs {
    /// A slab, beside those that QPs keep.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.0.pop().unwrap_or_else(|| vec![0; RX_SLAB])
    }

    /// Takes back a slab that a QP has kept.
    pub(super) fn give(&mut self, slab: Vec<u8>) {
        if self.0.len() < SPARE {
            self.0.push(slab);
        }
    }
}

/// Bytes that were read and not looked at.
pub(super) struct Unread {
    pub bytes: Vec<u8>,
    pub from: usize,
    pub to: usize,
    /// Held while `bytes` is a slab: counted at its user.
    pub slab: Option<Arc<()>>,
}
