//! Sends over TCP: messages become FPDUs in the engine's slab, and the slab goes to the socket.
//!
//! Application memory is read exactly once, into the slab, and the CRC is computed over that copy.
//! An application that writes to its buffer during a send changes its data but never the framing.
//! Long messages without CRCs and Markers use [`zero_copy`](super::zero_copy) instead.

use std::convert::Infallible;
use std::io;

use super::failure::socket_error_text;
use super::zero_copy::ZeroCopyError;
use super::{TcpLink, TxBatch};
use crate::ddp::{self, Header, TaggedHeader, UntaggedHeader};
use crate::device::memory::{MemoryFault, Target};
use crate::engine::charge::{ChargeNames, Owner};
use crate::engine::interface::{Output, Transmit};
use crate::engine::numbers::cost;
use crate::engine::phase::{StreamEvent, StreamPhase};
use crate::engine::qp::{OutgoingFpdu, Qp};
use crate::engine::requester::message::{Gather, GatherFault};
use crate::engine::requester::staging::StageError;
use crate::engine::rnr_notice::Notice;
use crate::engine::schedule::{CALL_COST, FPDU_COST};
use crate::engine::state::EngineState;
use crate::mpa::MAX_FPDU;
use crate::rdmap::{Control, Opcode, READ_REQUEST_LEN, ReadRequest};
use crate::stream::startup::Rtr;
use rnic_abi::shm::io::Piece;
use rnic_abi::types::{Msn, Stag, TaggedOffset};

/// Why a segment was not framed.
enum FrameError {
    Gather(GatherFault),
    Memory(MemoryFault),
}

/// No FPDU was framed: the QP waits, or has nothing to send.
struct NoFpdu;

