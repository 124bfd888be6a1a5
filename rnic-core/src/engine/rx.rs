//! Receiving from TCP: bytes become verified FPDUs, FPDUs become segments, segments are placed.
//!
//! Nothing of an FPDU is looked at before its CRC and Markers have been checked (RFC 5044 section 6).
//! Bytes arrive in the engine's slab; only an FPDU that is not complete moves to a buffer of its own,
//! and the next call reads the missing bytes straight behind it.

use std::io::{self, IoSliceMut};

use super::failure;
use super::hold::Segment;
use super::moving::After;
use super::partial::{Excess, Owner};
use super::qp::{Link, Phase, Qp};
use super::schedule::{CALL_COST, FPDU_COST};
use super::{Delivery, Output, Receive, Shard};
use crate::abi::control::{DisconnectReason, Event};
use crate::ddp::MAX_HEADER_LEN;
use crate::device::memory::Payload;
use crate::mpa::{MAX_FPDU, MpaFault};
use crate::rdmap::codes;
use crate::stream::inbound::{Arrival, ReadArrival, SendKind};
use crate::stream::startup::RtrKinds;
use crate::stream::{Fault, terminate};
use std::sync::atomic::Ordering::Relaxed;

use super::reason::Reason;
use super::reason::Trouble;

impl Shard {
    /// Ends the stream that gives way to others, after whatever goes on.
    pub(super) fn end_for_room(&mut self, excess: Option<Excess>) {
        if let Some(Excess { victim, why }) = excess {
            self.deliver(victim, Delivery::Lost(why));
        }
    }
}

