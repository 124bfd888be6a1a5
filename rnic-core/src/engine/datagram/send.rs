//! Sends datagrams from the send queue, and delivers incoming datagrams.

use std::net::SocketAddr;

use super::delayed::packet_of;
use crate::device::memory::Payload;
use crate::engine::Engine;
use crate::engine::numbers::count;
use crate::engine::qp::{OutgoingFpdu, Qp};
use crate::engine::reason::Reason;
use crate::engine::requester::RequestError;
use crate::engine::requester::message::{Addressed, Gather, GatherFault, Segment};
use crate::engine::schedule::{CALL_COST, REQUEST_COST};
use crate::engine::state::EngineState;
use rnic_abi::roce::{Datagram, grh, is_unicast, packet};
use rnic_abi::types::{QpId, Time};

impl Engine {
    /// Takes one turn of a UD QP.
    pub(in crate::engine) fn send_datagrams(&mut self, qp: &mut Box<Qp>) {
        let mut slab = std::mem::take(&mut self.tx_slab);
        qp.deliver_delayed_datagrams(&mut self.state);
        while !qp.core.turn.is_over() && qp.link_takes_datagram(&self.state) {
            if !qp.next_datagram(&mut self.state) {
                qp.end_backlog();
                break;
            }
            let (before, data) = slab.split_at_mut(grh::LEN);
            let Some((datagram, len)) = qp.read_datagram(&mut self.state, data) else { break };
            before.copy_from_slice(&grh::emit(&datagram, len));
            let bytes = &slab[..grh::LEN + len];
            if !qp.loses_datagram(&datagram) && !qp.delay_datagram(&self.state, &datagram, bytes) {
                self.send_datagram(qp, &datagram, bytes);
            }
            qp.datagram_sent(len);
        }
        self.tx_slab = slab;
        // Datagrams without a delay.
        qp.deliver_delayed_datagrams(&mut self.state);
        qp.retire(&mut self.state);
        qp.requester.return_slots(&qp.core, &mut self.state);
        qp.emit_datagrams_drained(&mut self.state);
        if qp.core.turn.is_over() {
            self.state.wake(&mut qp.core);
        }
    }

    /// Delivers a datagram to a port of the device, or sends a packet. `bytes` holds the GRH, then
    /// the data.
    fn send_datagram(&mut self, qp: &mut Box<Qp>, datagram: &Datagram, bytes: &[u8]) {
        let Some(port) = qp.datagrams.as_ref().map(|datagrams| datagrams.port.clone()) else {
            return;
        };
        if !port.needs_no_packet(datagram.to) {
            // The sender is charged for the system call.
            qp.core.turn.charge(CALL_COST);
            return self.state.outputs.push_back(packet_of(&port, datagram, bytes));
        }
        if datagram.qp == qp.core.id {
            qp.datagram_arrived(&mut self.state, datagram, bytes);
        } else if !self.datagram_arrived(datagram, bytes) {
            qp.datagram_without_receiver(&mut self.state, datagram);
        }
    }

    /// Delivers a datagram to another QP of this engine. Returns false if there is no such UD QP in
    /// a state that receives. The receiver is charged only if a receive fails.
    fn datagram_arrived(&mut self, datagram: &Datagram, bytes: &[u8]) -> bool {
        let Some(key) = self.by_id.get(&datagram.qp) else { return false };
        let found = self.qps.get_mut(*key as usize).and_then(Option::as_mut);
        let Some(qp) = found.filter(|qp| qp.receives_datagrams()) else { return false };
        let before = qp.core.turn.deficit;
        qp.datagram_arrived(&mut self.state, datagram, bytes);
        self.state.settle(&mut qp.core, before);
        true
    }

    /// Handles a packet from another daemon. `from` and `to` are its UDP addresses. The receiving
    /// QP is charged for it. Packets to a QP with a large debt are dropped.
    pub fn handle_datagram(&mut self, from: SocketAddr, to: SocketAddr, packet: &[u8], now: Time) {
        self.state.now = now;
        let Ok((datagram, data)) = packet::parse(from, to, packet) else { return };
        let Some(key) = self.by_id.get(&datagram.qp) else { return };
        let Some(qp) = self.qps.get_mut(*key as usize).and_then(Option::as_mut) else { return };
        if !qp.takes_packet(&datagram) {
            return;
        }
        let mut slab = std::mem::take(&mut self.tx_slab);
        slab[..grh::LEN].copy_from_slice(&grh::emit(&datagram, data.len()));
        let len = grh::LEN + data.len();
        slab[grh::LEN..len].copy_from_slice(data);
        let before = qp.core.turn.deficit;
        qp.core.turn.charge(REQUEST_COST.max(i64::from(count(len))));
        qp.datagram_arrived(&mut self.state, &datagram, &slab[..len]);
        self.state.settle(&mut qp.core, before);
        // The QP repays its debt in a turn.
        self.state.wake(&mut qp.core);
        self.tx_slab = slab;
        self.deliver_pending();
    }
}