impl Qp {
    /// Makes one call to the socket, with the unsent tail or with as many new FPDUs as this turn
    /// allows.
    pub(in crate::engine) fn transmit_tcp(
        &mut self,
        engine: &mut EngineState,
        slab: &mut [u8],
        emss: usize,
        send: impl FnOnce(&TxBatch<'_>) -> io::Result<usize>,
    ) -> Transmit {
        let Some(tcp) = self.link.tcp_mut() else { return Transmit::Idle };
        tcp.set_emss(emss, engine.options.mulpdu);
        let accepted = tcp.accepted();
        let had_tail = !tcp.tail().is_empty();
        if !had_tail {
            tcp.blocked = false;
        }
        let (produced, mut more) = if had_tail {
            (0, true)
        } else if self.emulation.is_some() {
            (0, self.fill_line(engine, slab))
        } else {
            self.fill(engine, slab, usize::MAX)
        };
        let zero_copy = !had_tail && self.sends_without_copy(engine);
        let Some(tcp) = self.link.tcp_mut() else { return Transmit::Idle };
        tcp.in_batch = 0;
        tcp.framed += produced as u64;
        let has_tail = !tcp.tail().is_empty();
        let result = if zero_copy {
            more = true;
            self.core.turn.charge(CALL_COST);
            self.send_without_copy(engine, &slab[..produced], send)
        } else if has_tail || produced > 0 {
            self.core.turn.charge(CALL_COST);
            tcp.send_framed(&slab[..produced], send).map(|interrupted| more |= interrupted)
        } else {
            Ok(())
        };
        if let Err(error) = result {
            //= DDP-3-3
            self.send_failed(engine, &error);
            return Transmit::Idle;
        }
        self.charge_unsent(engine);
        let blocked = self.link.tcp().is_some_and(|tcp| tcp.blocked);
        self.retire(engine);
        self.after_transmit(engine);
        self.update_clock_after_send(engine, self.link.accepted() != accepted);
        self.settle_emulation(engine);
        match (blocked, more) {
            (true, _) => Transmit::Blocked,
            (false, true) => Transmit::More,
            (false, false) => Transmit::Idle,
        }
    }

    /// Makes one socket call with the framed bytes, followed by FPDUs whose payload is not copied.
    /// Returns errors of the socket.
    fn send_without_copy(
        &mut self,
        engine: &mut EngineState,
        framed: &[u8],
        send: impl FnOnce(&TxBatch<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        match self.transmit_zero_copy(engine, framed, send) {
            Ok(()) => {}
            Err(ZeroCopyError::Interrupted) => self.keep(framed),
            Err(ZeroCopyError::Gather(fault)) => {
                self.keep(framed);
                self.gather_failed(engine, fault);
            }
            Err(ZeroCopyError::Memory(fault)) => {
                // The rest is sent from private memory now. TCP did not refuse it.
                if let Some(tcp) = self.link.tcp_mut() {
                    tcp.blocked = false;
                }
                self.memory_failed(engine, fault);
            }
            Err(ZeroCopyError::Socket(error)) => return Err(error),
        }
        Ok(())
    }

    /// Handles a socket that no longer accepts bytes. Bytes that the peer sent before it closed are
    /// read first, and the stream ends after them.
    fn send_failed(&mut self, engine: &mut EngineState, e: &io::Error) {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};
        let why = socket_error_text("sending", e);
        let read_first = matches!(e.kind(), BrokenPipe | ConnectionReset)
            && self.life.phase().receives()
            && !self.responder.is_blocked();
        match self.link.tcp_mut().filter(|_| read_first) {
            Some(tcp) => {
                tcp.broken = Some(why);
                self.core.turn.readable = true;
                engine.enqueue(&mut self.core);
            }
            None => self.lost(engine, &why),
        }
    }

    /// Charges the session for bytes that TCP has not accepted, and ends a stream if a limit is
    /// exceeded.
    fn charge_unsent(&mut self, engine: &mut EngineState) {
        let owner = Owner { key: self.core.key, session: self.core.session };
        if let Some(tcp) = self.link.tcp_mut() {
            let room = tcp.tail_room();
            let excess = engine.unsent.set(&mut tcp.charge, owner, room);
            engine.evict(excess);
        }
    }

    /// Keeps framed bytes that were not handed to TCP.
    fn keep(&mut self, framed: &[u8]) {
        if let Some(tcp) = self.link.tcp_mut() {
            tcp.on_accepted(0, framed);
            tcp.blocked = false;
        }
    }

    /// Frames FPDUs until the turn, the batch or the work ends, or until there are `most` bytes.
    /// Returns the number of bytes, and true if there may be more work.
    pub(super) fn fill(
        &mut self,
        engine: &mut EngineState,
        slab: &mut [u8],
        most: usize,
    ) -> (usize, bool) {
        let mut used = 0;
        loop {
            let Some(tcp) = self.link.tcp_mut() else { return (used, false) };
            tcp.in_batch = used;
            if used >= tcp.batch.min(most)
                || self.core.turn.is_over()
                || slab.len() - used < MAX_FPDU
            {
                return (used, true);
            }
            if tcp.cut.is_some() {
                return (used, false);
            }
            let out = &mut slab[used..];
            let terminating = self.life.phase() == StreamPhase::Terminating;
            if (self.life.phase().responds() || terminating)
                && let Some(rtr) = tcp.rtr.take()
            {
                used += self.frame_rtr(rtr, out);
                continue;
            }
            if terminating
                && self.requester.message().is_none()
                && !self.requester.begin_last_notice()
            {
                if let Some(payload) = tcp.terminate.take() {
                    used += self.frame_terminate(&payload, out);
                }
                return (used, false);
            }
            if !terminating && (!self.life.phase().responds() || !self.next_message(engine)) {
                // If requests that made no message used up the turn, there may be more.
                return (used, self.core.turn.is_over());
            }
            if self.sends_without_copy(engine) {
                return (used, true);
            }
            match self.frame_segment(engine, out, used) {
                Ok(n) => used += n,
                Err(NoFpdu) => return (used, false),
            }
        }
    }

    /// Frames the next segment of the message in progress after `used` bytes of the slab. Returns
    /// the length of the FPDU in bytes. If the payload is not accessible, fails the message and
    /// returns 0.
    fn frame_segment(
        &mut self,
        engine: &mut EngineState,
        out: &mut [u8],
        used: usize,
    ) -> Result<usize, NoFpdu> {
        let Some(tcp) = self.link.tcp_mut() else { return Err(NoFpdu) };
        let Some(segment) = self.requester.next_segment(tcp.mulpdu, tcp.dv) else {
            return Err(NoFpdu);
        };
        let framed = match self.requester.message().and_then(|m| Some((m.header()?, m.sent))) {
            Some((whole, from)) => {
                let bytes = whole.emit();
                let from = from as usize;
                Ok(tcp.frame(&segment.header, &bytes[from..from + segment.len as usize], out))
            }
            None => {
                let mut memory = Gather::new();
                let stags = &engine.stags;
                self.requester
                    .gather(segment.len, &self.core, stags, &mut memory)
                    .map_err(FrameError::Gather)
                    .and_then(|()| {
                        tcp.frame_memory(&segment.header, &memory, segment.len as usize, out)
                            .map_err(FrameError::Memory)
                    })
            }
        };
        match framed {
            Ok(n) => {
                // `tcp.framed` does not include the bytes of the slab yet.
                let end = tcp.framed + (used + n) as u64;
                if self.core.faults.is_some()
                    && let Some(tcp) = self.link.tcp_mut()
                    && let crc = tcp.framer.has_crc()
                    && let Some(cut) = self.core.fpdu_fault(&mut out[..n], crc, engine)
                {
                    tcp.cut = Some(cut);
                    return Ok(n / 2);
                }
                self.core.turn.charge(cost(n).max(FPDU_COST));
                self.fpdu_sent(&OutgoingFpdu::Segment(segment), Some(end));
                Ok(n)
            }
            Err(FrameError::Gather(GatherFault::Unstaged)) => {
                self.stage(engine);
                Err(NoFpdu)
            }
            Err(FrameError::Gather(fault)) => {
                self.gather_failed(engine, fault);
                Ok(0)
            }
            Err(FrameError::Memory(fault)) => {
                self.memory_failed(engine, fault);
                Ok(0)
            }
        }
    }

    /// Starts a copy of the next bytes of the message that only a copier can read.
    pub(in crate::engine) fn stage(&mut self, engine: &mut EngineState) {
        match self.requester.stage(&self.core, engine) {
            Ok(()) => {}
            Err(StageError::Gather(fault)) => self.gather_failed(engine, fault),
            Err(StageError::Memory(fault)) => self.memory_failed(engine, fault),
        }
    }

    /// Frames the first FPDU of a peer-to-peer stream (RFC 6581 section 9).
    fn frame_rtr(&mut self, rtr: Rtr, out: &mut [u8]) -> usize {
        let Some(tcp) = self.link.tcp_mut() else { return 0 };
        let read = ReadRequest {
            sink_stag: Stag(0),
            sink_to: TaggedOffset(0),
            size: 0,
            src_stag: Stag(0),
            src_to: TaggedOffset(0),
        };
        let read: [u8; READ_REQUEST_LEN] = read.emit();
        let (header, payload): (_, &[u8]) = match rtr {
            Rtr::Write => (tcp.empty_write(Stag(0), TaggedOffset(0)), &[]),
            Rtr::Send => (tcp.untagged(Opcode::Send, self.requester.number_rtr_send()), &[]),
            Rtr::Read => {
                (tcp.untagged(Opcode::ReadRequest, self.requester.number_rtr_read()), &read)
            }
        };
        let n = tcp.frame(&header, payload, out);
        self.fpdu_sent(&OutgoingFpdu::Rtr, None);
        n
    }

    fn frame_terminate(&mut self, payload: &[u8], out: &mut [u8]) -> usize {
        let Some(tcp) = self.link.tcp_mut() else { return 0 };
        //= RDMAP-4.1-3, RDMAP-5.4-1
        let header = tcp.untagged(Opcode::Terminate, Msn::FIRST);
        //= RDMAP-4.2-1
        let n = tcp.frame(&header, payload, out);
        self.fpdu_sent(&OutgoingFpdu::Terminate, None);
        n
    }

    /// Handles the effects of accepted bytes: a FIN after a Terminate, or after the last message of
    /// a disconnect.
    fn after_transmit(&mut self, engine: &mut EngineState) {
        self.end_cut_stream(engine);
        // Requests before the failed one complete when TCP has accepted them.
        self.flush_sends(engine);
        self.requester.return_slots(&self.core, engine);
        self.finish_if_drained(engine);
        if self.life.phase() == StreamPhase::Terminating
            && self.requester.message().is_none()
            && let Some(tcp) = self.link.tcp_mut()
            && tcp.has_terminated()
        {
            //= RDMAP-5.4-9
            tcp.finish();
            engine.outputs.push_back(Output::ShutdownWrite(self.core.id));
            let peer_fin = self.life.peer_fin();
            match self.life.after(StreamEvent::TerminateWritten { peer_fin }) {
                Some(StreamPhase::Ended) => self.finish(engine, false),
                Some(next) => self.enter(next),
                None => {}
            }
        }
    }
}

impl TcpLink {
    /// Passes TCP the tail, or without a tail the framed bytes. Returns true if the call was
    /// interrupted.
    fn send_framed(
        &mut self,
        framed: &[u8],
        send: impl FnOnce(&TxBatch<'_>) -> io::Result<usize>,
    ) -> io::Result<bool> {
        let has_tail = !self.tail().is_empty();
        //= DDP-3-2
        let bytes = if has_tail { self.tail() } else { framed };
        let mut interrupted = false;
        let sent = match send(&TxBatch::new(&[Piece::Private(bytes)])) {
            Ok(n) => n.min(bytes.len()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {
                interrupted = true;
                0
            }
            Err(e) => return Err(e),
        };
        if has_tail {
            self.on_tail_accepted(sent);
        } else {
            self.on_accepted(sent, &framed[sent..]);
        }
        // An interrupted call does not arm the writable event.
        self.blocked &= !interrupted;
        Ok(interrupted)
    }

    /// Builds the header of an untagged message of one segment that carries no application data.
    fn untagged(&self, opcode: Opcode, msn: Msn) -> Header {
        Header::Untagged(UntaggedHeader {
            //= DDP-4.1-3
            last: true,
            dv: self.dv,
            rsvd_ulp: Control { rv: self.dv, opcode }.byte(),
            //= RDMAP-4.1-9
            inv_stag: Stag(0),
            //= RDMAP-4.1-5
            qn: opcode.queue().unwrap_or_default(),
            msn,
            mo: 0,
        })
    }

    /// Returns the header of an RDMA Write of zero bytes.
    fn empty_write(&self, stag: Stag, to: TaggedOffset) -> Header {
        Header::Tagged(TaggedHeader {
            //= DDP-4.1-3
            last: true,
            dv: self.dv,
            rsvd_ulp: Control { rv: self.dv, opcode: Opcode::Write }.byte(),
            stag,
            to,
        })
    }

    /// Frames a segment with a payload in private memory. Returns the length of the FPDU in bytes.
    fn frame(&mut self, header: &Header, payload: &[u8], out: &mut [u8]) -> usize {
        let mut bytes = [0; ddp::MAX_HEADER_LEN];
        let len = header.emit(&mut bytes);
        let framed: Result<usize, Infallible> =
            self.framer.frame(out, &bytes[..len], payload.len(), |at, block| {
                block.copy_from_slice(&payload[at..at + block.len()]);
                Ok(())
            });
        match framed {
            Ok(n) => n,
            Err(never) => match never {},
        }
    }

    /// Frames a segment with `len` bytes of `memory`. Returns the length of the FPDU in bytes.
    fn frame_memory(
        &mut self,
        header: &Header,
        memory: &Gather<'_>,
        len: usize,
        out: &mut [u8],
    ) -> Result<usize, MemoryFault> {
        let mut bytes = [0; ddp::MAX_HEADER_LEN];
        let header_len = header.emit(&mut bytes);
        let mut reader = Reader { targets: memory, index: 0, offset: 0 };
        self.framer.frame(out, &bytes[..header_len], len, |_, block| reader.read(block))
    }

    /// Frames the Terminate of a QP that is destroyed while connected, from its RDMAP header.
    /// Returns `None` if earlier FPDUs are unsent.
    pub(in crate::engine) fn final_terminate(&mut self, payload: &[u8]) -> Option<Vec<u8>> {
        //= RDMAP-4.1-3, RDMAP-5.4-1
        let header = self.untagged(Opcode::Terminate, Msn::FIRST);
        self.final_fpdu(&header, payload)
    }

    /// Frames the last ACK of an RC QP that leaves its stream. Returns `None` if the peer has sent
    /// no whole Send, or if earlier FPDUs are unsent: these may contain the end of a message.
    pub(in crate::engine) fn final_notice(&mut self) -> Option<Vec<u8>> {
        let (stag, to) = Notice::Done(self.last_send()?).target();
        self.final_fpdu(&self.empty_write(stag, to), &[])
    }

    fn final_fpdu(&mut self, header: &Header, payload: &[u8]) -> Option<Vec<u8>> {
        if self.rtr.is_some() {
            return None;
        }
        let mut bytes = self.take_line();
        if self.has_unsent() || self.in_batch > 0 {
            return None;
        }
        let from = bytes.len();
        bytes.resize(from + FINAL_FPDU_LEN, 0);
        let len = self.frame(header, payload, &mut bytes[from..]);
        bytes.truncate(from + len);
        Some(bytes)
    }

    /// Takes the bytes in flight on an emulated link, for a connection that closes gracefully.
    pub(in crate::engine) fn last_bytes(&mut self) -> Option<Vec<u8>> {
        Some(self.take_line()).filter(|bytes| !bytes.is_empty())
    }
}

/// Names of the limits on unsent bytes, for error texts.
pub(in crate::engine) const UNSENT: ChargeNames = ChargeNames {
    device: "limits.unsent_bytes",
    session: "limits.session_unsent_bytes",
    thing: "unsent bytes were",
};

/// Maximum length in bytes of a Terminate FPDU that encloses no headers, or of an FPDU without
/// payload, Markers included.
const FINAL_FPDU_LEN: usize = 64;

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
