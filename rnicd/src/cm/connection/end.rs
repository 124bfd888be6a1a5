//! The end of a connection: DREQ, DREP and REJ.

use std::net::IpAddr;

use rnic_abi::abi::control::Refusal;
use rnic_abi::roce::connection::{Ids, Reason, Reject};
use rnic_abi::roce::mad::Exchange;
use rnic_abi::types::{QpId, Time};

use super::state::{Phase, RcConnection};
use super::{REPEATS, TIMEWAIT, wrong_phase};
use crate::cm::{CmEvent, ConnectFailure, ConnectionManager, Slot};

impl ConnectionManager {
    /// Ends the connection of a QP (DREQ), or gives up the attempt. An event follows.
    pub fn disconnect_rc(&mut self, qp: QpId, now: Time) -> Result<(), Refusal> {
        let none = || wrong_phase(qp, "not connected", "a connection or an attempt");
        let key = self.connections.by_qp.get(&qp).copied().ok_or_else(none)?;
        let Some(Slot::Rc(c)) = self.slots.get(key).map(|entry| &entry.slot) else {
            return Err(none());
        };
        match c.phase {
            Phase::Requesting | Phase::Replied | Phase::Accepting => {
                self.give_up(key, Reason::CONSUMER, now);
                let why = ConnectFailure::reset("cancelled by this side");
                self.events.push_back(CmEvent::RcUnreachable { qp, why });
            }
            Phase::Established => {
                self.begin_disconnect(key);
                self.send_again(key, now);
            }
            Phase::Disconnecting | Phase::Timewait => {}
        }
        Ok(())
    }

    /// Forgets the connection of a QP that is destroyed, and tells the peer once. No event follows.
    pub fn abandon_rc(&mut self, qp: QpId, now: Time) {
        if let Some(key) = self.connections.by_qp.get(&qp).copied() {
            self.abandon_connection(key, now);
        }
    }

    pub(in crate::cm) fn abandon_connection(&mut self, key: usize, now: Time) {
        let Some(Slot::Rc(c)) = self.slots.get(key).map(|entry| &entry.slot) else { return };
        match c.phase {
            Phase::Requesting | Phase::Replied | Phase::Accepting => {
                self.give_up(key, Reason::CONSUMER, now);
            }
            Phase::Established | Phase::Disconnecting => {
                self.begin_disconnect(key);
                let Some(Slot::Rc(c)) = self.slots.get(key).map(|entry| &entry.slot) else {
                    return;
                };
                let (local, peer) = (c.addresses.local.ip(), c.addresses.peer.ip());
                let (sender, message) = (c.sender(), *c.message);
                self.end_connection(key, now);
                self.send_message(Some(sender), local, peer, message, now);
            }
            Phase::Timewait => {}
        }
    }

    /// Ends a connection or an attempt. If the peer knows its IDs, they stay reserved until delayed
    /// messages have arrived (timewait), so that such a message neither matches a later connection
    /// nor counts as a new request. Connection rates bound the number of connections in this phase.
    pub(super) fn end_connection(&mut self, key: usize, now: Time) {
        let Some(Slot::Rc(c)) = self.slots.get_mut(key).map(|entry| &mut entry.slot) else {
            return;
        };
        if c.phase == Phase::Timewait {
            // Otherwise a peer could extend this phase indefinitely.
            return;
        }
        if c.asked.is_none() && matches!(c.phase, Phase::Requesting | Phase::Replied) {
            self.remove(key);
            return;
        }
        self.connections.leave(key, c);
        self.connections.set_phase(c, Phase::Timewait);
        self.set_deadline(key, Some(now.after(TIMEWAIT)));
    }

    /// Ends the connections of this daemon, and undecided requests, that have lost the address of
    /// an end.
    pub(in crate::cm) fn end_lost_connections(&mut self, keys: &[usize], now: Time) {
        for key in keys.iter().copied() {
            let Some(entry) = self.slots.get(key) else { continue };
            let Some((local, peer)) = entry.slot.rc_addresses() else { continue };
            if [local, peer].iter().all(|ip| self.service.index_of(*ip).is_some()) {
                continue;
            }
            let c = match &entry.slot {
                Slot::Rc(c) => c,
                _ => {
                    self.withdraw_rc_request(key, "the device has lost the address of an end");
                    continue;
                }
            };
            let (qp, phase) = (c.qp, c.phase);
            self.end_connection(key, now);
            match phase {
                Phase::Established | Phase::Disconnecting => {
                    self.events.push_back(CmEvent::RcDisconnected { qp });
                }
                Phase::Requesting | Phase::Replied | Phase::Accepting => {
                    let why = "the device has lost the address of an end";
                    let why = ConnectFailure::reset(why);
                    self.events.push_back(CmEvent::RcUnreachable { qp, why });
                }
                Phase::Timewait => {}
            }
        }
    }

