//! The direct path: both ends are QPs of this engine, and a segment goes from segment to segment in
//! one copy.
//!
//! The sender produces the very DDP segments it would send over TCP, and hands them, typed, to the
//! functions that `rx` calls after deframing. Checks, completions, errors and Terminates are therefore
//! the same by construction; what is missing is MPA, TCP and two copies.

use super::hold::Segment::AtPeer;
use super::message::{Gather, GatherFault, Head, Segment, Source};
use super::moving::After;
use super::qp::Qp;
use super::reason::Reason;
use super::reason::Trouble;
use super::schedule::REQUEST_COST;
use super::{Delivery, Shard};
use crate::ddp::{MAX_HEADER_LEN, TaggedHeader, UntaggedHeader};
use crate::device::memory::{MemoryFault, Payload};
use crate::rdmap::{Opcode, Terminate};
use crate::shm::attached::CopyEnd;
use crate::stream::inbound::{ReadArrival, SendKind};
use crate::stream::terminate;

/// What came of a segment.
enum Outcome {
    /// Carried out.
    Done,
    /// The sender's memory cannot be had.
    Source(GatherFault),
    /// The sender's memory could not be read.
    Memory(MemoryFault),
    /// The receiver refused it.
    Sink(Trouble),
    /// The receiver had no buffer for it: it waits for one, or has found one by now.
    Held,
}

impl Qp {
    /// Carries out what `self` has to send to `peer`, until the turn or the work ends.
    pub(super) fn run_direct(&mut self, peer: &mut Qp, shard: &mut Shard) {
        let mut unretired = 0;
        while self.deficit > 0
            && self.phase.sends()
            && peer.phase.receives()
            && !peer.is_paused()
            && self.pick_message(shard)
        {
            let Some(message) = &self.message else { break };
            // Version and segment size are those of a TCP connection inside this machine.
            let segment = message.next_segment(SEGMENT, 1);
            match self.hand_over(peer, shard, &segment) {
                Outcome::Done => self.segment_left(segment.len, None),
                Outcome::Source(GatherFault::Unstaged) => {
                    self.stage(shard);
                    break;
                }
                Outcome::Source(fault) => self.gather_failed(fault, shard),
                Outcome::Memory(fault) => self.memory_failed(fault, shard),
                // The message stays as it is, and nothing overtakes it.
                Outcome::Held => {}
                Outcome::Sink(trouble) => {
                    let read = match &message.source {
                        Source::ReadRequest(request) => Some(*request),
                        _ => None,
                    };
                    // TCP would have taken the message before the peer's Terminate came back.
                    self.segment_left(segment.len, None);
                    self.retire(shard);
                    let len = (segment.header.len() + segment.len as usize) as u16;
                    peer.segment_failed(shard, trouble, |fault| {
                        terminate::build_from_header(fault, len, &segment.header, read.as_ref())
                    });
                }
            }
            self.deficit -= i64::from(segment.len).max(REQUEST_COST);
            unretired += 1;
            if unretired == RETIRE_EVERY {
                unretired = 0;
                self.retire(shard);
            }
        }
        self.retire(shard);
        self.return_slots(shard);
        self.close_if_dry(shard);
    }

