//! The SIDR server: listeners for UD QPs, undecided requests, and replies.
//!
//! A sender can forge its address, so a reply is as long as its request and is sent to that
//! request's source.

use std::net::IpAddr;

use rnic_abi::abi::control::Refusal;
use rnic_abi::roce::ServiceId;
use rnic_abi::roce::mad::{Exchange, zero_padded};
use rnic_abi::roce::sidr::{self, Reply, Request, Status};
use rnic_abi::types::{AddressPair, QpId, RequestId, Time};

use super::state::SidrRequest;
use crate::cm::admission::{Asked, NotAdmitted};
use crate::cm::{CmEvent, ConnectionManager, Sender, Slot};

impl ConnectionManager {
    /// Returns true if a request asks for a UD QP.
    pub fn is_for_ud(&self, request: RequestId) -> bool {
        let slot = self.requests.get(&request).and_then(|key| self.slots.get(*key));
        slot.is_some_and(|entry| matches!(entry.slot, Slot::SidrRequest(_)))
    }

    /// Handles a SIDR request.
    pub(super) fn handle_request(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        request: &Request,
        now: Time,
    ) {
        // The addresses in the request must be those of its packet.
        if (request.from.ip(), request.to) != (from, to) {
            return;
        }
        let Request { exchange, service, .. } = *request;
        if self.service.undecided.contains_key(&(from, exchange)) {
            return;
        }
        let asked = Asked { from, to, service, exchange };
        let (listener, session) = match self.admit_message(asked, now) {
            Ok(admitted) => admitted,
            Err(NotAdmitted::Unserved) => {
                return self.send_refusal(from, to, request, Status::UNSUPPORTED, now);
            }
            Err(NotAdmitted::Draining) => {
                return self.send_refusal(from, to, request, Status::REJECTED, now);
            }
            Err(NotAdmitted::Handled) => return,
        };
        let id = self.new_request(self.slots.vacant_key());
        let slot = SidrRequest { session, listener, request: id, from, to, exchange, service };
        // A requester with the same configuration waits for `reply_deadline`.
        let patience = self.options.reply_deadline.min(self.options.decision_deadline);
        let key = self.queue_message(Slot::SidrRequest(Box::new(slot)), asked, patience, now);
        self.service.undecided.insert((from, exchange), key);
        let local = (to, service.port().map_or(0, |(_, port)| port)).into();
        self.events.push_back(CmEvent::Request {
            listener,
            request: id,
            addresses: AddressPair { local, peer: request.from },
            peer_ird: None,
            peer_ord: None,
            revision: 0,
            peer_to_peer: false,
            private_data: request.private_data.to_vec(),
        });
    }

    /// Sends a reply without a program's decision. Replies to other daemons are rate-limited.
    fn send_refusal(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        request: &Request,
        status: Status,
        now: Time,
    ) {
        if self.service.may_answer(to, from, now) {
            let reply = rejection(request.exchange, request.service, status);
            self.send_message(None, to, from, reply.emit(), now);
        }
    }

    /// Accepts a request with a UD QP and its Q_Key.
    pub fn accept_datagrams(
        &mut self,
        request: RequestId,
        qp: QpId,
        q_key: u32,
        private_data: &[u8],
        now: Time,
    ) -> Result<(), Refusal> {
        let key = self.undecided(request)?;
        let data =
            zero_padded(private_data).ok_or_else(|| too_long(private_data, sidr::REPLY_DATA))?;
        self.answer(key, now, |asked| Reply {
            exchange: asked.exchange,
            service: asked.service,
            status: Status::VALID,
            qp,
            q_key,
            private_data: data,
        });
        Ok(())
    }

    /// Rejects an undecided request.
    pub(in crate::cm) fn reject_ud(
        &mut self,
        key: usize,
        private_data: &[u8],
        now: Time,
    ) -> Result<(), Refusal> {
        let data =
            zero_padded(private_data).ok_or_else(|| too_long(private_data, sidr::REPLY_DATA))?;
        self.answer(key, now, |asked| {
            let away = rejection(asked.exchange, asked.service, Status::REJECTED);
            Reply { private_data: data, ..away }
        });
        Ok(())
    }

    fn answer(&mut self, key: usize, now: Time, reply: impl FnOnce(&SidrRequest) -> Reply) {
        let Some(Slot::SidrRequest(asked)) = self.remove(key) else { return };
        let reply = reply(&asked);
        let bytes = reply.emit();
        if let Some(l) = self.listeners.get_mut(&asked.listener) {
            l.pending -= 1;
            match reply.status {
                Status::VALID => l.accepted += 1,
                _ => l.rejected += 1,
            }
            if let Some(answers) = l.answers_mut() {
                answers.keep(asked.from, asked.exchange, &bytes);
            }
        }
        let sender = Sender { session: asked.session, qp: None };
        self.send_message(Some(sender), asked.to, asked.from, bytes, now);
    }
}

/// Returns a reply without a QP.
fn rejection(exchange: Exchange, service: ServiceId, status: Status) -> Reply {
    let private_data = [0; sidr::REPLY_DATA];
    Reply { exchange, service, status, qp: QpId(0), q_key: 0, private_data }
}

pub(super) fn too_long(private_data: &[u8], limit: usize) -> Refusal {
    Refusal::AboveMaximum {
        field: "private_data".into(),
        value: private_data.len() as u64,
        key: "maximum bytes in a SIDR message".into(),
        limit: limit as u64,
    }
}
