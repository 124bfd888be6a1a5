//! The start-up frames and messages of the two sides of a connection.

use super::recording::{Connection, Side, What};
use crate::ddp::Header;
use crate::mpa::Deframer;
use crate::mpa::startup::{Frame, FrameKind, Progress, Repr};
use crate::rdmap::{Control, Opcode, READ_REQUEST_LEN, ReadRequest, Terminate};
use rnic_abi::types::Stag;

/// A complete message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub opcode: Opcode,
    /// Header of its first segment.
    pub header: Header,
    pub payload: Vec<u8>,
    pub segments: usize,
    /// Its FPDUs.
    pub bytes: Vec<u8>,
}

impl Message {
    /// Returns the STag and offset of a tagged message.
    pub fn tagged(&self) -> Option<(Stag, u64)> {
        match self.header {
            Header::Tagged(h) => Some((h.stag, h.to.0)),
            Header::Untagged(_) => None,
        }
    }

    /// Returns the request, if it is a Read Request.
    pub fn read_request(&self) -> Option<ReadRequest> {
        let bytes: &[u8; READ_REQUEST_LEN] = self.payload.first_chunk()?;
        (self.opcode == Opcode::ReadRequest).then(|| ReadRequest::parse(bytes))
    }

    /// Returns the STag that it invalidates.
    pub fn invalidates(&self) -> Option<Stag> {
        match (self.opcode, self.header) {
            (Opcode::SendInvalidate | Opcode::SendSolicitedInvalidate, Header::Untagged(h)) => {
                Some(h.inv_stag)
            }
            _ => None,
        }
    }

    pub fn solicits(&self) -> bool {
        matches!(self.opcode, Opcode::SendSolicited | Opcode::SendSolicitedInvalidate)
    }

    /// Returns true if it is a Send of any kind.
    pub fn sends(&self) -> bool {
        matches!(self.opcode, Opcode::Send | Opcode::SendInvalidate) || self.solicits()
    }

    /// Returns a description of the message.
    pub fn words(&self) -> String {
        let mut s = match self.opcode {
            Opcode::Terminate => Terminate::parse(&self.payload).unwrap().to_string(),
            Opcode::ReadRequest => self.read_request().unwrap().to_string(),
            opcode => format!("{opcode} of {}", self.payload.len()),
        };
        if self.segments > 1 {
            s += &format!(" in {} FPDUs", self.segments);
        }
        s
    }

    /// Returns its bytes in hexadecimal.
    pub fn hex(&self) -> String {
        self.bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Splits one direction of the stream into messages.
pub struct MessageReader {
    deframer: Deframer,
    inbox: Vec<u8>,
    begun: Option<Message>,
}

impl MessageReader {
    pub fn new(crc: bool) -> MessageReader {
        MessageReader { deframer: Deframer::new(false, crc), inbox: Vec::new(), begun: None }
    }

    /// Adds bytes. Returns the messages that they complete.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<Message> {
        self.inbox.extend_from_slice(bytes);
        let mut messages = Vec::new();
        loop {
            let needed = self.deframer.needed(&self.inbox);
            if needed > self.inbox.len() {
                return messages;
            }
            let fpdu: Vec<u8> = self.inbox.drain(..needed).collect();
            let mut copy = fpdu.clone();
            let ulpdu = self.deframer.take(&mut copy).expect("a valid FPDU");
            let (header, payload) = Header::parse(ulpdu).expect("a valid segment");
            let opcode = Control::parse(header.rsvd_ulp()).opcode;
            let message = self.begun.get_or_insert_with(|| Message {
                opcode,
                header,
                payload: Vec::new(),
                segments: 0,
                bytes: Vec::new(),
            });
            assert_eq!(message.opcode, opcode, "messages are not interleaved");
            message.payload.extend_from_slice(payload);
            message.bytes.extend_from_slice(&fpdu);
            message.segments += 1;
            if is_last(&header) {
                messages.extend(self.begun.take());
            }
        }
    }

    /// Returns true if no partial message remains.
    pub fn is_between_messages(&self) -> bool {
        self.inbox.is_empty() && self.begun.is_none()
    }
}

/// Action of a side.
#[derive(Clone, Debug)]
pub enum Act {
    /// The side sent bytes that completed these messages.
    Sent {
        bytes: Vec<u8>,
        complete: Vec<Message>,
    },
    Finished,
    Reset,
}

/// A parsed connection.
pub struct Conversation {
    pub request: Vec<u8>,
    pub reply: Vec<u8>,
    pub emss: usize,
    /// Actions after start-up, in the order of the recording.
    pub acts: Vec<(Side, Act)>,
}

impl Conversation {
    pub fn new(connection: &Connection) -> Conversation {
        let frame = |side, kind| {
            let said: Vec<u8> = said(connection, side);
            let Ok(Progress::Complete(frame, behind)) = Frame::check(kind, 2, &said) else {
                panic!("no start-up frame")
            };
            (said[..said.len() - behind.len()].to_vec(), Repr::parse(&frame).crc)
        };
        let (request, asked) = frame(Side::Initiator, FrameKind::Request);
        let (reply, answered) = frame(Side::Responder, FrameKind::Reply);
        let mut directions = [(Side::Initiator, request.len()), (Side::Responder, reply.len())]
            .map(|(side, frame)| (side, frame, MessageReader::new(asked || answered)));
        let mut acts = Vec::new();
        for (side, what) in &connection.events {
            let act = match what {
                What::Fin => Act::Finished,
                What::Reset => Act::Reset,
                What::Bytes(bytes) => {
                    let (_, frame, ear) = directions.iter_mut().find(|d| d.0 == *side).unwrap();
                    let bytes = bytes[bytes.len().min(*frame)..].to_vec();
                    *frame = frame.saturating_sub(what.len());
                    let complete = ear.feed(&bytes);
                    Act::Sent { bytes, complete }
                }
            };
            acts.push((*side, act));
        }
        assert!(directions.iter().all(|(_, _, ear)| ear.is_between_messages()));
        Conversation { request, reply, emss: connection.emss, acts }
    }

    /// Returns the messages of a side.
    pub fn messages(&self, of: Side) -> impl Iterator<Item = &Message> {
        self.acts.iter().filter(move |(side, _)| *side == of).flat_map(|(_, act)| match act {
            Act::Sent { complete, .. } => &complete[..],
            _ => &[],
        })
    }
}

impl What {
    fn len(&self) -> usize {
        match self {
            What::Bytes(bytes) => bytes.len(),
            What::Fin | What::Reset => 0,
        }
    }
}

fn is_last(header: &Header) -> bool {
    match header {
        Header::Tagged(h) => h.last,
        Header::Untagged(h) => h.last,
    }
}

fn said(connection: &Connection, by: Side) -> Vec<u8> {
    let of = connection.events.iter().filter(|(side, _)| *side == by);
    of.flat_map(|(_, what)| match what {
        What::Bytes(bytes) => &bytes[..],
        _ => &[],
    })
    .copied()
    .collect()
}
