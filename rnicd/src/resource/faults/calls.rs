//! Rules for library calls that need no request to the daemon, such as `ibv_post_send(3)`. While a
//! session has rules for such a call, its library sends a request before each call.

use rnic_abi::abi::control::{LibraryCall, RequestInfo};
use rnic_abi::abi::queue::SendOpcode;
use rnic_abi::faults::{FaultRule, Opcode, Point, Selector};
use rnic_abi::types::*;

use super::Rule;
use crate::resource::Manager;
use crate::resource::session::Session;

impl Rule {
    /// Returns the library calls that the rule selects, as bits of [`LibraryCall`]s.
    pub(super) fn library_calls(&self) -> u64 {
        let FaultRule { select, point, .. } = &self.armed.rule;
        let verb = select.verb.filter(|_| *point == Point::Verb);
        verb.map_or(0, |verb| verb.library_calls())
    }
}

impl Manager {
    /// Publishes which library calls have rules that select a session.
    pub(in crate::resource) fn publish_ruled_calls(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let selected = self.faults.rules.values().filter(|rule| rule.selects(session));
        let calls = selected.fold(0, |calls, rule| calls | rule.library_calls());
        session.arenas.set_ruled_calls(calls);
        // The next change of the rules must update the session, even if no rule selects it then.
        session.has_faults |= calls != 0;
    }

    /// Returns true if a rule that selects a session selects a request of the session. A rule
    /// without a verb selects only requests with an object for each key of the rule. A rule with a
    /// verb may also have keys that requests of this verb lack. These keys select the objects of
    /// the effect, and are not compared here.
    pub(super) fn selects_request(
        &self,
        select: &Selector,
        session: &Session,
        asked: &RequestInfo,
    ) -> bool {
        let names = |key| select.verb.is_none_or(|verb| verb.object().keys().contains(&key));
        let undecided = asked.connection_request.and_then(|id| session.requests.get(&id));
        let asked_peer = asked.peer.or(undecided.map(|request| request.peer));
        if let Some(id) = asked.qp {
            let Some(qp) = session.qps.get(&id) else { return false };
            let of = Selector { peer: None, ..select.clone() };
            let peer = asked_peer.or_else(|| qp.peer());
            return self.selects_qp(&of, id, qp)
                && select.peer.is_none_or(|wanted| peer == Some(wanted))
                && select.opcode.is_none_or(|wanted| opcode_of(asked) == Some(wanted));
        }
        let of_srq = match asked.call {
            Some(LibraryCall::PostSrqRecv { srq }) => session.srqs.get(&srq).map(|srq| srq.pd),
            _ => None,
        };
        let pd = asked.pd.or(of_srq);
        !(select.device.is_some() && names("device") || select.qp.is_some() && names("qp"))
            && (!names("pd") || select.pd.is_none_or(|wanted| pd == Some(PdId(wanted))))
            && (!names("cq") || select.cq.is_none_or(|wanted| asked.cq == Some(CqId(wanted))))
            && (!names("peer") || select.peer.is_none_or(|wanted| asked_peer == Some(wanted)))
    }
}

/// Returns the kind of the work request that a library is about to post.
fn opcode_of(asked: &RequestInfo) -> Option<Opcode> {
    let Some(LibraryCall::PostSend { opcode, .. }) = asked.call else { return None };
    SendOpcode::from_u8(opcode).map(Opcode::of)
}
