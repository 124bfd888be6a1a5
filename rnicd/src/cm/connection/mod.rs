//! Connections of RC and UC QPs by the InfiniBand connection manager (IBTA specification, volume 1,
//! chapter 12): [`active`] requests a connection, [`passive`] answers, and either end ends it
//! ([`end`]). A message that is not answered in time is repeated.
//!
//! This module does not change the QPs. As without a connection manager, the programs set the QP
//! attributes, which they exchange here.

mod active;
mod end;
mod passive;
mod state;

use std::net::IpAddr;
use std::time::Duration;

use rnic_abi::abi::control::Refusal;
use rnic_abi::roce::connection::{Delay, Ids, Message, Reason, Reject, Rejected};
use rnic_abi::roce::mad::{self, zero_padded};
use rnic_abi::types::{AddressPair, QpId, Time};

use state::Phase;
pub(super) use state::{Connections, RcConnection, RcRequest};
pub use state::{RcAcceptParams, RcConnectParams};

use super::{CmEvent, ConnectFailure, ConnectionManager, Slot};

impl ConnectionManager {
    /// Returns true if a QP has a connection or is about to have one.
    pub fn has_connection(&self, qp: QpId) -> bool {
        self.connections.by_qp.contains_key(&qp)
    }

    /// Handles a message of a peer. Ignores messages without a connection, except for requests.
    pub(super) fn handle_connection(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        message: Message,
        now: Time,
    ) {
        match message {
            Message::Request(asked) => self.handle_rc_request(from, to, asked, now),
            Message::Delay(delay) => self.handle_delay(from, to, &delay, now),
            Message::Reject(reject) => self.handle_rejection(from, to, &reject, now),
            Message::Reply(reply) => self.handle_rc_reply(from, to, &reply, now),
            Message::Ready(ids) => self.handle_ready_to_use(from, to, ids),
            Message::Disconnect(ids, qp) => self.handle_disconnect(from, to, ids, qp, now),
            Message::Disconnected(ids) => self.handle_disconnected(from, to, ids, now),
        }
    }

    /// Gives the peer more time to answer.
    fn handle_delay(&mut self, from: IpAddr, to: IpAddr, delay: &Delay, now: Time) {
        let Some(key) = self.connection(from, to, delay.ids) else { return };
        let Some(Slot::Rc(c)) = self.slots.get_mut(key).map(|entry| &mut entry.slot) else {
            return;
        };
        let is_answer = c.ids.exchange.transaction == delay.ids.exchange.transaction;
        let awaits = matches!(c.phase, Phase::Requesting | Phase::Accepting);
        // Accepted only once per message. Otherwise a peer could extend an attempt indefinitely.
        if is_answer && awaits && !std::mem::replace(&mut c.delayed, true) {
            let service = Duration::from_nanos(4096 << delay.timeout.min(LONGEST_DELAY));
            self.set_deadline(key, Some(now.after(service + RESPONSE)));
        }
    }

    /// Handles a deadline: repeats the last message, or gives up.
    pub(super) fn retry_connection(&mut self, key: usize, now: Time) {
        let Some(Slot::Rc(c)) = self.slots.get_mut(key).map(|entry| &mut entry.slot) else {
            return;
        };
        if c.repeats > 0 && !matches!(c.phase, Phase::Replied | Phase::Timewait) {
            c.repeats -= 1;
            return self.send_again(key, now);
        }
        let (qp, phase, peer) = (c.qp, c.phase, c.addresses.peer);
        let why = match phase {
            Phase::Requesting => format!("no answer from {peer} to the connection request"),
            Phase::Accepting => format!("{peer} did not confirm the accepted connection"),
            _ => format!("the program did not confirm the connection to {peer} in time"),
        };
        match phase {
            Phase::Disconnecting => {
                self.end_connection(key, now);
                self.events.push_back(CmEvent::RcDisconnected { qp });
            }
            Phase::Timewait => drop(self.remove(key)),
            Phase::Established => {}
            Phase::Requesting | Phase::Replied | Phase::Accepting => {
                self.give_up(key, Reason::TIMEOUT, now);
                let why = ConnectFailure::timed_out(why);
                self.events.push_back(CmEvent::RcUnreachable { qp, why });
            }
        }
    }

    /// Sends the message of a connection and expects an answer.
    fn send_again(&mut self, key: usize, now: Time) {
        let Some(Slot::Rc(c)) = self.slots.get_mut(key).map(|entry| &mut entry.slot) else {
            return;
        };
        c.delayed = false;
        let (sender, addresses, message) = (c.sender(), c.addresses, *c.message);
        // Before it is sent: the answer of a peer in this daemon arrives at once.
        self.set_deadline(key, Some(now.after(RESPONSE)));
        self.send_message(Some(sender), addresses.local.ip(), addresses.peer.ip(), message, now);
    }

