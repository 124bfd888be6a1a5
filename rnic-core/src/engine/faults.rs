//! Effects of fault rules on requests and completions: requests that fail, and completions that are
//! published late or never.
//!
//! Rules with effects outside of the engine are reported to the resource manager
//! ([`Notification::FaultStruck`]).

use super::deadlines::Due;
use super::fault_rules::{HeldCompletion, RequestFault, RequestWait, rule_of_fault};
use super::interface::Notification;
use super::qp_core::QpCore;
use super::reason::{Effect, Reason};
use super::state::EngineState;
use crate::device::cq::CqFault;
use rnic_abi::abi::control::{Diagnosis, DiagnosisKind};
use rnic_abi::abi::queue::{Cqe, SendOpcode};
use rnic_abi::faults::{Action, FaultName, Opcode, Point};
use rnic_abi::shm::queue::SendEntry;
use rnic_abi::types::Time;

impl QpCore {
    /// Evaluates the rules for a request that is about to begin. If a rule has an effect outside of
    /// the engine, the request waits for it ([`EngineCommand::FaultTookEffect`]).
    ///
    /// [`EngineCommand::FaultTookEffect`]: super::EngineCommand::FaultTookEffect
    #[inline]
    pub(super) fn request_fault(
        &mut self,
        entry: &SendEntry,
        engine: &mut EngineState,
    ) -> RequestFault {
        if self.faults.is_none() { RequestFault::None } else { self.fault_of(entry, engine) }
    }

    fn fault_of(&mut self, entry: &SendEntry, engine: &mut EngineState) -> RequestFault {
        let Some(faults) = &mut self.faults else { return RequestFault::None };
        match faults.request {
            RequestWait::None => {}
            RequestWait::Waits | RequestWait::Until(_) => return RequestFault::Waits,
            RequestWait::Ended => {
                faults.request = RequestWait::None;
                return RequestFault::None;
            }
        }
        let opcode = SendOpcode::from_u8(entry.header.opcode).map(Opcode::of);
        let struck = faults.strikes(Point::Request, opcode, engine.now);
        let Some((rule, action)) = struck else { return RequestFault::None };
        let fault = rule.name;
        if let Action::Complete { status } = action {
            let effect = Effect::Completes(status);
            return RequestFault::Fails(Reason::Injected { fault, effect });
        }
        if let Action::DelayRequest { by } = action {
            let at = engine.now.after(by);
            faults.request = RequestWait::Until(at);
            engine.deadlines.set(at, Due::Request(self.key));
            let text = format!("request {} was delayed by {by:?}", entry.header.wr_id);
            record(self, engine, fault, text);
            return RequestFault::Waits;
        }
        if !rule.begin_report() {
            return RequestFault::None;
        }
        let fault = rule.number;
        faults.request = RequestWait::Waits;
        engine.report(Notification::FaultStruck { fault, qp: self.id });
        RequestFault::Waits
    }

    /// Forgets that a rule has selected the next request, which is flushed.
    pub(super) fn forget_request_fault(&mut self, engine: &mut EngineState) {
        let Some(faults) = &mut self.faults else { return };
        if let RequestWait::Until(at) = std::mem::take(&mut faults.request) {
            engine.deadlines.clear(at, Due::Request(self.key));
        }
    }

