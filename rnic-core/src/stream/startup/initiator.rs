//! Initiator: the connecting end, which sends a Request and awaits a Reply.

use super::{
    Negotiated, Options, PrivateDataTooLong, Role, Rtr, RtrKinds, frame_missing, frame_value,
    negotiated,
};
use crate::ddp::{UntaggedHeader, qn};
use crate::mpa::Framer;
use crate::mpa::startup::{
    ENHANCED_LEN, Enhanced, Frame, FrameError, FrameKind, MAX_PRIVATE_DATA, Progress, Repr,
};
use crate::rdmap::{Control, Opcode, codes};
use crate::stream::{Fault, terminate};
use rnic_abi::types::{Msn, Stag, TerminateCode};

/// Failure of a start-up. The caller must close the TCP connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartupError {
    /// The received bytes are not a Reply.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A Reply of revision 0, refused because [`Options::rdmac`] is off or because the Reply lacks
    /// Markers or CRCs, which RDMAC peers always request.
    #[error("the peer answered with MPA revision 0, which is not supported")]
    Rdmac,
    /// The peer closed before its Reply was complete.
    #[error("the peer closed the connection during start-up")]
    Closed,
    /// The peer's ORD exceeds the offered IRD (2/0/6).
    #[error("the peer requests {wanted} outstanding reads, but the offered IRD is {offered}")]
    InsufficientIrd {
        /// The peer's ORD.
        wanted: u16,
        /// IRD offered in the Request.
        offered: u16,
        /// FPDU of the Terminate for the peer.
        terminate: Vec<u8>,
    },
    /// The ends support no common RTR (2/0/7).
    #[error("no common type of ready-to-receive message")]
    NoMatchingRtr {
        /// FPDU of the Terminate for the peer.
        terminate: Vec<u8>,
    },
    /// Input after the start-up has ended.
    #[error("start-up is already over")]
    Over,
}

impl StartupError {
    /// Returns the error code (RFC 5044 section 8 or RFC 6581); `None` for faults of the caller.
    #[must_use]
    pub fn code(&self) -> Option<TerminateCode> {
        match self {
            //= MPA-8-1
            StartupError::Frame(_) | StartupError::Rdmac => Some(codes::LLP_STARTUP),
            //= MPA-8-1
            StartupError::Closed => Some(codes::LLP_CLOSED),
            StartupError::InsufficientIrd { .. } => Some(codes::LLP_IRD),
            StartupError::NoMatchingRtr { .. } => Some(codes::LLP_RTR),
            StartupError::Over => None,
        }
    }

    /// Returns the bytes to send before the connection is closed, usually none.
    #[must_use]
    pub fn last_frame(&self) -> &[u8] {
        match self {
            StartupError::InsufficientIrd { terminate, .. }
            | StartupError::NoMatchingRtr { terminate } => terminate,
            _ => &[],
        }
    }
}

/// Result of processing received bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitiatorStep {
    /// The Reply is not complete.
    NeedMore,
    /// The Reply accepts, and Full Operation begins.
    Accepted(Negotiated),
    /// The Responder's application rejects. The TCP connection may stay open.
    Rejected {
        /// Private Data of the Reply.
        private_data: Vec<u8>,
    },
}

/// Action after the end of the peer's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EofAction {
    /// The peer may support revision 1 only. The caller retries with it on a new TCP connection.
    RetryRevision1,
    /// The start-up has failed. The caller must not retry.
    Fail(StartupError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    AwaitReply,
    Done,
}

/// The Initiator's start-up state machine.
#[derive(Debug)]
pub struct Initiator {
    options: Options,
    /// Enhanced data of the Request, if any.
    asked: Option<Enhanced>,
    revision: u8,
    request: Vec<u8>,
    input: Vec<u8>,
    state: State,
}

