//! Receive validation: what every ULPDU must satisfy before anything of it is placed.
//!
//! The checks of DDP and RDMAP that need neither memory nor buffers, in the one order in which the
//! first failure is the one reported (RFC 5041 section 7, RFC 5040 section 7). The engine makes
//! the others in between: STag and bounds of a Write, the outstanding request of a Read Response,
//! the posted buffer of a Send.

use super::Fault;
use crate::ddp::{self, Header, TaggedHeader, UntaggedHeader, qn};
use crate::rdmap::{
    ATOMIC_REQUEST_LEN, ATOMIC_RESPONSE_LEN, AtomicRequest, AtomicResponse, Control, IMMEDIATE_LEN,
    Opcode, READ_REQUEST_LEN, ReadRequest, Terminate, UnknownOperation, codes,
};
use crate::types::{Msn, Stag, TaggedOffset};

/// What a Send does besides delivering its payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendKind {
    /// It asks for the receiver's solicited event.
    pub solicited: bool,
    /// It asks for this STag to be invalidated before it is delivered.
    pub invalidate: Option<Stag>,
    /// It is Immediate Data: this, as a big-endian number, and no payload (RFC 7306 section 6).
    pub immediate: Option<u64>,
    /// It is a Send, and has this for the receiver beside its payload, as a big-endian number.
    pub beside: Option<u32>,
}

impl SendKind {
    /// What a Send with this opcode does; `stag` is what it invalidates if it does that, or the
    /// number that it has beside its payload.
    #[inline]
    #[must_use]
    pub fn of(opcode: Opcode, stag: Stag) -> Self {
        SendKind {
            solicited: opcode.solicits(),
            invalidate: opcode.invalidates().then_some(stag),
            immediate: None,
            beside: opcode.has_immediate().then_some(stag.0),
        }
    }
}

/// A complete Read Request, with what a Terminate about it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InboundRead {
    /// What is asked for.
    pub request: ReadRequest,
    /// DDP header of its (last) segment as received.
    pub header: [u8; UntaggedHeader::LEN],
    /// Length of that segment.
    pub segment_len: u16,
}

/// A complete Atomic Request, with what a Terminate about it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InboundAtomic {
    /// What is asked for.
    pub request: AtomicRequest,
    /// DDP header of its (last) segment as received.
    pub header: [u8; UntaggedHeader::LEN],
    /// Length of that segment.
    pub segment_len: u16,
}

/// A segment that passed, with its payload where the ULPDU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival<'p> {
    /// RDMA Write. With no payload, STag and TO are not to be looked at.
    Write {
        /// Buffer to place into.
        stag: Stag,
        /// Tagged offset at which the payload begins.
        to: TaggedOffset,
        /// Payload of the segment.
        payload: &'p [u8],
        /// The message ends here.
        last: bool,
        /// An earlier segment of the message had another STag: 1/1/00, if every check of the
        /// STag itself passes.
        stag_changed: bool,
    },
    /// RDMA Read Response. With no payload, STag and TO are not to be looked at.
    ReadResponse {
        /// Buffer to place into: the sink of the oldest outstanding Read.
        stag: Stag,
        /// Tagged offset at which the payload begins.
        to: TaggedOffset,
        /// Payload of the segment.
        payload: &'p [u8],
        /// The message ends here.
        last: bool,
    },
    /// A Send of any kind. Check the buffer with [`send_fits`], place, then tell
    /// [`Inbound::sent_placed`]; or Immediate Data, which are whole and placed already.
    Send {
        /// What else it does.
        kind: SendKind,
        /// Message sequence number of the Send on queue 0.
        msn: Msn,
        /// Where in the message the payload goes.
        mo: u32,
        /// Payload of the segment.
        payload: &'p [u8],
        /// The message ends here.
        last: bool,
        /// The message begins here: it takes the next posted buffer.
        first_of_message: bool,
    },
    /// A complete Read Request.
    ReadRequest(InboundRead),
    /// A complete Atomic Request.
    AtomicRequest(InboundAtomic),
    /// A complete Atomic Response. Whether a request awaits it is the engine's to know.
    AtomicResponse(AtomicResponse),
    /// Part of a request, of an Atomic Response or of Immediate Data that a peer cut up; the rest
    /// is to come.
    Part,
    /// The peer ends the stream.
    Terminate(Terminate<'p>),
    /// The peer ends the stream with a message that is not understood. Like any Terminate it is
    /// never answered.
    MalformedTerminate(MalformedTerminate),
}

/// What is wrong with a received Terminate; for the local report only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedTerminate {
    /// Not the first message of queue 2.
    #[error("Terminate with MSN {0}")]
    Msn(u32),
    /// Not one whole segment.
    #[error("Terminate in more than one segment")]
    InParts,
    /// Shorter than 4 bytes or than its flags say.
    #[error("Terminate too short for the headers it announces")]
    TooShort,
}

