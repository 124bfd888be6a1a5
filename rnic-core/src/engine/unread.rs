//! Bytes that were read from a socket and not looked at: their QP's turn ended before.
//!
//! A call to the socket may bring thousands of the smallest FPDUs, more than a turn is worth. The slab
//! that they stand in then stays with the QP, which goes on in its next turns before it reads again,
//! and the engine takes another one. A user may keep [`SLABS`] of them; QPs that would keep more read
//! [`LITTLE`] at a time and look at all of it.

use std::sync::Arc;

use super::Shard;
use super::qp::{Link, Qp};
use super::tcp::RX_SLAB;

/// Slabs that a user's QPs may keep.
const SLABS: usize = 4;
/// Bytes read when nothing may be left.
const LITTLE: usize = 4096;
/// Bytes that a call to the socket is worth making for.
const WORTH_A_CALL: usize = 16 * 1024;
/// Slabs at hand beside the engine's own.
const SPARE: usize = 4;

/// Bytes that were read and not looked at.
pub(super) struct Unread {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
    /// Held while `bytes` is a slab.
    _slab: Option<Arc<()>>,
}

impl Unread {
    /// All from an offset on, in memory of its own.
    pub(super) fn owned(bytes: Vec<u8>, from: usize) -> Self {
        let to = bytes.len();
        Unread { bytes, from, to, _slab: None }
    }
}

/// Slabs for receiving at hand.
#[derive(Default)]
pub(super) struct Slabs(Vec<Vec<u8>>);

impl Slabs {
    fn take(&mut self) -> Vec<u8> {
        self.0.pop().unwrap_or_else(|| vec![0; RX_SLAB])
    }

    fn give(&mut self, unread: Unread) {
        if unread._slab.is_some() && self.0.len() < SPARE {
            self.0.push(unread.bytes);
        }
    }
}

impl Qp {
    /// How much to read at a time, and whether what is not looked at in this turn may be left.
    pub(super) fn read_limit(&self, shard: &Shard) -> (usize, bool) {
        // The schedule itself holds one.
        let may_leave =
            shard.schedule.slabs(self.seat).is_some_and(|s| Arc::strong_count(s) <= SLABS);
        match may_leave {
            // No more than this turn will do with large FPDUs.
            true => ((self.deficit.max(0) as usize).clamp(WORTH_A_CALL, RX_SLAB), true),
            false => (LITTLE, false),
        }
    }

    /// Handles bytes of the slab, of which those may be left for later that stand behind the end of
    /// this turn.
    pub(super) fn read_slab(
        &mut self,
        shard: &mut Shard,
        slab: &mut Vec<u8>,
        to: usize,
        may_leave: bool,
    ) {
        let from = self.consume(shard, &mut slab[..to], !may_leave);
        if from < to
            && let Some(lease) = shard.schedule.slabs(self.seat).cloned()
        {
            let bytes = std::mem::replace(slab, shard.slabs.take());
            self.leave_unread(shard, Unread { bytes, from, to, _slab: Some(lease) });
        }
    }

    /// Handles bytes as far as this turn allows, the rest in later ones.
    pub(super) fn read_later(&mut self, shard: &mut Shard, bytes: Vec<u8>, from: usize) {
        if from < bytes.len() {
            self.leave_unread(shard, Unread::owned(bytes, from));
            self.read_on(shard);
        }
    }

    /// Goes on with what was left unread.
    pub(super) fn read_on(&mut self, shard: &mut Shard) {
        let Link::Tcp(tcp) = &mut self.link else { return };
        let Some(mut unread) = tcp.unread.take() else { return };
        let Unread { bytes, from, to, .. } = &mut unread;
        *from += self.consume(shard, &mut bytes[*from..*to], false);
        if from < to {
            self.leave_unread(shard, unread);
        } else {
            shard.slabs.give(unread);
        }
    }

    fn leave_unread(&mut self, shard: &mut Shard, unread: Unread) {
        if let Link::Tcp(tcp) = &mut self.link {
            tcp.unread = Some(unread);
            shard.wake(self);
        }
    }

    /// Whether there is something to be looked at before the socket is.
    pub(super) fn has_unread(&self) -> bool {
        matches!(&self.link, Link::Tcp(tcp) if tcp.unread.is_some())
    }
}
