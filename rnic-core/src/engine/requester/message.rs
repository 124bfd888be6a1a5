//! Outgoing messages and their segmentation (RFC 5041 section 5.2), for both paths.
//!
//! A [`Message`] tracks where its payload is and how much has been sent. [`Message::next_segment`]
//! cuts the next DDP segment, and [`Message::gather`] resolves the memory that it covers. The link
//! frames the segment for TCP or hands it to the other QP.

use arrayvec::ArrayVec;

use crate::ddp::{Header, TaggedHeader, UntaggedHeader};
use crate::device::memory::Target;
use crate::device::stag::{Principal, StagTable};
use crate::engine::numbers::count;
use crate::engine::reason::Reason;
use crate::rdmap::{
    ATOMIC_REQUEST_LEN, AtomicRequest, AtomicResponse, Control, Opcode, ReadRequest,
};
use crate::stream::InboundRead;
use rnic_abi::abi::queue::Sge;
use rnic_abi::shm::Mapping;
use rnic_abi::shm::queue::MAX_SGE;
use rnic_abi::types::{ATOMIC_LEN, Access, Gid, Msn, Stag, TaggedOffset};

/// Memory of one segment.
pub(in crate::engine) type Gather<'t> = ArrayVec<Target<'t>, MAX_SGE>;

/// DDP header fields common to the segments of a message.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum HeaderTemplate {
    /// To a tagged buffer, from this offset on.
    Tagged { opcode: Opcode, stag: Stag, to: u64 },
    /// To an untagged queue.
    Untagged { opcode: Opcode, invalidate: Stag, qn: u32, msn: Msn },
}

/// Source of the payload.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum MessageSource {
    /// None: the message is empty.
    Empty,
    /// One SGE, with a local key of the sender.
    Element(Sge),
    /// Several SGEs of the QP's own list: index of the next one, and offset in it.
    Elements { index: usize, offset: u32 },
    /// Inline data in the client's arena.
    Inline { at: usize },
    /// A region that the peer addressed: the response to its Read.
    ReadResponse(InboundRead),
    /// None: the message consists of this header.
    Header(HeaderMessage),
}

/// A message that consists of an RDMAP header.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum HeaderMessage {
    ReadRequest(ReadRequest),
    AtomicRequest(AtomicRequest),
    AtomicResponse(AtomicResponse),
    /// Immediate Data, as a big-endian number.
    Immediate(u64),
}

impl HeaderMessage {
    /// Returns the bytes of the message.
    //= 7306-4.2-1
    pub(in crate::engine) fn emit(&self) -> ArrayVec<u8, ATOMIC_REQUEST_LEN> {
        match self {
            HeaderMessage::ReadRequest(request) => request.emit().into_iter().collect(),
            HeaderMessage::AtomicRequest(request) => request.emit().into(),
            HeaderMessage::AtomicResponse(response) => response.emit().into_iter().collect(),
            HeaderMessage::Immediate(data) => data.to_be_bytes().into_iter().collect(),
        }
    }
}

/// A message being sent. Each request needs one, so it must stay small.
#[derive(Clone, Debug)]
pub(in crate::engine) struct Message {
    pub head: HeaderTemplate,
    pub source: MessageSource,
    pub total: u32,
    pub sent: u32,
    /// Sequence number of its request in flight. `None` for responses, for messages of the stream
    /// itself, and for requests that complete with a response.
    pub seq: Option<u64>,
}

/// Destination of the datagram in progress, from its request.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Addressed {
    pub to: Gid,
    pub qp: u32,
    /// `None` for the sender's own Q_Key.
    pub q_key: Option<u32>,
    /// Index of the source GID.
    pub source: u16,
    pub immediate: Option<u32>,
    pub solicited: bool,
}

/// One segment to be sent.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Segment {
    pub header: Header,
    /// Payload bytes, without the DDP header.
    pub len: u32,
    pub last: bool,
}