/// A tagged message under way.
#[derive(Clone, Copy, Debug)]
struct TaggedMessage {
    opcode: Opcode,
    /// STag of its first segment that had payload.
    stag: Option<Stag>,
}

/// State of one untagged queue of the receiver.
#[derive(Clone, Copy, Debug)]
struct Queue {
    /// The message in progress, or the next one.
    msn: Msn,
    /// Opcode of the message in progress.
    opcode: Option<Opcode>,
    /// Bytes of it received.
    received: u64,
    /// One past the highest byte of it received.
    end: u64,
}

impl Queue {
    const NEW: Queue = Queue { msn: Msn::FIRST, opcode: None, received: 0, end: 0 };

    fn place(&mut self, mo: u32, len: usize) {
        self.received += len as u64;
        self.end = self.end.max(u64::from(mo) + len as u64);
    }

    /// The message ended; the next one may begin.
    fn finish(&mut self) {
        *self = Queue { msn: self.msn.next(), ..Queue::NEW };
    }
}

/// Receive state of one stream.
///
/// After a fault or a Terminate the stream receives no more; nothing else may be given to it.
#[derive(Debug)]
pub struct Inbound {
    version: u8,
    /// Both ends have agreed on Sends with immediate data.
    immediate_sends: bool,
    tagged: Option<TaggedMessage>,
    sends: Queue,
    /// The Immediate Data in progress, as much of them as has come.
    immediate: [u8; IMMEDIATE_LEN],
    requests: Queue,
    /// The request in progress, as much of it as has come.
    request: [u8; ATOMIC_REQUEST_LEN],
    atomic_responses: Queue,
    /// The Atomic Response in progress.
    atomic_response: [u8; ATOMIC_RESPONSE_LEN],
}

impl Inbound {
    /// A stream at its first segment, with the DDP and RDMAP version negotiated (1, or 0 with an
    /// RDMAC peer).
    #[must_use]
    pub fn new(version: u8) -> Inbound {
        Inbound {
            version,
            immediate_sends: false,
            tagged: None,
            sends: Queue::NEW,
            immediate: [0; IMMEDIATE_LEN],
            requests: Queue::NEW,
            request: [0; ATOMIC_REQUEST_LEN],
            atomic_responses: Queue::NEW,
            atomic_response: [0; ATOMIC_RESPONSE_LEN],
        }
    }

    /// Both ends have agreed on Sends with immediate data.
    pub fn allow_immediate_sends(&mut self) {
        self.immediate_sends = true;
    }

    /// Lets the next message of each queue have this number, as after so many.
    #[cfg(test)]
    pub(crate) fn number_from(&mut self, msn: Msn) {
        for queue in [&mut self.sends, &mut self.requests, &mut self.atomic_responses] {
            queue.msn = msn;
        }
    }

