//! Receives from TCP: bytes become verified FPDUs, FPDUs become segments.
//!
//! Only the length of an FPDU is used before its CRC and Markers are checked (RFC 5044 section 6).
//! Bytes arrive in the engine's slab. Only an incomplete FPDU moves to a buffer of its own, and the
//! next call reads the missing bytes straight into that buffer.

use std::io::{self, IoSliceMut};

use super::failure::socket_error_text;
use super::partial::unwatch;
use crate::engine::arrival::PayloadSource;
use crate::engine::charge::Owner;
use crate::engine::incoming::{Incoming, Origin};
use crate::engine::interface::Receive;
use crate::engine::numbers::cost;
use crate::engine::phase::{StreamEvent, StreamPhase};
use crate::engine::qp::{IncomingFpdu, Qp};
use crate::engine::reason::{PlacementError, Reason};
use crate::engine::responder::is_about_own_requests;
use crate::engine::rnr_notice::Notice;
use crate::engine::schedule::{CALL_COST, FPDU_COST};
use crate::engine::state::EngineState;
use crate::mpa::{MAX_FPDU, MpaFault};
use crate::rdmap::codes;
use crate::stream::inbound::{Arrival, SendKind};
use crate::stream::startup::RtrKinds;
use crate::stream::{Fault, terminate};
use rnic_abi::abi::control::DisconnectReason;
use rnic_abi::types::Time;

