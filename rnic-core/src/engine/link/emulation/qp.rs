//! The emulated link in the life of its QP: when it is set, after each turn, and at the end.

use std::sync::Arc;

use super::arrival::Acknowledgement;
use super::delay_line::DelayLine;
use super::shared::{EmulatedLink, Fate};
use super::state::Emulation;
use crate::engine::charge::Owner;
use crate::engine::deadlines::Due;
use crate::engine::faults::record;
use crate::engine::qp::Qp;
use crate::engine::state::EngineState;
use crate::engine::transport::Transport;
use rnic_abi::faults::FaultName;
use rnic_abi::types::Time;

impl Qp {
    /// Sets the emulated link for data that this QP sends from now on.
    pub(in crate::engine) fn set_link(
        &mut self,
        engine: &mut EngineState,
        link: Option<Arc<EmulatedLink>>,
    ) {
        if self.emulation.is_none() && link.is_none() {
            return;
        }
        let emulation = self.emulation.get_or_insert_default();
        emulation.link = link;
        emulation.resumes = None;
        engine.wake(&mut self.core);
        // The peer's clock depends on a stall of this link.
        self.link.wake_peer(engine);
    }

    /// Returns true if a FIN must wait: for a stalled link, or for segments of a peer that has
    /// ended the stream after them.
    pub(in crate::engine) fn delays_fin(&self) -> bool {
        let delays = |of: &Emulation| of.stalled().is_some() || !of.arrivals.is_empty();
        self.emulation.as_deref().is_some_and(delays)
    }

    /// Sends `bytes` over the link. Returns the time at which they arrive.
    pub(in crate::engine) fn leaves(&mut self, now: Time, bytes: usize) -> Time {
        let id = self.core.id;
        self.emulation.as_mut().map_or(now, |emulation| emulation.send(now, bytes, id))
    }

    /// Ends the backlog: the QP has nothing more to send, so its next bytes are ready when posted.
    pub(in crate::engine) fn end_backlog(&mut self) {
        if let Some(emulation) = &mut self.emulation {
            emulation.resumes = None;
        }
    }

    /// Returns the rule that stalls the link of either end of an RC QP, so that no acknowledgement
    /// can arrive.
    pub(in crate::engine) fn stalled_by(&self) -> Option<FaultName> {
        let emulation = self.emulation.as_ref().filter(|_| self.core.transport.acknowledges())?;
        emulation.stalled().or(emulation.peer_stalled)
    }

    /// Returns what happens to the next packet of the QP, and records it unless it arrives.
    pub(in crate::engine) fn packet_fate(&mut self, engine: &EngineState) -> Fate {
        let Some(emulation) = &mut self.emulation else { return Fate::Arrives };
        let Some(link) = &emulation.link else { return Fate::Arrives };
        let packet = emulation.packets;
        emulation.packets += 1;
        let fate = link.fate(self.core.id, packet);
        if fate != Fate::Arrives && emulation.reports < MAX_REPORTS {
            emulation.reports += 1;
            let text = format!("packet {packet} of the QP {fate}");
            record(&self.core, engine, link.fault().name, text);
        }
        fate
    }

    /// Decides the fate of the message in progress of a UC QP, once. Drops a message that would not
    /// arrive, and returns true. Its request counts as sent.
    pub(in crate::engine) fn loses_message(&mut self, engine: &EngineState) -> bool {
        let Some(emulation) = &mut self.emulation else { return false };
        let Some(message) = self.requester.message() else { return false };
        let request = message.seq;
        let is_decided = request.is_none() || request == emulation.decided || message.sent > 0;
        if self.core.transport != Transport::Uc || is_decided {
            return false;
        }
        emulation.decided = request;
        let is_lost = match self.packet_fate(engine) {
            Fate::Lost | Fate::Truncated | Fate::Reordered => true,
            Fate::Arrives | Fate::Duplicated => false,
        };
        if is_lost {
            self.requester.lose_message();
        }
        is_lost
    }

    /// Updates charge and deadline after a turn. Drops the state if it is not needed any more.
    pub(in crate::engine) fn settle_emulation(&mut self, engine: &mut EngineState) {
        let Some(emulation) = &mut self.emulation else { return };
        let now = engine.now;
        let owner = Owner { key: self.core.key, session: self.core.session };
        let framed = self.link.tcp().map_or(0, |tcp| tcp.line().room());
        let room = framed + emulation.arrivals.room() + emulation.datagrams.room();
        engine.held.hold(&mut emulation.charge, owner, room);
        let line = self.link.tcp().and_then(|tcp| tcp.line().next_after(now));
        let next = [
            line,
            emulation.arrivals.next_after(now),
            emulation.datagrams.next_after(now),
            emulation.resumes.filter(|at| *at > now),
        ];
        let next = next.into_iter().flatten().min();
        if next != emulation.deadline {
            let due = Due::Link(self.core.key);
            if let Some(at) = emulation.deadline {
                engine.deadlines.clear(at, due);
            }
            if let Some(at) = next {
                engine.deadlines.set(at, due);
            }
            emulation.deadline = next;
        }
        let in_use = emulation.link.is_some()
            || emulation.peer_stalled.is_some()
            || emulation.acknowledgement.is_pending()
            || room > 0;
        if !in_use {
            self.emulation = None;
        }
    }

    /// Handles the deadline of the link.
    pub(in crate::engine) fn link_deadline_passed(&mut self, engine: &mut EngineState) {
        if let Some(emulation) = &mut self.emulation {
            emulation.deadline = None;
            engine.wake(&mut self.core);
        }
    }

    /// Drops units in flight, because the stream has ended. Datagrams need no stream and are sent.
    pub(in crate::engine) fn drop_arrivals(&mut self, engine: &mut EngineState) {
        self.send_delayed_datagrams(engine);
        if let Some(emulation) = &mut self.emulation {
            emulation.arrivals = DelayLine::default();
            emulation.acknowledgement = Acknowledgement::default();
            emulation.sender_waits = false;
            emulation.peer_stalled = None;
            self.settle_emulation(engine);
        }
    }

    /// Ends the emulation for a QP that is destroyed.
    pub(in crate::engine) fn end_emulation(&mut self, engine: &mut EngineState) {
        self.send_delayed_datagrams(engine);
        let Some(mut emulation) = self.emulation.take() else { return };
        engine.held.release(&mut emulation.charge, self.core.session);
        if let Some(at) = emulation.deadline {
            engine.deadlines.clear(at, Due::Link(self.core.key));
        }
    }
}

/// Maximum number of packets of a QP whose fate is recorded, so that they displace no other
/// records.
const MAX_REPORTS: u32 = 16;
