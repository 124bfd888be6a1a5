//! Sending over TCP: messages become FPDUs in the engine's slab, the slab goes to the socket.
//!
//! Application memory is read exactly once, into the slab, where the CRC is computed over the copy: an
//! application that scribbles changes its data, never the framing. Long messages without CRCs and Markers take the way of `bare` instead.

use std::convert::Infallible;
use std::io;

use super::bare::BareFault;
use super::charge::{Names, Owner};
use super::failure;
use super::ledger::Progress;
use super::message::{Gather, GatherFault, Message, Source};
use super::qp::{Link, OutstandingRead, Phase, Qp};
use super::reason::{Reason, revoked};
use super::schedule::{CALL_COST, FPDU_COST};
use super::tcp::TxBatch;
use super::{Output, Shard, Transmit};
use crate::ddp::{self, Header, TaggedHeader, UntaggedHeader};
use crate::device::memory::{MemoryFault, Target, Unreachable};
use crate::mpa::MAX_FPDU;
use crate::rdmap::{Control, Opcode, ReadRequest, codes};
use crate::shm::io::Piece;
use crate::stream::startup::Rtr;
use crate::stream::{Fault, terminate};
use crate::types::{CompletionStatus, Msn, Stag, TaggedOffset};

/// Why a segment was not framed.
enum FrameFault {
    Gather(GatherFault),
    Memory(MemoryFault),
}