    /// Resumes the request that waited for the effect of a rule, or for its time.
    pub(super) fn end_request_wait(&mut self, engine: &mut EngineState) {
        if let Some(faults) = &mut self.faults
            && matches!(faults.request, RequestWait::Waits | RequestWait::Until(_))
        {
            faults.request = RequestWait::Ended;
        }
        engine.wake(self);
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
            CompletionFate::Now => self.publish_into_slot(cqe, true, engine),
            CompletionFate::Never => engine.unreserve(&self.send_cq, 1),
            CompletionFate::Held(hold) => self.hold(hold, *cqe, true, engine),
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
            CompletionFate::Now => {
                let published = self.recv_cq.publish(cqe)?;
                self.notify_by_rules(published, cqe, false, engine);
            }
            CompletionFate::Never => {}
            CompletionFate::Held(hold) => {
                if self.recv_cq.reserve(1)? == 0 {
                    return Err(CqFault::Full);
                }
                self.hold(hold, *cqe, false, engine);
            }
        }
        Ok(())
    }

    /// Publishes the held completions, then those of flushed receives, into their reserved slots.
    pub(super) fn publish_flushed(&mut self, cqes: &[Cqe], engine: &mut EngineState) {
        if self.faults.is_some() {
            return cqes.iter().for_each(|cqe| self.publish_flushed_by_rules(cqe, engine));
        }
        engine.notify(self.recv_cq.publish_reserved(cqes), &self.recv_cq);
    }

    fn publish_flushed_by_rules(&mut self, cqe: &Cqe, engine: &mut EngineState) {
        match self.completion_fate(cqe, engine) {
            CompletionFate::Now => self.publish_into_slot(cqe, false, engine),
            CompletionFate::Never => engine.unreserve(&self.recv_cq, 1),
            CompletionFate::Held(hold) => self.hold(hold, *cqe, false, engine),
        }
    }

    /// Publishes a completion into its reserved slot.
    fn publish_into_slot(&mut self, cqe: &Cqe, of_send: bool, engine: &mut EngineState) {
        let cq = if of_send { &self.send_cq } else { &self.recv_cq };
        let published = cq.publish_reserved(std::slice::from_ref(cqe));
        self.notify_by_rules(published, cqe, of_send, engine);
    }

    fn completion_fate(&self, cqe: &Cqe, engine: &EngineState) -> CompletionFate {
        let Some(faults) = &self.faults else { return CompletionFate::Now };
        // A completion does not overtake held completions.
        let after_held = faults.held.back().map(|held| held.at);
        let wr_id = cqe.wr_id;
        match faults.strikes_completion(Point::Completion, cqe, engine.now) {
            Some((rule, Action::LoseCompletion)) => {
                record(self, engine, rule.name, format!("the completion of {wr_id} was lost"));
                CompletionFate::Never
            }
            Some((rule, Action::HoldCompletion { by, batch, gap })) => {
                if rule.is_recorded {
                    let text = format!("the completion of {wr_id} was held back for {by:?}");
                    record(self, engine, rule.name, text);
                }
                let at = engine.now.after(by);
                let at = after_held.map_or(at, |last| last.after(gap).max(at));
                CompletionFate::Held(Hold { at, batch })
            }
            _ => after_held
                .map_or(CompletionFate::Now, |at| CompletionFate::Held(Hold { at, batch: None })),
        }
    }

    fn hold(&mut self, hold: Hold, cqe: Cqe, of_send: bool, engine: &mut EngineState) {
        let Hold { at, batch } = hold;
        let due = Due::Completion(self.key);
        let Some(faults) = &mut self.faults else { return };
        if faults.held.is_empty() {
            engine.deadlines.set(at, due);
        }
        faults.held.push_back(HeldCompletion { at, cqe, of_send });
        if batch.is_some_and(|batch| faults.held.len() >= batch as usize) {
            self.publish_held(true, engine);
        }
    }

    /// Publishes the held completions that are due, or all.
    pub(super) fn publish_held(&mut self, all: bool, engine: &mut EngineState) {
        let due = Due::Completion(self.key);
        let Some(faults) = &mut self.faults else { return };
        let Some(first) = faults.held.front().map(|held| held.at) else { return };
        engine.deadlines.clear(first, due);
        let now = engine.now;
        let is_due = |held: &mut HeldCompletion| all || held.at <= now;
        while let Some(held) = self.faults.as_mut().and_then(|f| f.held.pop_front_if(is_due)) {
            self.publish_into_slot(&held.cqe, held.of_send, engine);
        }
        if let Some(next) = self.faults.as_ref().and_then(|faults| faults.held.front()) {
            engine.deadlines.set(next.at, due);
        }
    }

    /// Drops the held completions of a QP that is destroyed, and returns their slots.
    pub(super) fn drop_held(&mut self, engine: &mut EngineState) {
        self.send_held_events(true, engine);
        self.forget_request_fault(engine);
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

enum CompletionFate {
    Now,
    Held(Hold),
    Never,
}

/// Time until which a completion is held, and the number of held completions that ends it.
struct Hold {
    at: Time,
    batch: Option<u32>,
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