impl Qp {
    /// Makes one call to the socket and handles the bytes that it returns.
    pub(in crate::engine) fn receive_tcp(
        &mut self,
        engine: &mut EngineState,
        slab: &mut Vec<u8>,
        recv: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> Receive {
        if !self.responder.reads() {
            return Receive::Blocked;
        }
        if self.core.turn.is_over() || self.has_unread() {
            // In the QP's next turn, bytes read earlier come first.
            engine.wake(&mut self.core);
            return Receive::Progress;
        }
        self.core.turn.charge(CALL_COST);
        let (limit, may_leave) = self.read_limit(engine);
        // A QP that blocks must keep the bytes that it has read. So a QP that may block reads at
        // most the rest of the current FPDU, or the length of the longest FPDU.
        let may_block = self.responder.may_block();
        let (narrow, slab_len) =
            if may_block { (true, limit.min(MAX_FPDU)) } else { (false, limit) };
        let owner = self.owner();
        let phase = self.life.phase();
        let Some(tcp) = self.link.tcp_mut() else { return Receive::Closed };
        let needed = tcp.deframer.needed(tcp.partial.bytes());
        // Read no more than the first FPDU of a peer that has just begun. `Established` must be
        // emitted before a later FPDU completes something.
        let (narrow, slab_len) = match phase {
            StreamPhase::AwaitFirstFpdu => (true, needed.min(slab_len)),
            _ => (narrow, slab_len),
        };
        let space = &mut slab[..slab_len];
        let window = tcp.partial.spare(needed);
        let window_len = window.len();
        let (result, room) = if window_len == 0 {
            (recv(&mut [IoSliceMut::new(space)]), slab_len)
        } else if narrow {
            (recv(&mut [IoSliceMut::new(window)]), window_len)
        } else {
            let both = &mut [IoSliceMut::new(window), IoSliceMut::new(space)];
            (recv(both), window_len + slab_len)
        };
        let n = match result {
            Ok(0) => {
                match tcp.broken.take().filter(|_| phase.receives()) {
                    Some(why) => self.lost(engine, &why),
                    None => self.fin_from_socket(engine),
                }
                return Receive::Closed;
            }
            Ok(n) => n.min(room),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let Some(why) = tcp.broken.take() else { return Receive::WouldBlock };
                self.lost(engine, &why);
                return Receive::Closed;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Receive::Progress,
            Err(e) => {
                //= MPA-8-3
                self.lost(engine, &socket_error_text("receiving", &e));
                return Receive::Closed;
            }
        };
        // After a Terminate of either side the rest is read and dropped.
        //= MPA-8-9, DDP-7.1-18
        if !phase.receives() {
            self.core.turn.charge(cost(n));
            tcp.drop_partial(owner, engine);
            return Receive::Progress;
        }
        // Later bytes, or a FIN, make the socket readable again. A failed socket is read until it
        // is empty.
        let emptied = n < room && tcp.broken.is_none();
        let into_partial = n.min(window_len);
        if into_partial > 0 {
            tcp.partial.grow(into_partial, engine.now);
        }
        self.read_slab(engine, slab, n - into_partial, may_leave);
        if emptied { Receive::Emptied } else { Receive::Progress }
    }

    fn owner(&self) -> Owner {
        Owner { key: self.core.key, session: self.core.session }
    }

    /// Handles complete FPDUs, first from the partial buffer and then from `bytes`, until the turn
    /// ends, or all of them if `at_any_cost`. Returns the number of bytes consumed from `bytes`.
    pub(super) fn consume(
        &mut self,
        engine: &mut EngineState,
        mut bytes: &mut [u8],
        at_any_cost: bool,
    ) -> usize {
        let len = bytes.len();
        // An earlier segment may have found its receive and be waiting for a copier.
        if !self.responder.reads() {
            self.responder.keep_unread(bytes);
            return len;
        }
        let owner = self.owner();
        // Complete the FPDU that began earlier. Its length may become known only here.
        while let Some(tcp) = self.link.tcp_mut()
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
                self.append_partial(engine, owner, now);
                bytes = later;
                continue;
            }
            let (mut buffer, filled) = engine.partials.take(&mut tcp.partial, owner.session);
            self.fpdu_arrived(engine, &mut buffer[..filled]);
            engine.partials.give_buffer(buffer);
            if !self.responder.reads() {
                self.responder.keep_unread(bytes);
                return len;
            }
        }
        //= MPA-8-9
        while self.life.phase().receives()
            && !bytes.is_empty()
            && let Some(tcp) = self.link.tcp_mut()
        {
            if self.core.turn.is_over() && !at_any_cost {
                return len - bytes.len();
            }
            let needed = tcp.deframer.needed(bytes);
            if needed > bytes.len() {
                self.append_partial(engine, owner, bytes);
                return len;
            }
            //= MPA-6-2, MPA-6-4
            let (fpdu, later) = bytes.split_at_mut(needed);
            self.fpdu_arrived(engine, fpdu);
            bytes = later;
            if !self.responder.reads() {
                self.responder.keep_unread(bytes);
                return len;
            }
        }
        // A stream that has ended drops the rest.
        len
    }

    fn append_partial(&mut self, engine: &mut EngineState, owner: Owner, bytes: &[u8]) {
        let Some(tcp) = self.link.tcp_mut() else { return };
        let EngineState { partials, deadlines, now, .. } = engine;
        let excess = partials.append(&mut tcp.partial, owner, bytes, *now, deadlines);
        engine.evict(excess);
    }

    /// Ends the stream if it has paused inside an FPDU for too long.
    pub(in crate::engine) fn check_stall(&mut self, engine: &mut EngineState) {
        if self.is_stopped() {
            self.restart_stall(engine.now);
        }
        let Some(tcp) = self.link.tcp_mut() else { return };
        let EngineState { partials, deadlines, now, .. } = engine;
        let stalled = partials.stalled(&mut tcp.partial, self.core.key, *now, deadlines);
        if let Some(span) = stalled {
            let seconds = span.as_secs_f32();
            let why =
                format!("no byte arrived for {seconds:.1} s inside an FPDU (mpa.stall_deadline)");
            self.lost(engine, &why);
        }
    }

    /// Restarts the time after which the stream counts as stalled.
    pub(in crate::engine) fn restart_stall(&mut self, now: Time) {
        if let Some(tcp) = self.link.tcp_mut() {
            tcp.partial.note_progress(now);
        }
    }

    /// Checks the CRC of one whole FPDU and handles it.
    fn fpdu_arrived(&mut self, engine: &mut EngineState, fpdu: &mut [u8]) {
        self.core.turn.charge(cost(fpdu.len()).max(FPDU_COST));
        let Some(tcp) = self.link.tcp_mut() else { return };
        let ulpdu = match tcp.deframer.take(fpdu) {
            Ok(ulpdu) => ulpdu,
            Err(fault) => return self.framing_failed(engine, fault),
        };
        let first = self.life.phase() == StreamPhase::AwaitFirstFpdu;
        if first {
            self.first_fpdu(engine);
        }
        self.fpdu_received(IncomingFpdu::Segment);
        self.ulpdu_arrived(engine, ulpdu, first);
    }

    fn framing_failed(&mut self, engine: &mut EngineState, fault: MpaFault) {
        let fault = Fault::from(fault);
        if self.life.phase() == StreamPhase::AwaitFirstFpdu {
            // The responder may send no FPDU yet, hence no Terminate.
            self.lost(engine, &format!("the first FPDU failed: {fault}"));
        } else if self.can_unlink() || self.is_refusing() {
            // An adapter drops a packet with a wrong CRC, which is no request of the peer.
            self.lost(engine, &format!("an FPDU failed: {fault}"));
        } else {
            let payload = terminate::build(fault, &[], None);
            self.terminate(engine, fault.code, Some(payload), Reason::Segment);
        }
    }

    /// Opens a responder's stream at the first valid FPDU. It may send from now on (RFC 5044
    /// section 7.1.2).
    fn first_fpdu(&mut self, engine: &mut EngineState) {
        if let Some(next) = self.life.after(StreamEvent::FirstFpdu) {
            self.enter(next);
        }
        // The first FPDU is read in parts; few streams have incomplete FPDUs later.
        if let Some(tcp) = self.link.tcp_mut() {
            unwatch(&mut tcp.partial, self.core.key, &mut engine.deadlines);
        }
        self.life.set_deadline(&self.core, engine, None);
        self.emit_established(engine, Vec::new());
        engine.wake(&mut self.core);
    }

    /// Checks a ULPDU against the state of the stream and carries it out.
    #[inline]
    pub(in crate::engine) fn ulpdu_arrived(
        &mut self,
        engine: &mut EngineState,
        ulpdu: &[u8],
        first: bool,
    ) {
        if self.responder.keep_in_backlog(ulpdu) {
            return;
        }
        // Requests after the refused request are parsed and dropped, because later responses must
        // still be handled.
        let drops = self.is_refusing() && !is_about_own_requests(ulpdu);
        let ird_available = self.requester.ird_available();
        let Some(tcp) = self.link.tcp_mut() else { return };
        // The first FPDU in the peer-to-peer model is not a message of the peer's program.
        let is_rtr = first && tcp.await_rtr.is_some();
        let origin = Origin::Wire(ulpdu);
        let arrival = match tcp.inbound.handle(ulpdu, ird_available) {
            _ if drops => return,
            Ok(arrival) => arrival,
            Err(fault) => {
                let error = match fault.code {
                    // `inbound` returns this code only for a request beyond the IRD.
                    codes::UNTAGGED_NO_BUFFER => {
                        Reason::RequestsFull { ird: self.requester.depths().0 }.into()
                    }
                    _ => PlacementError::from(fault),
                };
                return self.segment_failed(engine, error, |fault| origin.terminate(fault, None));
            }
        };
        let (segment, payload) = match arrival {
            Arrival::Write { stag, to, payload, last, stag_changed } => {
                let notice = Notice::find(stag, to, payload);
                if let Some(notice) = notice.filter(|_| self.core.transport.has_notices()) {
                    return self.notice_arrived(engine, notice);
                }
                (Incoming::Write { stag, to: to.0, last, stag_changed, total: None }, payload)
            }
            Arrival::ReadResponse { stag, to, payload, last } => {
                (Incoming::ReadResponse { stag, to: to.0, last }, payload)
            }
            Arrival::Send { kind, mo, payload, last, first_of_message, .. } => {
                // The first FPDU may be an RTR of the peer and not a message.
                let may_be_rtr = tcp.await_rtr.take().is_some_and(|k| k.contains(RtrKinds::SEND));
                let plain = kind == SendKind::default();
                let whole = first_of_message && last && mo == 0 && payload.is_empty();
                if first && may_be_rtr && plain && whole {
                    if let Err(fault) = tcp.inbound.sent_placed(0, 0, true) {
                        let build = |fault| origin.terminate(fault, None);
                        self.segment_failed(engine, fault, build);
                    }
                    return;
                }
                (Incoming::Send { kind, mo, last, total: None }, payload)
            }
            //= 7306-7-2
            Arrival::ReadRequest(read) => (Incoming::ReadRequest(read), &[][..]),
            //= 7306-5.4-4, 7306-5.4-6, 7306-7-3, 7306-7-11, 7306-7-12
            Arrival::AtomicRequest(atomic) => (Incoming::AtomicRequest(atomic), &[][..]),
            Arrival::AtomicResponse(response) => (Incoming::AtomicResponse(response), &[][..]),
            //= RDMAP-5.5-12, RDMAP-5.5-17
            Arrival::Part => return,
            //= RDMAP-5.4-5
            Arrival::Terminate(t) => return self.terminate_received(engine, &t),
            Arrival::MalformedTerminate(why) => {
                let why = format!("the peer sent a malformed Terminate: {why}");
                //= RDMAP-5.4-7
                return self.lost(engine, &why);
            }
        };
        // Rules do not count it either.
        let faults = if is_rtr { self.core.faults.take() } else { None };
        if !is_rtr {
            self.note_communication(engine);
        }
        self.wire_segment_arrived(engine, segment, payload, origin);
        if is_rtr {
            self.core.faults = faults;
        }
        if is_rtr && self.core.transport.has_notices() {
            // The peer's requester does not count the RTR among its Writes, which notices number.
            self.responder.begin_stream();
        }
    }

    /// Handles a segment from the wire, just received or kept earlier.
    #[inline]
    pub(in crate::engine) fn wire_segment_arrived(
        &mut self,
        engine: &mut EngineState,
        segment: Incoming,
        payload: &[u8],
        origin: Origin<'_>,
    ) {
        let arrived = self.segment_arrived(engine, segment, PayloadSource::Bytes(payload), origin);
        if let Err(error) = arrived {
            let read = segment.read_request();
            self.segment_failed(engine, error, |fault| origin.terminate(fault, read));
        }
    }

    /// Handles a return value of 0 from `recv`: the peer has closed its sending direction.
    fn fin_from_socket(&mut self, engine: &mut EngineState) {
        let Some(tcp) = self.link.tcp() else { return };
        if tcp.partial.is_empty() || !self.life.phase().receives() {
            //= DDP-3-9
            self.fin_received(engine);
            return;
        }
        if self.can_unlink() || self.is_refusing() {
            return self.lost(engine, "the peer closed inside a message");
        }
        // Inside an FPDU the connection is lost, but the outgoing direction still works.
        let why = "the peer closed inside a message".to_owned();
        self.life.set_end_reason(DisconnectReason::Lost { why });
        self.life.see_peer_fin();
        if self.life.phase() == StreamPhase::AwaitFirstFpdu {
            self.life.record_loss(&self.core, engine, "the peer closed inside its first FPDU");
            self.finish(engine, true);
        } else {
            //= MPA-8-3
            self.terminate(engine, codes::LLP_CLOSED, None, Reason::CutShort);
        }
    }
}
