//! Rules of replies to connection requests, which are sent late or never.
//!
//! The accept of an iWARP connection is carried out later: until then the request is undecided, and
//! if it ends, so does the attempt of the QP. A connection of an RC or UC QP is accepted at once,
//! and REP is delayed or dropped whenever it is sent.

use rnic_abi::abi::control::Refusal;
use rnic_abi::faults::{FaultName, MessageEffect, MessageKind};
use rnic_abi::types::*;

use super::held::{HeldReply, Later};
use crate::clock;
use crate::cm::{AcceptParams, ConnectFailure};
use crate::resource::Manager;
use crate::resource::session::Session;

impl Manager {
    /// Accepts a request, now or as a rule requires.
    pub(in crate::resource) fn accept_by_rules(
        &mut self,
        id: SessionId,
        params: AcceptParams,
        held: Option<HeldReply>,
        now: Time,
    ) -> Result<(), Refusal> {
        let Some(held) = held else { return self.cm.accept(params, now) };
        let text = match held.by {
            Some(by) => format!("the MPA reply was delayed by {by:?}"),
            None => "the MPA reply was not sent".to_owned(),
        };
        self.record_fault(id, held.name, Some(params.qp), &text, now);
        let request = params.request;
        self.faults.accepts.insert(request, params);
        if let Some(by) = held.by {
            self.delay(now.after(by), id, Later::Accept(request), now);
        }
        Ok(())
    }

    /// Holds back the REP of a QP that has accepted a connection, or no longer.
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
        let Some(params) = self.faults.accepts.remove(&request) else { return };
        let qp = params.qp;
        if let Err(refusal) = self.cm.accept(params, now) {
            // Fails if the request has ended.
            let _ = self.cm.reject(request, &[], now);
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
        let Some(params) = self.faults.accepts.remove(&request) else { return false };
        self.unreachable(params.qp, ConnectFailure::reset(why));
        true
    }

    /// Cancels connecting or accepting on a QP. A request whose accept a rule holds back is
    /// rejected.
    pub(in crate::resource) fn cancel_startup(&mut self, qp: QpId) {
        self.cm.cancel(qp);
        let held = self.faults.accepts.iter().find(|(_, params)| params.qp == qp);
        if let Some(request) = held.map(|(request, _)| *request) {
            self.faults.accepts.remove(&request);
            // Fails if the request has ended.
            let _ = self.cm.reject(request, &[], clock::now());
        }
    }
}
