//! Effects of fault rules on messages of the peer, and on the QP as a whole.

use std::sync::Arc;
use std::time::Duration;

use super::fault_rules::QpFault;
use super::faults::record;
use super::incoming::Incoming;
use super::qp::Qp;
use super::reason::{Effect, Reason};
use super::state::EngineState;
use crate::device::{ArmedFault, Occasion};
use rnic_abi::faults::{Action, FaultName, Opcode, Point};
use rnic_abi::types::Time;

impl Qp {
    /// Replaces the rules of the QP. If a rule ends, the completions and events that it and other
    /// rules hold are released.
    pub(super) fn set_faults(&mut self, rules: Vec<Arc<ArmedFault>>, engine: &mut EngineState) {
        let old = self.core.faults.as_ref().map_or(&[][..], |faults| &faults.rules[..]);
        let ends = |rule: &&Arc<ArmedFault>| !rules.iter().any(|new| Arc::ptr_eq(rule, new));
        let ended = || old.iter().filter(ends).map(|rule| rule.rule.action);
        let held_completions =
            ended().any(|action| matches!(action, Action::HoldCompletion { .. }));
        let held_events = ended().any(|action| matches!(action, Action::HoldEvent { .. }));
        if held_completions {
            self.core.publish_held(true, engine);
        }
        if held_events {
            self.core.send_held_events(true, engine);
        }
        if rules.is_empty() {
            self.core.forget_request_fault(engine);
            self.core.faults = None;
            // A request may have waited for the effect of a rule.
            engine.wake(&mut self.core);
        } else {
            self.core.faults.get_or_insert_default().rules = rules;
        }
    }

    /// Fails if a rule refuses a message of the peer. Must be called once for each segment, when it
    /// is about to be placed. Messages are counted at their last segment, so the bytes before it
    /// have been placed.
    #[inline]
    pub(super) fn message_fault(&mut self, segment: &Incoming, now: Time) -> Result<(), Reason> {
        let Some(faults) = &mut self.core.faults else { return Ok(()) };
        if let Incoming::Send { mo: 0, .. } = segment {
            faults.passes_send = false;
        }
        let (opcode, stag) = match segment {
            // An acknowledgement request is no message of the peer's program.
            Incoming::ReadRequest(read)
                if read.request.size == 0 && self.core.transport.acknowledges() =>
            {
                return Ok(());
            }
            Incoming::Write { last: true, stag, .. } => (Opcode::Write, Some(*stag)),
            Incoming::Send { last: true, .. } => (Opcode::Send, None),
            Incoming::ReadRequest(read) => (Opcode::Read, Some(read.request.src_stag)),
            Incoming::AtomicRequest(atomic) => (Opcode::Atomic, Some(atomic.request.stag)),
            _ => return Ok(()),
        };
        let occasion = Occasion { stag, ..Occasion::new(Point::Message, Some(opcode)) };
        let struck = faults.strikes_at(&occasion, now);
        let Some((rule, action)) = struck else { return Ok(()) };
        let effect = match action {
            Action::Refuse { error } => Effect::Refuses { error, opcode },
            Action::Terminate { code } => Effect::Terminates(code),
            _ => return Ok(()),
        };
        Err(Reason::Injected { fault: rule.name, effect })
    }

    /// Returns the time for which a rule holds back a Send although there may be a receive.
    #[inline]
    pub(super) fn rnr_fault(&self, segment: &Incoming, engine: &EngineState) -> Option<Duration> {
        let faults = self.core.faults.as_ref()?;
        let Incoming::Send { mo: 0, .. } = segment else { return None };
        let timer = self.rc.as_ref().filter(|_| self.core.transport.acknowledges())?.rnr_timer();
        if faults.passes_send {
            return None;
        }
        let (rule, action) = faults.strikes(Point::Receive, Some(Opcode::Send), engine.now)?;
        let name = rule.name;
        let Action::Rnr { times } = action else { return None };
        let text = format!("a Send was answered as if there were no receive, {times} times");
        record(&self.core, engine, name, text);
        // Ends the wait half a timer before the peer's last retry, which is after `times` timers.
        Some(timer.saturating_mul(times) - timer / 2)
    }

    /// Resumes a Send that a rule has delayed. It takes a receive, or waits for one like any other
    /// Send.
    pub(super) fn end_rnr_fault(&mut self, engine: &mut EngineState) {
        if let Some(faults) = &mut self.core.faults {
            faults.passes_send = true;
        }
        self.receive_found(engine);
    }

    /// Stops the QP because of the rule `by`, or resumes it.
    pub(super) fn set_stopped(&mut self, by: Option<FaultName>, engine: &mut EngineState) {
        self.core.stopped = by;
        self.stop_clock(engine);
        self.watch(engine);
        // The peer is not to blame for bytes that were not read.
        self.restart_stall(engine.now);
        if by.is_none() {
            engine.wake(&mut self.core);
        }
        // In its next turn the peer finds that this QP has stopped, or goes on.
        self.link.wake_peer(engine);
    }

    /// Forgets rules of an earlier stream and of its peer.
    pub(super) fn end_stream_faults(&mut self) {
        self.core.peer_stopped = None;
        if let Some(faults) = &mut self.core.faults {
            faults.passes_send = false;
        }
    }

    /// Returns true if a rule has stopped the QP. A QP in Error still flushes.
    pub(super) fn is_stopped(&self) -> bool {
        self.core.stopped.is_some() && !self.life.phase().flushes()
    }

    /// Publishes the held completions that are due.
    pub(super) fn publish_held(&mut self, engine: &mut EngineState) {
        self.core.publish_held(false, engine);
        if self.life.is_flush_pending() {
            engine.wake(&mut self.core);
        }
    }

    /// Ends the connection or fails the QP, for a rule.
    pub(super) fn inject(&mut self, fault: FaultName, effect: QpFault, engine: &mut EngineState) {
        let reason = Reason::Injected { fault, effect: Effect::Fails };
        match effect {
            QpFault::Disconnect => self.end_connection(engine, reason),
            QpFault::Fatal => self.fail_locally(engine, reason),
        }
    }
}
