//! Effects of fault rules on one QP: requests that fail, messages that are refused, and completions
//! that are published late or never.
//!
//! A QP without rules has no [`Faults`], so each occasion costs it one branch. Rules with other
//! effects are reported to the resource manager ([`Notification::FaultStruck`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::deadlines::Due;
use super::incoming::Incoming;
use super::interface::Notification;
use super::qp::Qp;
use super::qp_core::QpCore;
use super::reason::{Effect, Reason};
use super::state::EngineState;
use crate::device::ArmedFault;
use crate::device::cq::CqFault;
use rnic_abi::abi::control::{Diagnosis, DiagnosisKind};
use rnic_abi::abi::queue::Cqe;
use rnic_abi::faults::{Action, FaultName, Opcode, Point};
use rnic_abi::types::{CompletionOpcode, Time};

/// Rules of a QP, and the completions that they hold back.
#[derive(Default)]
pub(super) struct Faults {
    rules: Vec<Arc<ArmedFault>>,
    /// Completions to be published later, in order. Each holds a reserved slot of its CQ.
    held: VecDeque<HeldCompletion>,
    /// The next Send has been held back, and takes its receive when there is one.
    passes_send: bool,
}

struct HeldCompletion {
    at: Time,
    cqe: Cqe,
    of_send: bool,
}

/// A fault that ends a QP or its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpFault {
    /// Ends the connection, as an administrator does.
    Disconnect,
    /// Fails the QP.
    Fatal,
}

impl Faults {
    /// Returns rules for a new QP, or `None` without any.
    pub(super) fn new(rules: Vec<Arc<ArmedFault>>) -> Option<Box<Self>> {
        let faults = Faults { rules, ..Faults::default() };
        (!faults.rules.is_empty()).then(|| Box::new(faults))
    }

    fn strikes(
        &self,
        point: Point,
        opcode: Option<Opcode>,
        now: Time,
    ) -> Option<(&ArmedFault, Action)> {
        let struck = |rule: &Arc<ArmedFault>| rule.at(point, opcode, now);
        self.rules.iter().find_map(|rule| Some((&**rule, struck(rule)?)))
    }

    /// Notes that the Send that a rule held back may now take its receive.
    fn pass_next_send(&mut self) {
        self.passes_send = true;
    }

    /// Returns true if a rule corrupts the CRC of the next FPDU.
    pub(super) fn corrupts_crc(&self, core: &QpCore, engine: &EngineState) -> bool {
        let Some((rule, _)) = self.strikes(Point::Fpdu, None, engine.now) else { return false };
        record(core, engine, rule.name, "the CRC of an FPDU was corrupted".to_owned());
        true
    }
}

impl QpCore {
    /// Returns the reason why a rule fails this request, if one does.
    pub(super) fn request_fault(
        &self,
        opcode: Option<Opcode>,
        engine: &mut EngineState,
    ) -> Option<Reason> {
        let (rule, action) = self.faults.as_ref()?.strikes(Point::Request, opcode, engine.now)?;
        let fault = rule.name;
        if let Action::Complete { status } = action {
            return Some(Reason::Injected { fault, effect: Effect::Completes(status) });
        }
        if rule.begin_report() {
            let fault = rule.number;
            engine.report(Notification::FaultStruck { fault, qp: self.id });
        }
        None
    }

    /// Publishes completions of requests into their reserved slots.
    #[inline]
    pub(super) fn publish_sends(&mut self, cqes: &[Cqe], engine: &mut EngineState) {
        if self.faults.is_some() {
            return cqes.iter().for_each(|cqe| self.publish_send_by_rules(cqe, engine));
        }
        engine.notify(self.send_cq.publish_reserved(cqes), &self.send_cq);
    }

    fn publish_send_by_rules(&mut self, cqe: &Cqe, engine: &mut EngineState) {
        match self.completion_fate(cqe, engine) {
            CompletionFate::Now => {
                let cqes = std::slice::from_ref(cqe);
                engine.notify(self.send_cq.publish_reserved(cqes), &self.send_cq);
            }
            CompletionFate::Never => engine.unreserve(&self.send_cq, 1),
            CompletionFate::At(at) => self.hold(at, *cqe, true, engine),
        }
    }

    /// Publishes the completion of a receive, which has no slot.
    #[inline]
    pub(super) fn publish_receive(
        &mut self,
        cqe: &Cqe,
        engine: &mut EngineState,
    ) -> Result<(), CqFault> {
        if self.faults.is_none() {
            engine.notify(self.recv_cq.publish(cqe)?, &self.recv_cq);
            return Ok(());
        }
        match self.completion_fate(cqe, engine) {
            CompletionFate::Now => engine.notify(self.recv_cq.publish(cqe)?, &self.recv_cq),
            CompletionFate::Never => {}
            CompletionFate::At(at) => {
                if self.recv_cq.reserve(1)? == 0 {
                    return Err(CqFault::Full);
                }
                self.hold(at, *cqe, false, engine);
            }
        }
        Ok(())
    }

    /// Publishes the completions of flushed receives into their reserved slots. Those that are held
    /// come first.
    pub(super) fn publish_flushed(&mut self, cqes: &[Cqe], engine: &mut EngineState) {
        self.publish_held(true, engine);
        engine.notify(self.recv_cq.publish_reserved(cqes), &self.recv_cq);
    }