/// Error in resolving a segment's memory.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum GatherFault {
    /// A local SGE cannot be resolved.
    Local(Reason),
    /// The region of a Read was revoked after it was checked.
    Revoked,
    /// Only a copier can read the memory, which must be staged first.
    Unstaged,
}

impl Message {
    /// Cuts the next segment, at most `mulpdu` bytes including its header, for DDP version `dv`.
    pub(in crate::engine) fn next_segment(&self, mulpdu: usize, dv: u8) -> Segment {
        let header_len = match self.head {
            HeaderTemplate::Tagged { .. } => TaggedHeader::LEN,
            HeaderTemplate::Untagged { .. } => UntaggedHeader::LEN,
        };
        let rest = self.total - self.sent;
        // MULPDU is at least 128 (RFC 5044 section 3), so there is room for payload.
        //= MPA-3-5, DDP-5.2-1, DDP-5.2-2, 7306-A-1
        let len = rest.min(count(mulpdu - header_len));
        //= DDP-4.1-3, DDP-4.1-4, DDP-4.1-5, DDP-4.1-6, DDP-5.2-9
        let last = len == rest;
        //= 7306-4.1-1, 7306-4.1-7
        let control = |opcode| Control { rv: dv, opcode }.byte();
        let header = match self.head {
            HeaderTemplate::Tagged { opcode, stag, to } => Header::Tagged(TaggedHeader {
                last,
                dv,
                //= DDP-4.2-4
                rsvd_ulp: control(opcode),
                //= DDP-4.2-8
                stag,
                // The sink checks the range as a whole; a peer's sink offset may wrap here.
                //= DDP-5.2-8, DDP-5.3-3
                to: TaggedOffset(to.wrapping_add(u64::from(self.sent))),
            }),
            HeaderTemplate::Untagged { opcode, invalidate, qn, msn } => {
                Header::Untagged(UntaggedHeader {
                    last,
                    dv,
                    //= DDP-4.3-4
                    rsvd_ulp: control(opcode),
                    inv_stag: invalidate,
                    //= DDP-4.3-6
                    qn,
                    //= DDP-4.3-10
                    msn,
                    //= DDP-4.3-11, DDP-5.2-6, DDP-5.3-3
                    mo: self.sent,
                })
            }
        };
        Segment { header, len, last }
    }