    /// Returns the connections and undecided requests between two addresses of the device.
    pub(in crate::cm) fn local_connections(&self) -> Vec<usize> {
        let keys = self.connections.by_id.values().copied();
        let is_local = |key: &usize| {
            let ends = self.slots.get(*key).and_then(|entry| entry.slot.rc_addresses());
            ends.is_some_and(|(a, b)| [a, b].iter().all(|ip| self.service.index_of(*ip).is_some()))
        };
        keys.filter(is_local).collect()
    }

    /// Sends DREQ as a new transaction.
    fn begin_disconnect(&mut self, key: usize) {
        let transaction = self.service.new_transaction();
        self.set_phase(key, Phase::Disconnecting);
        if let Some(Slot::Rc(c)) = self.slots.get_mut(key).map(|entry| &mut entry.slot) {
            c.ids.exchange.transaction = transaction;
            *c.message = c.ids.emit_disconnect(c.remote_qp);
            c.repeats = REPEATS;
        }
    }

    /// Handles DREQ. Sends DREP even without such a connection, because the DREP to an earlier DREQ
    /// may have been lost.
    pub(super) fn handle_disconnect(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        ids: Ids,
        qp: QpId,
        now: Time,
    ) {
        let key = self.connection(from, to, ids);
        let slot = key.and_then(|key| self.slots.get(key)).map(|entry| &entry.slot);
        let has_begun = |c: &RcConnection| !matches!(c.phase, Phase::Requesting | Phase::Timewait);
        let ends = matches!(slot, Some(Slot::Rc(c)) if c.qp == qp && has_begun(c));
        let sender = match slot {
            Some(Slot::Rc(c)) => Some(c.sender()),
            _ => None,
        };
        let answer = ids.answered_by(ids.receiver).emit_disconnected();
        match key.filter(|_| ends) {
            Some(key) => {
                self.end_connection(key, now);
                self.events.push_back(CmEvent::RcDisconnected { qp });
                self.send_message(sender, to, from, answer, now);
            }
            None => self.send_unasked(sender, to, from, answer, now),
        }
    }

    /// Handles DREP.
    pub(super) fn handle_disconnected(&mut self, from: IpAddr, to: IpAddr, ids: Ids, now: Time) {
        let Some(key) = self.connection(from, to, ids) else { return };
        let Some(Slot::Rc(c)) = self.slots.get(key).map(|entry| &entry.slot) else { return };
        let qp = c.qp;
        if c.phase == Phase::Disconnecting && c.ids.exchange.transaction == ids.exchange.transaction
        {
            self.end_connection(key, now);
            self.events.push_back(CmEvent::RcDisconnected { qp });
        }
    }

    /// Handles REJ: of a request, of a reply, or of a connection that only this end considers
    /// established.
    pub(super) fn handle_rejection(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        reject: &Reject,
        now: Time,
    ) {
        let Exchange { transaction, id } = reject.ids.exchange;
        // A requester that gives up before REP does not know this end's ID.
        let of_request = self.connections.by_request.get(&(from, reject.ids.exchange));
        let key = of_request.or_else(|| self.connections.by_id.get(&reject.ids.receiver)).copied();
        let Some(key) = key else { return };
        let c = match self.slots.get(key).map(|entry| &entry.slot) {
            Some(Slot::RcRequest(asked)) if asked.asked.to == to && asked.from() == from => {
                self.end_rc_request(key, "the requester gave up");
                return;
            }
            Some(Slot::Rc(c)) => c,
            _ => return,
        };
        let is_peer = (c.addresses.peer.ip(), c.addresses.local.ip()) == (from, to);
        let is_known = c.ids.receiver == 0 || id == 0 || c.ids.receiver == id;
        if !is_peer || !is_known || c.ids.exchange.transaction != transaction {
            return;
        }
        let RcConnection { qp, phase, offer, .. } = **c;
        self.end_connection(key, now);
        let event = match phase {
            Phase::Requesting | Phase::Replied | Phase::Accepting => CmEvent::RcRejected {
                qp,
                psn: offer.psn,
                reason: reject.reason.0,
                private_data: reject.private_data.to_vec(),
            },
            Phase::Established | Phase::Disconnecting => CmEvent::RcDisconnected { qp },
            Phase::Timewait => return,
        };
        self.events.push_back(event);
    }
}
