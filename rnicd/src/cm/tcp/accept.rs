//! Accepts and rejects connection requests over TCP.

use std::net::IpAddr;

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::{AddressPair, ListenerId, RequestId, SessionId, Time};
use rnic_core::stream::startup::{ConnectRequest, ResponderError};

use super::passive::{Passive, PassivePhase, Step};
use super::rejected::Closing;
use crate::cm::connect_failure::{ConnectFailure, answer_refused};
use crate::cm::net::OutgoingBytes;
use crate::cm::startups::WaitsFor;
use crate::cm::{AcceptParams, CmEvent, ConnectionManager, Rejection, Slot};
use crate::socket::Socket;

impl ConnectionManager {
    pub(in crate::cm) fn drive_passive(&mut self, key: usize, now: Time) {
        let Slot::Passive(passive) = &mut self.slots[key].slot else { return };
        match passive.drive(&mut self.scratch[..]) {
            Step::Wait => {}
            Step::Request(request) => self.announce(key, request, now),
            Step::Replied => self.finish_passive(key),
            //= MPA-7.1.1-2, MPA-7.1.2-2a, MPA-7.1.2-5, MPA-8-7
            Step::Failed(why) => self.fail_passive(key, &why),
            Step::Answer(reply, why) => {
                tracing::debug!(peer = %passive.addresses.peer, "MPA start-up: {why}");
                if let Some(Slot::Passive(passive)) = self.remove(key) {
                    self.no_request(&passive, &why);
                    let session = passive.session;
                    let peer = passive.addresses.peer.ip();
                    self.close_after(passive.stream, reply, session, peer, now);
                }
            }
        }
    }

    /// Reports that no request will arrive on a connection that a client passed. No client waits
    /// for other connections.
    pub(in crate::cm) fn no_request(&mut self, passive: &Passive, why: &str) {
        if passive.stream.is_passed() {
            let listener = passive.listener;
            let reason = why.into();
            self.events.push_back(CmEvent::NoRequest { listener, reason });
        }
    }

    /// Reports a complete request, or rejects it if the backlog is full.
    fn announce(&mut self, key: usize, request: ConnectRequest, now: Time) {
        let Slot::Passive(passive) = &self.slots[key].slot else { return };
        let session = passive.session;
        let listener = passive.listener;
        let addresses = passive.addresses;
        if !self.can_queue(listener) {
            // An empty rejection always fits.
            let _ = self.send_rejection(key, &[], false, now);
            return;
        }
        let id = self.new_request(key);
        if let Some(l) = self.listeners.get_mut(&listener) {
            l.pending += 1;
        }
        let Slot::Passive(passive) = &mut self.slots[key].slot else { return };
        passive.phase = PassivePhase::AwaitDecision(id);
        self.charge(key, session, addresses.peer.ip(), WaitsFor::Decision);
        self.set_deadline(key, Some(now.after(self.options.decision_deadline)));
        self.events.push_back(request_event(listener, id, addresses, request));
    }

    /// Ends a connection in start-up. The event depends on its phase.
    pub(in crate::cm) fn fail_passive(&mut self, key: usize, why: &str) {
        // Dropping the stream closes it gracefully.
        drop(self.end_passive(key, why));
    }

    /// Like [`fail_passive`](Self::fail_passive), but returns the stream for the caller to end.
    pub(in crate::cm) fn end_passive(&mut self, key: usize, why: &str) -> Option<Socket> {
        let Some(Slot::Passive(passive)) = self.remove(key) else { return None };
        match passive.phase {
            PassivePhase::AwaitRequest => {
                tracing::debug!(peer = %passive.addresses.peer, "MPA start-up: {why}");
                self.no_request(&passive, why);
            }
            PassivePhase::AwaitDecision(request) => self.withdraw(passive.listener, request, why),
            PassivePhase::Replying { qp, .. } => {
                let why = ConnectFailure::reset(why);
                self.events.push_back(CmEvent::Unreachable { qp, why });
            }
        }
        Some(passive.stream)
    }

