//! A stream whose incoming direction stands still, for one of two reasons. Either a Send found no
//! receive and its QP was made to wait for one (RFC 5041 section 7.1 lets a receiver end
//! the stream at once; to wait instead is ours, and costs the peer only what TCP's flow control
//! costs it anyway); or a copier is writing the bytes of a segment
//! ([`placement`](super::placement)). A Send that has waited may, with its receive, go on to wait
//! for a copier; and at a QP that is wired by hand a copier may write a response that has passed a
//! Send that waits.
//!
//! *Over TCP* a segment without a receive has been verified and is kept with what was read behind
//! it, of a segment that is being written only the latter; the socket is not read again, so
//! everything else stays in the kernel and the peer's window closes. A QP that [may
//! block](Responder::may_block) reads so little at a time that what is kept never exceeds one FPDU
//! of the largest size, and what is kept behind a Send that waits ([`behind`]); only at its first
//! copy a QP has not known that it would, and keeps what it has read. A reset is seen all the same,
//! because the worker passes on the socket's error
//! ([`Engine::handle_socket_error`](crate::engine::Engine::handle_socket_error)); a FIN is in its
//! place behind the bytes, and waits with them. *By the direct path* nothing is kept: the sender
//! hands over nothing but responses until it is woken. What it does besides sending is deferred
//! where TCP would deliver it in its place behind a segment that has left ([`Responder::defer`]).
//!
//! The other direction goes on. At a QP that is not wired by hand a Read Response is behind the
//! message that waits, so an application that posts its next receive only after a Read is done
//! waits for itself; it is warned once.
//!
//! It ends in one of three ways: what is awaited has come, the deadline has passed, or the stream
//! has ended ([`Responder::release`], [`Responder::copied`]); only a copier's answer is awaited
//! even then, because it writes where a flushed receive is.

use super::behind;
use super::held::{Held, HeldSegment};
use super::placement::PendingPlacement;
use super::receives::{Receives, emit_notices};
use super::{MissingReceive, Responder};
use crate::device::srq::{TakeMode, Waiter};
use crate::engine::deadlines::Due;
use crate::engine::incoming::{Incoming, Origin};
use crate::engine::interface::Output;
use crate::engine::qp_core::QpCore;
use crate::engine::reason::{PlacementError, Reason};
use crate::engine::state::{EngineState, PeerSignal};
use crate::shm::queue::ReceiveEntry;
use crate::types::Msn;

impl Responder {
    /// Whether the incoming direction may have to stand still: then little is read at a time.
    pub(in crate::engine) fn may_block(&self) -> bool {
        matches!(self.missing, MissingReceive::Waits { .. }) || self.has_copied
    }

    /// Whether the incoming direction stands still.
    pub(in crate::engine) fn is_blocked(&self) -> bool {
        self.held.is_some() || self.copying.is_some()
    }

    /// Whether it is a receive that is awaited.
    pub(in crate::engine) fn awaits_receive(&self) -> bool {
        self.held.is_some()
    }

    /// The number of the Send that waits, if the peer has to be told.
    pub(in crate::engine) fn held_msn(&self) -> Option<Msn> {
        self.held.as_ref().and_then(|held| held.msn())
    }

    /// Whether what is about the other direction passes a Send that waits.
    fn passes(&self) -> bool {
        matches!(self.missing, MissingReceive::Waits { passes: true, .. })
    }

    /// Whether responses may be handed over, past a Send that waits.
    pub(in crate::engine) fn takes_responses(&self) -> bool {
        self.copying.is_none() && (self.held.is_none() || self.passes())
    }

    /// Whether what has come may be looked at, if only to keep it.
    pub(in crate::engine) fn reads(&self) -> bool {
        self.copying.is_none()
            && match &self.held {
                None => self.behind.is_empty(),
                Some(_) => self.passes() && self.behind.has_room(),
            }
    }

