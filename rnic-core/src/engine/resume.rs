//! A queue pair goes on when what it waited for has come: a receive, a copy, or a change of STags;
//! or when it does not come.

use super::incoming::Origin;
use super::link::Link;
use super::phase::StreamPhase;
use super::qp::Qp;
use super::reason::Reason;
use super::responder::held::{Held, HeldSegment};
use super::state::{EngineState, PeerSignal};
use crate::device::copier::CopyResult;
use crate::device::memory::MemoryFault;
use crate::shm::attached::CopyEnd;

impl Qp {
    /// Takes the receive that is awaited, if it has come. Called in each turn; costs nothing unless
    /// one is awaited.
    #[inline]
    pub(super) fn resume_receiving(&mut self, engine: &mut EngineState) {
        // A response that has passed the Send may be with a copier.
        if !self.responder.awaits_receive() || self.responder.is_copying() {
            return;
        }
        let awaits_response = self.requester.awaits_response();
        match self.responder.take_awaited(&self.core, engine, awaits_response) {
            None | Some(Ok(false)) => {}
            Some(Ok(true)) => self.receive_found(engine),
            Some(Err(error)) => {
                let Some(held) = self.release(engine) else { return };
                self.link.refuse_waiting(engine);
                self.segment_failed(engine, error, |fault| held.terminate(fault));
                // Responses are taken in while earlier requests are answered.
                self.read_behind(engine);
            }
        }
    }

    /// There is a receive: places the segment that waited, then handles what was read behind it.
    fn receive_found(&mut self, engine: &mut EngineState) {
        let Some(held) = self.release(engine) else { return };
        // By the direct path its sender hands it over again.
        let HeldSegment::Received { ulpdu, payload, segment } = &held.segment else { return };
        self.wire_segment_arrived(engine, *segment, &ulpdu[*payload..], Origin::Wire(ulpdu));
        self.read_behind(engine);
    }

    /// Goes on with what was kept while the incoming direction stood still.
    fn read_behind(&mut self, engine: &mut EngineState) {
        while let Some(ulpdu) = self.responder.next_behind() {
            self.ulpdu_arrived(engine, &ulpdu, false);
        }
        let unread = self.responder.take_unread();
        self.read_later(engine, unread, 0);
    }

    /// No receive has come in time.
    pub(super) fn rnr_timeout_passed(&mut self, engine: &mut EngineState) {
        self.responder.warn_of_read(&self.core, engine, self.requester.awaits_response());
        let Some(held) = self.release(engine) else { return };
        self.link.refuse_waiting(engine);
        let reason = Reason::NoReceive { waited: true };
        let fault = reason.fault();
        self.terminate(engine, fault.code, Some(held.terminate(fault)), reason);
    }

    /// No receive is awaited any more; the Send that did.
    pub(super) fn release(&mut self, engine: &mut EngineState) -> Option<Box<Held>> {
        let held = self.responder.release(&self.core, engine)?;
        self.tell_of_wait(engine, None);
        self.link.read_on(&self.core, engine);
        Some(held)
    }

    /// A copier has answered.
    pub(super) fn copied(&mut self, engine: &mut EngineState, job: u64, result: CopyResult) {
        if self.requester.is_staging(job) {
            if let Err(fault) = self.requester.staged(&self.core, result) {
                self.memory_failed(engine, fault);
            }
            engine.wake(&mut self.core);
        } else if self.requester.is_executing(job) {
            if let Err(error) = self.requester.executed(result) {
                self.request_error(engine, error);
            }
            engine.wake(&mut self.core);
        } else if self.responder.is_placing(job) {
            self.placed_by_copier(engine, result);
        } else if self.is_placing_datagrams() {
            self.datagram_placed(engine, job, result);
        }
        // Otherwise what it was for has ended meanwhile.
    }

    fn placed_by_copier(&mut self, engine: &mut EngineState, result: CopyResult) {
        let Some(mut pending) = self.responder.copied() else { return };
        self.link.read_on(&self.core, engine);
        engine.wake(&mut self.core);
        let (segment, len) = (pending.segment, pending.len);
        if self.life.phase().flushes() {
            // The stream has ended meanwhile.
            return self.flush(engine);
        }
        let unlinked = self.life.phase() == StreamPhase::Unlinked;
        let outcome = match result {
            Ok(_) => self.segment_placed(engine, segment, len),
            Err(cause) => {
                let owner = pending.copier.session();
                let fault = MemoryFault { owner, cause, end: CopyEnd::Sink };
                Err(self.unplaced(&segment, fault))
            }
        };
        let deferred = std::mem::take(&mut pending.deferred);
        match outcome {
            // Before the application, which has heard of it, can end the stream.
            // To a peer whose request is being refused, it would acknowledge that one as well.
            Ok(()) if self.is_refusing() => {}
            Ok(()) if self.is_wired() => self.link.tell_placed(engine),
            Ok(()) => {}
            Err(error) => {
                self.segment_failed(engine, error, |fault| pending.enclosure.terminate(fault));
            }
        }
        // By the direct path, or over TCP.
        for signal in deferred {
            self.handle_signal(engine, &signal);
        }
        self.read_behind(engine);
        if unlinked {
            self.unlinked_at_last(engine);
        }
    }

    /// Something that the other end of a direct connection did: whether it has its place behind a
    /// segment that a copier is writing, and is kept there.
    pub(super) fn defer(&mut self, signal: PeerSignal) -> Result<(), PeerSignal> {
        let ends = matches!(signal, PeerSignal::Terminate(_) | PeerSignal::Reset);
        self.responder.defer(signal)?;
        if ends {
            // Who ends the stream is gone, and its key may soon be another QP's.
            self.link = Link::None;
        }
        Ok(())
    }

    /// Every worker has carried out the change that the oldest request waits for.
    pub(super) fn stags_changed(&mut self, engine: &mut EngineState) {
        if self.requester.stags_changed(&self.core, engine) {
            self.retire(engine);
            engine.wake(&mut self.core);
        }
    }
}
