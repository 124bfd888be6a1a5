//! Bytes that were read from a socket and not yet parsed because the turn of their QP ended.
//!
//! One call to the socket may return thousands of the smallest FPDUs, more than a turn pays for.
//! The slab that holds them then stays with the QP, which parses the rest in its next turns before
//! it reads again, and the engine takes another slab. The QPs of a user may keep [`MAX_SLABS`]
//! slabs. Beyond that, they read [`SMALL_READ`] bytes at a time and parse all of them.

use std::sync::Arc;

use super::slabs::{RX_SLAB, Unread};
use crate::engine::qp::Qp;
use crate::engine::state::EngineState;

/// Maximum number of slabs that a user's QPs may keep.
const MAX_SLABS: usize = 4;
/// Bytes to read when none may be left unread.
const SMALL_READ: usize = 4096;
/// Minimum number of bytes for which a call to the socket is worthwhile.
const MIN_READ: usize = 16 * 1024;

impl Qp {
    /// Returns how many bytes to read, and true if bytes beyond this turn may be left unread.
    pub(super) fn read_limit(&self, engine: &EngineState) -> (usize, bool) {
        // The schedule itself holds one reference.
        let may_leave = engine
            .schedule
            .slabs(self.core.slot)
            .is_some_and(|s| Arc::strong_count(s) <= MAX_SLABS);
        if may_leave {
            // No more than this turn handles in large FPDUs.
            let left = usize::try_from(self.core.turn.deficit).unwrap_or(0);
            (left.clamp(MIN_READ, RX_SLAB), true)
        } else {
            (SMALL_READ, false)
        }
    }

    /// Handles bytes of the slab. If `may_leave`, bytes beyond the end of this turn stay unread.
    pub(super) fn read_slab(
        &mut self,
        engine: &mut EngineState,
        slab: &mut Vec<u8>,
        to: usize,
        may_leave: bool,
    ) {
        let from = self.consume(engine, &mut slab[..to], !may_leave);
        if from < to
            && let Some(lease) = engine.schedule.slabs(self.core.slot).cloned()
        {
            let bytes = std::mem::replace(slab, engine.slabs.take());
            self.leave_unread(engine, Unread { bytes, from, to, slab: Some(lease) });
        }
    }

    /// Handles bytes as far as this turn allows, and the rest in later turns.
    pub(in crate::engine) fn read_later(
        &mut self,
        engine: &mut EngineState,
        bytes: Vec<u8>,
        from: usize,
    ) {
        let to = bytes.len();
        if from < to {
            self.leave_unread(engine, Unread { bytes, from, to, slab: None });
            self.read_unread(engine);
        }
    }

    /// Continues with unread bytes.
    pub(in crate::engine) fn read_unread(&mut self, engine: &mut EngineState) {
        let Some(tcp) = self.link.tcp_mut() else { return };
        let Some(mut unread) = tcp.unread.take() else { return };
        let Unread { bytes, from, to, .. } = &mut unread;
        *from += self.consume(engine, &mut bytes[*from..*to], false);
        if from < to {
            self.leave_unread(engine, unread);
        } else if unread.slab.is_some() {
            engine.slabs.give(unread.bytes);
        }
    }

    fn leave_unread(&mut self, engine: &mut EngineState, unread: Unread) {
        if let Some(tcp) = self.link.tcp_mut() {
            tcp.unread = Some(unread);
            engine.wake(&mut self.core);
        }
    }

    /// Returns true if unread bytes must be handled before the socket is read.
    pub(in crate::engine) fn has_unread(&self) -> bool {
        self.link.tcp().is_some_and(|tcp| tcp.unread.is_some())
    }
}
