//! Executes runs of short RDMA Writes on the direct path straight from the queue.
//!
//! A request usually passes through three representations: message, segment and entry in flight.
//! For a short Write this takes several times as long as the Write itself. Here the Write is read
//! from the queue, executed and completed directly. This applies only to the simplest Writes, and
//! only while no request precedes them. All other requests and all faults are left to
//! [`next_message`](Requester::next_message), which reads the entry again.

use arrayvec::ArrayVec;

use super::Requester;
use super::complete::PUBLISH_BATCH;
use crate::engine::numbers::count;
use crate::engine::qp_core::QpCore;
use crate::engine::state::EngineState;
use rnic_abi::abi::queue::{Cqe, SendFlags, SendOpcode};
use rnic_abi::shm::Mapping;
use rnic_abi::shm::queue::SendEntry;
use rnic_abi::types::{CompletionOpcode, CompletionStatus, Stag};

/// An RDMA Write of inline data or of one SGE, otherwise with no flag but `SIGNALED`.
#[derive(Clone, Copy)]
pub(in crate::engine) struct ShortWrite {
    pub from: WriteSource,
    pub len: u32,
    pub stag: Stag,
    pub to: u64,
    wr_id: u64,
    signaled: bool,
}

/// Source of the bytes.
#[derive(Clone, Copy)]
pub(in crate::engine) enum WriteSource {
    /// Inline data at this offset of the arena.
    Inline { at: usize },
    /// The memory of the SGE.
    Element { lkey: u32, addr: u64 },
}

/// A run of Writes that have been executed and not yet completed.
#[derive(Default)]
pub(in crate::engine) struct ShortWrites {
    pub count: u32,
    pub bytes: u64,
    /// Length of the last Write.
    pub last_len: u32,
    cqes: ArrayVec<Cqe, PUBLISH_BATCH>,
}

impl Requester {
    /// Returns true if the next request may be executed in the queue: it is a Write with room for
    /// its completion, and no earlier request is in progress.
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
        // `next_message` finds and handles a fault of the queue or CQ.
        let pending = self.sq.pending().unwrap_or(0);
        pending > 0
            && self.sq.next_opcode() == Some(SendOpcode::Write as u8)
            && matches!(self.have_slot(pending, core, engine), Ok(true))
    }

    /// Returns the next request, without taking it, if it is a plain Write of 1 to [`SHORT`] bytes.
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
        let stag = Stag(header.rkey);
        let to = header.remote_addr;
        let wr_id = header.wr_id;
        // A zero-length Write needs no memory, so its STags must not be checked.
        let write = ShortWrite { from, len, stag, to, wr_id, signaled };
        (1..=SHORT).contains(&len).then_some(write)
    }

    /// Returns the arena that holds inline data.
    #[inline]
    pub(in crate::engine) fn arena(&self) -> &Mapping {
        self.sq.mapping()
    }

    /// Returns true if there is room for one more completion.
    #[inline]
    pub(in crate::engine) fn has_room_for(&self, done: &ShortWrites) -> bool {
        done.count < count(PUBLISH_BATCH) && count(done.cqes.len()) < self.slots
    }

    /// Takes an executed Write from the queue and adds it to the run.
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
            let opcode = CompletionOpcode::RdmaWrite;
            let status = CompletionStatus::Success;
            done.cqes.push(Cqe::new(core.id.0, write.wr_id, opcode, status));
        }
    }

    /// Completes a run. Slots of unsignaled Writes stay reserved for the next requests until the
    /// turn ends.
    pub(in crate::engine) fn complete_short_writes(
        &mut self,
        done: &ShortWrites,
        core: &QpCore,
        engine: &mut EngineState,
    ) {
        self.in_flight.skip_completed(done.count);
        core.shared.sends_completed.add(u64::from(done.count));
        // As in `complete_finished`, the ring slots come back first.
        self.sq.retire(done.count);
        if !done.cqes.is_empty() {
            self.slots -= count(done.cqes.len());
            engine.notify(core.send_cq.publish_reserved(&done.cqes), &core.send_cq);
        }
    }
}

/// Maximum length of a short Write in bytes. For longer Writes the overhead does not matter.
pub(in crate::engine) const SHORT: u32 = 16 * 1024;
