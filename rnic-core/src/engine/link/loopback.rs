//! Loopback of an RC or UC QP that is its own peer.
//!
//! Payload is copied twice, because the QP's requests cannot be read while its responder is
//! borrowed mutably. Otherwise loopback works like the path between two QPs
//! ([`direct`](super::direct)).

use super::direct::{RETIRE_EVERY, SEGMENT, VERSION, incoming_of};
use crate::device::memory::Payload;
use crate::engine::arrival::PayloadSource;
use crate::engine::incoming::Origin;
use crate::engine::numbers::ulpdu_len;
use crate::engine::qp::{IncomingFpdu, OutgoingFpdu, Qp};
use crate::engine::reason::Reason;
use crate::engine::requester::message::{Gather, GatherFault, Segment};
use crate::engine::schedule::REQUEST_COST;
use crate::engine::state::EngineState;
use crate::rdmap::Terminate;

impl Qp {
    /// Delivers the messages that the QP sends to itself, until the turn or the work ends.
    pub(in crate::engine) fn run_loopback(&mut self, engine: &mut EngineState) {
        if self.emulation.is_some() && self.run_emulated(None, engine) {
            return;
        }
        let mut bytes = Vec::new();
        let mut unretired = 0;
        self.requester.set_peer_refuses(self.is_refusing());
        if !self.responder.is_blocked() {
            self.requester.acknowledge_all();
        }
        self.set_peer_waits(engine, self.responder.awaits_receive());
        while !self.core.turn.is_over()
            && self.life.phase().responds()
            && self.life.phase().receives()
            && self.responder.takes_responses()
            && self.next_message(engine)
        {
            let Some(segment) = self.requester.next_segment(SEGMENT, VERSION) else { break };
            bytes.clear();
            if !self.read_segment(engine, segment, &mut bytes) {
                break;
            }
            self.deliver_loopback(engine, segment, &bytes);
            self.core.turn.charge(i64::from(segment.len).max(REQUEST_COST));
            unretired += 1;
            if unretired == RETIRE_EVERY {
                self.retire(engine);
                unretired = 0;
            }
        }
        self.retire(engine);
        self.requester.return_slots(&self.core, engine);
        self.finish_if_drained(engine);
    }

    /// Appends the payload of a segment to `bytes`, unless its message is only a header. Returns
    /// false if it must be staged first, or cannot be read.
    pub(super) fn read_segment(
        &mut self,
        engine: &mut EngineState,
        segment: Segment,
        bytes: &mut Vec<u8>,
    ) -> bool {
        if self.requester.message().is_some_and(|message| message.header().is_some()) {
            return true;
        }
        let from = bytes.len();
        bytes.resize(from + segment.len as usize, 0);
        let read = {
            let mut memory = Gather::new();
            let requester = &self.requester;
            let gathered = requester.gather(segment.len, &self.core, &engine.stags, &mut memory);
            gathered.map(|()| Payload::Gather(&memory).read(0, &mut bytes[from..]))
        };
        match read {
            Ok(Ok(())) => return true,
            Ok(Err(fault)) => self.memory_failed(engine, fault),
            Err(GatherFault::Unstaged) => self.stage(engine),
            Err(fault) => self.gather_failed(engine, fault),
        }
        false
    }

    /// Handles a segment that the QP sends to itself.
    fn deliver_loopback(&mut self, engine: &mut EngineState, segment: Segment, bytes: &[u8]) {
        let Some(message) = self.requester.message() else { return };
        let incoming = incoming_of(message, &segment);
        let len = ulpdu_len(segment.header.len() + segment.len as usize);
        let origin = Origin::Direct { header: segment.header, len };
        let waited = self.responder.awaits_receive();
        let arrived = if incoming.awaits_response() && !self.requester.ird_available() {
            Err(Reason::RequestsFull { ird: self.requester.depths().0 }.into())
        } else {
            self.segment_arrived(engine, incoming, PayloadSource::Bytes(bytes), origin)
        };
        // The segment waits for a receive. The message stays in progress, and no later request
        // overtakes it.
        if arrived.is_ok() && self.responder.awaits_receive() && !waited {
            self.requester.put_aside();
            return self.set_peer_waits(engine, true);
        }
        self.fpdu_received(IncomingFpdu::Segment);
        self.fpdu_sent(&OutgoingFpdu::Segment(segment), None);
        match arrived {
            Ok(_) if self.responder.is_blocked() => {}
            Ok(_) => self.requester.acknowledge_all(),
            Err(error) => {
                let read = incoming.read_request();
                self.segment_failed(engine, error, |fault| origin.terminate(fault, read));
                self.requester.set_peer_refuses(self.is_refusing());
            }
        }
    }

    /// On loopback, fails the request that the QP's own Terminate blames, so that it is not
    /// flushed.
    pub(in crate::engine) fn blame_loopback(&mut self, payload: &[u8]) {
        let to_itself = matches!(self.link, super::Link::Direct(peer) if peer.id == self.core.id);
        if to_itself && let Ok(terminate) = Terminate::parse(payload) {
            self.blame(&terminate);
        }
    }
}