impl Qp {
    /// Makes a datagram ready to be read. Returns false if no datagram can be sent now.
    fn next_datagram(&mut self, engine: &mut EngineState) -> bool {
        let Some(datagrams) = &self.datagrams else { return false };
        if !self.life.phase().sends() {
            return false;
        }
        let mtu = datagrams.port.mtu;
        match self.requester.next_datagram(mtu, &mut self.core, engine) {
            Ok(found) => found,
            Err(error) => {
                self.request_error(engine, error);
                false
            }
        }
    }

    /// Reads the data of the ready datagram into `bytes`. Returns the datagram and its length, or
    /// `None` if the data must be staged first, cannot be read, or may not be sent.
    fn read_datagram(
        &mut self,
        engine: &mut EngineState,
        bytes: &mut [u8],
    ) -> Option<(Datagram, usize)> {
        let len = self.requester.message()?.total as usize;
        let addressed = self.requester.addressed()?;
        let datagram = match self.address(addressed) {
            Ok(datagram) => datagram,
            Err(reason) => {
                let seq = self.requester.message()?.seq?;
                self.request_error(engine, RequestError::Failed { seq, reason });
                return None;
            }
        };
        let read = {
            let mut memory = Gather::new();
            let requester = &self.requester;
            let gathered = requester.gather(count(len), &self.core, &engine.stags, &mut memory);
            gathered.map(|()| Payload::Gather(&memory).read(0, &mut bytes[..len]))
        };
        match read {
            Ok(Ok(())) => return Some((datagram, len)),
            Ok(Err(fault)) => self.memory_failed(engine, fault),
            Err(GatherFault::Unstaged) => self.stage(engine),
            Err(fault) => self.gather_failed(engine, fault),
        }
        None
    }

    /// Builds the header of the ready datagram. Fails if its source or destination is not allowed.
    fn address(&mut self, addressed: Addressed) -> Result<Datagram, Reason> {
        let Some(datagrams) = &mut self.datagrams else { return Err(Reason::NoDatagram) };
        let source = addressed.source;
        let index = usize::from(source);
        let gid = datagrams.port.gids.get(index).copied().filter(|gid| !gid.is_zero());
        let from = gid.ok_or(Reason::DatagramSource { index: source.into() })?;
        let route = (from.address(), addressed.to.address());
        if datagrams.allowed != Some(route) {
            if !is_unicast(route.1) || !datagrams.rules.may_send(route.0, route.1) {
                return Err(Reason::DatagramForbidden { to: route.1 });
            }
            datagrams.allowed = Some(route);
        }
        let Addressed { to, qp, q_key, immediate, solicited, .. } = addressed;
        let source = self.core.id;
        let psn = datagrams.psn.unwrap_or(0);
        let q_key = q_key.unwrap_or(datagrams.q_key);
        let p_key = datagrams.port.changes.p_key;
        let qp = QpId(qp);
        Ok(Datagram { from, source, to, qp, p_key, q_key, psn, immediate, solicited })
    }

    /// Returns true if the source GID of a datagram no longer exists.
    fn loses_datagram(&self, datagram: &Datagram) -> bool {
        let port = self.datagrams.as_ref().map(|datagrams| &datagrams.port);
        port.is_some_and(|port| port.changes.lost.contains(&datagram.from))
    }

    /// Accounts for the ready datagram, which has been sent.
    fn datagram_sent(&mut self, len: usize) {
        let Some(segment) = self.requester.next_segment(MAX_SEGMENT, VERSION) else { return };
        let segment = Segment { len: count(len), ..segment };
        self.fpdu_sent(&OutgoingFpdu::Segment(segment), None);
        self.core.turn.charge(REQUEST_COST.max(i64::from(count(len))));
        if let Some(psn) = self.datagrams.as_mut().and_then(|datagrams| datagrams.psn.as_mut()) {
            *psn = psn.wrapping_add(1) & LOW_24;
        }
    }
}

/// Segment size that every datagram fits.
const MAX_SEGMENT: usize = 64 * 1024 - 1;
/// DDP version, which no packet carries.
const VERSION: u8 = 1;
const LOW_24: u32 = 0xFF_FFFF;
