//! Emulated links: delay, rate, stalls and losses of what a QP sends, on every kind of link.
//!
//! All that a QP sends passes its [`EmulatedLink`]: requests, responses and, on an RC QP, the
//! acknowledgements of the direct path. The *rate* holds back the QP, which takes no turn at
//! sending while the link is busy. The *delay* puts what was sent into a [`DelayLine`], from which
//! it arrives in order: framed bytes before the socket of a TCP connection
//! ([`tcp`](super::tcp::delayed)), segments before the other QP of the direct path ([`direct`]),
//! and datagrams before their socket or receiver (`datagram/delayed.rs`). A request is done when it
//! has entered the line, as it is done when TCP has accepted it. On RC it is done when the peer has
//! acknowledged it, one delay of each QP later.
//!
//! Payload is read when it enters the line and its target is checked when it arrives, so a
//! deregistration is a barrier here too. The memory of a line is bounded and charged to the session
//! of the QP that owns it. A QP whose session has reached a limit on unsent bytes waits until its
//! line is empty, so that no stream ends because of a rule.
//!
//! The end of a stream keeps its place behind earlier segments but has no delay of its own. A QP
//! that is destroyed sends at once what its line holds.

pub(in crate::engine) mod delay_line;
pub(in crate::engine) mod direct;
mod shared;

use std::sync::Arc;
use std::time::Duration;

pub(in crate::engine) use delay_line::DelayLine;
pub use shared::EmulatedLink;
pub(in crate::engine) use shared::Fate;

use crate::engine::charge::{Owner, StreamCharge};
use crate::engine::datagram::delayed::DelayedDatagrams;
use crate::engine::deadlines::Due;
use crate::engine::faults::record;
use crate::engine::qp::Qp;
use crate::engine::qp_core::QpCore;
use crate::engine::state::EngineState;
use crate::engine::transport::Transport;
use direct::{Acknowledgement, Arrival};
use rnic_abi::faults::FaultName;
use rnic_abi::types::{QpId, SessionId, Time};

/// State of a QP whose link is emulated, or whose peer's link on the direct path is.
#[derive(Default)]
pub(in crate::engine) struct Emulation {
    /// Link of what the QP sends. `None` if only its peer has one, or until the lines are empty.
    link: Option<Arc<EmulatedLink>>,
    /// Units sent, which select their jitter.
    units: u64,
    /// Messages or datagrams sent, which select their fate.
    packets: u64,
    /// Number of packets whose fate was recorded.
    reports: u32,
    /// Request whose fate is decided.
    decided: Option<u64>,
    /// Time at which the link accepts more. Until the QP has nothing more to send, its bytes count
    /// as ready at this time, so that late turns do not lower the rate.
    resumes: Option<Time>,
    /// The deadline that is set.
    deadline: Option<Time>,
    /// Segments, acknowledgements and signals of the other QP of the direct path.
    arrivals: DelayLine<Arrival>,
    /// The other QP waits for room in `arrivals`.
    sender_waits: bool,
    /// The rule that stalls the link of the other QP of the direct path.
    peer_stalled: Option<FaultName>,
    acknowledgement: Acknowledgement,
    pub datagrams: DelayedDatagrams,
    /// Charge of the session for what is in flight to or, over TCP and on UD, from this QP.
    charge: StreamCharge,
}

impl Emulation {
    /// Returns true if the link accepts another unit now.
    pub(in crate::engine) fn is_open(&mut self, now: Time) -> bool {
        let Some(link) = &self.link else { return true };
        if link.is_stalled() {
            return false;
        }
        let free_at = link.free_at().unwrap_or_default();
        let is_open = free_at <= now.after(AHEAD);
        if !is_open {
            self.resumes = Some(Time(free_at.0 - nanoseconds(AHEAD)));
        }
        is_open
    }

    /// Returns the rule that stalls the link.
    fn stalled(&self) -> Option<FaultName> {
        self.link.as_ref().filter(|link| link.is_stalled()).map(|link| link.fault().name)
    }

    /// Sends a unit. Returns the time at which it arrives, unless an earlier unit arrives later.
    pub(in crate::engine) fn send(&mut self, now: Time, bytes: usize, qp: QpId) -> Time {
        let Some(link) = &self.link else { return now };
        let left = link.send(self.ready_at(now), bytes);
        let delay = link.delay(qp, self.units);
        self.units += 1;
        left.after(delay)
    }

    /// Returns how many bytes a QP may hand to the link at once, at least 1.
    pub(in crate::engine) fn allowance(&self, now: Time) -> usize {
        let ready = self.ready_at(now);
        self.link.as_ref().map_or(usize::MAX, |link| link.bytes_between(ready, now.after(AHEAD)))
    }

    /// Returns the time at which bytes sent now count as ready.
    fn ready_at(&self, now: Time) -> Time {
        let earliest = Time(now.0.saturating_sub(nanoseconds(CATCH_UP)));
        self.resumes.map_or(now, |at| at.clamp(earliest, now))
    }

    /// Returns true if a unit may enter this line: it has room, and its session for more memory, or
    /// nothing is in flight.
    pub(in crate::engine) fn has_room<T>(
        &self,
        line: &DelayLine<T>,
        session: SessionId,
        engine: &EngineState,
    ) -> bool {
        // A QP has only one line that fills up.
        let more = line.room() + 1;
        line.is_empty() || line.has_room() && engine.held.may_hold(&self.charge, session, more)
    }

    /// Returns what happens to the next packet of the QP, and records it unless it arrives.
    pub(in crate::engine) fn fate(&mut self, core: &QpCore, engine: &EngineState) -> Fate {
        let Some(link) = &self.link else { return Fate::Arrives };
        let packet = self.packets;
        self.packets += 1;
        let fate = link.fate(core.id, packet);
        if fate != Fate::Arrives && self.reports < MAX_REPORTS {
            self.reports += 1;
            record(core, engine, link.fault().name, format!("packet {packet} of the QP {fate}"));
        }
        fate
    }
}

impl Qp {
    /// Sets the link of what this QP sends from now on.
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

    /// Notes that the QP has nothing more to send, so that its next bytes are ready when posted.
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
        let is_lost = match emulation.fate(&self.core, engine) {
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

    /// Drops what has not arrived, because the stream has ended. Datagrams need no stream and are
    /// sent.
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

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Maximum number of packets of a QP whose fate is recorded, so that they displace no other records.
const MAX_REPORTS: u32 = 16;
/// Time before the link is free at which the QP hands it the next unit, so that a turn that is a
/// little late leaves no gap.
const AHEAD: Duration = Duration::from_micros(100);
/// Maximum time by which a turn may be late without lowering the rate.
const CATCH_UP: Duration = Duration::from_millis(100);
