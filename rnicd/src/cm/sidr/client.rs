//! The SIDR client: resolves which UD QP serves a port. The request is sent again after growing
//! pauses until a reply arrives or the deadline passes.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rnic_abi::abi::control::Refusal;
use rnic_abi::roce::mad::{self, Exchange, zero_padded};
use rnic_abi::roce::sidr::{self, Reply, Request, Status};
use rnic_abi::roce::{PortSpace, ServiceId};
use rnic_abi::types::{AddressPair, QpId, Time};

use super::server::too_long;
use super::state::SidrResolution;
use crate::cm::{CmEvent, ConnectFailure, ConnectParams, ConnectionManager, Sender, Slot};
use crate::config::Span;

impl ConnectionManager {
    /// Resolves the UD QP that serves a port. The result is an event; errors are failures of the
    /// local end.
    pub fn resolve(&mut self, params: ConnectParams, now: Time) -> Result<(), Refusal> {
        self.check_idle(params.qp)?;
        let data = zero_padded(&params.private_data)
            .ok_or_else(|| too_long(&params.private_data, sidr::REQUEST_DATA))?;
        let ConnectParams { session, qp, local, peer, .. } = params;
        let verb = "resolve a UD QP at";
        let (addresses, source) =
            self.ends_of_request(session, PortSpace::Udp, local, peer, verb)?;
        let AddressPair { local, peer } = addresses;
        let key = self.slots.vacant_key();
        // Keys are slot numbers, which stay far below `u32::MAX`.
        let id = u32::try_from(key).unwrap_or(u32::MAX);
        let exchange = Exchange { transaction: self.service.new_transaction(), id };
        let service = ServiceId::new(PortSpace::Udp, peer.port());
        let request = Request { exchange, service, from: local, to: peer.ip(), private_data: data };
        self.insert(Slot::SidrResolution(Box::new(SidrResolution {
            session,
            qp,
            exchange,
            addresses,
            source,
            request: Box::new(request.emit()),
            pause: FIRST_PAUSE,
            until: now.after(self.options.reply_deadline),
        })));
        self.qps.insert(qp, key);
        self.ask(key, now);
        Ok(())
    }

    /// Handles the deadline: sends the request again, or gives up.
    pub(in crate::cm) fn retry_resolution(&mut self, key: usize, now: Time) {
        let Slot::SidrResolution(asking) = &self.slots[key].slot else { return };
        if now < asking.until {
            return self.ask(key, now);
        }
        let AddressPair { peer, .. } = asking.addresses;
        let why = format!(
            "no UD QP for port {}: no answer from {} before the deadline (mpa.reply_deadline = {})",
            peer.port(),
            peer.ip(),
            Span(self.options.reply_deadline)
        );
        self.end_resolution(key, |qp| CmEvent::Unreachable {
            qp,
            why: ConnectFailure::timed_out(why),
        });
    }

    fn ask(&mut self, key: usize, now: Time) {
        let Slot::SidrResolution(asking) = &mut self.slots[key].slot else { return };
        let at = now.after(asking.pause).min(asking.until);
        asking.pause = (asking.pause * 2).min(MAX_PAUSE);
        let AddressPair { local, peer } = asking.addresses;
        let request = *asking.request;
        let sender = Sender { session: asking.session, qp: Some(asking.qp) };
        self.set_deadline(key, Some(at));
        self.send_message(Some(sender), local.ip(), peer.ip(), request, now);
    }

    /// Handles a SIDR reply. A reply that matches no request is ignored.
    pub(super) fn handle_reply(&mut self, from: IpAddr, to: IpAddr, reply: &Reply) {
        let Reply { exchange, status, qp: remote_qp, q_key, .. } = *reply;
        let Ok(key) = usize::try_from(exchange.id) else { return };
        let Some(Slot::SidrResolution(asking)) = self.slots.get(key).map(|entry| &entry.slot)
        else {
            return;
        };
        let AddressPair { local, peer } = asking.addresses;
        if asking.exchange != exchange || (peer.ip(), local.ip()) != (from, to) {
            return;
        }
        let source = asking.source;
        // UD traffic uses the port's own address instead of an alias.
        let port = |at: SocketAddr| SocketAddr::new(self.service.port_of(at.ip()), at.port());
        let addresses = AddressPair { local: port(local), peer: port(peer) };
        let private_data = reply.private_data.to_vec();
        self.end_resolution(key, |qp| match status {
            Status::VALID if remote_qp.0 > mad::QP.0 => {
                CmEvent::Resolved { qp, addresses, source, remote_qp, q_key, private_data }
            }
            Status::VALID => {
                let why = format!("{from} answered with QP {remote_qp}, not a UD QP");
                CmEvent::Unreachable { qp, why: ConnectFailure::protocol(why) }
            }
            Status::REJECTED => CmEvent::Rejected { qp, private_data },
            Status::UNSUPPORTED => {
                let port = peer.port();
                let why = format!("no listener for UD QPs at port {port} of {from}");
                CmEvent::Unreachable { qp, why: ConnectFailure::refused(why) }
            }
            Status(other) => {
                let why = format!("{from} answered with SIDR status {other} and no QP");
                CmEvent::Unreachable { qp, why: ConnectFailure::protocol(why) }
            }
        });
    }

    fn end_resolution(&mut self, key: usize, event: impl FnOnce(QpId) -> CmEvent) {
        if let Some(Slot::SidrResolution(asking)) = self.remove(key) {
            self.events.push_back(event(asking.qp));
        }
    }

    /// Cancels a resolution. A request that is undecided in this daemon is withdrawn. A request in
    /// another daemon ends at its deadline there.
    pub(in crate::cm) fn cancel_resolution(&mut self, asking: &SidrResolution) {
        let AddressPair { local, peer } = asking.addresses;
        if self.service.stays_local(local.ip(), peer.ip()) {
            self.withdraw_local(local.ip(), asking.exchange, "the requester gave up");
        }
    }
}

/// Pause before the first retry. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const MAX_PAUSE: Duration = Duration::from_secs(4);
