//! Connections of RC and UC QPs through connection managers (REQ, REP, RTU): checks and events.
//!
//! The messages do not change the QPs. The programs do that, with the attributes that they have
//! exchanged.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::abi::control::{DisconnectReason, Event, RcOffer, Refusal};
use rnic_abi::roce::PortSpace;
use rnic_abi::roce::connection::Service;
use rnic_abi::types::*;

use super::qp_attr::RcStream;
use super::rc::{MOST_24, PATH_MTUS, THREE_BITS, TWENTY_FOUR_BITS};
use super::{Qp, QpPhase, wrong_state};
use crate::clock;
use crate::cm::{CmEvent, ConnectFailure, RcAcceptParams, RcConnectParams};
use crate::resource::answer::{Answer, Outcome};
use crate::resource::memory::Attached;
use crate::resource::session::Undecided;
use crate::resource::{Manager, Pending, find, refuse};
use crate::worker::Command;

/// A program's connection request.
pub struct RcRequest {
    pub qp: QpId,
    pub space: PortSpace,
    pub peer: SocketAddr,
    pub local: Option<SocketAddr>,
    pub offer: RcOffer,
    pub private_data: Vec<u8>,
}

impl Manager {
    pub(in crate::resource) fn connect_rc(
        &mut self,
        id: SessionId,
        wanted: RcRequest,
        now: Time,
    ) -> Answer {
        let RcRequest { qp, space, peer, local, offer, private_data } = wanted;
        let space = space_of_rc(space)?;
        check_offer(&offer)?;
        if let Some(local) = local {
            self.may_use_port(id, "connect from", local)?;
        }
        let kind = service_of(qp, find(&mut self.sessions, id)?.qp(qp)?)?;
        self.may_ask(id, "connect to", peer, local)?;
        self.take_rate(id, now)?;
        let guid = self.guid.number();
        let params = RcConnectParams {
            session: id,
            qp,
            kind,
            space,
            peer,
            local,
            offer,
            guid,
            private_data,
        };
        self.cm.connect_rc(params, now)?;
        Outcome::done()
    }

    pub(in crate::resource) fn accept_rc(
        &mut self,
        id: SessionId,
        mut params: RcAcceptParams,
        now: Time,
    ) -> Answer {
        let (request, qp) = (params.request, params.qp);
        let held = self.faults.held_reply.take();
        check_offer(&params.offer)?;
        let session = find(&mut self.sessions, id)?;
        session.request(request)?;
        let object = session.qp(qp)?;
        let kind = service_of(qp, object)?;
        params.kind = (object.kind != QpType::Ud).then_some(kind);
        self.cm.accept_rc(params, now)?;
        self.hold_rep(qp, held);
        find(&mut self.sessions, id)?.requests.remove(&request);
        Outcome::done()
    }

    pub(in crate::resource) fn establish_rc(
        &mut self,
        id: SessionId,
        qp: QpId,
        now: Time,
    ) -> Answer {
        find(&mut self.sessions, id)?.qp(qp)?;
        self.cm.establish_rc(qp, now)?;
        Outcome::done()
    }

    /// Ends a connection whose peer has requested another connection with the same QP. Ignores the
    /// request while the QPs have a stream: the peer's daemon still has the connection then, so the
    /// request is forged.
    pub(super) fn end_stale(&mut self, qp: QpId, remote_qp: QpId, peer: IpAddr) {
        let gid = Gid::from(peer);
        if !self.rc(qp).is_some_and(|rc| rc.is_linked_with(gid, remote_qp)) {
            // Fails if the connection has ended in between.
            let _ = self.cm.disconnect_rc(qp, clock::now());
        }
    }

