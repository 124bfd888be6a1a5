//! Receiving from TCP: octets become verified FPDUs, FPDUs become segments, segments are placed.
//!
//! Nothing of an FPDU is looked at before its CRC and Markers have been checked (RFC 5044 section 6).
//! Octets arrive in the engine's slab; only an FPDU that is not complete moves to a buffer of its own,
//! and the next call reads the missing octets straight behind it.

use std::io::{self, IoSliceMut};

use super::qp::{Link, Phase, Qp};
use super::{Output, Receive, Shard};
use crate::abi::control::{DisconnectReason, Event};
use crate::ddp::MAX_HEADER_LEN;
use crate::device::memory::Payload;
use crate::mpa::{MAX_FPDU, MpaFault};
use crate::rdmap::codes;
use crate::stream::inbound::{Arrival, ReadArrival};
use crate::stream::startup::RtrKinds;
use crate::stream::{Fault, terminate};
use std::sync::atomic::Ordering::Relaxed;

use super::moving::After;
use super::place::Trouble;

impl Qp {
    /// One call to the socket, and everything that follows from what came.
    pub(super) fn receive_tcp(
        &mut self,
        shard: &mut Shard,
        slab: &mut [u8],
        recv: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> Receive {
        if self.is_landing() {
            // `ReadOn` will ask for this again.
            return Receive::WouldBlock;
        }
        // A connection that had to wait keeps what came behind: not more than it must.
        let most = if self.paced { MAX_FPDU } else { slab.len() };
        let slab = &mut slab[..most];
        let Link::Tcp(tcp) = &mut self.link else { return Receive::Closed };
        let needed = tcp.deframer.needed(tcp.partial.octets());
        let window = tcp.partial.window(needed);
        let window_len = window.len();
        let result = if window_len == 0 {
            recv(&mut [IoSliceMut::new(slab)])
        } else {
            recv(&mut [IoSliceMut::new(window), IoSliceMut::new(slab)])
        };
        let n = match result {
            Ok(0) => {
                self.fin_from_socket(shard);
                return Receive::Closed;
            }
            Ok(n) => n.min(window_len + slab.len()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Receive::WouldBlock,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Receive::Progress,
            Err(e) => {
                self.lost(shard, &format!("receiving failed: {e}"));
                return Receive::Closed;
            }
        };
        // After a Terminate of either side the rest is read and dropped.
        if !self.phase.receives() {
            shard.buffers.give(std::mem::take(&mut tcp.partial));
            return Receive::Progress;
        }
        let into_partial = n.min(window_len);
        tcp.partial.grow(into_partial);
        self.consume(shard, &mut slab[..n - into_partial]);
        Receive::Progress
    }

    /// Handles every complete FPDU in the partial buffer and then in `octets`.
    pub(super) fn consume(&mut self, shard: &mut Shard, mut octets: &mut [u8]) {
        // Complete the FPDU that began earlier, learning its length on the way.
        while let Link::Tcp(tcp) = &mut self.link
            && !tcp.partial.is_empty()
        {
            let needed = tcp.deframer.needed(tcp.partial.octets());
            let missing = needed.saturating_sub(tcp.partial.octets().len());
            if missing > 0 {
                if octets.is_empty() {
                    return;
                }
                let n = missing.min(octets.len());
                let (now, later) = octets.split_at_mut(n);
                tcp.partial.window(needed)[..n].copy_from_slice(now);
                tcp.partial.grow(n);
                octets = later;
                continue;
            }
            if let Some((mut buffer, len)) = tcp.partial.take() {
                self.fpdu_arrived(shard, &mut buffer[..len]);
                shard.buffers.give_buffer(buffer);
                if self.is_landing() {
                    return self.keep_back(octets);
                }
            }
        }
        while self.phase.receives()
            && !octets.is_empty()
            && let Link::Tcp(tcp) = &mut self.link
        {
            let needed = tcp.deframer.needed(octets);
            if needed > octets.len() {
                tcp.partial = shard.buffers.begin(octets);
                return;
            }
            let (fpdu, later) = octets.split_at_mut(needed);
            self.fpdu_arrived(shard, fpdu);
            octets = later;
            if self.is_landing() {
                return self.keep_back(octets);
            }
        }
    }

    /// Keeps octets that came behind a segment that a mover is writing.
    fn keep_back(&mut self, octets: &[u8]) {
        self.paced = true;
        self.backlog = octets.to_vec();
    }

    /// One whole FPDU.
    fn fpdu_arrived(&mut self, shard: &mut Shard, fpdu: &mut [u8]) {
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
            // No FPDU may be sent, hence no Terminate (decision D10).
            self.lost(shard, &format!("the first FPDU failed: {fault}"));
        } else {
            self.terminate(shard, fault.code, Some(terminate::build(fault, &[], None)));
        }
    }

    /// A responder's first valid FPDU: it may send from now on (RFC 5044 section 7.1.2).
    fn first_fpdu(&mut self, shard: &mut Shard) {
        self.enter(Phase::Open);
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
        let arrival = tcp.inbound.handle(ulpdu, ird_free)?;
        // A ULPDU's length is a u16.
        let back = (&ulpdu[..ulpdu.len().min(MAX_HEADER_LEN)], ulpdu.len() as u16);
        match arrival {
            Arrival::Write { stag, to, payload, last, stag_changed } => {
                let len = payload.len();
                let payload = Payload::Octets(payload);
                let stags = &shard.stags;
                let placed = self.place_write(stags, stag, to.0, payload, last, stag_changed)?;
                self.follow(shard, placed, After::Write, len, back)
            }
            Arrival::ReadResponse { stag, to, payload, last } => {
                let len = payload.len();
                let payload = Payload::Octets(payload);
                let placed = self.place_response(&shard.stags, stag, to.0, payload, last)?;
                self.follow(shard, placed, After::Response { last }, len, back)
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
                self.take_receive()?;
                let len = payload.len();
                let placed = self.place_send(&shard.stags, mo, Payload::Octets(payload))?;
                let after = After::Send { kind, mo, last, total: None };
                self.follow(shard, placed, after, len, back)
            }
            Arrival::ReadRequest(read) => {
                if let Err(trouble) = self.read_requested(shard, read) {
                    // The header as a whole, even if it came in several segments.
                    self.segment_failed(shard, trouble, |fault| {
                        let ReadArrival { request, header, segment_len } = &read;
                        terminate::build_from_octets(fault, *segment_len, header, Some(request))
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

    /// `recv` returned 0: the peer has closed its direction.
    fn fin_from_socket(&mut self, shard: &mut Shard) {
        let Link::Tcp(tcp) = &self.link else { return };
        if tcp.partial.is_empty() || !self.phase.receives() {
            self.fin_received(shard);
            return;
        }
        // Inside an FPDU: the connection is lost, but our direction still works (decision D11).
        self.end.get_or_insert(DisconnectReason::Lost {
            why: "the peer closed inside a message".to_owned(),
        });
        self.peer_fin = true;
        if self.phase == Phase::Quiet {
            self.finish(shard, true);
        } else {
            self.terminate(shard, codes::LLP_CLOSED, None);
        }
    }
}
