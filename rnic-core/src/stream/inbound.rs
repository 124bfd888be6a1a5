//! Receive validation of ULPDUs, before any of their payload is placed.
//!
//! This module contains the checks of DDP and RDMAP that need neither memory nor buffers. They run
//! in a fixed order, and the first failure is reported (RFC 5041 section 7, RFC 5040 section 7).
//! The engine makes the other checks: STag and bounds of a Write, the outstanding request of a Read
//! Response, the posted buffer of a Send.

use super::Fault;
use crate::ddp::{self, Header, TaggedHeader, UntaggedHeader, qn};
use crate::rdmap::{
    ATOMIC_REQUEST_LEN, ATOMIC_RESPONSE_LEN, AtomicRequest, AtomicResponse, Control, IMMEDIATE_LEN,
    Opcode, READ_REQUEST_LEN, ReadRequest, Terminate, UnknownOperation, codes,
};
use rnic_abi::types::{Msn, Stag, TaggedOffset};

/// Attributes of a Send other than its payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendKind {
    /// Requests a solicited event at the receiver.
    pub solicited: bool,
    /// STag to invalidate before the message is delivered.
    pub invalidate: Option<Stag>,
    /// Immediate Data as a big-endian number, without payload (RFC 7306 section 6).
    pub immediate: Option<u64>,
    /// Immediate data of a Send, in addition to its payload, as a big-endian number.
    pub send_immediate: Option<u32>,
}

impl SendKind {
    /// Returns the attributes of a Send with this opcode. `stag` is the STag to invalidate or the
    /// immediate data, depending on the opcode.
    #[inline]
    #[must_use]
    pub fn of(opcode: Opcode, stag: Stag) -> Self {
        SendKind {
            solicited: opcode.solicits(),
            invalidate: opcode.invalidates().then_some(stag),
            immediate: None,
            send_immediate: opcode.has_immediate().then_some(stag.0),
        }
    }
}

/// A complete Read Request, with the fields that a Terminate about it encloses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InboundRead {
    /// Parameters of the request.
    pub request: ReadRequest,
    /// DDP header of its last segment, as received.
    pub header: [u8; UntaggedHeader::LEN],
    /// Length of that segment's ULPDU in bytes.
    pub segment_len: u16,
}

/// A complete Atomic Request, with the fields that a Terminate about it encloses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InboundAtomic {
    /// Parameters of the request.
    pub request: AtomicRequest,
    /// DDP header of its last segment, as received.
    pub header: [u8; UntaggedHeader::LEN],
    /// Length of that segment's ULPDU in bytes.
    pub segment_len: u16,
}

/// A valid segment. Its payload is a slice of the ULPDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival<'p> {
    /// RDMA Write. Without payload, STag and TO must not be checked.
    Write {
        /// Destination buffer.
        stag: Stag,
        /// Tagged offset at which the payload begins.
        to: TaggedOffset,
        /// Payload of the segment.
        payload: &'p [u8],
        /// True for the last segment of the message.
        last: bool,
        /// True if an earlier segment of the message had a different STag: fault 1/1/00, unless a
        /// check of the STag itself fails first.
        stag_changed: bool,
    },
    /// RDMA Read Response. Without payload, STag and TO must not be checked.
    ReadResponse {
        /// Destination buffer, the sink of the oldest outstanding Read.
        stag: Stag,
        /// Tagged offset at which the payload begins.
        to: TaggedOffset,
        /// Payload of the segment.
        payload: &'p [u8],
        /// True for the last segment of the message.
        last: bool,
    },
    /// A Send of any kind. The caller checks the buffer with [`send_fits`], places the payload and
    /// calls [`Inbound::sent_placed`]. Immediate Data is complete and has no payload to place.
    Send {
        /// Other attributes of the Send.
        kind: SendKind,
        /// Message sequence number of the Send on queue 0.
        msn: Msn,
        /// Offset of the payload in the message.
        mo: u32,
        /// Payload of the segment.
        payload: &'p [u8],
        /// True for the last segment of the message.
        last: bool,
        /// True for the first segment of the message, which takes the next posted buffer.
        first_of_message: bool,
    },
    /// A complete Read Request.
    ReadRequest(InboundRead),
    /// A complete Atomic Request.
    AtomicRequest(InboundAtomic),
    /// A complete Atomic Response. The engine checks that a request awaits it.
    AtomicResponse(AtomicResponse),
    /// An incomplete request, Atomic Response or Immediate Data message, which the peer sends in
    /// several segments.
    Part,
    /// The peer ends the stream.
    Terminate(Terminate<'p>),
    /// The peer ends the stream with an invalid message. Like any Terminate, it is never answered.
    MalformedTerminate(MalformedTerminate),
}

/// Defect of a received Terminate, for local reports only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedTerminate {
    /// It is not the first message of queue 2.
    #[error("Terminate with MSN {0}")]
    Msn(u32),
    /// It is not a single segment.
    #[error("Terminate in more than one segment")]
    InParts,
    /// It is shorter than 4 bytes or than the headers that its flags announce.
    #[error("Terminate too short for the headers it announces")]
    TooShort,
}

/// A partly received tagged message.
#[derive(Clone, Copy, Debug, Default)]
struct TaggedMessage {
    /// STag of its first segment with payload.
    stag: Option<Stag>,
}

/// Receive state of an untagged queue.
#[derive(Clone, Copy, Debug)]
struct Queue {
    /// Number of the message in progress, or of the next one.
    msn: Msn,
    /// Opcode of the message in progress.
    opcode: Option<Opcode>,
    /// Number of bytes received of this message.
    received: u64,
    /// Highest end offset among the received segments of this message.
    end: u64,
}

impl Queue {
    const NEW: Queue = Queue { msn: Msn::FIRST, opcode: None, received: 0, end: 0 };

