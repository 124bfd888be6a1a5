//! Rules of verbs, which the control thread evaluates for each request of a program.

use std::time::Duration;

use rnic_abi::abi::control::{DiagnosisKind, Event, LibraryCall, Refusal, ReplyBody, RequestInfo};
use rnic_abi::faults::{Action, CmEventEffect, CmEventKind, FaultRule, Point, Verb};
use rnic_abi::roce::connection::REJECT_DATA;
use rnic_abi::types::*;
use rnic_core::engine::rule_of_fault;

use super::held::{HeldReply, Later};
use crate::resource::Manager;
use crate::resource::answer::{Outcome, Refused};
use crate::resource::qp::Qp;

impl Manager {
    /// Evaluates the rules of a request. Returns its answer if a rule gives one.
    pub(in crate::resource) fn verb_fault(
        &mut self,
        id: SessionId,
        asked: &RequestInfo,
        now: Time,
    ) -> Option<Result<Outcome, Refused>> {
        self.faults.held_reply = None;
        if self.faults.rules.is_empty() {
            return None;
        }
        let verb = Verb::of_request(asked.name)?;
        let session = self.sessions.get(&id)?;
        let object = asked.qp.and_then(|qp| session.qps.get(&qp));
        let is_rc = asked.name == "AcceptRc";
        let is_iwarp = |qp: &Qp| qp.kind == QpType::Iwarp;
        let selects = |rule: &super::Rule| {
            let FaultRule { select, action, point, .. } = &rule.armed.rule;
            // Libraries report only calls that rules name, so a rule without a verb selects no
            // library call.
            let is_of_verb = match select.verb {
                Some(only) => only == verb,
                None => asked.call.is_none(),
            };
            *point == Point::Verb
                && is_of_verb
                && rule.selects(session)
                && (!action.holds_reply() || is_rc || object.is_some_and(is_iwarp))
                && is_of_event(*action, asked)
                && self.selects_request(select, session, asked)
        };
        let rules = self.faults.rules.iter().filter(|(_, rule)| selects(rule));
        let struck = rules.filter(|(_, rule)| rule.armed.strikes(now));
        let struck: Vec<_> =
            struck.map(|(number, rule)| (*number, rule.name(), rule.armed.rule.action)).collect();
        let mut answer = None;
        let mut held = None;
        for (number, name, action) in struck {
            match action {
                Action::Fail { errno } => {
                    let rule = rule_of_fault(name);
                    let refusal = Refusal::System {
                        what: rule.clone(),
                        error: rustix::io::Errno::from_raw_os_error(errno.into()).to_string(),
                        errno,
                    };
                    let kind = DiagnosisKind::Injected;
                    answer = Some(Err(self.refused_by(id, *asked, (kind, rule), refusal, now)));
                }
                Action::Reject { .. } if asked.connection_request.is_some() => {
                    if self.reject_accepted(id, asked, number, now) {
                        answer = Some(Ok(ReplyBody::Done.into()));
                    }
                }
                Action::Reject { .. } | Action::Unreachable { .. } => {
                    let Some(qp) = asked.qp else { continue };
                    let is_rc = asked.name == "ConnectRc";
                    let event = self.failed_connect(qp, is_rc, number, &rule_of_fault(name));
                    let by = if let Action::Unreachable { by, .. } = action {
                        by
                    } else {
                        Duration::ZERO
                    };
                    if let Some(event) = event {
                        self.record_fault(id, name, Some(qp), "a connection request failed", now);
                        self.delay(now.after(by), id, Later::Event(event), now);
                        answer = Some(Ok(ReplyBody::Done.into()));
                    }
                }
                Action::AddrError { errno, by } | Action::RouteError { errno, by } => {
                    if let Some(
                        LibraryCall::ResolveAddr { context, .. }
                        | LibraryCall::ResolveRoute { context, .. },
                    ) = asked.call
                    {
                        self.record_fault(id, name, None, "a resolution failed", now);
                        let event = Event::ResolutionFailed { context, errno };
                        self.delay(now.after(by), id, Later::Event(event), now);
                        answer = Some(Ok(ReplyBody::EventFollows.into()));
                    }
                }
                Action::CmEvent { effect, .. } => {
                    let (count, text) = match effect {
                        CmEventEffect::Drop => (0, "lost"),
                        CmEventEffect::Duplicate => (2, "repeated"),
                    };
                    let text = format!("{} was {text}", event_of(asked));
                    self.record_fault(id, name, None, &text, now);
                    answer = Some(Ok(ReplyBody::Events { count }.into()));
                }
                Action::LateReply { by } => held = Some((number, name, Some(by))),
                Action::NoReply => held = Some((number, name, None)),
                _ => self.take_effect(number, Some((id, asked.qp)), now),
            }
        }
        self.faults.held_reply = held.map(|(rule, name, by)| HeldReply { rule, name, by });
        answer
    }

    /// Returns the event of a connection attempt that fails.
    fn failed_connect(&mut self, qp: QpId, is_rc: bool, number: u64, why: &str) -> Option<Event> {
        let rule = self.faults.rules.get(&number)?.armed.clone();
        let FaultRule { action, data, .. } = &rule.rule;
        let (_, object) = self.qp_of(qp)?;
        let context = object.shared.context.load(std::sync::atomic::Ordering::Relaxed);
        Some(match *action {
            Action::Reject { reason } if is_rc => {
                let mut private_data = data.clone();
                private_data.resize(REJECT_DATA, 0);
                Event::RcRejected { qp, context, reason, private_data }
            }
            Action::Reject { .. } => Event::Rejected { qp, context, private_data: data.clone() },
            Action::Unreachable { errno, .. } => {
                Event::Unreachable { qp, context, errno, reason: why.to_owned() }
            }
            _ => return None,
        })
    }
}

/// Returns true if an action on events applies to the event that a library queues. Other actions
/// apply to all requests.
fn is_of_event(action: Action, asked: &RequestInfo) -> bool {
    let Action::CmEvent { kind, effect } = action else { return true };
    let Some(LibraryCall::CmEvent { kind: number, .. }) = asked.call else { return false };
    CmEventKind::of_number(number).is_some_and(|queued| {
        kind.is_none_or(|wanted| wanted == queued) && effect.applies_to(queued)
    })
}

/// Returns the name of the event that a library queues.
fn event_of(asked: &RequestInfo) -> String {
    match asked.call {
        Some(LibraryCall::CmEvent { kind, .. }) => CmEventKind::of_number(kind),
        _ => None,
    }
    .map_or_else(String::new, CmEventKind::name)
}
