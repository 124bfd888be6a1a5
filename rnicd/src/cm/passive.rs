//! The passive side of connecting over TCP: R-wait and R-decide of the start-up state machine, and
//! the graceful close of a rejected connection.

use std::io;
use std::net::{IpAddr, Shutdown};

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::{AddressPair, ListenerId, QpId, RequestId, SessionId, Time};
use rnic_core::stream::startup::{
    ConnectRequest, Negotiated, Options, Responder, ResponderError, ResponderStep,
};

use super::connect_failure::ConnectFailure;
use super::net::OutgoingBytes;
use super::startups::WaitsFor;
use super::{
    AcceptParams, CmEvent, ConnectionManager, Rejection, Slot, answer_refused, net, with_code,
};
use crate::socket::Socket;

/// A connection that a listener accepted.
#[derive(Debug)]
pub(super) struct Passive {
    pub(super) session: SessionId,
    pub(super) listener: ListenerId,
    pub(super) stream: Socket,
    pub(super) addresses: AddressPair,
    responder: Responder,
    phase: PassivePhase,
}

#[derive(Debug)]
enum PassivePhase {
    /// The peer's request is incomplete.
    AwaitRequest,
    /// The application must decide. The peer must not send anything in this phase.
    AwaitDecision(RequestId),
    /// Accepted; the kernel has not taken all of the reply.
    Replying { qp: QpId, reply: OutgoingBytes, negotiated: Box<Negotiated> },
}

/// Result of driving a connection.
enum Step {
    Wait,
    Request(ConnectRequest),
    /// The kernel has the reply.
    Replied,
    Failed(String),
    /// As `Failed`, after sending these bytes to the peer.
    Answer(Vec<u8>, String),
}

impl Passive {
    pub(super) fn new(
        session: SessionId,
        listener: ListenerId,
        stream: Socket,
        addresses: AddressPair,
        options: &Options,
    ) -> Self {
        //= MPA-7.1-7
        let responder = Responder::new(options);
        Passive {
            session,
            listener,
            stream,
            addresses,
            responder,
            phase: PassivePhase::AwaitRequest,
        }
    }

    pub(super) fn request(&self) -> Option<RequestId> {
        match self.phase {
            PassivePhase::AwaitDecision(request) => Some(request),
            PassivePhase::AwaitRequest | PassivePhase::Replying { .. } => None,
        }
    }

    /// Returns the QP that accepted it.
    pub(super) fn qp(&self) -> Option<QpId> {
        match self.phase {
            PassivePhase::Replying { qp, .. } => Some(qp),
            PassivePhase::AwaitRequest | PassivePhase::AwaitDecision(_) => None,
        }
    }

    fn drive(&mut self, scratch: &mut [u8]) -> Step {
        match &mut self.phase {
            PassivePhase::AwaitRequest => self.read_request(scratch),
            PassivePhase::AwaitDecision(_) => match self.check_quiet() {
                Ok(()) => Step::Wait,
                Err(why) => Step::Failed(why),
            },
            PassivePhase::Replying { reply, .. } => match reply.send(&self.stream) {
                Ok(true) => Step::Replied,
                Ok(false) => Step::Wait,
                Err(e) => Step::Failed(format!("sending the MPA reply: {e}")),
            },
        }
    }

    fn read_request(&mut self, scratch: &mut [u8]) -> Step {
        loop {
            // Bytes after a rejection belong to the program that passed the socket (RFC 5044
            // section 7.1.2).
            let most = if self.stream.is_passed() {
                self.responder.missing().min(scratch.len())
            } else {
                scratch.len()
            };
            match net::receive(&self.stream, &mut scratch[..most]) {
                Ok(0) => return Step::Failed("the peer closed inside its MPA request".into()),
                Ok(n) => match self.responder.handle_input(&scratch[..n]) {
                    Ok(ResponderStep::NeedMore) => {}
                    Ok(ResponderStep::Request(request)) => {
                        return match self.check_quiet() {
                            Ok(()) => Step::Request(request),
                            Err(why) => Step::Failed(why),
                        };
                    }
                    Err(e) => {
                        let why = with_code(&e, e.code());
                        return match e.last_frame() {
                            [] => Step::Failed(why),
                            final_bytes => Step::Answer(final_bytes.to_vec(), why),
                        };
                    }
                },
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Step::Wait,
                Err(e) => return Step::Failed(e.to_string()),
            }
        }
    }

    /// Checks that the peer sends nothing before it has our reply (RFC 5044 section 7.1.2).
    fn check_quiet(&self) -> Result<(), String> {
        match net::peek(&self.stream, &mut [0; 1]) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(e) => Err(e.to_string()),
            Ok(0) => Err("the peer closed the connection".into()),
            Ok(_) => Err("the peer sent bytes before it had the MPA reply".into()),
        }
    }
}

impl ConnectionManager {
    pub(super) fn drive_passive(&mut self, key: usize, now: Time) {
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

    /// Reports that no request will arrive on a connection that a client passed. For other
    /// connections of a listener no client waits.
    pub(super) fn no_request(&mut self, passive: &Passive, why: &str) {
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
    pub(super) fn fail_passive(&mut self, key: usize, why: &str) {
        // Dropping the stream closes it gracefully.
        drop(self.end_passive(key, why));
    }

    /// As [`fail_passive`](Self::fail_passive), but returns the stream for the caller to end.
    pub(super) fn end_passive(&mut self, key: usize, why: &str) -> Option<Socket> {
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

    pub(super) fn accept_tcp(
        &mut self,
        key: usize,
        params: AcceptParams,
        now: Time,
    ) -> Result<(), Refusal> {
        let Slot::Passive(passive) = &mut self.slots[key].slot else {
            return self.undecided(params.request).map(drop);
        };
        if let Err(why) = passive.check_quiet() {
            // The poll has not reported this yet.
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
        // Now its descriptor belongs to the QP.
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
    pub(super) fn reject_tcp(
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

    /// Sends final bytes on a stream that is still registered, in a slot of its own, charged to the
    /// session's user. Without room for that slot the stream is reset.
    pub(super) fn close_after(
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
        let closing = Closing {
            stream,
            final_bytes: OutgoingBytes::new(final_bytes),
            shut: false,
            discarded: 0,
        };
        let key = self.insert(Slot::Closing(closing));
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

    pub(super) fn drive_closing(&mut self, key: usize) {
        let Slot::Closing(closing) = &mut self.slots[key].slot else { return };
        if closing.drive(&mut self.scratch[..]) {
            self.remove(key);
        }
    }
}

/// A rejected connection. It sends the final bytes and then waits for the peer's FIN: closing with
/// unread bytes would reset the connection and could destroy the final bytes in flight.
#[derive(Debug)]
pub(super) struct Closing {
    pub(super) stream: Socket,
    final_bytes: OutgoingBytes,
    shut: bool,
    discarded: usize,
}

impl Closing {
    /// Returns true when nothing is left to do.
    fn drive(&mut self, scratch: &mut [u8]) -> bool {
        if !self.shut {
            match self.final_bytes.send(&self.stream) {
                Ok(true) => self.shut = self.stream.shutdown(Shutdown::Write).is_ok(),
                Ok(false) => return false,
                Err(_) => return true,
            }
        }
        while self.shut && self.discarded < MAX_DISCARDED {
            match net::receive(&self.stream, scratch) {
                Ok(n @ 1..) => self.discarded += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return false,
                Ok(0) | Err(_) => return true,
            }
        }
        true
    }
}

pub(super) fn request_event(
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

/// Maximum bytes from a rejected peer to read and discard before its connection is closed.
const MAX_DISCARDED: usize = 64 * 1024;