    pub(in crate::cm) fn accept_tcp(
        &mut self,
        key: usize,
        params: AcceptParams,
        now: Time,
    ) -> Result<(), Refusal> {
        let Slot::Passive(passive) = &mut self.slots[key].slot else {
            return self.undecided(params.request).map(drop);
        };
        if let Err(why) = passive.check_quiet() {
            // The peer has already ended or broken the start-up, which the poll has not reported
            // yet.
            self.fail_passive(key, &why);
            return self.undecided(params.request).map(drop);
        }
        let ird = params.ird;
        let ord = params.ord;
        let limits = (self.options.max_ird, self.options.max_ord);
        let (reply, negotiated) = passive
            .responder
            .accept(ird, ord, limits.0, limits.1, &params.private_data)
            .map_err(|e| answer_refused(e, params.request))?;
        passive.phase = PassivePhase::Replying {
            qp: params.qp,
            reply: OutgoingBytes::new(reply),
            negotiated: Box::new(negotiated),
        };
        if let Some(l) = self.listeners.get_mut(&passive.listener) {
            l.pending -= 1;
            l.accepted += 1;
        }
        self.requests.remove(&params.request);
        self.qps.insert(params.qp, key);
        // The descriptor now belongs to the QP.
        self.credit(key);
        self.set_deadline(key, Some(now.after(self.options.reply_deadline)));
        self.drive_passive(key, now);
        Ok(())
    }

    fn finish_passive(&mut self, key: usize) {
        let Some(Slot::Passive(passive)) = self.remove(key) else { return };
        self.deregister(&passive.stream);
        if let PassivePhase::Replying { qp, negotiated, .. } = passive.phase {
            self.events.push_back(CmEvent::ConnectedTcp {
                qp,
                stream: passive.stream,
                negotiated,
                addresses: passive.addresses,
            });
        }
    }

    /// Rejects an undecided request.
    pub(in crate::cm) fn reject_tcp(
        &mut self,
        key: usize,
        private_data: &[u8],
        awaited: bool,
        now: Time,
    ) -> Result<Rejection, ResponderError> {
        let Slot::Passive(passive) = &self.slots[key].slot else { return Ok(Rejection::Done) };
        let listener = passive.listener;
        let rejection = self.send_rejection(key, private_data, awaited, now)?;
        if let Some(l) = self.listeners.get_mut(&listener) {
            l.pending -= 1;
        }
        Ok(rejection)
    }

    /// Sends a rejection. Closes the connection after the peer has closed it, or releases it to the
    /// client that passed it.
    fn send_rejection(
        &mut self,
        key: usize,
        private_data: &[u8],
        awaited: bool,
        now: Time,
    ) -> Result<Rejection, ResponderError> {
        let Slot::Passive(passive) = &mut self.slots[key].slot else { return Ok(Rejection::Done) };
        let reply = passive.responder.reject(private_data)?;
        if let Some(l) = self.listeners.get_mut(&passive.listener) {
            l.rejected += 1;
        }
        match self.remove(key) {
            Some(Slot::Passive(p)) if p.stream.is_passed() => {
                let peer = p.addresses.peer.ip();
                //= MPA-7.1.2-2d
                return Ok(self.give_back(p.session, peer, p.stream, reply, awaited, now));
            }
            Some(Slot::Passive(p)) => {
                let peer = p.addresses.peer.ip();
                self.close_after(p.stream, reply, p.session, peer, now);
            }
            _ => {}
        }
        Ok(Rejection::Done)
    }

    /// Sends final bytes on a stream that is still registered. The stream gets a separate slot,
    /// charged to the session's user, or is reset if there is no room for the slot.
    pub(in crate::cm) fn close_after(
        &mut self,
        stream: Socket,
        final_bytes: Vec<u8>,
        session: SessionId,
        peer: IpAddr,
        now: Time,
    ) {
        self.deregister(&stream);
        if !self.make_room(session, peer, now) {
            return stream.reset();
        }
        let key = self.insert(Slot::Closing(Closing::new(stream, final_bytes)));
        self.charge(key, session, peer, WaitsFor::Peer);
        self.set_deadline(key, Some(now.after(self.options.close_deadline)));
        if let Slot::Closing(closing) = &self.slots[key].slot
            && self.register(key, &closing.stream).is_err()
        {
            self.remove(key);
        } else {
            self.drive_closing(key);
        }
    }

    pub(in crate::cm) fn drive_closing(&mut self, key: usize) {
        let Slot::Closing(closing) = &mut self.slots[key].slot else { return };
        if closing.drive(&mut self.scratch[..]) {
            self.remove(key);
        }
    }
}

pub(in crate::cm) fn request_event(
    listener: ListenerId,
    request: RequestId,
    addresses: AddressPair,
    of_peer: ConnectRequest,
) -> CmEvent {
    CmEvent::Request {
        listener,
        request,
        addresses,
        peer_ird: of_peer.peer_ird,
        peer_ord: of_peer.peer_ord,
        revision: of_peer.revision,
        peer_to_peer: of_peer.peer_to_peer,
        private_data: of_peer.private_data,
    }
}