    /// Validates one ULPDU. `ird_free` says that a slot for another inbound request is free; it is
    /// looked at only when one begins.
    #[inline]
    //= RDMAP-7.2-1, RDMAP-7.2-6, 7306-8.2-1
    pub fn handle<'p>(&mut self, ulpdu: &'p [u8], ird_free: bool) -> Result<Arrival<'p>, Fault> {
        match Header::parse(ulpdu) {
            //= DDP-4.1-1
            Ok((Header::Tagged(header), payload)) => self.tagged(header, payload),
            //= DDP-4.1-2
            Ok((Header::Untagged(header), payload)) => {
                self.untagged(header, payload, ulpdu, ird_free)
            }
            Err(ddp::TooShort) => Err(Fault::TOO_SHORT),
        }
    }

    #[inline]
    fn tagged<'p>(
        &mut self,
        header: TaggedHeader,
        payload: &'p [u8],
    ) -> Result<Arrival<'p>, Fault> {
        //= DDP-4.1-11
        if header.dv != self.version {
            return Err(Fault::segment(codes::TAGGED_VERSION));
        }
        //= DDP-4.2-3, DDP-5.4-5, RDMAP-3.1-7
        let opcode = self.opcode(header.rsvd_ulp)?;
        let mut message = self.tagged.unwrap_or(TaggedMessage { opcode, stag: None });
        //= RDMAP-7.2-2
        if !opcode.is_tagged() || message.opcode != opcode {
            return Err(Fault::segment(codes::OPERATION_OPCODE));
        }
        let TaggedHeader { stag, to, last, .. } = header;
        let mut stag_changed = false;
        if !payload.is_empty() {
            stag_changed = *message.stag.get_or_insert(stag) != stag;
        }
        self.tagged = if last { None } else { Some(message) };
        Ok(match opcode {
            //= DDP-4.2-7
            Opcode::Write => Arrival::Write { stag, to, payload, last, stag_changed },
            _ => Arrival::ReadResponse { stag, to, payload, last },
        })
    }

    #[inline]
    fn untagged<'p>(
        &mut self,
        header: UntaggedHeader,
        payload: &'p [u8],
        ulpdu: &'p [u8],
        ird_free: bool,
    ) -> Result<Arrival<'p>, Fault> {
        //= DDP-4.1-11
        if header.dv != self.version {
            return Err(Fault::segment(codes::UNTAGGED_VERSION));
        }
        // RDMAC's version has no extensions.
        let queues = if self.version == 0 { qn::TERMINATE } else { qn::ATOMIC_RESPONSE };
        //= DDP-7.1-1, 7306-10.2-1
        if header.qn > queues {
            return Err(Fault::segment(codes::UNTAGGED_QN));
        }
        //= DDP-4.3-3, DDP-5.4-5, RDMAP-3.1-7
        let opcode = self.opcode(header.rsvd_ulp)?;
        //= RDMAP-4.2-2, RDMAP-7.2-2, 7306-1.1-5, 7306-8.2-2
        if opcode.queue() != Some(header.qn)
            || (opcode.is_extension() && self.version == 0)
            || (opcode.has_immediate() && !self.immediate_sends)
        {
            return Err(Fault::segment(codes::OPERATION_OPCODE));
        }
        match header.qn {
            qn::SEND => self.send(header, opcode, payload),
            qn::READ_REQUEST => self.request(header, opcode, payload, ulpdu, ird_free),
            //= 7306-4.1-6
            qn::ATOMIC_RESPONSE => self.atomic_response(header, payload),
            _ => Ok(terminate(header, payload)),
        }
    }

    /// The opcode, if the RDMAP version is the negotiated one.
    #[inline]
    fn opcode(&self, rsvd_ulp: u8) -> Result<Opcode, Fault> {
        let Control { rv, opcode } = Control::parse(rsvd_ulp);
        //= RDMAP-4.1-6, RDMAP-7.2-3, 7306-4.1-1, 7306-8.2-3
        if rv != self.version {
            return Err(Fault::segment(codes::OPERATION_VERSION));
        }
        Ok(opcode)
    }

    #[inline]
    fn send<'p>(
        &mut self,
        header: UntaggedHeader,
        opcode: Opcode,
        payload: &'p [u8],
    ) -> Result<Arrival<'p>, Fault> {
        let first_of_message = self.sends.opcode.is_none();
        if *self.sends.opcode.get_or_insert(opcode) != opcode {
            return Err(Fault::segment(codes::OPERATION_OPCODE));
        }
        //= DDP-7.1-9, DDP-5.3-7
        if header.msn != self.sends.msn {
            return Err(Fault::segment(codes::UNTAGGED_MSN));
        }
        let UntaggedHeader { msn, mo, last, inv_stag, .. } = header;
        //= RDMAP-4.1-10, 7306-4.1-4
        let mut kind = SendKind::of(opcode, inv_stag);
        if opcode.is_immediate() {
            // The RFC has no code for fewer bytes.
            //= 7306-6.2-1, 7306-6.3-7
            if !collect(&mut self.sends, &header, payload, &mut self.immediate)? {
                return Ok(Arrival::Part);
            }
            kind.immediate = Some(u64::from_be_bytes(self.immediate));
            let (mo, first_of_message) = (0, true);
            return Ok(Arrival::Send { kind, msn, mo, payload: &[], last, first_of_message });
        }
        Ok(Arrival::Send { kind, msn, mo, payload, last, first_of_message })
    }

    /// Notes that a Send segment has been placed. On the last one, checks that the message is
    /// whole and returns its length.
    ///
    /// The order of earlier segments is free, but the last one ends the message and as many bytes
    /// have come as the message is long, so that nothing stale is delivered in a gap.
    #[inline]
    pub fn sent_placed(&mut self, mo: u32, len: usize, last: bool) -> Result<Option<u32>, Fault> {
        let sends = &mut self.sends;
        sends.place(mo, len);
        if !last {
            return Ok(None);
        }
        let total = u64::from(mo) + len as u64;
        //= DDP-5.4-2
        let whole = total == sends.end && total == sends.received;
        //= DDP-5.3-6
        sends.finish();
        // No buffer is longer than 2^32 - 1 bytes, so no message that fitted one is either.
        match u32::try_from(total) {
            //= DDP-5.4-3, RDMAP-3.1-5
            Ok(total) if whole => Ok(Some(total)),
            _ => Err(Fault::segment(codes::UNTAGGED_MO)),
        }
    }

    fn request<'p>(
        &mut self,
        header: UntaggedHeader,
        opcode: Opcode,
        payload: &'p [u8],
        ulpdu: &'p [u8],
        ird_free: bool,
    ) -> Result<Arrival<'p>, Fault> {
        let begins = self.requests.opcode.is_none();
        if *self.requests.opcode.get_or_insert(opcode) != opcode {
            return Err(Fault::segment(codes::OPERATION_OPCODE));
        }
        let queue = &mut self.requests;
        //= DDP-7.1-9, DDP-5.3-7
        if header.msn != queue.msn {
            return Err(Fault::segment(codes::UNTAGGED_MSN));
        }
        //= DDP-7.1-2, RDMAP-6.1-7
        if begins && !ird_free {
            return Err(Fault::segment(codes::UNTAGGED_NO_BUFFER));
        }
        let len = match opcode {
            //= 7306-5.2.1-1
            Opcode::AtomicRequest => ATOMIC_REQUEST_LEN,
            _ => READ_REQUEST_LEN,
        };
        if !collect(queue, &header, payload, &mut self.request[..len])? {
            return Ok(Arrival::Part);
        }
        let mut bytes = [0; UntaggedHeader::LEN];
        bytes.copy_from_slice(&ulpdu[..UntaggedHeader::LEN]);
        #[expect(clippy::cast_possible_truncation, reason = "at most 70: it fitted the header")]
        let segment_len = (UntaggedHeader::LEN + payload.len()) as u16;
        if let Opcode::AtomicRequest = opcode {
            let request = AtomicRequest::parse(&self.request)
                //= 7306-1.1-5, 7306-5.2.1-18
                .map_err(|UnknownOperation(_)| Fault::segment(codes::OPERATION_UNSPECIFIED))?;
            return Ok(Arrival::AtomicRequest(InboundAtomic {
                request,
                header: bytes,
                segment_len,
            }));
        }
        let mut read = [0; READ_REQUEST_LEN];
        read.copy_from_slice(&self.request[..READ_REQUEST_LEN]);
        let request = ReadRequest::parse(&read);
        Ok(Arrival::ReadRequest(InboundRead { request, header: bytes, segment_len }))
    }

    fn atomic_response<'p>(
        &mut self,
        header: UntaggedHeader,
        payload: &'p [u8],
    ) -> Result<Arrival<'p>, Fault> {
        let queue = &mut self.atomic_responses;
        //= 7306-5-9, 7306-5.2.2-11
        if header.msn != queue.msn {
            return Err(Fault::segment(codes::UNTAGGED_MSN));
        }
        if !collect(queue, &header, payload, &mut self.atomic_response)? {
            return Ok(Arrival::Part);
        }
        Ok(Arrival::AtomicResponse(AtomicResponse::parse(&self.atomic_response)))
    }
}

