//! Effects of rules on sessions, devices and QPs.

use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::abi::control::{AsyncObject, Diagnosis, DiagnosisKind, Event};
use rnic_abi::faults::{Action, AsyncEvent, Element, FaultName};
use rnic_abi::types::*;
use rnic_core::engine::{EngineCommand, QpFault, rule_of_fault};

use super::{Lasting, Rule};
use crate::clock;
use crate::resource::Manager;
use crate::resource::qp::QpPhase;
use crate::resource::session::Session;

/// The session and the QP, if known, of the request that a rule selected. `None` for a rule that a
/// timer triggers.
pub(super) type Subject = Option<(SessionId, Option<QpId>)>;

impl Manager {
    /// Returns the time at which [`run_faults`](Self::run_faults) is due.
    pub fn next_fault(&self) -> Option<Time> {
        self.faults.next()
    }

    /// Carries out the rules whose timer has expired, and ends effects.
    pub fn run_faults(&mut self, now: Time) {
        for rule in std::mem::take(&mut self.faults.reported) {
            rule.end_report();
        }
        while let Some(&(at, number)) = self.faults.due.first()
            && at <= now
        {
            self.faults.due.pop_first();
            if self.faults.rules.get(&number).is_some_and(|rule| rule.lasts.is_some()) {
                self.end_effect(number, now);
            } else {
                self.strike(number, None, now);
            }
            // The rule may be a setting that comes into force now.
            self.faults.are_stale = true;
        }
        self.refresh_stale_faults();
        self.run_delayed(now);
    }

    /// Carries out the effect of a rule that struck in a worker.
    pub(in crate::resource) fn fault_struck(&mut self, number: u64, qp: QpId) {
        if let Some(rule) = self.faults.rules.get(&number) {
            self.faults.reported.push(rule.armed.clone());
        }
        let Some(session) = self.handles.qps.owner(qp.0) else { return };
        self.take_effect(number, Some((session, Some(qp))), clock::now());
        // A session that is about to end must not start further requests.
        let rule = self.faults.rules.get(&number);
        if rule.is_none_or(|rule| rule.armed.rule.action != Action::EndSession) {
            self.faults.waiting.push(qp);
        }
    }

    /// Lets workers start the requests that waited for the effects of rules.
    pub(super) fn release_requests(&mut self) {
        for qp in std::mem::take(&mut self.faults.waiting) {
            if let Some((_, object)) = self.qp_of(qp)
                && let QpPhase::Bound(worker) = object.phase
            {
                self.workers.one(worker, EngineCommand::FaultTookEffect(qp));
            }
        }
    }

    /// Counts an occasion of a rule. If the fault takes place, carries it out.
    pub(super) fn strike(&mut self, number: u64, subject: Subject, now: Time) {
        let Some(rule) = self.faults.rules.get(&number) else { return };
        if rule.armed.strikes(now) {
            self.take_effect(number, subject, now);
        }
    }

    /// Carries out the effect of a rule on the subject, or without a subject on all objects that
    /// the rule selects.
    pub(super) fn take_effect(&mut self, number: u64, subject: Subject, now: Time) {
        let Some(rule) = self.faults.rules.get(&number) else { return };
        let name = rule.name();
        let action = rule.armed.rule.action;
        match action {
            Action::Disconnect | Action::QpFatal => {
                let (effect, text) = match action {
                    Action::Disconnect => (QpFault::Disconnect, "the connection was ended"),
                    _ => (QpFault::Fatal, "the queue pair has failed"),
                };
                for (session, qp) in self.qps_of(number, subject) {
                    self.inject(session, qp, name, effect);
                    self.record_fault(session, name, Some(qp), text, now);
                }
            }
            Action::Stop { time } => {
                let only = subject.and_then(|(_, qp)| qp);
                let lasting = only.map_or(Lasting::All, Lasting::Qp);
                if self.begin_effect(number, lasting, time, now) {
                    let text = "the queue pair was stopped";
                    for (session, qp) in self.qps_of(number, subject) {
                        self.record_fault(session, name, Some(qp), text, now);
                    }
                }
            }
            Action::PortDown { time } if self.begin_effect(number, Lasting::All, time, now) => {
                self.raise(number, AsyncEvent::PORT_ERR, None, now);
                self.files_changed(number);
            }
            Action::CqFatal => self.fail_cqs(number, subject, now),
            Action::SrqFatal => self.fail_srqs(number, subject, now),
            Action::Change { change, time }
                if self.begin_effect(number, Lasting::All, time, now) =>
            {
                self.begin_change(number, change, now);
            }
            Action::Event { event } => self.raise(number, event, subject, now),
            Action::DeviceFatal => {
                self.raise(number, AsyncEvent::DEVICE_FATAL, None, now);
                for (session, qp) in self.qps_of(number, None) {
                    self.inject(session, qp, name, QpFault::Fatal);
                }
            }
            Action::EndSession => {
                for session in self.sessions_of(number, subject) {
                    self.record_fault(session, name, None, "the session was ended", now);
                    self.outbox.end_by_rule(session, rule_of_fault(name));
                }
            }
            // The engine, `verb_fault` or a setting of the QP carries out the others.
            _ => {}
        }
    }

