//! Datagrams over an emulated link. Each is dropped, changed or delayed after its request has
//! completed.

use super::DatagramPort;
use super::in_flight::DelayedDatagram;
use crate::engine::interface::Output;
use crate::engine::qp::Qp;
use crate::engine::schedule::CALL_COST;
use crate::engine::state::EngineState;
use rnic_abi::roce::{Datagram, grh, packet};
use rnic_abi::types::Time;

impl Qp {
    /// Returns true if the emulated link accepts another datagram now.
    pub(super) fn link_takes_datagram(&mut self, engine: &EngineState) -> bool {
        let session = self.core.session;
        let Some(emulation) = &mut self.emulation else { return true };
        let has_room = emulation.has_room(&emulation.datagrams.line, session, &engine.held);
        has_room && emulation.is_open(engine.now)
    }

    /// Sends a datagram over the emulated link. Returns false if the QP has none.
    pub(super) fn delay_datagram(
        &mut self,
        engine: &EngineState,
        datagram: &Datagram,
        bytes: &[u8],
    ) -> bool {
        if self.emulation.is_none() {
            return false;
        }
        let at = self.leaves(engine.now, bytes.len() - grh::LEN);
        let fate = self.packet_fate(engine);
        let delayed = DelayedDatagram { datagram: *datagram, bytes: bytes.into() };
        if let Some(emulation) = &mut self.emulation {
            emulation.datagrams.push(at, delayed, fate);
        }
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
