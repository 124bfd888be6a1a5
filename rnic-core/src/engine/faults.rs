//! Effects of fault rules on requests and completions: requests that fail, and completions that are
//! published late or never.
//!
//! Rules with effects outside of the engine are reported to the resource manager
//! ([`Notification::FaultStruck`]).

use super::deadlines::Due;
use super::fault_rules::{HeldCompletion, rule_of_fault};
use super::interface::Notification;
use super::qp_core::QpCore;
use super::reason::{Effect, Reason};
use super::state::EngineState;
use crate::device::cq::CqFault;
use rnic_abi::abi::control::{Diagnosis, DiagnosisKind};
use rnic_abi::abi::queue::Cqe;
use rnic_abi::faults::{Action, FaultName, Opcode, Point};
use rnic_abi::types::{CompletionOpcode, Time};

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
    pub(super) fn publish_held(&mut self, all: bool, engine: &mut EngineState) {
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

    /// Returns true if a rule corrupts the CRC of the next FPDU.
    pub(super) fn corrupts_crc(&self, engine: &EngineState) -> bool {
        let struck = self.faults.as_ref().and_then(|f| f.strikes(Point::Fpdu, None, engine.now));
        let Some((rule, _)) = struck else { return false };
        record(self, engine, rule.name, "the CRC of an FPDU was corrupted".to_owned());
        true
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