    /// Gathers a segment's memory and places it at the peer.
    fn hand_over(&self, peer: &mut Qp, shard: &mut Shard, segment: &Segment) -> Outcome {
        let Some(message) = &self.message else { return Outcome::Done };
        if let Source::ReadRequest(request) = &message.source {
            if !peer.read_slot_free() {
                return Outcome::Sink(Reason::ReadsFull { ird: peer.ird }.into());
            }
            let mut header = [0; UntaggedHeader::LEN];
            segment.header.emit(&mut header);
            let segment_len = (header.len() + segment.len as usize) as u16;
            let read = ReadArrival { request: *request, header, segment_len };
            peer.shared.segments_received.add(1);
            return sunk(peer.read_requested(shard, read));
        }
        let is_send = matches!(message.head, Head::Untagged { .. });
        if is_send && !peer.can_receive(shard) {
            return Outcome::Done;
        }
        let mut memory = Gather::new();
        let gathered = message
            .gather(
                segment.len,
                self.principal(),
                &shard.stags,
                self.sq.mapping(),
                self.elements.as_slice(),
                &mut memory,
            )
            .and_then(|()| self.stage.fill_in(message, segment.len, &mut memory));
        if let Err(fault) = gathered {
            return Outcome::Source(fault);
        }
        let payload = Payload::Gather(&memory);
        let from = message.sent;
        let last = segment.last;
        peer.shared.segments_received.add(1);
        let (placed, after) = match message.head {
            Head::Tagged { opcode: Opcode::Write, stag, to } => {
                let to = to.wrapping_add(u64::from(from));
                (peer.place_write(&shard.stags, stag, to, payload, last, false), After::Write)
            }
            Head::Tagged { stag, to, .. } => {
                let to = to.wrapping_add(u64::from(from));
                let placed = peer.place_response(&shard.stags, stag, to, payload, last);
                (placed, After::Response { last })
            }
            Head::Untagged { opcode, invalidate, .. } => {
                // Only now: a segment that cannot be gathered never reaches the peer.
                let taken = peer.take_receive(shard.now, &mut shard.outputs);
                if matches!(taken, Ok(false)) {
                    drop(memory);
                    let len = (segment.header.len() + segment.len as usize) as u16;
                    let at_peer = AtPeer { header: segment.header, len };
                    return match peer.await_receive(shard, at_peer, &[]) {
                        Ok(_) => Outcome::Held,
                        Err(trouble) => Outcome::Sink(trouble),
                    };
                }
                let placed = taken.and_then(|_| peer.place_send(&shard.stags, from, payload));
                let invalidates =
                    matches!(opcode, Opcode::SendInvalidate | Opcode::SendSolicitedInvalidate);
                let solicited =
                    matches!(opcode, Opcode::SendSolicited | Opcode::SendSolicitedInvalidate);
                let kind = SendKind { solicited, invalidate: invalidates.then_some(invalidate) };
                (placed, After::Send { kind, mo: from, last, total: Some(message.total) })
            }
        };
        drop(memory);
        let mut header = [0; MAX_HEADER_LEN];
        let header_len = segment.header.emit(&mut header);
        let len = segment.len as usize;
        let back = (&header[..header_len], (header_len + len) as u16);
        sunk(placed.and_then(|placed| peer.follow(shard, placed, after, len, back)))
    }

    /// The peer refuses the segment at hand after it held it: over TCP it would have been taken before.
    fn segment_taken(&mut self, shard: &mut Shard) {
        if let Some(message) = &self.message
            && matches!(message.head, Head::Untagged { .. })
        {
            let len = message.next_segment(SEGMENT, 1).len;
            self.segment_left(len, None);
            self.retire(shard);
        }
    }

    /// Something the peer did to this QP by the direct path.
    pub(super) fn delivered(&mut self, shard: &mut Shard, delivery: &Delivery) {
        match delivery {
            Delivery::Terminate(payload) => match Terminate::parse(payload) {
                Ok(t) => self.terminate_received(shard, &t),
                Err(_) => self.lost(shard, "a malformed Terminate"),
            },
            Delivery::SegmentTaken => self.segment_taken(shard),
            Delivery::Fin => self.fin_received(shard),
            Delivery::Reset => self.lost(shard, "the peer reset the connection"),
            Delivery::Lost(why) => self.lost(shard, why),
        }
    }
}

/// Bytes of a segment, header included: a tagged one carries whole pages, which the copy likes, and a
/// step is short enough for the revocation that may wait for it.
const SEGMENT: usize = 15 * 4096 + TaggedHeader::LEN;
/// Segments after which what is done completes: a turn has several times as many small requests, and
/// a program on another CPU posts the next ones meanwhile.
const RETIRE_EVERY: u32 = 64;

fn sunk(result: Result<(), Trouble>) -> Outcome {
    match result {
        Ok(()) => Outcome::Done,
        // As over TCP, where nothing of it would have left.
        Err(Trouble::Memory(fault)) if fault.end == CopyEnd::Source => Outcome::Memory(fault),
        Err(trouble) => Outcome::Sink(trouble),
    }
}
