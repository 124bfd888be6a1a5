//! Blocks the incoming direction of a stream, for one of two reasons. Either a Send has found no
//! receive and waits for one, or a copier is writing the bytes of a segment
//! ([`placement`](super::placement)). RFC 5041 section 7.1 lets a receiver end the stream if there
//! is no receive. Waiting instead is a choice of this implementation and costs the peer no more
//! than TCP's flow control. A Send that has waited for a receive may then wait for a copier. On an
//! RC QP a copier may write a response that has passed a waiting Send.
//!
//! *Over TCP* a Send without a receive has been verified and is kept, with the bytes that were read
//! after it. Of a segment that a copier writes, only the bytes after it are kept. The socket is not
//! read again, so everything else stays in the kernel and the peer's window closes. A QP that [may
//! block](Responder::may_block) reads so little at a time that it never keeps more than one FPDU of
//! the largest size and the ULPDUs after a waiting Send ([`rnr_backlog`]). A QP
//! cannot foresee its first copy and then keeps everything that it has read. A reset is still seen,
//! because the worker passes on the socket's error
//! ([`Engine::handle_socket_error`](crate::engine::Engine::handle_socket_error)). A FIN stays in
//! the socket behind unread bytes. *On the direct path* nothing is kept: the sender hands over only
//! responses until it is woken. Its signals are deferred if TCP would deliver them after the
//! segment that is being written ([`Responder::defer`]).
//!
//! The other direction continues. On an iWARP QP a Read Response is queued after the waiting
//! message, so an application that posts its next receive only after a Read completes deadlocks.
//! The engine logs one warning.
//!
//! The wait ends in one of three ways: the receive is posted or the copy is done, the deadline
//! passes, or the stream ends ([`Responder::release`], [`Responder::copied`]). Only the result of a
//! copy is still awaited after the end of the stream, because the copier writes to memory of a
//! receive that would be flushed.

use std::time::Duration;

use super::Responder;
use super::placement::PendingPlacement;
use super::receives::{Receives, emit_notices};
use super::rnr_backlog;
use super::rnr_wait::{WaitingSegment, WaitingSend};
use crate::device::srq::{TakeMode, Waiter};
use crate::engine::deadlines::Due;
use crate::engine::incoming::{Incoming, Origin};
use crate::engine::interface::{Freed, Output};
use crate::engine::qp_core::QpCore;
use crate::engine::reason::{PlacementError, Reason};
use crate::engine::state::{EngineState, PeerSignal};
use crate::engine::transport::MissingReceive;
use rnic_abi::shm::queue::ReceiveEntry;
use rnic_abi::types::Msn;

impl Responder {
    /// Returns true if the incoming direction may be blocked. The QP then reads little at a time.
    pub(in crate::engine) fn may_block(&self) -> bool {
        matches!(self.missing, MissingReceive::Waits { .. }) || self.has_copied
    }

    /// Returns true if the incoming direction is blocked.
    pub(in crate::engine) fn is_blocked(&self) -> bool {
        self.held.is_some() || self.copying.is_some()
    }

    /// Returns true if a Send waits for a receive.
    pub(in crate::engine) fn awaits_receive(&self) -> bool {
        self.held.is_some()
    }

    /// Returns the MSN of the waiting Send if the peer must be notified of it.
    pub(in crate::engine) fn waiting_msn(&self) -> Option<Msn> {
        self.held.as_ref().and_then(|held| held.msn())
    }

    /// Returns true if ULPDUs for the other direction pass a waiting Send.
    pub(in crate::engine) fn passes(&self) -> bool {
        matches!(self.missing, MissingReceive::Waits { passes: true, .. })
    }

    /// Returns true if responses may be handed over, past a waiting Send.
    pub(in crate::engine) fn takes_responses(&self) -> bool {
        self.copying.is_none() && (self.held.is_none() || self.passes())
    }

    /// Returns true if received bytes may be parsed, if only to keep them.
    pub(in crate::engine) fn reads(&self) -> bool {
        self.copying.is_none()
            && match &self.held {
                None => self.behind.is_empty(),
                Some(_) => self.passes() && self.behind.has_room(),
            }
    }

