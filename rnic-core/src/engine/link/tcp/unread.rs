//! Bytes that were read from a socket and not looked at: their QP's turn ended before.
//!
//! A call to the socket may bring thousands of the smallest FPDUs, more than a turn is worth. The
//! slab that they stand in then stays with the QP, which goes on in its next turns before it reads
//! again, and the engine takes another one. A user may keep [`SLABS`] of them; QPs that would keep
//! more read [`LITTLE`] at a time and look at all of it.

use std::sync::Arc;

use super::slabs::{RX_SLAB, Unread};
use crate::engine::qp::Qp;
use crate::engine::state::EngineState;

/// Slabs that a user's QPs may keep.
const SLABS: usize = 4;
/// Bytes read when nothing may be left.
const LITTLE: usize = 4096;
/// Bytes that a call to the socket is worth making for.
const WORTH_A_CALL: usize = 16 * 1024;

impl Qp {
    /// How much to read at a time, and whether what is not looked at in this turn may be left.
    pub(super) fn read_limit(&self, engine: &EngineState) -> (usize, bool) {
        // The schedule itself holds one.
        let may_leave =
            engine.schedule.slabs(self.core.seat).is_some_and(|s| Arc::strong_count(s) <= SLABS);
        match may_leave {
            // No more than this turn will do with large FPDUs.
            true => {
                let left = usize::try_from(self.core.turn.deficit).unwrap_or(0);
                (left.clamp(WORTH_A_CALL, RX_SLAB), true)
            }
            false => (LITTLE, false),
        }
    }

    /// Handles bytes of the slab, of which those may be left for later that stand behind the end of
    /// this turn.
    pub(super) fn read_slab(
        &mut self,
        engine: &mut EngineState,
        slab: &mut Vec<u8>,
        to: usize,
        may_leave: bool,
    ) {
        let from = self.consume(engine, &mut slab[..to], !may_leave);
        if from < to
            && let Some(lease) = engine.schedule.slabs(self.core.seat).cloned()
        {
            let bytes = std::mem::replace(slab, engine.slabs.take());
            self.leave_unread(engine, Unread { bytes, from, to, slab: Some(lease) });
        }
    }

    /// Handles bytes as far as this turn allows, the rest in later ones.
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

    /// Goes on with what was left unread.
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

    /// Whether there is something to be looked at before the socket is.
    pub(in crate::engine) fn has_unread(&self) -> bool {
        self.link.tcp().is_some_and(|tcp| tcp.unread.is_some())
    }
}
