//! Responder: the listening end, which awaits a Request and sends a Reply.

use super::{
    Negotiated, Options, PrivateDataTooLong, Role, RtrKinds, frame_missing, frame_value, negotiated,
};
use crate::mpa::startup::{Enhanced, Frame, FrameError, FrameKind, NOT_NEGOTIATED, Progress, Repr};
use crate::rdmap::codes;
use rnic_abi::types::TerminateCode;

/// Failure of a start-up. The caller must close the TCP connection, except after
/// [`PrivateData`](Self::PrivateData).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResponderError {
    /// The received bytes are not a Request.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A Request of revision 0, refused because [`Options::rdmac`] is off or because the Request
    /// lacks Markers or CRCs, which RDMAC peers always request. The peer must receive a rejecting
    /// Reply of revision 1.
    #[error("MPA revision 0 is not supported")]
    Rdmac {
        /// The Reply, to send before the TCP connection is closed.
        reply: Vec<u8>,
    },
    /// The peer sent more bytes after its Request, before the Reply.
    #[error("the peer sent bytes after its request, before the reply")]
    BytesAfterRequest,
    /// The call is not allowed in this state.
    #[error("call not allowed in this start-up state")]
    InvalidState,
    /// The Private Data do not fit into the Reply. The Request is still undecided.
    #[error(transparent)]
    PrivateData(#[from] PrivateDataTooLong),
}

impl ResponderError {
    /// Returns the code of the peer's fault (RFC 5044 section 8); `None` for faults of the caller.
    #[must_use]
    pub fn code(&self) -> Option<TerminateCode> {
        match self {
            ResponderError::Frame(_)
            | ResponderError::Rdmac { .. }
            //= MPA-8-1
            | ResponderError::BytesAfterRequest => Some(codes::LLP_STARTUP),
            ResponderError::InvalidState | ResponderError::PrivateData(_) => None,
        }
    }

    /// Returns the bytes to send before the connection is closed, usually none.
    #[must_use]
    pub fn last_frame(&self) -> &[u8] {
        match self {
            ResponderError::Rdmac { reply } => reply,
            _ => &[],
        }
    }
}

/// A valid Request, which the application accepts or rejects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The Initiator's Private Data.
    pub private_data: Vec<u8>,
    /// Maximum inbound Reads of the Initiator; `None` if it does not negotiate.
    pub peer_ird: Option<u16>,
    /// Desired outbound Reads of the Initiator; `None` if it does not negotiate.
    pub peer_ord: Option<u16>,
    /// MPA revision of the Request.
    pub revision: u8,
    /// True if the Request asks for the peer-to-peer model.
    pub peer_to_peer: bool,
}

/// Result of processing received bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponderStep {
    /// The Request is not complete.
    NeedMore,
    /// The Request is complete and must be accepted or rejected.
    Request(ConnectRequest),
}

/// Parameters of the Request that determine the Reply.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RequestTerms {
    markers: bool,
    crc: bool,
    revision: u8,
    enhanced: Option<Enhanced>,
    private_data: Vec<u8>,
}

#[derive(Debug)]
enum State {
    AwaitRequest { input: Vec<u8> },
    Deciding(RequestTerms),
    Done,
}

/// The Responder's start-up state machine.
#[derive(Debug)]
pub struct Responder {
    options: Options,
    state: State,
}

impl Responder {
    /// Creates a state machine that awaits a Request.
    #[must_use]
    pub fn new(options: &Options) -> Responder {
        Responder { options: *options, state: State::AwaitRequest { input: Vec::new() } }
    }

    /// Processes received bytes, split at arbitrary points. Bytes after the Request are an error
    /// while no Reply has been sent.
    pub fn handle_input(&mut self, bytes: &[u8]) -> Result<ResponderStep, ResponderError> {
        match std::mem::replace(&mut self.state, State::Done) {
            State::AwaitRequest { mut input } => {
                input.extend_from_slice(bytes);
                //= MPA-7.1.2-2
                let Some(asked) = parse_request(&self.options, &input)? else {
                    self.state = State::AwaitRequest { input };
                    return Ok(ResponderStep::NeedMore);
                };
                let request = ConnectRequest {
                    private_data: asked.private_data.clone(),
                    peer_ird: asked.enhanced.and_then(|e| negotiated(e.ird)),
                    peer_ord: asked.enhanced.and_then(|e| negotiated(e.ord)),
                    revision: asked.revision,
                    peer_to_peer: asked.enhanced.is_some_and(|e| e.peer_to_peer),
                };
                //= MPA-7.1-8
                self.state = State::Deciding(asked);
                Ok(ResponderStep::Request(request))
            }
            State::Deciding(asked) if bytes.is_empty() => {
                self.state = State::Deciding(asked);
                Ok(ResponderStep::NeedMore)
            }
            State::Deciding(_) => Err(ResponderError::BytesAfterRequest),
            State::Done => Err(ResponderError::InvalidState),
        }
    }

