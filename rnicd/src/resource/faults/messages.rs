//! Rules of messages that the connection manager of the RoCE device sends.

use rnic_abi::faults::{Action, FaultName, FaultRule, MessageEffect, MessageKind, Point, Selector};
use rnic_abi::roce::mad;
use rnic_abi::types::*;

use super::Rule;
use super::held::Later;
use super::later::MAX_DELAYED;
use crate::clock;
use crate::cm::{CmMessage, Sender};
use crate::resource::Manager;
use crate::resource::session::Session;

impl Manager {
    /// Sends a message as the rules of its session require.
    pub(in crate::resource) fn send_by_rules(&mut self, message: Box<CmMessage>) {
        let now = clock::now();
        let Some((name, kind, effect)) = self.message_effect(&message, now) else {
            return self.pass(&message, now);
        };
        let Sender { session, qp } = message.sender;
        let kind = kind.name();
        let text = match effect {
            MessageEffect::Drop => format!("{kind} was not sent"),
            MessageEffect::Duplicate { by } => {
                self.pass(&message, now);
                if by.is_zero() {
                    self.pass(&message, now);
                } else {
                    self.delay(now.after(by), session, Later::Message(message), now);
                }
                format!("{kind} was sent twice")
            }
            MessageEffect::Delay { by } => {
                if self.delay(now.after(by), session, Later::Message(message), now) {
                    format!("{kind} was delayed by {by:?}")
                } else {
                    format!(
                        "{kind} was sent at once: {MAX_DELAYED} actions of the session are already \
                         delayed, or the session has ended"
                    )
                }
            }
        };
        self.record_fault(session, name, qp, &text, now);
    }

    pub(super) fn pass(&mut self, message: &CmMessage, now: Time) {
        let CmMessage { from, to, mad, .. } = *message;
        self.cm.pass_message(from, to, mad, now);
    }

    /// Returns the effect of the first rule that takes effect on a message, with its name.
    fn message_effect(
        &self,
        message: &CmMessage,
        now: Time,
    ) -> Option<(FaultName, MessageKind, MessageEffect)> {
        let sent = MessageKind::of_attribute(mad::attribute(&message.mad))?;
        let Sender { session: id, qp } = message.sender;
        let session = self.sessions.get(&id).or_else(|| self.leaving.get(&id))?;
        if let Some((name, effect)) = self.held_reply(session, qp, sent) {
            return Some((name, sent, effect));
        }
        let selects = |rule: &Rule| {
            let FaultRule { select, action, point, .. } = &rule.armed.rule;
            let Action::CmMessage { kind, effect } = *action else { return None };
            let selected = *point == Point::CmMessage
                && kind.is_none_or(|kind| kind == sent)
                && rule.selects(session)
                && self.selects_message(select, session, message)
                && rule.armed.strikes(now);
            selected.then_some((rule.name(), sent, effect))
        };
        self.faults.rules.values().find_map(selects)
    }

    /// Returns true if a rule that selects the session of a message selects the message. A message
    /// that concerns no QP is not selected by keys of a PD, QP or CQ.
    fn selects_message(&self, select: &Selector, session: &Session, message: &CmMessage) -> bool {
        let CmMessage { sender, from, to, .. } = message;
        let Selector { device, pd, qp: only, cq, peer, .. } = select;
        let object = sender.qp.and_then(|id| Some((id, session.qps.get(&id)?)));
        let has_gid =
            |device: &String| self.gids_of(device).iter().any(|r| r.gid == (*from).into());
        let of_qp = match object {
            Some((id, qp)) => {
                // The peer is compared below, with the destination of the message.
                self.selects_qp(&Selector { peer: None, ..select.clone() }, id, qp)
            }
            None => {
                let of_device = device.as_ref().is_none_or(has_gid);
                only.is_none() && pd.is_none() && cq.is_none() && of_device
            }
        };
        of_qp && peer.is_none_or(|peer| peer == *to)
    }
}
