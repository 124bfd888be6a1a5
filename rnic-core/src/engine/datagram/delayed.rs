//! Datagrams over an emulated link: each one is lost, changed or delayed after its request is done.

use super::DatagramPort;
use crate::engine::interface::Output;
use crate::engine::link::emulation::{DelayLine, Fate};
use crate::engine::qp::Qp;
use crate::engine::schedule::CALL_COST;
use crate::engine::state::EngineState;
use rnic_abi::roce::{Datagram, grh, packet};
use rnic_abi::types::Time;

/// Datagrams in flight from a UD QP.
#[derive(Default)]
pub(in crate::engine) struct DelayedDatagrams {
    line: DelayLine<DelayedDatagram>,
    /// The datagram that the next one overtakes, and the time at which it is sent if there is none.
    overtaken: Option<(Time, DelayedDatagram)>,
}

/// A datagram in flight.
#[derive(Clone)]
pub(in crate::engine) struct DelayedDatagram {
    pub datagram: Datagram,
    /// The GRH, then the data.
    pub bytes: Box<[u8]>,
}

impl DelayedDatagrams {
    /// Returns the memory of the datagrams in bytes.
    pub(in crate::engine) fn room(&self) -> usize {
        self.line.room() + self.overtaken.as_ref().map_or(0, |(_, held)| held.bytes.len())
    }

    /// Returns the time after `now` at which the next datagram is due.
    pub(in crate::engine) fn next_after(&self, now: Time) -> Option<Time> {
        let held = self.overtaken.as_ref().map(|(at, _)| *at).filter(|at| *at > now);
        self.line.next_after(now).into_iter().chain(held).min()
    }

    fn push(&mut self, at: Time, delayed: DelayedDatagram, fate: Fate) {
        let held = self.overtaken.take();
        match fate {
            Fate::Lost | Fate::Truncated => {
                self.overtaken = held;
                return;
            }
            Fate::Reordered if held.is_none() => {
                self.overtaken = Some((at.after(HOLD), delayed));
                return;
            }
            Fate::Duplicated => self.line.push(at, delayed.bytes.len(), delayed.clone()),
            Fate::Reordered | Fate::Arrives => {}
        }
        self.line.push(at, delayed.bytes.len(), delayed);
        if let Some((_, held)) = held {
            self.line.push(at, held.bytes.len(), held);
        }
    }

    fn take_due(&mut self, now: Time) -> Option<DelayedDatagram> {
        if let Some((_, held)) = self.overtaken.take_if(|(at, _)| *at <= now) {
            self.line.push(now, held.bytes.len(), held);
        }
        self.line.take_due(now, |_| true)
    }
}

impl Qp {
    /// Returns true if the emulated link accepts another datagram now.
    pub(super) fn link_takes_datagram(&mut self, engine: &EngineState) -> bool {
        let session = self.core.session;
        let Some(emulation) = &mut self.emulation else { return true };
        let has_room = emulation.has_room(&emulation.datagrams.line, session, engine);
        has_room && emulation.is_open(engine.now)
    }

    /// Sends a datagram over the emulated link. Returns false if the QP has none.
    pub(super) fn delay_datagram(
        &mut self,
        engine: &EngineState,
        datagram: &Datagram,
        bytes: &[u8],
    ) -> bool {
        let id = self.core.id;
        let Some(emulation) = &mut self.emulation else { return false };
        let at = emulation.send(engine.now, bytes.len() - grh::LEN, id);
        let fate = emulation.fate(&self.core, engine);
        let delayed = DelayedDatagram { datagram: *datagram, bytes: bytes.into() };
        emulation.datagrams.push(at, delayed, fate);
        true
    }

    /// Sends the datagrams that are due, until the turn ends.
    pub(super) fn deliver_delayed_datagrams(&mut self, engine: &mut EngineState) {
        let now = engine.now;
        while let Some(emulation) = &mut self.emulation
            && !self.core.turn.is_over()
            && let Some(delayed) = emulation.datagrams.take_due(now)
        {
            self.core.turn.charge(CALL_COST);
            self.send_delayed_datagram(engine, delayed);
        }
    }

    /// Sends all datagrams in flight, because the QP is destroyed.
    pub(in crate::engine) fn send_delayed_datagrams(&mut self, engine: &mut EngineState) {
        while let Some(emulation) = &mut self.emulation
            && let Some(delayed) = emulation.datagrams.take_due(Time(u64::MAX))
        {
            self.send_delayed_datagram(engine, delayed);
        }
    }

    fn send_delayed_datagram(&self, engine: &mut EngineState, delayed: DelayedDatagram) {
        let Some(port) = self.datagrams.as_ref().map(|datagrams| &datagrams.port) else { return };
        let DelayedDatagram { datagram, bytes } = &delayed;
        if port.needs_no_packet(datagram.to) {
            engine.datagrams.push_back(delayed);
        } else {
            engine.outputs.push_back(packet_of(port, datagram, bytes));
        }
    }
}

/// Returns the packet of a datagram. `bytes` holds the GRH, then the data.
pub(super) fn packet_of(port: &DatagramPort, datagram: &Datagram, bytes: &[u8]) -> Output {
    Output::SendDatagram {
        from: datagram.from.address(),
        to: datagram.to.address(),
        packet: packet::emit(datagram, &bytes[grh::LEN..], port.udp, port.udp),
    }
}

/// Time for which a datagram waits for the next one to overtake it.
const HOLD: std::time::Duration = std::time::Duration::from_millis(10);