    fn place(&mut self, mo: u32, len: usize) {
        self.received += len as u64;
        self.end = self.end.max(u64::from(mo) + len as u64);
    }

    /// Ends the message.
    fn finish(&mut self) {
        *self = Queue { msn: self.msn.next(), ..Queue::NEW };
    }
}

/// Receive state of a stream.
///
/// After a fault or a Terminate the stream must receive no further segments.
#[derive(Debug)]
pub struct Inbound {
    version: u8,
    /// True if both ends have agreed on Sends with immediate data.
    immediate_sends: bool,
    /// True if a Write and a Read Response may be in progress at the same time.
    responses_pass: bool,
    write: Option<TaggedMessage>,
    response: Option<TaggedMessage>,
    sends: Queue,
    /// Immediate Data received so far of the message in progress.
    immediate: [u8; IMMEDIATE_LEN],
    requests: Queue,
    /// Bytes received so far of the request in progress.
    request: [u8; ATOMIC_REQUEST_LEN],
    atomic_responses: Queue,
    /// Bytes received so far of the Atomic Response in progress.
    atomic_response: [u8; ATOMIC_RESPONSE_LEN],
}

impl Inbound {
    /// Creates the state of a stream before its first segment, with the negotiated version of DDP
    /// and RDMAP (1, or 0 with an RDMAC peer).
    #[must_use]
    pub fn new(version: u8) -> Inbound {
        Inbound {
            version,
            immediate_sends: false,
            responses_pass: false,
            write: None,
            response: None,
            sends: Queue::NEW,
            immediate: [0; IMMEDIATE_LEN],
            requests: Queue::NEW,
            request: [0; ATOMIC_REQUEST_LEN],
            atomic_responses: Queue::NEW,
            atomic_response: [0; ATOMIC_RESPONSE_LEN],
        }
    }

    /// Accepts Sends with immediate data. Called if both ends have agreed on them.
    pub fn allow_immediate_sends(&mut self) {
        self.immediate_sends = true;
    }

    /// Accepts Writes among the segments of a Read Response, and vice versa. Called if the engine
    /// keeps Writes that arrive after a Send without a receive, and handles responses at once.
    pub fn allow_passing_responses(&mut self) {
        self.responses_pass = true;
    }

    /// Sets the MSN of the next message on each queue.
    #[cfg(test)]
    pub(crate) fn set_next_msn(&mut self, msn: Msn) {
        for queue in [&mut self.sends, &mut self.requests, &mut self.atomic_responses] {
            queue.msn = msn;
        }
    }

    /// Validates a ULPDU. `ird_free` is true if a slot for another inbound request is free; it
    /// matters only for the first segment of a request.
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
        //= RDMAP-7.2-2
        if !opcode.is_tagged() || self.interrupts(opcode) {
            return Err(Fault::segment(codes::OPERATION_OPCODE));
        }
        let in_progress = match opcode {
            Opcode::Write => &mut self.write,
            _ => &mut self.response,
        };
        let TaggedHeader { stag, to, last, .. } = header;
        let message = in_progress.get_or_insert_default();
        let mut stag_changed = false;
        if !payload.is_empty() {
            stag_changed = *message.stag.get_or_insert(stag) != stag;
        }
        if last {
            *in_progress = None;
        }
        Ok(match opcode {
            //= DDP-4.2-7
            Opcode::Write => Arrival::Write { stag, to, payload, last, stag_changed },
            _ => Arrival::ReadResponse { stag, to, payload, last },
        })
    }

    /// Returns true if a tagged segment with this opcode may not arrive now, because a message with
    /// the other opcode is in progress.
    #[inline]
    fn interrupts(&self, opcode: Opcode) -> bool {
        let other = if opcode == Opcode::Write { &self.response } else { &self.write };
        other.is_some() && !self.responses_pass
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
        // Version 0 (RDMAC) has no extensions.
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

    /// Returns the opcode, if the RDMAP version is the negotiated one.
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
            // The RFC defines no error code for Immediate Data that is too short.
            //= 7306-6.2-1, 7306-6.3-7
            if !collect(&mut self.sends, &header, payload, &mut self.immediate)? {
                return Ok(Arrival::Part);
            }
            kind.immediate = Some(u64::from_be_bytes(self.immediate));
            let mo = 0;
            let first_of_message = true;
            return Ok(Arrival::Send { kind, msn, mo, payload: &[], last, first_of_message });
        }
        Ok(Arrival::Send { kind, msn, mo, payload, last, first_of_message })
    }

    /// Returns the MSN of the last Send that was placed in full; `None` if there is none.
    pub fn last_send(&self) -> Option<Msn> {
        let next = self.sends.msn;
        (next != Msn::FIRST).then(|| Msn(next.0.wrapping_sub(1)))
    }

    /// Records that a Send segment has been placed. For the last one, checks that the message is
    /// complete and returns its length.
    ///
    /// Earlier segments may arrive in any order. The last one must end the message, and the number
    /// of received bytes must equal the length, so that no gap with stale data is delivered.
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
        // No buffer has more than 2^32 - 1 bytes, so no message that fits a buffer does.
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
        #[expect(clippy::cast_possible_truncation, reason = "at most 70: two headers")]
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

/// Copies a segment of a message of fixed length to its position in `whole`. Returns true if the
/// message is complete.
fn collect(
    queue: &mut Queue,
    header: &UntaggedHeader,
    payload: &[u8],
    whole: &mut [u8],
) -> Result<bool, Fault> {
    send_fits(header.mo, payload.len(), whole.len() as u64)?;
    // `send_fits` bounds both sums by the length of `whole`.
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

/// Checks that a segment of an untagged message fits a buffer of `buffer_len` bytes: first its
/// offset, then its end.
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