impl Qp {
    /// One call to the socket, and everything that follows from what came.
    pub(super) fn receive_tcp(
        &mut self,
        shard: &mut Shard,
        slab: &mut Vec<u8>,
        recv: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> Receive {
        if self.is_paused() {
            return Receive::Paused;
        }
        if self.deficit <= 0 || self.has_unread() {
            // Not now: in its turn, and behind what was read before.
            shard.wake(self);
            return Receive::Progress;
        }
        self.deficit -= CALL_COST;
        let (limit, may_leave) = self.read_limit(shard);
        // What is read has to be kept if the stream must stand still: at most the rest of one FPDU,
        // or as many bytes as the longest one has.
        let (narrow, slab_len) = match self.may_pause() {
            true => (true, limit.min(MAX_FPDU)),
            false => (false, limit),
        };
        let Link::Tcp(tcp) = &mut self.link else { return Receive::Closed };
        let needed = tcp.deframer.needed(tcp.partial.bytes());
        // Of a peer that has just begun no more than the first FPDU: its sign that the connection
        // stands is to be told before anything that came behind it completes.
        let (narrow, slab_len) = match self.phase {
            Phase::Quiet => (true, needed.min(slab_len)),
            _ => (narrow, slab_len),
        };
        let space = &mut slab[..slab_len];
        let window = tcp.partial.window(needed);
        let window_len = window.len();
        let result = if window_len == 0 {
            recv(&mut [IoSliceMut::new(space)])
        } else if narrow {
            recv(&mut [IoSliceMut::new(window)])
        } else {
            recv(&mut [IoSliceMut::new(window), IoSliceMut::new(space)])
        };
        let n = match result {
            Ok(0) => {
                match tcp.broken.take().filter(|_| self.phase.receives()) {
                    Some(why) => self.lost(shard, &why),
                    None => self.fin_from_socket(shard),
                }
                return Receive::Closed;
            }
            Ok(n) => n.min(window_len + slab_len),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let Some(why) = tcp.broken.take() else { return Receive::WouldBlock };
                self.lost(shard, &why);
                return Receive::Closed;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Receive::Progress,
            Err(e) => {
                self.lost(shard, &failure::in_words("receiving", &e));
                return Receive::Closed;
            }
        };
        // After a Terminate of either side the rest is read and dropped.
        if !self.phase.receives() {
            self.deficit -= n as i64;
            shard.buffers.give(&mut tcp.partial, Owner { key: self.key, session: self.session });
            return Receive::Progress;
        }
        let into_partial = n.min(window_len);
        if into_partial > 0 {
            tcp.partial.grow(into_partial, shard.now);
        }
        self.read_slab(shard, slab, n - into_partial, may_leave);
        Receive::Progress
    }

    /// Handles complete FPDUs, in the partial buffer and then in `bytes`, until the turn ends,
    /// or whatever it costs. How many of `bytes` need not be looked at again.
    pub(super) fn consume(
        &mut self,
        shard: &mut Shard,
        mut bytes: &mut [u8],
        at_any_cost: bool,
    ) -> usize {
        let len = bytes.len();
        // What came before may have found its receive and wait for a mover now.
        if self.is_paused() {
            self.keep_unread(bytes);
            return len;
        }
        let owner = Owner { key: self.key, session: self.session };
        // Complete the FPDU that began earlier, learning its length on the way.
        while let Link::Tcp(tcp) = &mut self.link
            && !tcp.partial.is_empty()
        {
            let needed = tcp.deframer.needed(tcp.partial.bytes());
            let missing = needed.saturating_sub(tcp.partial.bytes().len());
            if missing > 0 {
                if bytes.is_empty() {
                    return len;
                }
                let n = missing.min(bytes.len());
                let (now, later) = bytes.split_at_mut(n);
                let excess = shard.buffers.append(&mut tcp.partial, owner, now, shard.now);
                shard.end_for_room(excess);
                bytes = later;
                continue;
            }
            let (mut buffer, filled) = shard.buffers.take(&mut tcp.partial, self.session);
            self.fpdu_arrived(shard, &mut buffer[..filled]);
            shard.buffers.give_buffer(buffer);
            if self.is_paused() {
                self.keep_unread(bytes);
                return len;
            }
        }
        while self.phase.receives()
            && !bytes.is_empty()
            && let Link::Tcp(tcp) = &mut self.link
        {
            if self.deficit <= 0 && !at_any_cost {
                return len - bytes.len();
            }
            let needed = tcp.deframer.needed(bytes);
            if needed > bytes.len() {
                let excess = shard.buffers.append(&mut tcp.partial, owner, bytes, shard.now);
                shard.end_for_room(excess);
                return len;
            }
            let (fpdu, later) = bytes.split_at_mut(needed);
            self.fpdu_arrived(shard, fpdu);
            bytes = later;
            if self.is_paused() {
                self.keep_unread(bytes);
                return len;
            }
        }
        // Of a stream that has ended, the rest is dropped.
        len
    }

    /// Ends the stream if it has paused inside an FPDU for too long.
    pub(super) fn look_for_stall(&mut self, shard: &mut Shard) {
        let Link::Tcp(tcp) = &mut self.link else { return };
        if let Some(paused) = shard.buffers.stalled(&mut tcp.partial, self.key, shard.now) {
            let seconds = paused.as_secs_f32();
            self.lost(
                shard,
                &format!("nothing came for {seconds:.1} s inside of an FPDU (mpa.stall_deadline)"),
            );
        }
    }

    /// One whole FPDU.
    fn fpdu_arrived(&mut self, shard: &mut Shard, fpdu: &mut [u8]) {
        self.deficit -= (fpdu.len() as i64).max(FPDU_COST);
        let Link::Tcp(tcp) = &mut self.link else { return };
        let ulpdu = match tcp.deframer.take(fpdu) {
            Ok(ulpdu) => ulpdu,
            Err(fault) => return self.framing_failed(shard, fault),
        };
        let first = self.phase == Phase::Quiet;
        if first {
            self.first_fpdu(shard);
        }
        self.shared.segments_received.add(1);
        if let Err(trouble) = self.ulpdu_arrived(shard, ulpdu, first) {
            self.segment_failed(shard, trouble, |fault| terminate::build(fault, ulpdu, None));
        }
    }

    fn framing_failed(&mut self, shard: &mut Shard, fault: MpaFault) {
        let fault = Fault::from(fault);
        if self.phase == Phase::Quiet {
            // No FPDU may be sent, hence no Terminate.
            self.lost(shard, &format!("the first FPDU failed: {fault}"));
        } else {
            let payload = terminate::build(fault, &[], None);
            self.terminate(shard, fault.code, Some(payload), Reason::Segment);
        }
    }

    /// A responder's first valid FPDU: it may send from now on (RFC 5044 section 7.1.2).
    fn first_fpdu(&mut self, shard: &mut Shard) {
        self.enter(Phase::Open);
        // It was read piece by piece; few streams have such pieces later.
        if let Link::Tcp(tcp) = &mut self.link {
            shard.buffers.unwatch(&mut tcp.partial, self.key);
        }
        shard.timers.set(self, None);
        self.announce(shard, Vec::new());
        shard.wake(self);
    }

    /// Tells the application that the connection stands, before any completion can.
    pub(super) fn announce(&mut self, shard: &mut Shard, private_data: Vec<u8>) {
        let Some(addresses) = self.addresses else { return };
        self.announced = true;
        let event = Event::Established {
            qp: self.id,
            context: self.shared.context.load(Relaxed),
            addresses,
            ird: self.ird,
            ord: self.ord,
            private_data,
            revision: self.revision,
        };
        shard.outputs.push_back(Output::Event { session: self.session, event });
    }

    fn ulpdu_arrived(
        &mut self,
        shard: &mut Shard,
        ulpdu: &[u8],
        first: bool,
    ) -> Result<(), Trouble> {
        let ird_free = self.read_slot_free();
        let Link::Tcp(tcp) = &mut self.link else { return Ok(()) };
        let arrival = tcp.inbound.handle(ulpdu, ird_free).map_err(|fault| match fault.code {
            // Of all that `inbound` looks at, only a Read Request can lack room.
            codes::UNTAGGED_NO_BUFFER => Reason::ReadsFull { ird: self.ird }.into(),
            _ => Trouble::from(fault),
        })?;
        match arrival {
            Arrival::Write { stag, to, payload, last, stag_changed } => {
                let len = payload.len();
                let payload = Payload::Bytes(payload);
                let stags = &shard.stags;
                let placed = self.place_write(stags, stag, to.0, payload, last, stag_changed)?;
                self.follow(shard, placed, After::Write, len, back(ulpdu))
            }
            Arrival::ReadResponse { stag, to, payload, last } => {
                let len = payload.len();
                let payload = Payload::Bytes(payload);
                let placed = self.place_response(&shard.stags, stag, to.0, payload, last)?;
                self.follow(shard, placed, After::Response { last }, len, back(ulpdu))
            }
            Arrival::Send { kind, mo, payload, last, first_of_message, .. } => {
                // The first FPDU may be no message but the peer's sign that it is ready.
                let sign = tcp.await_rtr.take().is_some_and(|k| k.contains(RtrKinds::SEND));
                let plain = !kind.solicited && kind.invalidate.is_none();
                let whole = first_of_message && last && mo == 0 && payload.is_empty();
                if first && sign && plain && whole {
                    tcp.inbound.sent_placed(0, 0, true)?;
                    return Ok(());
                }
                if !self.can_receive(shard) {
                    return Ok(());
                }
                let at = ulpdu.len() - payload.len();
                if !self.take_receive(shard.now, &mut shard.outputs)? {
                    let ulpdu_len = ulpdu.len();
                    let segment =
                        Segment::Received { ulpdu: ulpdu_len, payload: at, kind, mo, last };
                    if !self.await_receive(shard, segment, ulpdu)? {
                        return Ok(());
                    }
                }
                self.send_arrived(shard, kind, mo, ulpdu, at, last)
            }
            Arrival::ReadRequest(read) => {
                if let Err(trouble) = self.read_requested(shard, read) {
                    // The header as a whole, even if it came in several segments.
                    self.segment_failed(shard, trouble, |fault| {
                        let ReadArrival { request, header, segment_len } = &read;
                        terminate::build_from_bytes(fault, *segment_len, header, Some(request))
                    });
                }
                Ok(())
            }
            Arrival::ReadRequestPart => Ok(()),
            Arrival::Terminate(t) => {
                self.terminate_received(shard, &t);
                Ok(())
            }
            Arrival::MalformedTerminate(why) => {
                self.lost(shard, &format!("the peer sent a malformed Terminate: {why}"));
                Ok(())
            }
        }
    }

    /// A Send segment for which there is a receive; its payload is the ULPDU from `at` on.
    pub(super) fn send_arrived(
        &mut self,
        shard: &mut Shard,
        kind: SendKind,
        mo: u32,
        ulpdu: &[u8],
        at: usize,
        last: bool,
    ) -> Result<(), Trouble> {
        let payload = &ulpdu[at..];
        let placed = self.place_send(&shard.stags, mo, Payload::Bytes(payload))?;
        let after = After::Send { kind, mo, last, total: None };
        self.follow(shard, placed, after, payload.len(), back(ulpdu))
    }

    /// `recv` returned 0: the peer has closed its direction.
    fn fin_from_socket(&mut self, shard: &mut Shard) {
        let Link::Tcp(tcp) = &self.link else { return };
        if tcp.partial.is_empty() || !self.phase.receives() {
            self.fin_received(shard);
            return;
        }
        // Inside an FPDU: the connection is lost, but our direction still works.
        self.end.get_or_insert(DisconnectReason::Lost {
            why: "the peer closed inside a message".to_owned(),
        });
        self.peer_fin = true;
        if self.phase == Phase::Quiet {
            self.connection_lost(shard, "the peer closed inside its first FPDU");
            self.finish(shard, true);
        } else {
            self.terminate(shard, codes::LLP_CLOSED, None, Reason::CutShort);
        }
    }
}

/// A ULPDU's header, should it have to go back, and its length, which is a u16.
fn back(ulpdu: &[u8]) -> (&[u8], u16) {
    (&ulpdu[..ulpdu.len().min(MAX_HEADER_LEN)], ulpdu.len() as u16)
}