impl Initiator {
    /// Creates a state machine and its Request with `private_data`. If no room remains for enhanced
    /// data, the Request has revision 1.
    pub fn new(options: &Options, private_data: &[u8]) -> Result<Initiator, PrivateDataTooLong> {
        PrivateDataTooLong::check(private_data, false)?;
        let fits = private_data.len() <= MAX_PRIVATE_DATA - ENHANCED_LEN;
        let enhanced = options.revision >= 2 && !options.rdmac && fits;
        let asked = enhanced.then(|| Enhanced {
            peer_to_peer: options.peer_to_peer,
            rtr: options.rtr(),
            ird: frame_value(options.ird),
            ord: frame_value(options.ord),
        });
        //= MPA-7.1.1-14, MPA-C.2.5-1
        let revision = if enhanced { 2 } else { 1 };
        let request = Repr {
            markers: options.markers,
            crc: options.crc,
            //= MPA-7.1.1-10
            reject: false,
            revision,
            enhanced: asked,
            private_data,
        }
        //= MPA-7.1.2-1
        .to_vec(FrameKind::Request);
        Ok(Initiator {
            options: *options,
            asked,
            revision,
            request,
            input: Vec::new(),
            state: State::AwaitReply,
        })
    }

    /// Returns the Request, which the caller sends first.
    #[must_use]
    pub fn request(&self) -> &[u8] {
        &self.request
    }

    /// Processes received bytes, split at arbitrary points. Bytes after the Reply are stored in
    /// [`Negotiated::leftover`].
    pub fn handle_input(&mut self, bytes: &[u8]) -> Result<InitiatorStep, StartupError> {
        match self.state {
            State::AwaitReply => {
                self.input.extend_from_slice(bytes);
                let input = std::mem::take(&mut self.input);
                let step = self.parse_reply(&input);
                match step {
                    Ok(InitiatorStep::NeedMore) => self.input = input,
                    Ok(_) | Err(_) => self.state = State::Done,
                }
                step
            }
            State::Done => Err(StartupError::Over),
        }
    }

    /// Returns the number of bytes known to be missing from the Reply; 0 once it is complete. A
    /// caller that never reads more than this reads no byte after the Reply.
    #[must_use]
    pub fn missing(&self) -> usize {
        match self.state {
            State::AwaitReply => frame_missing(FrameKind::Reply, self.revision, &self.input),
            State::Done => 0,
        }
    }

    /// Handles the end of the peer's stream.
    pub fn handle_eof(&mut self) -> EofAction {
        match self.state {
            State::AwaitReply => {
                self.state = State::Done;
                if self.revision >= 2 && self.input.is_empty() {
                    EofAction::RetryRevision1
                } else {
                    EofAction::Fail(StartupError::Closed)
                }
            }
            State::Done => EofAction::Fail(StartupError::Over),
        }
    }

    #[cfg(test)]
    pub(super) fn state(&self) -> State {
        self.state
    }

    fn parse_reply(&self, input: &[u8]) -> Result<InitiatorStep, StartupError> {
        //= MPA-7.1.2-3
        let (frame, leftover) = match Frame::check(FrameKind::Reply, self.revision, input)? {
            Progress::NeedMore(_) => return Ok(InitiatorStep::NeedMore),
            Progress::Complete(frame, leftover) => (frame, leftover),
        };
        let reply = Repr::parse(&frame);
        let rdmac = reply.revision == 0;
        // An RDMAC peer always requests Markers and CRCs. Without them it could not read our FPDUs.
        //= MPA-C.1-2
        if rdmac && !(self.options.rdmac && reply.markers && reply.crc) {
            //= MPA-C.2.2-1
            return Err(StartupError::Rdmac);
        }
        if reply.reject {
            //= MPA-7.1.2-3b
            return Ok(InitiatorStep::Rejected { private_data: reply.private_data.to_vec() });
        }
        let mut negotiated = Negotiated {
            role: Role::Initiator { rtr: None },
            revision: reply.revision,
            //= MPA-3-13, MPA-C.1-1, MPA-C.1-3, MPA-C.2.5-1, MPA-C.3-1
            //= DDP-4.1-10
            version: if rdmac { 0 } else { 1 },
            //= MPA-4.4-5, MPA-4.4-9, MPA-4.4-10, MPA-7.1.1-8
            crc: self.options.crc || reply.crc,
            //= MPA-7.1.1-5, MPA-7.1.1-6, MPA-C.3-1
            tx_markers: reply.markers,
            //= MPA-C.2.5-1
            rx_markers: self.options.markers || rdmac,
            //= RDMAP-6.1-3
            ird: self.options.ird,
            //= RDMAP-6.1-4
            ord: self.options.ord,
            peer_ird: None,
            peer_ord: None,
            peer_to_peer: false,
            //= MPA-7.1.2-9a
            private_data: reply.private_data.to_vec(),
            leftover: leftover.to_vec(),
        };
        if let (Some(asked), Some(answer)) = (self.asked, reply.enhanced) {
            self.apply_enhanced(&mut negotiated, asked, answer)?;
        }
        Ok(InitiatorStep::Accepted(negotiated))
    }