    /// Resolves the next `len` bytes of the payload. `arena` holds inline data, and `list` the
    /// SGEs of [`MessageSource::Elements`]. A [`MessageSource::Header`] has no memory, since
    /// its bytes are in the message.
    pub(in crate::engine) fn gather<'t>(
        &self,
        len: u32,
        principal: Principal,
        stags: &'t StagTable,
        arena: &'t Mapping,
        list: &[Sge],
        out: &mut Gather<'t>,
    ) -> Result<(), GatherFault> {
        if len == 0 {
            return Ok(());
        }
        match &self.source {
            MessageSource::Empty | MessageSource::Header(_) => {}
            MessageSource::Inline { at } => {
                out.push(Target::inline(
                    principal.session,
                    arena,
                    at + self.sent as usize,
                    len as usize,
                ));
            }
            MessageSource::ReadResponse(InboundRead { request, .. }) => {
                let to = request.src_to.0.wrapping_add(u64::from(self.sent));
                let target = stags
                    .remote(principal, request.src_stag, to, u64::from(len), Access::REMOTE_READ)
                    .map_err(|_| GatherFault::Revoked)?;
                out.push(target);
            }
            MessageSource::Element(sge) => {
                let addr = sge.addr.wrapping_add(u64::from(self.sent));
                out.push(
                    resolve_sge(stags, principal, sge.lkey, addr, len)
                        .map_err(GatherFault::Local)?,
                );
            }
            MessageSource::Elements { index, offset } => {
                let mut left = len;
                let mut skip = *offset;
                for sge in list.get(*index..).unwrap_or_default() {
                    if left == 0 {
                        break;
                    }
                    let n = (sge.length - skip).min(left);
                    if n > 0 {
                        let addr = sge.addr.wrapping_add(u64::from(skip));
                        let target = resolve_sge(stags, principal, sge.lkey, addr, n);
                        out.push(target.map_err(GatherFault::Local)?);
                    }
                    left -= n;
                    skip = 0;
                }
            }
        }
        Ok(())
    }

    /// Returns the STags of the memory that holds the payload. `list` is as in [`Message::gather`].
    pub(in crate::engine) fn stags<'l>(&self, list: &'l [Sge]) -> impl Iterator<Item = Stag> + 'l {
        let (one, list) = match &self.source {
            MessageSource::Empty | MessageSource::Inline { .. } | MessageSource::Header(_) => {
                (None, &[][..])
            }
            MessageSource::ReadResponse(owed) => (Some(owed.request.src_stag), &[][..]),
            MessageSource::Element(sge) => (Some(Stag(sge.lkey)), &[][..]),
            MessageSource::Elements { .. } => (None, list),
        };
        one.into_iter().chain(list.iter().map(|sge| Stag(sge.lkey)))
    }

    /// Returns true if the message answers a request of the peer.
    pub(in crate::engine) fn is_response(&self) -> bool {
        let (HeaderTemplate::Tagged { opcode, .. } | HeaderTemplate::Untagged { opcode, .. }) =
            self.head;
        opcode.is_response()
    }

    /// Returns true if the message is untagged. An untagged message is finished before the stream
    /// ends.
    pub(in crate::engine) fn is_untagged(&self) -> bool {
        matches!(self.head, HeaderTemplate::Untagged { .. })
    }

    /// Returns how many bytes of a segment its receiver places in memory.
    pub(in crate::engine) fn data_in(&self, segment: &Segment) -> u32 {
        match self.header() {
            None => segment.len,
            Some(HeaderMessage::AtomicResponse(_)) => ATOMIC_LEN,
            Some(_) => 0,
        }
    }

    /// Returns the header if the message consists only of a header.
    pub(in crate::engine) fn header(&self) -> Option<&HeaderMessage> {
        match &self.source {
            MessageSource::Header(header) => Some(header),
            _ => None,
        }
    }

    /// Advances by `len` bytes, which have been sent. Returns true if the message is complete.
    /// `list` is as in [`Message::gather`].
    pub(in crate::engine) fn advance(&mut self, len: u32, list: &[Sge]) -> bool {
        self.sent += len;
        if let MessageSource::Elements { index, offset } = &mut self.source {
            let mut left = len;
            while let Some(sge) = list.get(*index) {
                let n = (sge.length - *offset).min(left);
                left -= n;
                *offset += n;
                if *offset < sge.length {
                    break;
                }
                *index += 1;
                *offset = 0;
            }
        }
        //= DDP-5.2-4
        self.sent == self.total
    }
}

/// Resolves the memory of a local SGE for reading.
pub(in crate::engine) fn resolve_sge(
    stags: &StagTable,
    principal: Principal,
    lkey: u32,
    addr: u64,
    len: u32,
) -> Result<Target<'_>, Reason> {
    let write = false;
    let found = stags.local(principal, lkey, addr, len, write);
    found.map_err(|fault| Reason::LocalKey { fault, lkey, addr, len, write })
}

/// Returns the total length of the SGEs, or `None` if it is not below 2^32.
pub(in crate::engine) fn total_length(list: &[Sge]) -> Option<u32> {
    //= DDP-5.2-3
    u32::try_from(list.iter().map(|s| u64::from(s.length)).sum::<u64>()).ok()
}

/// Returns the next MSN of a queue and advances it.
pub(in crate::engine) fn take(msn: &mut Msn) -> Msn {
    let this = *msn;
    //= DDP-4.3-7
    *msn = this.next();
    this
}

const _: () = assert!(size_of::<Message>() <= 128);
