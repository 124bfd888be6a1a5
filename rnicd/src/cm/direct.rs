//! Connects to a listener of the same daemon without a TCP connection.
//!
//! Used only if a listener of this daemon has the destination's port and either the same address or
//! a wildcard address; then the kernel's routes must show that the destination is local. The state
//! machines are the same as over TCP, so private data, IRD and ORD, CRC and the RTR frame are
//! negotiated in the same way.

use std::net::SocketAddr;

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::{AddressPair, ListenerId, QpId, RequestId, Time};
use rnic_core::stream::startup::{InitiatorStep, Responder, ResponderError, ResponderStep};

use super::connect_failure::{ConnectFailure, answer_refused};
use super::slots::Direct;
use super::tcp::active::new_initiator;
use super::tcp::request_event;
use super::{AcceptParams, CmEvent, ConnectParams, ConnectionManager, DirectEnd, Slot, net};
use crate::system;

impl ConnectionManager {
    /// Returns the listener of this daemon that a connect reaches, and the source address.
    pub(super) fn direct_target(
        &self,
        params: &ConnectParams,
    ) -> Result<Option<(ListenerId, SocketAddr)>, Refusal> {
        let peer = net::canonical(params.peer);
        let listening = || {
            self.listeners
                .iter()
                .filter(|(_, l)| l.is_bound() && l.backlog > 0 && l.address.port() == peer.port())
        };
        let exact = listening().find(|(_, l)| same_host(l.address, peer));
        let wildcard = || listening().find(|(_, l)| l.is_wildcard_for(peer));
        let Some((listener, _)) = exact.or_else(wildcard) else { return Ok(None) };
        let source = net::source_if_local(params.local, peer)
            .map_err(|e| system::refusal(&format!("connect {peer}"), &e))?;
        Ok(source.map(|source| (*listener, source)))
    }

    /// Sends a request to a listener of this daemon.
    pub(super) fn connect_direct(
        &mut self,
        params: ConnectParams,
        listener: ListenerId,
        source: SocketAddr,
        now: Time,
    ) -> Result<(), Refusal> {
        let options = self.initiator_options(&params);
        let initiator = new_initiator(&options, &params.private_data)?;
        let mut responder = Responder::new(&self.options.startup);
        let qp = params.qp;
        let step = responder.handle_input(initiator.request());
        let Ok(ResponderStep::Request(request)) = step else {
            // Only a permissive IETF RNIC can refuse its own request.
            let why = step.err().map_or("incomplete MPA request".into(), |e| e.to_string());
            let why = ConnectFailure::protocol(why);
            self.unreachable(qp, why);
            return Ok(());
        };
        let peer = self.options.ports.named(net::canonical(params.peer));
        let addresses = AddressPair { local: net::canonical(source), peer };
        let key = self.insert(Slot::Direct(Box::new(Direct {
            session: params.session,
            qp,
            initiator,
            listener,
            request: RequestId(0),
            responder,
            addresses,
        })));
        self.qps.insert(qp, key);
        if !self.can_queue(listener) {
            // An empty rejection always fits.
            let _ = self.send_direct_rejection(key, &[]);
            return Ok(());
        }
        let id = self.new_request(key);
        if let Slot::Direct(direct) = &mut self.slots[key].slot {
            direct.request = id;
        }
        if let Some(l) = self.listeners.get_mut(&listener) {
            l.pending += 1;
        }
        let deadline = self.options.reply_deadline.min(self.options.decision_deadline);
        self.set_deadline(key, Some(now.after(deadline)));
        self.events.push_back(request_event(listener, id, swapped(addresses), request));
        Ok(())
    }

