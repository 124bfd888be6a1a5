//! A connection that a listener accepted: R-wait and R-decide of the start-up state machine.

use std::io;

use rnic_abi::types::{AddressPair, ListenerId, QpId, RequestId, SessionId};
use rnic_core::stream::startup::{ConnectRequest, Negotiated, Options, Responder, ResponderStep};

use crate::cm::connect_failure::with_code;
use crate::cm::net::{self, OutgoingBytes};
use crate::socket::Socket;

/// A connection that a listener accepted.
#[derive(Debug)]
pub(in crate::cm) struct Passive {
    pub(in crate::cm) session: SessionId,
    pub(in crate::cm) listener: ListenerId,
    pub(in crate::cm) stream: Socket,
    pub(in crate::cm) addresses: AddressPair,
    pub(super) responder: Responder,
    pub(super) phase: PassivePhase,
}

#[derive(Debug)]
pub(super) enum PassivePhase {
    /// The peer's request is incomplete.
    AwaitRequest,
    /// The application must decide. The peer must not send anything in this phase.
    AwaitDecision(RequestId),
    /// Accepted; the kernel has not taken all of the reply.
    Replying { qp: QpId, reply: OutgoingBytes, negotiated: Box<Negotiated> },
}

/// Result of driving a connection.
pub(super) enum Step {
    Wait,
    Request(ConnectRequest),
    /// The kernel has the reply.
    Replied,
    Failed(String),
    /// Like `Failed`, after sending these bytes to the peer.
    Answer(Vec<u8>, String),
}

impl Passive {
    pub(in crate::cm) fn new(
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

    pub(in crate::cm) fn request(&self) -> Option<RequestId> {
        match self.phase {
            PassivePhase::AwaitDecision(request) => Some(request),
            PassivePhase::AwaitRequest | PassivePhase::Replying { .. } => None,
        }
    }

    /// Returns the QP that accepted it.
    pub(in crate::cm) fn qp(&self) -> Option<QpId> {
        match self.phase {
            PassivePhase::Replying { qp, .. } => Some(qp),
            PassivePhase::AwaitRequest | PassivePhase::AwaitDecision(_) => None,
        }
    }

    pub(super) fn drive(&mut self, scratch: &mut [u8]) -> Step {
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
    pub(super) fn check_quiet(&self) -> Result<(), String> {
        match net::peek(&self.stream, &mut [0; 1]) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(e) => Err(e.to_string()),
            Ok(0) => Err("the peer closed the connection".into()),
            Ok(_) => Err("the peer sent bytes before it had the MPA reply".into()),
        }
    }
}