    /// Reports an event of a connection to its session.
    pub(super) fn handle_rc_event(&mut self, event: CmEvent) {
        if let CmEvent::RcRequest { listener, request, addresses, peer, private_data } = event {
            let Some((session, context)) = self.session_of_listener(listener) else { return };
            let undecided = Undecided { listener, peer: addresses.peer.ip() };
            session.requests.insert(request, undecided);
            return session.tell_in_order(Event::RcRequest {
                listener,
                context,
                request,
                addresses,
                peer,
                private_data,
            });
        }
        let (CmEvent::RcReply { qp, .. }
        | CmEvent::RcEstablished { qp, .. }
        | CmEvent::RcRejected { qp, .. }
        | CmEvent::RcUnreachable { qp, .. }
        | CmEvent::RcDisconnected { qp }) = event
        else {
            return;
        };
        let Some((session, object)) = self.qp_of(qp) else { return };
        let context = object.shared.context.load(Relaxed);
        let event = match event {
            CmEvent::RcDisconnected { .. } => return self.rc_disconnected(session, qp),
            CmEvent::RcReply { addresses, peer, private_data, .. } => {
                Event::RcReply { qp, context, addresses, peer, private_data }
            }
            CmEvent::RcEstablished { addresses, offer, .. } => Event::Established {
                qp,
                context,
                addresses,
                ird: offer.responder_resources.into(),
                ord: offer.initiator_depth.into(),
                private_data: Vec::new(),
                revision: 0,
            },
            CmEvent::RcRejected { psn, reason, private_data, .. } => {
                // The library repeats a request to a port without a listener.
                if object.rejected.replace((psn, reason)) != Some((psn, reason)) {
                    let text = format!("the peer rejected the connection with reason {reason}");
                    self.not_connected(session, qp, RULE, &text);
                }
                Event::RcRejected { qp, context, reason, private_data }
            }
            CmEvent::RcUnreachable { why: ConnectFailure { errno, reason }, .. } => {
                self.not_connected(session, qp, RULE, &reason);
                Event::Unreachable { qp, context, errno, reason }
            }
            _ => return,
        };
        if let Ok(session) = find(&mut self.sessions, session) {
            session.tell_in_order(event);
        }
    }

    /// Reports the end of a connection, after the messages that the peer sent before DREQ have
    /// completed. DREQ does not travel in the stream of these messages, and may overtake them.
    fn rc_disconnected(&mut self, session: SessionId, qp: QpId) {
        let Ok(of) = find(&mut self.sessions, session) else { return };
        let copier = of.attached.as_ref().and_then(Attached::copier);
        let Ok(object) = of.qp(qp) else { return };
        let context = object.shared.context.load(Relaxed);
        let over_tcp = object.rc.as_ref().is_some_and(|rc| rc.stream == Some(RcStream::Tcp));
        let event = Event::Disconnected { qp, context, reason: DisconnectReason::Orderly };
        match object.phase {
            QpPhase::Bound(worker) if over_tcp => {
                let ticket = self.workers.one_ticketed(worker, Command::ReadAll(qp));
                of.hold_event(ticket, event);
                self.workers.await_copies(ticket, copier);
                self.pending.insert(ticket, Pending::Disconnected { session });
            }
            _ => of.tell_in_order(event),
        }
    }
}

/// Returns the type of a connection that a program requests or accepts with this QP. A UD QP is
/// permitted, because UCX connects its QPs itself and passes a UD QP only for its number.
fn service_of(qp: QpId, object: &Qp) -> Result<Service, Refusal> {
    match object.kind {
        QpType::Rc | QpType::Ud => Ok(Service::Reliable),
        QpType::Uc => Ok(Service::Unreliable),
        QpType::Iwarp => Err(wrong_state(qp, "an iWARP QP", "an RC, UC or UD QP")),
    }
}

/// Returns an error for the port space of UD QPs.
pub(in crate::resource) fn space_of_rc(space: PortSpace) -> Result<PortSpace, Refusal> {
    match space {
        PortSpace::Tcp | PortSpace::Ib => Ok(space),
        PortSpace::Udp => Err(refuse::invalid("space", "RDMA_PS_UDP is for UD QPs")),
    }
}

fn check_offer(offer: &RcOffer) -> Result<(), Refusal> {
    if !PATH_MTUS.contains(&offer.path_mtu) {
        let why = format!("{} bytes is not a path MTU; use one of {PATH_MTUS:?}", offer.path_mtu);
        return Err(refuse::invalid("path_mtu", why));
    }
    refuse::at_most("psn", offer.psn.into(), TWENTY_FOUR_BITS, MOST_24.into())?;
    refuse::at_most("retry_count", offer.retry_count.into(), THREE_BITS, 7)?;
    refuse::at_most("rnr_retry", offer.rnr_retry.into(), THREE_BITS, 7)
}

const RULE: &str = "IBTA specification, volume 1, section 12.9: REQ is answered with REP, and REP \
                    with RTU";