    /// Ends an attempt and tells the peer.
    fn give_up(&mut self, key: usize, reason: Reason, now: Time) {
        let Some(Slot::Rc(c)) = self.slots.get(key).map(|entry| &entry.slot) else { return };
        let of = match c.phase {
            Phase::Requesting => Rejected::REQUEST,
            Phase::Replied => Rejected::REPLY,
            // It rejects the reply that it has sent.
            _ => Rejected::OTHER,
        };
        let reject = rejection(c.ids, of, reason);
        let AddressPair { local, peer } = c.addresses;
        let sender = c.sender();
        self.end_connection(key, now);
        self.send_message(Some(sender), local.ip(), peer.ip(), reject.emit(), now);
    }

    /// Returns the slot of the connection that a message of the peer belongs to.
    fn connection(&self, from: IpAddr, to: IpAddr, ids: Ids) -> Option<usize> {
        let key = *self.connections.by_id.get(&ids.receiver)?;
        let Slot::Rc(c) = &self.slots.get(key)?.slot else { return None };
        let is_peer = (c.addresses.peer.ip(), c.addresses.local.ip()) == (from, to);
        let is_known = c.ids.receiver == 0 || c.ids.receiver == ids.exchange.id;
        (is_peer && is_known).then_some(key)
    }

    fn set_phase(&mut self, key: usize, phase: Phase) {
        if let Some(Slot::Rc(c)) = self.slots.get_mut(key).map(|entry| &mut entry.slot) {
            self.connections.set_phase(c, phase);
        }
    }

    /// Refuses a QP that has a connection. A connection that only waits for DREP is abandoned
    /// instead.
    fn check_unconnected(&mut self, qp: QpId, now: Time) -> Result<(), Refusal> {
        let slot = self.connections.by_qp.get(&qp).and_then(|key| self.slots.get(*key));
        match slot.map(|entry| &entry.slot) {
            Some(Slot::Rc(c)) if c.phase == Phase::Disconnecting => {
                self.abandon_rc(qp, now);
                Ok(())
            }
            Some(_) => Err(wrong_phase(qp, "connected or connecting", "no connection")),
            None => Ok(()),
        }
    }

    /// Returns an unused ID for a connection, which other hosts cannot predict.
    fn new_connection_id(&mut self) -> u32 {
        loop {
            // The low half of a hash is as unpredictable as all of it.
            let id = self.service.new_transaction() as u32;
            if id != 0 && !self.connections.by_id.contains_key(&id) {
                return id;
            }
        }
    }
}

fn wrong_phase(qp: QpId, state: &str, needs: &str) -> Refusal {
    Refusal::WrongState {
        kind: "connection of QP".into(),
        handle: qp.0,
        state: state.into(),
        needs: needs.into(),
    }
}

/// Returns a rejection without private data.
fn rejection(ids: Ids, of: Rejected, reason: Reason) -> Reject {
    Reject { ids, of, reason, private_data: [0; rnic_abi::roce::connection::REJECT_DATA] }
}

/// Pads private data with zeros, or refuses them.
fn padded<const N: usize>(private_data: &[u8]) -> Result<[u8; N], Refusal> {
    zero_padded(private_data).ok_or_else(|| Refusal::AboveMaximum {
        field: "private_data".into(),
        value: private_data.len() as u64,
        key: "maximum bytes in a connection message".into(),
        limit: N as u64,
    })
}

/// Returns the code of a path MTU.
fn mtu_code(bytes: u16) -> u8 {
    // 256 bytes is code 1, and each code doubles the size.
    u8::try_from(bytes.max(256).ilog2() - 7).unwrap_or(5).min(5)
}

/// Returns the path MTU of an InfiniBand MTU code, or `None` if the code is invalid.
fn mtu_of(code: u8) -> Option<u16> {
    (1..=5).contains(&code).then(|| 128 << code)
}

/// Number of the lowest QP that is not for management.
const FIRST_QP: u32 = mad::QP.0 + 1;
/// Code of the time in which an answer is expected, as in the kernel's rdma_cm.
const RESPONSE_CODE: u8 = 20;
/// The same as a duration: 4.3 s.
const RESPONSE: Duration = Duration::from_nanos(4096 << RESPONSE_CODE);
/// Number of times that a message is repeated, as in the kernel's rdma_cm.
const REPEATS: u8 = 15;
/// Time for which messages of an ended connection may still arrive. The kernel derives the same
/// time from the packet lifetime of RoCE.
const TIMEWAIT: Duration = Duration::from_nanos(4096 << ACK_TIMEOUT);
/// Longest service timeout that a peer may request in MRA (69 s), as a code. The kernel requests
/// this much.
const LONGEST_DELAY: u8 = 24;
/// Local ACK timeout in requests: one more than the packet lifetime of RoCE paths in the kernel.
const ACK_TIMEOUT: u8 = 17;