    fn inject(&mut self, session: SessionId, qp: QpId, name: FaultName, effect: QpFault) {
        let Some((_, object)) = self.qp_of(qp) else { return };
        let context = object.shared.context.load(Relaxed);
        if let QpPhase::Bound(worker) = object.phase {
            self.workers.one(worker, EngineCommand::Inject(qp, name, effect));
        } else if effect == QpFault::Fatal && self.end_unbound(session, qp).is_some() {
            // The ticket is not needed, because no reply waits for it.
            let reason = rule_of_fault(name);
            self.tell(session, &Event::QpFatal { qp, context, reason });
        }
    }

    /// Begins the lasting effect of a rule. Returns false if the effect is already in force. Then
    /// only its timer restarts, because a program may cause any number of occasions.
    fn begin_effect(
        &mut self,
        number: u64,
        lasting: Lasting,
        time: Option<std::time::Duration>,
        now: Time,
    ) -> bool {
        let Some(rule) = self.faults.rules.get_mut(&number) else { return false };
        let begins = rule.lasts.replace(lasting) != Some(lasting);
        self.faults.are_stale |= begins;
        if time.is_some() || begins {
            self.faults.due.retain(|(_, of)| *of != number);
        }
        if let Some(time) = time {
            self.faults.due.insert((now.after(time), number));
        }
        begins
    }

    /// Ends the lasting effect of a rule, if it has one.
    pub(super) fn end_effect(&mut self, number: u64, now: Time) {
        let Some(rule) = self.faults.rules.get_mut(&number) else { return };
        if rule.lasts.take().is_none() {
            return;
        }
        self.faults.are_stale = true;
        match rule.armed.rule.action {
            Action::PortDown { .. } => {
                self.raise(number, AsyncEvent::PORT_ACTIVE, None, now);
                self.files_changed(number);
            }
            Action::Change { change, .. } => self.end_change(number, change, now),
            _ => {}
        }
    }

    /// Raises an asynchronous event for the objects that a rule selects.
    pub(super) fn raise(&mut self, number: u64, event: AsyncEvent, subject: Subject, now: Time) {
        let Some(rule) = self.faults.rules.get(&number) else { return };
        let name = rule.name();
        let mut objects: Vec<(SessionId, AsyncObject)> = Vec::new();
        match event.element() {
            Element::Device | Element::Port => {
                let devices = self.devices_of(&rule.armed.rule);
                for id in self.sessions_of(number, subject) {
                    let of_session = |name: &String| (id, AsyncObject::Device(name.clone()));
                    objects.extend(devices.iter().map(of_session));
                }
            }
            Element::Qp => {
                let qps = self.qps_of(number, subject).into_iter();
                objects.extend(qps.map(|(id, qp)| (id, AsyncObject::Qp(qp))));
            }
            Element::Cq => {
                let cqs = self.cqs_of(number, subject).into_iter();
                objects.extend(cqs.map(|(id, cq)| (id, AsyncObject::Cq(cq))));
            }
            Element::Srq => {
                let srqs = self.srqs_of(number, subject).into_iter();
                objects.extend(srqs.map(|(id, srq)| (id, AsyncObject::Srq(srq))));
            }
        }
        let text = format!("{} was raised", event.name());
        let mut recorded = None;
        // Objects of the same session are adjacent, so each session gets one record.
        for (id, object) in objects {
            self.tell(id, &Event::Async { event: event.number(), object });
            if recorded.replace(id) != Some(id) {
                self.record_fault(id, name, None, &text, now);
            }
        }
    }

    /// Returns the rule and the sessions that it selects: the session of the subject, or all
    /// sessions without a subject.
    pub(super) fn selected(
        &self,
        number: u64,
        subject: Subject,
    ) -> impl Iterator<Item = (&Rule, &Session)> {
        let one = subject.and_then(|(id, _)| self.sessions.get(&id));
        let all = subject.is_none().then(|| self.sessions.values()).into_iter().flatten();
        let rule = self.faults.rules.get(&number).into_iter();
        rule.flat_map(move |rule| {
            let sessions = one.into_iter().chain(all.clone());
            sessions.filter(|session| rule.selects(session)).map(move |session| (rule, session))
        })
    }

    pub(super) fn sessions_of(&self, number: u64, subject: Subject) -> Vec<SessionId> {
        self.selected(number, subject).map(|(_, session)| session.id).collect()
    }

    pub(super) fn qps_of(&self, number: u64, subject: Subject) -> Vec<(SessionId, QpId)> {
        let only = subject.and_then(|(_, qp)| qp);
        let mut found = Vec::new();
        let Some(select) = self.faults.rules.get(&number).map(|rule| rule.armed.rule.concerned())
        else {
            return found;
        };
        for (_, session) in self.selected(number, subject) {
            let one = only.and_then(|id| session.qps.get_key_value(&id));
            let all = only.is_none().then_some(&session.qps).into_iter().flatten();
            for (id, qp) in one.into_iter().chain(all) {
                if self.selects_qp(&select, *id, qp) {
                    found.push((session.id, *id));
                }
            }
        }
        found
    }

    /// Records that a rule had an effect.
    pub(super) fn record_fault(
        &mut self,
        session: SessionId,
        name: FaultName,
        qp: Option<QpId>,
        text: &str,
        now: Time,
    ) {
        let rule = rule_of_fault(name);
        let why = Diagnosis { qp, ..Diagnosis::new(session, DiagnosisKind::Injected, rule, text) };
        self.records.diagnoses.record(now, why);
    }
}