    /// Returns the number of bytes known to be missing from the Request; 0 once it is complete.
    #[must_use]
    pub fn missing(&self) -> usize {
        match &self.state {
            State::AwaitRequest { input } => {
                frame_missing(FrameKind::Request, max_revision(&self.options), input)
            }
            State::Deciding(_) | State::Done => 0,
        }
    }

    /// Accepts the Request and returns the Reply and the negotiated parameters.
    ///
    /// `ird` and `ord` default to the options and are reduced to `ird_limit` and `ord_limit`.
    /// Without `ird`, IRD is raised to the Initiator's ORD, up to the limit. The caller must be
    /// ready for FPDUs before it sends the Reply.
    pub fn accept(
        &mut self,
        ird: Option<u16>,
        ord: Option<u16>,
        ird_limit: u16,
        ord_limit: u16,
        private_data: &[u8],
    ) -> Result<(Vec<u8>, Negotiated), ResponderError> {
        let State::Deciding(asked) = &self.state else {
            return Err(ResponderError::InvalidState);
        };
        PrivateDataTooLong::check(private_data, asked.enhanced.is_some())?;
        let rdmac = asked.revision == 0;
        let mut n = Negotiated {
            role: Role::Responder { await_rtr: None },
            revision: asked.revision,
            //= MPA-3-13, MPA-C.1-1, MPA-C.1-3, MPA-C.2.4-1, MPA-C.3-1
            //= DDP-4.1-10
            version: if rdmac { 0 } else { 1 },
            //= MPA-4.4-5, MPA-4.4-9, MPA-4.4-10, MPA-7.1.1-8
            crc: self.crc(asked),
            //= MPA-7.1.1-5, MPA-7.1.1-6, MPA-C.3-1
            tx_markers: asked.markers,
            //= MPA-C.2.3-1
            rx_markers: self.options.markers || rdmac,
            //= RDMAP-6.1-3
            ird: ird.unwrap_or(self.options.ird).min(ird_limit),
            //= RDMAP-6.1-4
            ord: ord.unwrap_or(self.options.ord).min(ord_limit),
            peer_ird: None,
            peer_ord: None,
            peer_to_peer: false,
            private_data: asked.private_data.clone(),
            leftover: Vec::new(),
        };
        let answer = asked.enhanced.map(|asked| {
            let raise_to = if ird.is_none() { ird_limit } else { n.ird };
            agree(&mut n, asked, self.options.rtr(), raise_to, ird_limit)
        });
        let reply = Repr {
            markers: n.rx_markers,
            //= MPA-C.1-2, MPA-C.2.4-1
            crc: n.crc,
            //= MPA-7.1.1-11
            reject: false,
            revision: asked.revision,
            enhanced: answer,
            private_data,
        }
        .to_vec(FrameKind::Reply);
        self.state = State::Done;
        Ok((reply, n))
    }

    /// Rejects the Request and returns the Reply. The TCP connection may stay open.
    pub fn reject(&mut self, private_data: &[u8]) -> Result<Vec<u8>, ResponderError> {
        let State::Deciding(asked) = &self.state else {
            return Err(ResponderError::InvalidState);
        };
        PrivateDataTooLong::check(private_data, asked.enhanced.is_some())?;
        let rdmac = asked.revision == 0;
        let reply = Repr {
            markers: self.options.markers || rdmac,
            crc: self.crc(asked),
            //= MPA-7.1.1-11
            reject: true,
            revision: asked.revision,
            enhanced: asked.enhanced.map(|asked| Enhanced {
                peer_to_peer: asked.peer_to_peer,
                rtr: self.options.rtr(),
                ird: answer_ird(&asked, self.options.ird),
                ord: answer_ord(&asked, self.options.ord),
            }),
            private_data,
        }
        .to_vec(FrameKind::Reply);
        self.state = State::Done;
        Ok(reply)
    }

