//! Resumes a QP after a wait for a receive, a copy or an STag change, or after the wait has timed
//! out.

use super::incoming::Origin;
use super::link::Link;
use super::phase::StreamPhase;
use super::qp::Qp;
use super::reason::Reason;
use super::responder::rnr_wait::{WaitingSegment, WaitingSend};
use super::state::{EngineState, PeerSignal};
use crate::device::copier::CopyResult;
use crate::device::memory::MemoryFault;
use rnic_abi::shm::attached::CopyEnd;

impl Qp {
    /// Takes the awaited receive if it has been posted. Called in each turn; costs nothing unless a
    /// Send waits.
    #[inline]
    pub(super) fn resume_receiving(&mut self, engine: &mut EngineState) {
        // A copier may be writing a response that has passed the Send.
        if !self.responder.awaits_receive() || self.responder.is_copying() {
            return;
        }
        let awaits_response = self.requester.awaits_response();
        match self.responder.take_awaited(&self.core, engine, awaits_response) {
            None | Some(Ok(false)) => {}
            Some(Ok(true)) => self.receive_found(engine),
            Some(Err(error)) => {
                let Some(held) = self.release(engine) else { return };
                self.refuse_waiting(engine, &held);
                self.segment_failed(engine, error, |fault| held.terminate(fault));
                // A refusing QP still handles responses.
                self.resume_reading(engine);
            }
        }
    }

    /// Places the waiting segment into the receive that was found, then handles the bytes that were
    /// read after it.
    pub(super) fn receive_found(&mut self, engine: &mut EngineState) {
        let Some(held) = self.release(engine) else { return };
        // On the direct path the sender hands it over again.
        let WaitingSegment::Received { ulpdu, payload, segment } = &held.segment else { return };
        self.wire_segment_arrived(engine, *segment, &ulpdu[*payload..], Origin::Wire(ulpdu));
        self.resume_reading(engine);
    }

    /// Handles ULPDUs and bytes kept while the incoming direction was blocked.
    fn resume_reading(&mut self, engine: &mut EngineState) {
        while let Some(ulpdu) = self.responder.next_in_backlog() {
            self.ulpdu_arrived(engine, &ulpdu, false);
        }
        let unread = self.responder.take_unread();
        self.read_later(engine, unread, 0);
    }

    /// Ends the stream, because no receive was posted in time.
    pub(super) fn rnr_timeout_passed(&mut self, engine: &mut EngineState) {
        if self.responder.is_held_by_rule() {
            return self.end_rnr_fault(engine);
        }
        self.responder.warn_of_read(&self.core, engine, self.requester.awaits_response());
        let Some(held) = self.release(engine) else { return };
        self.refuse_waiting(engine, &held);
        let reason = Reason::NoReceive { waited: true };
        let fault = reason.fault();
        self.terminate(engine, fault.code, Some(held.terminate(fault)), reason);
    }

    /// Signals to the sender on the direct path that the segment which it keeps is refused.
    fn refuse_waiting(&self, engine: &mut EngineState, held: &WaitingSend) {
        if let WaitingSegment::AtPeer { .. } = held.segment {
            self.link.refuse_waiting(engine);
        }
    }

    /// Ends the wait for a receive. Returns the Send that waited, if any.
    pub(super) fn release(&mut self, engine: &mut EngineState) -> Option<Box<WaitingSend>> {
        let held = self.responder.release(&self.core, engine)?;
        self.send_rnr_notice(engine, None);
        self.link.read_on(&self.core, engine);
        Some(held)
    }

    /// Handles the result of a copy.
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
        // Otherwise the request or segment that needed the copy has ended.
    }

    fn placed_by_copier(&mut self, engine: &mut EngineState, result: CopyResult) {
        let Some(mut pending) = self.responder.copied() else { return };
        self.link.read_on(&self.core, engine);
        engine.wake(&mut self.core);
        let segment = pending.segment;
        let len = pending.len;
        if self.life.phase().flushes() {
            // The stream has ended during the copy.
            return self.flush(engine);
        }
        let unlinked = self.life.phase() == StreamPhase::Unlinked;
        let outcome = match result {
            Ok(_) => self.segment_placed(engine, segment, len),
            Err(cause) => {
                let owner = pending.copier.session();
                let fault = MemoryFault { owner, cause, end: CopyEnd::Sink };
                Err(self.placement_failed(&segment, fault))
            }
        };
        let deferred = std::mem::take(&mut pending.deferred);
        match outcome {
            // Signals immediately, before the application, which sees the completion, can end the
            // stream. A refusing QP sends no signal, because that would acknowledge the refused
            // request too.
            Ok(()) if self.is_refusing() => {}
            // The next turn acknowledges over the emulated link.
            Ok(()) if self.emulation.is_some() => {}
            Ok(()) if self.core.transport.acknowledges() => self.link.signal_placed(engine),
            Ok(()) => {}
            Err(error) => {
                self.segment_failed(engine, error, |fault| pending.enclosure.terminate(fault));
            }
        }
        // Deferred signals exist only on the direct path, kept bytes only over TCP.
        for signal in deferred {
            self.handle_signal(engine, &signal);
        }
        self.resume_reading(engine);
        if unlinked {
            self.report_unlinked(engine);
        }
    }

    /// Keeps a signal of the other end of a direct connection if it belongs after a segment that a
    /// copier is writing. Returns the signal otherwise.
    pub(super) fn defer(&mut self, signal: PeerSignal) -> Result<(), PeerSignal> {
        let signal = match self.delay_signal(signal) {
            Ok(()) => return Ok(()),
            Err(signal) => signal,
        };
        let ends = matches!(signal, PeerSignal::Terminate(_) | PeerSignal::Reset);
        self.responder.defer(signal)?;
        if ends {
            // The QP that ended the stream may be destroyed and its key reused.
            self.link = Link::None;
        }
        Ok(())
    }

    /// Completes the oldest request after every worker has carried out its STag change.
    pub(super) fn stags_changed(&mut self, engine: &mut EngineState) {
        if self.requester.stags_changed(&self.core, engine) {
            self.retire(engine);
            engine.wake(&mut self.core);
        }
    }
}
