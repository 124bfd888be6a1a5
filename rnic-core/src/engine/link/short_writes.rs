//! Runs of short RDMA Writes on the direct path.
//!
//! Each Write is handled as in [`hand_over`](Qp::hand_over): both STags are checked and the bytes
//! are copied once. The counters advance once for the whole run. Any other Write, and any Write
//! that fails, goes through `hand_over`.

use super::direct::PAYLOAD;
use crate::device::RecentStag;
use crate::device::memory::Target;
use crate::engine::numbers::cost;
use crate::engine::qp::{IncomingFpdu, OutgoingFpdu, Qp};
use crate::engine::requester::short_writes::{SHORT, ShortWrite, ShortWrites, WriteSource};
use crate::engine::schedule::SHORT_WRITE_COST;
use crate::engine::state::EngineState;
use rnic_abi::types::Access;

impl Qp {
    /// Carries out the next Writes while short and in shared memory, at most until the turn ends.
    /// Returns true if there were any.
    #[inline]
    pub(super) fn hand_over_short_writes(
        &mut self,
        peer: &mut Qp,
        engine: &mut EngineState,
    ) -> bool {
        if self.core.faults.is_some()
            || peer.core.faults.is_some()
            || peer.core.order.is_some()
            || !peer.responder.takes_short_writes()
            || !peer.core.rights.contains(Access::REMOTE_WRITE)
            || !self.requester.may_write_at_once(&self.core, engine)
        {
            return false;
        }
        let mut done = ShortWrites::default();
        self.write_at_once(peer, engine, &mut done);
        if done.count == 0 {
            return false;
        }
        peer.note_communication(engine);
        peer.fpdu_received(IncomingFpdu::Run { segments: done.count });
        peer.core.shared.bytes_received.add(done.bytes);
        peer.responder.write_placed(done.last_len as usize, true);
        self.fpdu_sent(&OutgoingFpdu::Writes { segments: done.count, bytes: done.bytes }, None);
        self.requester.complete_short_writes(&done, &self.core, engine);
        true
    }

    #[inline]
    fn write_at_once(&mut self, peer: &Qp, engine: &EngineState, done: &mut ShortWrites) {
        let mut sources = RecentStag::new(&engine.stags);
        let mut sinks = RecentStag::new(&engine.stags);
        while !self.core.turn.is_over()
            && self.requester.has_room_for(done)
            // Limits the bytes that are copied before the run completes.
            && done.bytes < u64::from(PAYLOAD)
            && let Some(write) = self.requester.next_short_write()
            && self.copy_short_write(peer, &write, &mut sources, &mut sinks)
        {
            self.core.turn.charge(cost(write.len as usize).max(SHORT_WRITE_COST));
            self.requester.written(&write, done, &self.core);
        }
    }

    /// Copies the bytes of a Write if both ends are in shared memory and accessible. Returns true
    /// if all bytes have arrived.
    #[inline]
    fn copy_short_write<'t>(
        &self,
        peer: &Qp,
        write: &ShortWrite,
        sources: &mut RecentStag<'t>,
        sinks: &mut RecentStag<'t>,
    ) -> bool {
        let ShortWrite { from, len, stag, to, .. } = *write;
        let principal = self.core.principal();
        let source = match from {
            WriteSource::Inline { at } => {
                Ok(Target::inline(principal.session, self.requester.arena(), at, len as usize))
            }
            WriteSource::Element { lkey, addr } => sources.local(principal, lkey, addr, len, false),
        };
        let len = u64::from(len);
        let right = Access::REMOTE_WRITE;
        let sink = sinks.remote(peer.core.principal(), stag, to, len, right);
        match (source, sink) {
            (Ok(source), Ok(sink)) if source.is_shared() && sink.is_shared() => {
                source.copy_to(&sink, true).is_ok()
            }
            _ => false,
        }
    }
}

const _: () = assert!(SHORT <= PAYLOAD, "a short Write fits one segment");
