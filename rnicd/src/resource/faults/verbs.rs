//! Rules of verbs, which the control thread evaluates for each request of a program.

use std::time::Duration;

use rnic_abi::abi::control::{DiagnosisKind, Event, LibraryCall, Refusal, ReplyBody, RequestInfo};
use rnic_abi::faults::{Action, FaultRule, Point, Verb};
use rnic_abi::types::*;
use rnic_core::engine::rule_of_fault;

use super::held::{HeldReply, Later};
use crate::resource::Manager;
use crate::resource::answer::{Outcome, Refused};

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
        let selects = |rule: &super::Rule| {
            let FaultRule { select, action, point, .. } = &rule.armed.rule;
            // A call of the library that no rule concerns costs no request.
            let is_of_verb = match select.verb {
                Some(only) => only == verb,
                None => asked.call.is_none(),
            };
            *point == Point::Verb
                && is_of_verb
                && rule.selects(session)
                && (!action.holds_reply() || object.is_some_and(|qp| qp.kind != QpType::Ud))
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
                Action::Reject { .. } | Action::Unreachable { .. } => {
                    let Some(qp) = asked.qp else { continue };
                    let event = self.failed_connect(qp, action, &rule_of_fault(name));
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
                Action::LateReply { by } => held = Some((number, name, Some(by))),
                Action::NoReply => held = Some((number, name, None)),
                _ => self.take_effect(number, Some((id, asked.qp)), now),
            }
        }
        self.faults.held_reply = held.map(|(rule, name, by)| HeldReply { rule, name, by });
        answer
    }

    /// Returns the event of a connection attempt that fails.
    fn failed_connect(&mut self, qp: QpId, action: Action, why: &str) -> Option<Event> {
        let (_, object) = self.qp_of(qp)?;
        let context = object.shared.context.load(std::sync::atomic::Ordering::Relaxed);
        let is_rc = object.kind.is_roce() && object.kind != QpType::Ud;
        Some(match action {
            Action::Reject { reason } if is_rc => {
                Event::RcRejected { qp, context, reason, private_data: vec![0; REJ_DATA] }
            }
            Action::Reject { .. } => Event::Rejected { qp, context, private_data: Vec::new() },
            Action::Unreachable { errno, .. } => {
                Event::Unreachable { qp, context, errno, reason: why.to_owned() }
            }
            _ => return None,
        })
    }
}

/// Length of the private data of a rejection (IBTA specification, volume 1, section 12.6.7).
const REJ_DATA: usize = 148;