    /// There is no receive for this segment, whose payload is the last `payload` bytes of `origin`:
    /// takes one that has been posted by now (true), or waits until one is. `awaits_response` says
    /// that the owner has a Read outstanding, which is behind it.
    ///
    /// Asks the client to ring *before* the last look at the queue; the fence argument stands at
    /// [`ReceiveProducer::waits`](crate::shm::queue::ReceiveProducer::waits). The bell is this QP's
    /// for its own queue, and leads to [`Responder::take_awaited`] by its next turn; for a shared
    /// queue it is that queue's, and leads there by [`Srq::ready`](crate::device::Srq::ready).
    pub(in crate::engine) fn await_receive(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        (segment, origin, payload): (Incoming, Origin<'_>, usize),
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
                        engine.doorbells.await_receive(core.seat, srq);
                        Some(place)
                    }
                }
            }
        };
        self.warn_of_read(core, engine, awaits_response && !self.passes());
        let until = engine.now.after(time);
        engine.deadlines.set(until, Due::Rnr(core.key));
        let segment = match origin {
            Origin::Wire(ulpdu) => {
                let payload = ulpdu.len() - payload;
                HeldSegment::Received { ulpdu: ulpdu.into(), payload, segment }
            }
            Origin::Direct { header, len } => HeldSegment::AtPeer { header, len },
        };
        self.held = Some(Box::new(Held { segment, place, until }));
        Ok(false)
    }

    /// The incoming direction stands still until a copier has written this segment.
    pub(in crate::engine) fn await_copy(&mut self, pending: PendingPlacement) {
        self.has_copied = true;
        self.copying = Some(Box::new(pending));
    }

    /// Keeps bytes that were read behind all for which the stream stands still.
    pub(in crate::engine) fn keep_unread(&mut self, bytes: &[u8]) {
        self.unread.extend_from_slice(bytes);
    }

    /// Keeps a ULPDU that does not pass the Send that waits; false if nothing waits, or it passes.
    pub(in crate::engine) fn keep_behind(&mut self, ulpdu: &[u8]) -> bool {
        let keeps = self.held.is_some() && !behind::passes(ulpdu);
        if keeps {
            self.behind.keep(ulpdu);
        }
        keeps
    }

    /// The next ULPDU that came behind a Send that has waited, if nothing stands before it.
    pub(in crate::engine) fn next_behind(&mut self) -> Option<Box<[u8]>> {
        if self.is_blocked() { None } else { self.behind.next() }
    }

    /// What was read behind all that, if nothing stands before it.
    pub(in crate::engine) fn take_unread(&mut self) -> Vec<u8> {
        if self.reads() { std::mem::take(&mut self.unread) } else { Vec::new() }
    }

    /// The stream receives nothing any more.
    pub(in crate::engine) fn drop_unread(&mut self) {
        self.behind.clear();
        self.unread = Vec::new();
    }

    /// Takes the receive that is awaited, if there is one by now. `None` if none is awaited.
    pub(in crate::engine) fn take_awaited(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        awaits_response: bool,
    ) -> Option<Result<bool, PlacementError>> {
        let turn = self.held.as_ref()?.place.map_or(TakeMode::AtOnce, TakeMode::Waited);
        let taken = self.take_next(turn, core, engine.now, &mut engine.outputs);
        if matches!(taken, Ok(false)) {
            self.warn_of_read(core, engine, awaits_response && !self.passes());
        }
        Some(taken)
    }

    /// An application that waits for a Read before it posts a receive waits for itself: says so
    /// once.
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
            "QP {} holds a message for want of a receive while a Read of its own is outstanding; \
             the response is behind that message",
            core.id
        );
        engine.outputs.push_back(Output::Warning { session: core.session, text });
    }

    /// No receive is awaited any more; the Send that did, if one did. The stream is to be
    /// [read on](crate::engine::link::Link::read_on) then.
    pub(in crate::engine) fn release(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
    ) -> Option<Box<Held>> {
        let held = self.held.take()?;
        engine.deadlines.clear(held.until, Due::Rnr(core.key));
        match (&mut self.receives, held.place) {
            (Receives::Own(rq), _) => rq.clear_waits(engine.worker),
            (Receives::Shared(srq), Some(place)) => {
                let workers = srq.leave(place);
                engine.doorbells.stop_awaiting(core.seat, srq);
                engine.receives_freed(srq, workers);
            }
            (Receives::Shared(_), None) => {}
        }
        Some(held)
    }

    /// The copier has answered: what it was writing. The stream is to be read on.
    pub(in crate::engine) fn copied(&mut self) -> Option<Box<PendingPlacement>> {
        self.copying.take()
    }

    /// Whether a copier is writing a segment.
    pub(in crate::engine) fn is_copying(&self) -> bool {
        self.copying.is_some()
    }

    /// Whether this copy writes a segment.
    pub(in crate::engine) fn is_placing(&self, job: u64) -> bool {
        self.copying.as_ref().is_some_and(|pending| pending.job == job)
    }

    /// Something that the other end of a direct connection did: whether it has its place behind a
    /// segment that a copier is writing, and is kept there.
    pub(in crate::engine) fn defer(&mut self, signal: PeerSignal) -> Result<(), PeerSignal> {
        let behind =
            matches!(signal, PeerSignal::Terminate(_) | PeerSignal::Fin | PeerSignal::Reset);
        let Some(pending) = self.copying.as_mut().filter(|_| behind) else { return Err(signal) };
        pending.deferred.push(signal);
        Ok(())
    }

    /// Bytes kept while the stream stands still.
    #[cfg(test)]
    pub(in crate::engine) fn kept_bytes(&self) -> usize {
        let held = self.held.as_ref().map_or(0, |held| match &held.segment {
            HeldSegment::Received { ulpdu, .. } => ulpdu.len(),
            HeldSegment::AtPeer { .. } => 0,
        });
        held + self.behind.bytes() + self.unread.len()
    }
}
