//! Rules that delay or suppress replies to connection requests.
//!
//! On the iWARP device a rule delays the accept itself. The request stays undecided until then, and
//! if the request ends, the QP's connection attempt fails. A connection of an RC or UC QP is
//! accepted at once, and each REP is delayed or dropped when it is sent.

use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::abi::control::{Event, MAX_PRIVATE_DATA, Refusal, RequestInfo};
use rnic_abi::faults::{FaultName, MessageEffect, MessageKind};
use rnic_abi::roce::connection::{REJECT_DATA, Reason};
use rnic_abi::types::*;
use rnic_core::engine::rule_of_fault;

use super::held::{HeldAccept, HeldReply, Later};
use crate::clock;
use crate::cm::{AcceptParams, ConnectFailure};
use crate::resource::session::Session;
use crate::resource::{Manager, find, refuse};

impl Manager {
    /// Accepts a request at once, or as the rule `held` requires.
    pub(in crate::resource) fn accept_by_rules(
        &mut self,
        id: SessionId,
        params: AcceptParams,
        held: Option<HeldReply>,
        now: Time,
    ) -> Result<(), Refusal> {
        let Some(held) = held else { return self.cm.accept(params, now) };
        let bytes = params.private_data.len() as u64;
        refuse::at_most("private_data", bytes, "one MPA frame", MAX_PRIVATE_DATA as u64)?;
        let text = match held.by {
            Some(by) => format!("the MPA reply was delayed by {by:?}"),
            None => "the MPA reply was not sent".to_owned(),
        };
        self.record_fault(id, held.name, Some(params.qp), &text, now);
        let request = params.request;
        let undecided = self.sessions.get(&id).and_then(|of| of.requests.get(&request));
        let listener = undecided.map(|undecided| undecided.listener);
        self.faults.accepts.insert(request, HeldAccept { session: id, listener, params });
        if let Some(by) = held.by {
            self.delay(now.after(by), id, Later::Accept(request), now);
        }
        Ok(())
    }

    /// Rejects a connection request that the program accepts. Returns false if the request has
    /// ended.
    pub(super) fn reject_accepted(
        &mut self,
        id: SessionId,
        asked: &RequestInfo,
        number: u64,
        now: Time,
    ) -> bool {
        let Some(rule) = self.faults.rules.get(&number).map(|rule| rule.armed.clone()) else {
            return false;
        };
        let (Some(request), Some(qp)) = (asked.connection_request, asked.qp) else { return false };
        let Ok(session) = find(&mut self.sessions, id) else { return false };
        let Some(object) = session.qps.get(&qp) else { return false };
        if session.requests.remove(&request).is_none() {
            return false;
        }
        let context = object.shared.context.load(Relaxed);
        let kind = object.kind;
        // The kind of the QP is not sufficient: programs that connect their QPs themselves may
        // accept an RC connection with the number of a UD QP.
        let is_for_ud = self.cm.is_for_ud(request);
        self.cm.reject_unasked(request, &rule.rule.data, now);
        let text = "the connection request was rejected";
        self.record_fault(id, rule.name, Some(qp), text, now);
        let reason = rule_of_fault(rule.name);
        let event = match kind {
            // No event, because the QP has no connection and also serves other requests.
            _ if is_for_ud => return true,
            kind if kind.is_roce() => {
                let private_data = vec![0; REJECT_DATA];
                Event::RcRejected { qp, context, reason: Reason::CONSUMER.0, private_data }
            }
            _ => {
                let ConnectFailure { errno, reason } = ConnectFailure::reset(reason);
                Event::Unreachable { qp, context, errno, reason }
            }
        };
        self.tell(id, &event);
        true
    }

    /// Sets or removes the rule that holds back the REP of a QP.
    pub(in crate::resource) fn hold_rep(&mut self, qp: QpId, held: Option<HeldReply>) {
        if let Some((_, object)) = self.qp_of(qp) {
            object.held_reply = held;
        }
    }

    /// Returns the effect of a rule on the REP of a QP.
    pub(super) fn held_reply(
        &self,
        session: &Session,
        qp: Option<QpId>,
        sent: MessageKind,
    ) -> Option<(FaultName, MessageEffect)> {
        let object = session.qps.get(&qp.filter(|_| sent == MessageKind::REP)?)?;
        let HeldReply { rule, name, by } = object.held_reply?;
        let delay = by.map_or(MessageEffect::Drop, |by| MessageEffect::Delay { by });
        self.faults.rules.contains_key(&rule).then_some((name, delay))
    }

    /// Carries out an accept that a rule has delayed.
    pub(super) fn end_held_accept(&mut self, request: RequestId, now: Time) {
        let Some(HeldAccept { params, .. }) = self.faults.accepts.remove(&request) else { return };
        let qp = params.qp;
        if let Err(refusal) = self.cm.accept(params, now) {
            self.cm.reject_unasked(request, &[], now);
            self.unreachable(qp, ConnectFailure::reset(refusal));
        }
    }

    /// Ends the attempt of a QP whose accept a rule holds back, because the request has ended.
    /// Returns false for other requests.
    pub(in crate::resource) fn held_accept_withdrawn(
        &mut self,
        request: RequestId,
        why: &str,
    ) -> bool {
        let Some(held) = self.faults.accepts.remove(&request) else { return false };
        self.unreachable(held.params.qp, ConnectFailure::reset(why));
        true
    }

    /// Ends the attempts of QPs whose accepts a rule holds back, because their listener is closed.
    /// Its requests have been rejected.
    pub(in crate::resource) fn end_held_accepts_of(&mut self, listener: ListenerId) {
        let held = self.faults.accepts.iter().filter(|(_, held)| held.listener == Some(listener));
        for request in held.map(|(request, _)| *request).collect::<Vec<_>>() {
            self.held_accept_withdrawn(request, "the listener was closed");
        }
    }

    /// Cancels connecting or accepting on a QP. A request whose accept a rule holds back is
    /// rejected.
    pub(in crate::resource) fn cancel_startup(&mut self, qp: QpId) {
        self.cm.cancel(qp);
        let held = self.faults.accepts.iter().find(|(_, held)| held.params.qp == qp);
        if let Some(request) = held.map(|(request, _)| *request) {
            self.faults.accepts.remove(&request);
            self.cm.reject_unasked(request, &[], clock::now());
        }
    }
}