    fn completion_fate(&self, cqe: &Cqe, engine: &EngineState) -> CompletionFate {
        let Some(faults) = &self.faults else { return CompletionFate::Now };
        let opcode = CompletionOpcode::from_u8(cqe.opcode).map(Opcode::of_completion);
        // A completion does not overtake those that are held.
        let after_held = faults.held.back().map(|held| held.at);
        let wr_id = cqe.wr_id;
        match faults.strikes(Point::Completion, opcode, engine.now) {
            Some((rule, Action::LoseCompletion)) => {
                record(self, engine, rule.name, format!("the completion of {wr_id} was lost"));
                CompletionFate::Never
            }
            Some((rule, Action::HoldCompletion { by })) => {
                let text = format!("the completion of {wr_id} was held back for {by:?}");
                record(self, engine, rule.name, text);
                let at = engine.now.after(by);
                CompletionFate::At(after_held.map_or(at, |last| last.max(at)))
            }
            _ => after_held.map_or(CompletionFate::Now, CompletionFate::At),
        }
    }

    fn hold(&mut self, at: Time, cqe: Cqe, of_send: bool, engine: &mut EngineState) {
        let due = Due::Completion(self.key);
        let Some(faults) = &mut self.faults else { return };
        if faults.held.is_empty() {
            engine.deadlines.set(at, due);
        }
        faults.held.push_back(HeldCompletion { at, cqe, of_send });
    }

    /// Publishes the held completions that are due, or all.
    fn publish_held(&mut self, all: bool, engine: &mut EngineState) {
        let due = Due::Completion(self.key);
        let Some(faults) = &mut self.faults else { return };
        let Some(first) = faults.held.front().map(|held| held.at) else { return };
        engine.deadlines.clear(first, due);
        while let Some(held) = faults.held.pop_front_if(|held| all || held.at <= engine.now) {
            let cq = if held.of_send { &self.send_cq } else { &self.recv_cq };
            engine.notify(cq.publish_reserved(std::slice::from_ref(&held.cqe)), cq);
        }
        if let Some(next) = faults.held.front() {
            engine.deadlines.set(next.at, due);
        }
    }

    /// Drops the held completions of a QP that is destroyed, and returns their slots.
    pub(super) fn drop_held(&mut self, engine: &mut EngineState) {
        let Some(mut faults) = self.faults.take() else { return };
        if let Some(first) = faults.held.front() {
            engine.deadlines.clear(first.at, Due::Completion(self.key));
        }
        for held in faults.held.drain(..) {
            let cq = if held.of_send { &self.send_cq } else { &self.recv_cq };
            engine.unreserve(cq, 1);
        }
    }
}

impl Qp {
    /// Replaces the rules of the QP.
    pub(super) fn set_faults(&mut self, rules: Vec<Arc<ArmedFault>>, engine: &mut EngineState) {
        let holds =
            |rule: &Arc<ArmedFault>| matches!(rule.rule.action, Action::HoldCompletion { .. });
        if !rules.iter().any(holds) {
            self.core.publish_held(true, engine);
        }
        if rules.is_empty() {
            self.core.faults = None;
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
        let (opcode, read) = match segment {
            // An acknowledgement request is no message of the peer's program.
            Incoming::ReadRequest(read)
                if read.request.size == 0 && self.core.transport.acknowledges() =>
            {
                return Ok(());
            }
            Incoming::Write { last: true, .. } => (Opcode::Write, false),
            Incoming::Send { last: true, .. } => (Opcode::Send, false),
            Incoming::ReadRequest(_) => (Opcode::Read, true),
            Incoming::AtomicRequest(_) => (Opcode::Atomic, false),
            _ => return Ok(()),
        };
        let struck = faults.strikes(Point::Message, Some(opcode), now);
        let Some((rule, action)) = struck else { return Ok(()) };
        let effect = match action {
            Action::Refuse { error } => Effect::Refuses { error, read },
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
        // The peer's last retry comes after `times` timers, and finds the receive.
        Some(timer.saturating_mul(times) - timer / 2)
    }

    /// Lets a Send that a rule held back take its receive, or wait for one like any other.
    pub(super) fn end_rnr_fault(&mut self, engine: &mut EngineState) {
        if let Some(faults) = &mut self.core.faults {
            faults.pass_next_send();
        }
        self.receive_found(engine);
    }

    /// Stops the QP for a rule, or lets it continue.
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

enum CompletionFate {
    Now,
    At(Time),
    Never,
}

/// Records the effect of a rule on a QP.
pub(super) fn record(core: &QpCore, engine: &EngineState, fault: FaultName, text: String) {
    let why = Diagnosis {
        qp: Some(core.id),
        pd: Some(core.pd),
        ..Diagnosis::new(core.session, DiagnosisKind::Injected, rule_of_fault(fault), text)
    };
    engine.options.diagnoses.record(engine.now, why);
}

/// Returns the rule that a diagnosis names for a fault.
pub fn rule_of_fault(fault: FaultName) -> String {
    format!("injected by fault {fault}")
}
