//! Slabs for receiving, and who may keep one.

use std::sync::Arc;

/// Bytes of a receive slab: as many as one call takes in.
pub(in crate::engine) const RX_SLAB: usize = 128 * 1024;
/// Slabs at hand beside the engine's own.
const SPARE: usize = 4;

/// Held while a QP keeps a slab; counted at its user.
pub(super) type SlabLease = Arc<()>;

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