    /// Takes a receive for this segment if one has been posted by now. Otherwise makes the segment
    /// wait and returns false. Its payload is the last `payload` bytes of `origin`.
    /// `awaits_response` is true if this QP has a Read outstanding, whose response follows the
    /// segment.
    ///
    /// The doorbell must be requested *before* the last check of the queue, for the reason given at
    /// [`ReceiveProducer::waits`](rnic_abi::shm::queue::ReceiveProducer::waits). For the QP's own
    /// queue it is the QP's doorbell, which leads to [`Responder::take_awaited`] in its next turn.
    /// For an SRQ it is the SRQ's doorbell, which leads there by
    /// [`Srq::ready`](crate::device::Srq::ready).
    pub(in crate::engine) fn await_receive(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        segment: Incoming,
        origin: Origin<'_>,
        payload: usize,
        awaits_response: bool,
    ) -> Result<bool, PlacementError> {
        let MissingReceive::Waits { time, .. } = self.missing else {
            return Err(Reason::NoReceive { waited: false }.into());
        };
        let waiter = Waiter { qp: core.id, worker: engine.worker, key: core.key };
        let place = match &mut self.receives {
            Receives::Own(rq) => {
                rq.set_waits(engine.worker);
                let found = rq.peek();
                if !matches!(found, Ok(0)) {
                    rq.clear_waits(engine.worker);
                    found.map_err(PlacementError::Queue)?;
                    return self.take_next(TakeMode::AtOnce, core, engine.now, &mut engine.outputs);
                }
                None
            }
            Receives::Shared(srq) => {
                let mut entry = ReceiveEntry::default();
                let (got, notices) = srq
                    .take_or_wait(waiter, engine.now, &mut entry)
                    .map_err(PlacementError::Srq)?;
                match got {
                    Ok(got) => {
                        emit_notices(srq, notices, &mut engine.outputs);
                        return self.got(got, entry);
                    }
                    Err(place) => {
                        engine.doorbells.await_receive(core.slot, srq);
                        Some(place)
                    }
                }
            }
        };
        self.warn_of_read(core, engine, awaits_response && !self.passes());
        self.hold(core, engine, segment, origin, payload, time).place = place;
        Ok(false)
    }

    /// Makes a Send wait for at most `time`. Its payload is the last `payload` bytes of `origin`.
    pub(in crate::engine) fn hold(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        segment: Incoming,
        origin: Origin<'_>,
        payload: usize,
        time: Duration,
    ) -> &mut WaitingSend {
        let until = engine.now.after(time);
        engine.deadlines.set(until, Due::Rnr(core.key));
        let segment = match origin {
            Origin::Wire(ulpdu) => {
                let payload = ulpdu.len() - payload;
                WaitingSegment::Received { ulpdu: ulpdu.into(), payload, segment }
            }
            Origin::Direct { header, len } => WaitingSegment::AtPeer { header, len },
        };
        let held = WaitingSend { segment, place: None, until, by_rule: false };
        self.held.insert(Box::new(held))
    }