    /// Applies IRD, ORD and RTR (RFC 6581 section 9). Selects no RTR unless the Reply agrees to
    /// peer-to-peer.
    fn apply_enhanced(
        &self,
        n: &mut Negotiated,
        asked: Enhanced,
        answer: Enhanced,
    ) -> Result<(), StartupError> {
        n.peer_ird = negotiated(answer.ird);
        n.peer_ord = negotiated(answer.ord);
        if let Some(ird) = n.peer_ird {
            n.ord = asked.ord.min(ird);
        }
        if let Some(ord) = n.peer_ord {
            n.ird = asked.ird;
            if ord > asked.ird {
                let terminate = terminate_fpdu(n, Fault::local(codes::LLP_IRD));
                return Err(StartupError::InsufficientIrd {
                    wanted: ord,
                    offered: asked.ird,
                    terminate,
                });
            }
            //= RDMAP-6.1-5
            // The peer never has more Reads outstanding than its ORD.
            n.ird = ord;
        }
        n.peer_to_peer = asked.peer_to_peer && answer.peer_to_peer;
        if n.peer_to_peer {
            let Some(rtr) = choose_rtr(asked.rtr & answer.rtr, n) else {
                let terminate = terminate_fpdu(n, Fault::local(codes::LLP_RTR));
                return Err(StartupError::NoMatchingRtr { terminate });
            };
            n.role = Role::Initiator { rtr: Some(rtr) };
        }
        Ok(())
    }
}

/// Returns the common RTR with the fewest side effects. A Read needs an IRD slot at the peer.
fn choose_rtr(common: RtrKinds, n: &Negotiated) -> Option<Rtr> {
    if common.contains(RtrKinds::WRITE) {
        Some(Rtr::Write)
    } else if common.contains(RtrKinds::READ) && n.peer_ird != Some(0) {
        Some(Rtr::Read)
    } else if common.contains(RtrKinds::SEND) {
        Some(Rtr::Send)
    } else {
        None
    }
}

/// Returns a Terminate as the only FPDU of the stream.
fn terminate_fpdu(n: &Negotiated, fault: Fault) -> Vec<u8> {
    let payload = terminate::build(fault, &[], None);
    let header = UntaggedHeader {
        last: true,
        dv: n.version,
        rsvd_ulp: Control { rv: n.version, opcode: Opcode::Terminate }.byte(),
        inv_stag: Stag(0),
        qn: qn::TERMINATE,
        msn: Msn::FIRST,
        mo: 0,
    };
    let mut ulpdu = vec![0; UntaggedHeader::LEN];
    header.emit(&mut ulpdu);
    ulpdu.extend_from_slice(&payload);
    let mut framer = Framer::new(n.tx_markers, n.crc);
    let mut out = vec![0; framer.fpdu_len(ulpdu.len())];
    match framer.frame(&mut out, &ulpdu, 0, |_, _| Ok::<_, std::convert::Infallible>(())) {
        Ok(_) => out,
        Err(never) => match never {},
    }
}