    pub(super) fn accept_direct(
        &mut self,
        key: usize,
        params: AcceptParams,
    ) -> Result<(), Refusal> {
        let Slot::Direct(direct) = &mut self.slots[key].slot else {
            return self.undecided(params.request).map(drop);
        };
        let limits = (self.options.max_ird, self.options.max_ord);
        let (reply, of_passive) = direct
            .responder
            .accept(params.ird, params.ord, limits.0, limits.1, &params.private_data)
            .map_err(|e| answer_refused(e, params.request))?;
        let answer = direct.initiator.handle_input(&reply);
        if let Some(l) = self.listeners.get_mut(&direct.listener) {
            l.pending -= 1;
            l.accepted += 1;
        }
        let qp = direct.qp;
        let addresses = direct.addresses;
        self.remove(key);
        let why = match answer {
            Ok(InitiatorStep::Accepted(of_active)) => {
                let active = DirectEnd { qp, negotiated: of_active, addresses };
                let passive = DirectEnd {
                    qp: params.qp,
                    negotiated: of_passive,
                    addresses: swapped(addresses),
                };
                self.events.push_back(CmEvent::ConnectedDirect {
                    active: Box::new(active),
                    passive: Box::new(passive),
                });
                return Ok(());
            }
            Ok(InitiatorStep::NeedMore | InitiatorStep::Rejected { .. }) => {
                ConnectFailure::protocol("the MPA reply was not understood")
            }
            Err(e) => ConnectFailure::protocol(e),
        };
        self.unreachable(qp, why.clone());
        self.unreachable(params.qp, why);
        Ok(())
    }

    /// Rejects an undecided request.
    pub(super) fn reject_direct(
        &mut self,
        key: usize,
        private_data: &[u8],
    ) -> Result<(), ResponderError> {
        let Slot::Direct(direct) = &self.slots[key].slot else { return Ok(()) };
        let listener = direct.listener;
        self.send_direct_rejection(key, private_data)?;
        if let Some(l) = self.listeners.get_mut(&listener) {
            l.pending -= 1;
        }
        Ok(())
    }

    fn send_direct_rejection(
        &mut self,
        key: usize,
        private_data: &[u8],
    ) -> Result<(), ResponderError> {
        let Slot::Direct(direct) = &mut self.slots[key].slot else { return Ok(()) };
        let reply = direct.responder.reject(private_data)?;
        let answer = direct.initiator.handle_input(&reply);
        let qp = direct.qp;
        let listener = direct.listener;
        if let Some(l) = self.listeners.get_mut(&listener) {
            l.rejected += 1;
        }
        self.remove(key);
        match answer {
            Ok(InitiatorStep::Rejected { private_data }) => {
                self.events.push_back(CmEvent::Rejected { qp, private_data });
            }
            Ok(InitiatorStep::NeedMore | InitiatorStep::Accepted(_)) => {
                let why = ConnectFailure::protocol("the MPA reply was not understood");
                self.unreachable(qp, why);
            }
            Err(e) => self.unreachable(qp, ConnectFailure::protocol(e)),
        }
        Ok(())
    }

    pub(super) fn expire_direct(&mut self, key: usize) {
        if let Some(Slot::Direct(direct)) = self.remove(key) {
            self.withdraw(direct.listener, direct.request, "the deadline passed");
            let why = ConnectFailure::timed_out("no answer to the request before the deadline");
            self.unreachable(direct.qp, why);
        }
    }

    fn unreachable(&mut self, qp: QpId, why: ConnectFailure) {
        self.events.push_back(CmEvent::Unreachable { qp, why });
    }
}

/// Returns true if two addresses have the same IP. Link-local addresses must also have the same
/// scope ID.
fn same_host(a: SocketAddr, b: SocketAddr) -> bool {
    match (a, b) {
        (SocketAddr::V6(a), SocketAddr::V6(b)) => a.ip() == b.ip() && a.scope_id() == b.scope_id(),
        _ => a.ip() == b.ip(),
    }
}

/// Returns the addresses as the other end sees them.
fn swapped(addresses: AddressPair) -> AddressPair {
    AddressPair { local: addresses.peer, peer: addresses.local }
}