    /// Returns true if either end requires CRCs. The Reply sets C even if the Request has set it,
    /// because Initiators may rely on the Reply alone.
    fn crc(&self, asked: &RequestTerms) -> bool {
        self.options.crc || asked.crc
    }

    #[cfg(test)]
    pub(super) fn state(&self) -> &'static str {
        match self.state {
            State::AwaitRequest { .. } => "AwaitRequest",
            State::Deciding(_) => "Deciding",
            State::Done => "Done",
        }
    }
}

/// Returns the maximum revision accepted in a Request.
fn max_revision(options: &Options) -> u8 {
    options.revision.clamp(1, 2)
}

/// Decodes a Request from the bytes received so far.
fn parse_request(options: &Options, input: &[u8]) -> Result<Option<RequestTerms>, ResponderError> {
    //= MPA-7.1.2-2
    let (frame, trailing) = match Frame::check(FrameKind::Request, max_revision(options), input)? {
        Progress::NeedMore(_) => return Ok(None),
        Progress::Complete(frame, trailing) => (frame, trailing),
    };
    let request = Repr::parse(&frame);
    // An RDMAC peer always requests Markers and CRCs. Without them it could not read our FPDUs.
    let rdmac = request.markers && request.crc;
    if request.revision == 0 && !(options.rdmac && rdmac) {
        let refusal = Repr {
            markers: options.markers,
            crc: options.crc,
            reject: true,
            revision: 1,
            enhanced: None,
            private_data: &[],
        };
        //= MPA-C.2.1-1
        return Err(ResponderError::Rdmac { reply: refusal.to_vec(FrameKind::Reply) });
    }
    //= MPA-7.1.1-19
    if !trailing.is_empty() {
        return Err(ResponderError::BytesAfterRequest);
    }
    Ok(Some(RequestTerms {
        markers: request.markers,
        crc: request.crc,
        revision: request.revision,
        enhanced: request.enhanced,
        //= MPA-7.1.2-9a
        private_data: request.private_data.to_vec(),
    }))
}

/// Negotiates IRD, ORD and RTR for an enhanced Request and returns the values for the Reply (RFC
/// 6581 section 9).
fn agree(
    n: &mut Negotiated,
    asked: Enhanced,
    rtr: RtrKinds,
    raise_to: u16,
    ird_limit: u16,
) -> Enhanced {
    n.peer_ird = negotiated(asked.ird);
    n.peer_ord = negotiated(asked.ord);
    if let Some(ord) = n.peer_ord {
        n.ird = n.ird.max(ord.min(raise_to));
    }
    if let Some(ird) = n.peer_ird {
        n.ord = n.ord.min(ird);
    }
    n.peer_to_peer = asked.peer_to_peer;
    let mut ours = rtr;
    if asked.peer_to_peer {
        // The Read RTR needs an IRD slot. Without one it is offered only if there is no other kind.
        if (ours & asked.rtr).contains(RtrKinds::READ) && n.ird == 0 {
            if ird_limit > 0 {
                n.ird = 1;
            } else if ours != RtrKinds::READ {
                ours.remove(RtrKinds::READ);
            }
        }
        n.role = Role::Responder { await_rtr: Some(ours & asked.rtr) };
    }
    Enhanced {
        peer_to_peer: asked.peer_to_peer,
        rtr: ours,
        ird: answer_ird(&asked, n.ird),
        ord: answer_ord(&asked, n.ord),
    }
}

/// Returns the IRD for a Reply: not negotiated if the Initiator's ORD is not.
fn answer_ird(asked: &Enhanced, ird: u16) -> u16 {
    if asked.ord == NOT_NEGOTIATED { NOT_NEGOTIATED } else { frame_value(ird) }
}

/// Returns the ORD for a Reply: not negotiated if the Initiator's IRD is not.
fn answer_ord(asked: &Enhanced, ord: u16) -> u16 {
    if asked.ird == NOT_NEGOTIATED { NOT_NEGOTIATED } else { frame_value(ord) }
}