/// Copies a segment of a message of a fixed length to its place in `whole`; whether all of it has
/// come.
fn collect(
    queue: &mut Queue,
    header: &UntaggedHeader,
    payload: &[u8],
    whole: &mut [u8],
) -> Result<bool, Fault> {
    send_fits(header.mo, payload.len(), whole.len() as u64)?;
    // `send_fits` bounds both sums by the length of the whole.
    let from = header.mo as usize;
    whole[from..from + payload.len()].copy_from_slice(payload);
    queue.place(header.mo, payload.len());
    if !header.last {
        return Ok(false);
    }
    if from + payload.len() != whole.len() || queue.received != whole.len() as u64 {
        return Err(Fault::segment(codes::OPERATION_UNSPECIFIED));
    }
    queue.finish();
    Ok(true)
}

/// Checks that a segment of an untagged message lies inside the buffer of `buffer_len` bytes that
/// its message was given: its offset first, then its end.
#[inline]
pub fn send_fits(mo: u32, len: usize, buffer_len: u64) -> Result<(), Fault> {
    //= DDP-7.1-7
    if u64::from(mo) > buffer_len {
        return Err(Fault::segment(codes::UNTAGGED_MO));
    }
    //= DDP-7.1-8, RDMAP-5.3-4
    if u64::from(mo) + len as u64 > buffer_len {
        return Err(Fault::segment(codes::UNTAGGED_TOO_LONG));
    }
    Ok(())
}

fn terminate<'p>(header: UntaggedHeader, payload: &'p [u8]) -> Arrival<'p> {
    //= RDMAP-5.4-3, RDMAP-5.4-4
    if header.msn != Msn::FIRST {
        return Arrival::MalformedTerminate(MalformedTerminate::Msn(header.msn.0));
    }
    if header.mo != 0 || !header.last {
        return Arrival::MalformedTerminate(MalformedTerminate::InParts);
    }
    match Terminate::parse(payload) {
        Ok(terminate) => Arrival::Terminate(terminate),
        Err(_) => Arrival::MalformedTerminate(MalformedTerminate::TooShort),
    }
}

#[cfg(test)]
mod tests;