impl Qp {
    /// One call to the socket: the unsent tail, or as many new FPDUs as this turn allows.
    pub(super) fn transmit_tcp(
        &mut self,
        shard: &mut Shard,
        slab: &mut [u8],
        emss: usize,
        send: impl FnOnce(&TxBatch<'_>) -> io::Result<usize>,
    ) -> Transmit {
        let Link::Tcp(tcp) = &mut self.link else { return Transmit::Idle };
        tcp.set_emss(emss, shard.options.mulpdu);
        let had_tail = !tcp.tail().is_empty();
        if !had_tail {
            tcp.blocked = false;
        }
        let (produced, mut more) = if had_tail { (0, true) } else { self.fill(shard, slab) };
        let bare = !had_tail && self.goes_bare(shard);
        let Link::Tcp(tcp) = &mut self.link else { return Transmit::Idle };
        tcp.framed += produced as u64;
        if bare {
            self.deficit -= CALL_COST;
            match self.transmit_bare(shard, &slab[..produced], send) {
                Ok(()) => more = true,
                Err(BareFault::Interrupted) => {
                    self.keep(&slab[..produced]);
                    more = true;
                }
                Err(BareFault::Gather(fault)) => {
                    self.keep(&slab[..produced]);
                    more = true;
                    self.gather_failed(fault, shard);
                }
                Err(BareFault::Memory(fault)) => {
                    // What is left goes out of private memory now, and was not refused.
                    if let Link::Tcp(tcp) = &mut self.link {
                        tcp.blocked = false;
                    }
                    more = true;
                    self.memory_failed(fault, shard);
                }
                Err(BareFault::Socket(e)) => {
                    self.send_failed(shard, &e);
                    return Transmit::Idle;
                }
            }
        } else if had_tail || produced > 0 {
            self.deficit -= CALL_COST;
            let bytes = if had_tail { tcp.tail() } else { &slab[..produced] };
            let result = send(&TxBatch::new(&[Piece::Private(bytes)]));
            let mut interrupted = false;
            let sent = match result {
                Ok(n) => n.min(bytes.len()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {
                    interrupted = true;
                    0
                }
                Err(e) => {
                    self.send_failed(shard, &e);
                    return Transmit::Idle;
                }
            };
            if had_tail {
                tcp.took_of_tail(sent);
            } else {
                tcp.took(sent, &slab[sent..produced]);
            }
            // Nobody will say that it is writable if it was not asked.
            tcp.blocked &= !interrupted;
            more |= interrupted;
        }
        self.charge_unsent(shard);
        let blocked = matches!(&self.link, Link::Tcp(tcp) if tcp.blocked);
        self.retire(shard);
        self.after_transmit(shard);
        match (blocked, more) {
            (true, _) => Transmit::Blocked,
            (false, true) => Transmit::More,
            (false, false) => Transmit::Idle,
        }
    }

    /// The socket takes nothing any more. A peer that is gone may have sent something before, which
    /// waits for its turn: that is carried out first, and the stream ends where the socket does.
    fn send_failed(&mut self, shard: &mut Shard, e: &io::Error) {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};
        let why = failure::in_words("sending", e);
        match &mut self.link {
            Link::Tcp(tcp)
                if matches!(e.kind(), BrokenPipe | ConnectionReset)
                    && self.phase.receives()
                    && self.pause.is_none() =>
            {
                tcp.broken = Some(why);
                self.readable = true;
                shard.line_up(self);
            }
            _ => self.lost(shard, &why),
        }
    }

    /// Charges the session for what TCP has not taken, and ends a stream if that is too much.
    fn charge_unsent(&mut self, shard: &mut Shard) {
        let owner = Owner { key: self.key, session: self.session };
        if let Link::Tcp(tcp) = &mut self.link {
            let room = tcp.tail_room();
            let excess = shard.unsent.set(&mut tcp.held, owner, room);
            shard.end_for_room(excess);
        }
    }

    /// Keeps bytes that TCP was not asked to take.
    fn keep(&mut self, framed: &[u8]) {
        if let Link::Tcp(tcp) = &mut self.link {
            tcp.took(0, framed);
            tcp.blocked = false;
        }
    }

    /// Produces FPDUs until the turn, the batch or the work ends: bytes produced, and whether there
    /// may be more work.
    fn fill(&mut self, shard: &mut Shard, slab: &mut [u8]) -> (usize, bool) {
        let mut used = 0;
        loop {
            let Link::Tcp(tcp) = &mut self.link else { return (used, false) };
            if used >= tcp.batch || self.deficit <= 0 || slab.len() - used < MAX_FPDU {
                return (used, true);
            }
            let out = &mut slab[used..];
            let terminating = self.phase == Phase::Terminating;
            if (self.phase.sends() || terminating)
                && let Some(rtr) = tcp.rtr.take()
            {
                used += self.frame_rtr(rtr, out);
                continue;
            }
            if terminating && self.message.is_none() {
                if let Some(payload) = tcp.terminate.take() {
                    used += self.frame_terminate(&payload, out);
                }
                return (used, false);
            }
            if !terminating && (!self.phase.sends() || !self.pick_message(shard)) {
                // If the turn ended over requests that made no message, there may be more.
                return (used, self.deficit <= 0);
            }
            if self.goes_bare(shard) {
                return (used, true);
            }
            match self.frame_segment(shard, out) {
                Err(FrameFault::Gather(GatherFault::Unstaged)) => {
                    self.stage(shard);
                    return (used, false);
                }
                Ok((n, len)) => {
                    self.deficit -= (n as i64).max(FPDU_COST);
                    used += n;
                    let Link::Tcp(tcp) = &self.link else { return (used, false) };
                    // What was framed before, and what stands in the slab.
                    let end = tcp.framed + used as u64;
                    self.segment_left(len, Some(end));
                }
                Err(fault) => self.frame_failed(fault, shard),
            }
        }
    }

    /// Frames the next segment of the message in progress: bytes of the FPDU and of its payload.
    fn frame_segment(&mut self, shard: &Shard, out: &mut [u8]) -> Result<(usize, u32), FrameFault> {
        let who = self.principal();
        let (Some(message), Link::Tcp(tcp)) = (&mut self.message, &mut self.link) else {
            return Ok((0, 0));
        };
        let segment = message.next_segment(tcp.mulpdu, tcp.dv);
        let mut header = [0; ddp::MAX_HEADER_LEN];
        let header_len = segment.header.emit(&mut header);
        let len = segment.len as usize;
        if let Source::ReadRequest(request) = &message.source {
            let bytes = request.emit();
            let from = message.sent as usize;
            let n = framed(tcp.framer.frame(out, &header[..header_len], len, |at, block| {
                block.copy_from_slice(&bytes[from + at..from + at + block.len()]);
                Ok(())
            }));
            return Ok((n, segment.len));
        }
        let mut memory = Gather::new();
        let (arena, list) = (self.sq.mapping(), self.elements.as_slice());
        message
            .gather(segment.len, who, &shard.stags, arena, list, &mut memory)
            .and_then(|()| self.stage.fill_in(message, segment.len, &mut memory))
            .map_err(FrameFault::Gather)?;
        let mut reader = Reader { targets: &memory, index: 0, offset: 0 };
        let n = tcp
            .framer
            .frame(out, &header[..header_len], len, |_, block| reader.read(block))
            .map_err(FrameFault::Memory)?;
        Ok((n, segment.len))
    }

    /// A segment with `len` bytes of payload has left, by either path. With the last one of a
    /// message, its request is done, or will be when TCP has accepted the bytes up to `queued`.
    // Not a `Progress`: passed through memory, it would be written in parts and read back at once in
    // one piece, and that waits for all stores before it, those of the payload included.
    pub(super) fn segment_left(&mut self, len: u32, queued: Option<u64>) {
        let Some(message) = &mut self.message else { return };
        self.shared.segments_sent.add(1);
        if !matches!(message.source, Source::ReadRequest(_)) {
            self.shared.bytes_sent.add(u64::from(len));
        }
        if !message.advance(len, self.elements.as_slice()) {
            return;
        }
        if message.is_response() {
            self.shared.reads_answered.add(1);
        }
        if let Some(entry) = message.seq.and_then(|seq| self.ledger.get_mut(seq))
            && entry.progress == Progress::Sending
        {
            entry.progress = match queued {
                Some(end) => Progress::Queued(end),
                None => Progress::Done(CompletionStatus::Success),
            };
        }
        self.message = None;
    }

    fn frame_failed(&mut self, fault: FrameFault, shard: &mut Shard) {
        match fault {
            FrameFault::Gather(fault) => self.gather_failed(fault, shard),
            FrameFault::Memory(fault) => self.memory_failed(fault, shard),
        }
    }

    /// The memory of the message in progress could not be read.
    pub(super) fn memory_failed(&mut self, fault: MemoryFault, shard: &mut Shard) {
        shard.unreachable(fault);
        let reason = Reason::Memory(fault);
        match fault.cause {
            Unreachable::Truncated => {
                self.message = None;
                self.fail_locally(shard, "shared memory vanished", reason);
            }
            Unreachable::Unmapped => self.gather_failed(GatherFault::Local(reason), shard),
            // Its regions are as good as revoked.
            Unreachable::Detached => {
                let response = self.message.as_ref().is_some_and(Message::is_response);
                let as_if =
                    if response { GatherFault::Revoked } else { GatherFault::Local(reason) };
                self.gather_failed(as_if, shard);
            }
        }
    }

    /// The memory of the message in progress cannot be had.
    pub(super) fn gather_failed(&mut self, fault: GatherFault, shard: &mut Shard) {
        let Some(message) = self.message.take() else { return };
        match (fault, &message.source, message.seq) {
            (GatherFault::Local(reason), _, Some(seq)) => {
                self.request_failed(seq, reason, shard);
            }
            (GatherFault::Revoked, Source::Region(owed), _) => {
                // Revoked while the response was being sent: the header of the read
                // goes back, advanced by what was sent.
                let reason = revoked(owed, message.sent);
                let fault = reason.fault();
                let payload = terminate::build_from_bytes(
                    fault,
                    owed.segment_len,
                    &owed.header,
                    Some(&owed.request.advanced(message.sent)),
                );
                self.terminate(shard, fault.code, Some(payload), reason);
            }
            // Requests alone have elements, responses alone regions.
            _ => {
                let code = codes::RDMA_LOCAL_CATASTROPHIC;
                self.terminate(shard, code, None, Reason::Segment);
            }
        }
    }

    /// The first FPDU of a peer-to-peer stream (RFC 6581 section 9).
    fn frame_rtr(&mut self, rtr: Rtr, out: &mut [u8]) -> usize {
        let Link::Tcp(tcp) = &mut self.link else { return 0 };
        let dv = tcp.dv;
        let untagged = |opcode, qn, msn| {
            Header::Untagged(UntaggedHeader {
                last: true,
                dv,
                rsvd_ulp: Control { rv: dv, opcode }.byte(),
                inv_stag: Stag(0),
                qn,
                msn,
                mo: 0,
            })
        };
        let mut payload: &[u8] = &[];
        let read = ReadRequest {
            sink_stag: Stag(0),
            sink_to: TaggedOffset(0),
            size: 0,
            src_stag: Stag(0),
            src_to: TaggedOffset(0),
        }
        .emit();
        let header = match rtr {
            Rtr::Write => Header::Tagged(TaggedHeader {
                last: true,
                dv,
                rsvd_ulp: Control { rv: dv, opcode: Opcode::Write }.byte(),
                stag: Stag(0),
                to: TaggedOffset(0),
            }),
            Rtr::Send => {
                let msn = self.send_msn;
                self.send_msn = msn.next();
                untagged(Opcode::Send, ddp::qn::SEND, msn)
            }
            Rtr::Read => {
                let msn = self.read_msn;
                self.read_msn = msn.next();
                payload = &read;
                self.reads.push_back(OutstandingRead {
                    seq: None,
                    sink: Stag(0),
                    to: 0,
                    size: 0,
                    received: 0,
                    invalidate: false,
                });
                untagged(Opcode::ReadRequest, ddp::qn::READ_REQUEST, msn)
            }
        };
        frame_bytes(tcp, &header, payload, out)
    }

    fn frame_terminate(&mut self, payload: &[u8], out: &mut [u8]) -> usize {
        let Link::Tcp(tcp) = &mut self.link else { return 0 };
        let header = Header::Untagged(UntaggedHeader {
            last: true,
            dv: tcp.dv,
            rsvd_ulp: Control { rv: tcp.dv, opcode: Opcode::Terminate }.byte(),
            inv_stag: Stag(0),
            qn: ddp::qn::TERMINATE,
            msn: Msn::FIRST,
            mo: 0,
        });
        frame_bytes(tcp, &header, payload, out)
    }

    /// The Terminate with which a QP leaves that is destroyed while connected: an FPDU, or for the
    /// direct path its payload. None where it would not stand between two messages, or where
    /// nothing may be sent.
    pub(super) fn farewell(&mut self) -> Option<Vec<u8>> {
        let inside = self.message.as_ref().is_some_and(|m| m.sent > 0);
        if !self.phase.sends() || inside {
            return None;
        }
        let fault = Fault::local(codes::RDMA_LOCAL_CATASTROPHIC);
        let payload = terminate::build(fault, &[], None);
        match &self.link {
            Link::None => None,
            Link::Direct(_) => Some(payload),
            Link::Tcp(tcp) if tcp.has_unsent() || tcp.rtr.is_some() => None,
            Link::Tcp(_) => {
                let mut bytes = vec![0; FAREWELL_LEN];
                let len = self.frame_terminate(&payload, &mut bytes);
                bytes.truncate(len);
                Some(bytes)
            }
        }
    }

    /// What follows from bytes having been accepted: FIN behind a Terminate, FIN behind the last
    /// message of a disconnect.
    fn after_transmit(&mut self, shard: &mut Shard) {
        self.return_slots(shard);
        self.close_if_dry(shard);
        if self.phase == Phase::Terminating
            && self.message.is_none()
            && let Link::Tcp(tcp) = &mut self.link
            && tcp.terminate.is_none()
            && !tcp.has_unsent()
        {
            tcp.fin_sent = true;
            shard.outputs.push_back(Output::ShutdownWrite(self.id));
            if self.peer_fin {
                self.finish(shard, false);
            } else {
                self.enter(Phase::Draining);
            }
        }
    }
}

/// The limits of what TCP has not taken, in words.
pub(super) const UNSENT: Names = Names {
    device: "limits.unsent_bytes",
    session: "limits.session_unsent_bytes",
    thing: "unsent bytes were",
};

/// Room for a Terminate that encloses nothing, Markers included.
const FAREWELL_LEN: usize = 64;

fn frame_bytes(
    tcp: &mut super::tcp::TcpLink,
    header: &Header,
    payload: &[u8],
    out: &mut [u8],
) -> usize {
    let mut bytes = [0; ddp::MAX_HEADER_LEN];
    let len = header.emit(&mut bytes);
    framed(tcp.framer.frame(out, &bytes[..len], payload.len(), |at, block| {
        block.copy_from_slice(&payload[at..at + block.len()]);
        Ok(())
    }))
}

fn framed(result: Result<usize, Infallible>) -> usize {
    match result {
        Ok(n) => n,
        Err(never) => match never {},
    }
}

/// Reads the memory of a segment from front to back.
struct Reader<'a, 't> {
    targets: &'a [Target<'t>],
    index: usize,
    offset: usize,
}

impl Reader<'_, '_> {
    fn read(&mut self, mut block: &mut [u8]) -> Result<(), MemoryFault> {
        while !block.is_empty()
            && let Some(target) = self.targets.get(self.index)
        {
            let n = (target.len() - self.offset).min(block.len());
            let (now, later) = block.split_at_mut(n);
            target.read(self.offset, now)?;
            block = later;
            self.offset += n;
            if self.offset == target.len() {
                self.index += 1;
                self.offset = 0;
            }
        }
        Ok(())
    }
}
