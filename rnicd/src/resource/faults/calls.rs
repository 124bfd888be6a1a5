//! Rules of calls that libraries carry out without a request, such as `ibv_post_send(3)`. A library
//! asks before such a call while its session has rules for it.

use rnic_abi::abi::control::LibraryCall;
use rnic_abi::abi::queue::SendOpcode;
use rnic_abi::faults::{FaultRule, Opcode, Point, Selector};
use rnic_abi::types::*;

use super::Rule;
use crate::resource::Manager;
use crate::resource::session::Session;

impl Rule {
    /// Returns the calls of libraries that the rule concerns: bits of [`LibraryCall`]s.
    pub(super) fn library_calls(&self) -> u64 {
        let FaultRule { select, point, .. } = &self.armed.rule;
        let verb = select.verb.filter(|_| *point == Point::Verb);
        verb.map_or(0, |verb| verb.library_calls())
    }
}

impl Manager {
    /// Tells the library of a session which of its calls have rules.
    pub(in crate::resource) fn publish_ruled_calls(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let selected = self.faults.rules.values().filter(|rule| rule.selects(session));
        let calls = selected.fold(0, |calls, rule| calls | rule.library_calls());
        session.arenas.set_ruled_calls(calls);
        // The next change of the rules concerns the session.
        session.has_faults |= calls != 0;
    }

    /// Returns true if the objects of a call match a selector. A key matches no call
    /// without such an object.
    pub(super) fn selects_call(
        &self,
        select: &Selector,
        session: &Session,
        call: LibraryCall,
    ) -> bool {
        let is_of = |id| session.qps.get(&id).is_some_and(|qp| self.selects_qp(select, id, qp));
        let Selector { device, pd, qp, cq, peer, opcode, .. } = select;
        let mut has_pd = None;
        let mut has_cq = None;
        let mut has_peer = None;
        match call {
            LibraryCall::PostSend { qp, opcode: of } => {
                let of = SendOpcode::from_u8(of).map(Opcode::of);
                return opcode.is_none_or(|only| of == Some(only)) && is_of(qp);
            }
            LibraryCall::PostRecv { qp } => return is_of(qp),
            LibraryCall::PostSrqRecv { srq } => has_pd = session.srqs.get(&srq).map(|srq| srq.pd.0),
            LibraryCall::PollCq { cq } | LibraryCall::ReqNotifyCq { cq } => has_cq = Some(cq.0),
            LibraryCall::CreateAh { pd } => has_pd = Some(pd.0),
            LibraryCall::QueryPort | LibraryCall::QueryPkey => {}
            LibraryCall::ResolveAddr { peer, .. } | LibraryCall::ResolveRoute { peer, .. } => {
                has_peer = Some(peer.ip());
            }
        }
        (device.is_none() && qp.is_none())
            && (pd.is_none() || *pd == has_pd)
            && (cq.is_none() || *cq == has_cq)
            && (peer.is_none() || *peer == has_peer)
    }
}