    /// Returns true if a fault rule holds back a Send.
    pub(in crate::engine) fn is_held_by_rule(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.by_rule)
    }

    /// Blocks the incoming direction until a copier has written this segment.
    pub(in crate::engine) fn await_copy(&mut self, pending: PendingPlacement) {
        self.has_copied = true;
        self.copying = Some(Box::new(pending));
    }

    /// Keeps bytes that were read after the segment that blocks the stream.
    pub(in crate::engine) fn keep_unread(&mut self, bytes: &[u8]) {
        self.unread.extend_from_slice(bytes);
    }

    /// Keeps a ULPDU that does not pass the waiting Send. Returns false if no Send waits or the
    /// ULPDU passes it.
    pub(in crate::engine) fn keep_in_backlog(&mut self, ulpdu: &[u8]) -> bool {
        let keeps = self.held.is_some() && !rnr_backlog::passes(ulpdu);
        if keeps {
            self.behind.keep(ulpdu);
        }
        keeps
    }

    /// Takes the next ULPDU that arrived after a waiting Send, if the stream is not blocked.
    pub(in crate::engine) fn next_in_backlog(&mut self) -> Option<Box<[u8]>> {
        if self.is_blocked() { None } else { self.behind.next() }
    }

    /// Takes the unread bytes, if received bytes may be parsed.
    pub(in crate::engine) fn take_unread(&mut self) -> Vec<u8> {
        if self.reads() { std::mem::take(&mut self.unread) } else { Vec::new() }
    }

    /// Drops everything kept, because the stream receives no more.
    pub(in crate::engine) fn drop_unread(&mut self) {
        self.behind.clear();
        self.unread = Vec::new();
    }

    /// Takes the awaited receive if it has been posted. Returns `None` if no Send waits.
    pub(in crate::engine) fn take_awaited(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        awaits_response: bool,
    ) -> Option<Result<bool, PlacementError>> {
        let held = self.held.as_ref()?;
        if held.by_rule {
            return Some(Ok(false));
        }
        let turn = held.place.map_or(TakeMode::AtOnce, TakeMode::Waited);
        let taken = self.take_next(turn, core, engine.now, &mut engine.outputs);
        if matches!(taken, Ok(false)) {
            self.warn_of_read(core, engine, awaits_response && !self.passes());
        }
        Some(taken)
    }

    /// Warns, once, if a Read is outstanding, because an application that waits for it before it
    /// posts a receive deadlocks.
    pub(in crate::engine) fn warn_of_read(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        awaits_response: bool,
    ) {
        if !awaits_response || std::mem::replace(&mut self.warned_of_read, true) {
            return;
        }
        let text = format!(
            "QP {} has no receive for a message while a Read of its own is outstanding; the \
             response follows that message, so post a receive without waiting for the Read",
            core.id
        );
        engine.outputs.push_back(Output::Warning { session: core.session, text });
    }

    /// Ends the wait for a receive and returns the Send that waited, if any. The caller must then
    /// [resume](crate::engine::link::Link::read_on) the stream.
    pub(in crate::engine) fn release(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
    ) -> Option<Box<WaitingSend>> {
        let held = self.held.take()?;
        engine.deadlines.clear(held.until, Due::Rnr(core.key));
        match (&mut self.receives, held.place) {
            (Receives::Own(rq), _) => rq.clear_waits(engine.worker),
            (Receives::Shared(srq), Some(place)) => {
                let workers = srq.leave(place);
                engine.doorbells.stop_awaiting(core.slot, srq);
                engine.freed(Freed::Receives(srq.clone()), workers);
            }
            (Receives::Shared(_), None) => {}
        }
        Some(held)
    }

    /// Ends the wait for a copier and returns the segment that it wrote. The caller must then
    /// resume the stream.
    pub(in crate::engine) fn copied(&mut self) -> Option<Box<PendingPlacement>> {
        self.copying.take()
    }

    /// Returns true if a copier is writing a segment.
    pub(in crate::engine) fn is_copying(&self) -> bool {
        self.copying.is_some()
    }

    /// Returns true if this copy writes a segment.
    pub(in crate::engine) fn is_placing(&self, job: u64) -> bool {
        self.copying.as_ref().is_some_and(|pending| pending.job == job)
    }

    /// Keeps a signal of the other end of a direct connection if it belongs after a segment that a
    /// copier is writing. Returns the signal otherwise.
    pub(in crate::engine) fn defer(&mut self, signal: PeerSignal) -> Result<(), PeerSignal> {
        let behind =
            matches!(signal, PeerSignal::Terminate(_) | PeerSignal::Fin | PeerSignal::Reset);
        let Some(pending) = self.copying.as_mut().filter(|_| behind) else { return Err(signal) };
        pending.deferred.push(signal);
        Ok(())
    }

    /// Returns the number of bytes kept while the stream is blocked.
    #[cfg(test)]
    pub(in crate::engine) fn kept_bytes(&self) -> usize {
        let held = self.held.as_ref().map_or(0, |held| match &held.segment {
            WaitingSegment::Received { ulpdu, .. } => ulpdu.len(),
            WaitingSegment::AtPeer { .. } => 0,
        });
        held + self.behind.bytes() + self.unread.len()
    }
}
