//! RDMA Writes that are carried out as they stand in the queue, many in a row, by the direct path.
//!
//! A request that becomes a message, a segment and an entry in flight is written down three times
//! before its completion; for a Write of few bytes that takes several times as long as the Write
//! itself. Here it is looked at, carried out and completed. That can be said of the plainest kind
//! only, and only while nothing is before it: everything else, and every fault, is left to the way
//! that all requests can go ([`next_message`](Requester::next_message)), which looks at the same
//! entry anew.

use arrayvec::ArrayVec;

use super::Requester;
use super::complete::PUBLISH_BATCH;
use crate::abi::queue::{Cqe, SendFlags, SendOpcode};
use crate::engine::numbers::count;
use crate::engine::qp_core::QpCore;
use crate::engine::state::EngineState;
use crate::shm::Mapping;
use crate::shm::queue::SendEntry;
use crate::types::{CompletionOpcode, CompletionStatus, Stag};

/// An RDMA Write of inline data or of one element, signaled or not, and nothing else.
#[derive(Clone, Copy)]
pub(in crate::engine) struct ShortWrite {
    pub from: WriteSource,
    pub len: u32,
    pub stag: Stag,
    pub to: u64,
    wr_id: u64,
    signaled: bool,
}

/// Where its bytes are.
#[derive(Clone, Copy)]
pub(in crate::engine) enum WriteSource {
    /// In the entry itself, at this place of the arena.
    Inline { at: usize },
    /// Where its element says.
    Element { lkey: u32, addr: u64 },
}

/// Writes in a row that have been carried out, and not been completed yet.
#[derive(Default)]
pub(in crate::engine) struct ShortWrites {
    pub count: u32,
    pub bytes: u64,
    /// Of the last one.
    pub last_len: u32,
    cqes: ArrayVec<Cqe, PUBLISH_BATCH>,
}

impl Requester {
    /// Whether the next request may be carried out as it stands: it is a Write, has room for its
    /// completion, and nothing is before it or under way.
    #[inline]
    pub(in crate::engine) fn may_write_at_once(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
    ) -> bool {
        let is_first = self.message.is_none()
            && self.aside.is_none()
            && self.fenced.is_none()
            && self.in_flight.is_empty()
            && self.changing.is_empty()
            && self.inbound.is_empty()
            && self.executing.is_none();
        let is_begun = !self.held_back
            && !self.peer_waits
            && !self.peer_refuses
            && self.left_to_send.is_none();
        if !is_first || !is_begun {
            return false;
        }
        // A queue or CQ that is broken is found so again, and dealt with.
        let pending = self.sq.pending().unwrap_or(0);
        pending > 0
            && self.sq.next_opcode() == Some(SendOpcode::Write as u8)
            && matches!(self.have_slot(pending, core, engine), Ok(true))
    }

    /// The next request, if it is such a Write, of [`SHORT`] bytes at most. It is not taken yet.
    #[inline]
    pub(in crate::engine) fn next_short_write(&self) -> Option<ShortWrite> {
        let (SendEntry { header, inline_at, .. }, first) = self.sq.look()?;
        let flags = SendFlags::from_bits_retain(header.flags);
        if header.opcode != SendOpcode::Write as u8
            || !(SendFlags::SIGNALED | SendFlags::INLINE).contains(flags)
            || header.params != [0; 4]
        {
            return None;
        }
        let (from, len) = if flags.contains(SendFlags::INLINE) {
            (WriteSource::Inline { at: inline_at }, u32::from(header.inline_len))
        } else if header.num_sge == 1 {
            (WriteSource::Element { lkey: first.lkey, addr: first.addr }, first.length)
        } else {
            return None;
        };
        let signaled = flags.contains(SendFlags::SIGNALED) || self.signal_all;
        let (stag, to, wr_id) = (Stag(header.rkey), header.remote_addr, header.wr_id);
        // One of no bytes needs no memory, and so cannot fail for want of it.
        let write = ShortWrite { from, len, stag, to, wr_id, signaled };
        (1..=SHORT).contains(&len).then_some(write)
    }

    /// The arena in which inline data are.
    #[inline]
    pub(in crate::engine) fn arena(&self) -> &Mapping {
        self.sq.mapping()
    }

    /// Whether there is room for one more completion.
    #[inline]
    pub(in crate::engine) fn has_room_for(&self, done: &ShortWrites) -> bool {
        done.count < count(PUBLISH_BATCH) && count(done.cqes.len()) < self.slots
    }

    /// The request that was looked at has been carried out.
    #[inline]
    pub(in crate::engine) fn written(
        &mut self,
        write: &ShortWrite,
        done: &mut ShortWrites,
        core: &QpCore,
    ) {
        self.sq.skip();
        done.count += 1;
        done.bytes += u64::from(write.len);
        done.last_len = write.len;
        if write.signaled {
            let (opcode, status) = (CompletionOpcode::RdmaWrite, CompletionStatus::Success);
            done.cqes.push(Cqe::new(core.id.0, write.wr_id, opcode, status));
        }
    }

    /// Completes what has been carried out. Slots of those that are silent stay reserved for the
    /// next ones, until the turn ends.
    pub(in crate::engine) fn complete_short_writes(
        &mut self,
        done: &ShortWrites,
        core: &QpCore,
        engine: &mut EngineState,
    ) {
        self.in_flight.pass(done.count);
        core.shared.sends_completed.add(u64::from(done.count));
        // As in `complete_finished`, the ring slots come back first.
        self.sq.retire(done.count);
        if !done.cqes.is_empty() {
            self.slots -= count(done.cqes.len());
            engine.notify(core.send_cq.publish_reserved(&done.cqes), &core.send_cq);
        }
    }
}

/// Bytes of a short Write at most: more take so long that it does not matter how they go.
pub(in crate::engine) const SHORT: u32 = 16 * 1024;
