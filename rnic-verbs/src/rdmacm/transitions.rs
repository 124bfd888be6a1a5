//! The effect of the daemon's events, and of destroyed objects, on ids.

use std::sync::Arc;

use rnic_client::{AddressPair, ConnectionRequest, QpId};

use super::connect::DISCONNECT_GRACE;
use super::delays::Action;
use super::devices::device_with;
use super::service::Service;
use super::state::{CmEvent, EventChannel, IdBody, Parameters, Phase};
use crate::{c, log};

impl IdBody {
    /// Handles the destruction of the connection's QP. The daemon sends no more events for it.
    pub(super) fn connection_lost(self: &Arc<Self>, qp: QpId) {
        let was = {
            let mut state = self.state.lock();
            if state.qp != Some(qp) {
                return;
            }
            state.qp = None;
            std::mem::replace(&mut state.phase, Phase::Ended)
        };
        self.ended(was);
    }

    /// Moves the id and its unfetched events to another channel (`rdma_migrate_id(3)`). Waits until
    /// the fetched events are acknowledged.
    pub(crate) fn migrate(self: &Arc<Self>, to: &Arc<EventChannel>) {
        let from = {
            // Held until the old channel has none of the id's events, so that they stay in order.
            let mut channel = self.channel.lock();
            let from = channel.replace(to.clone());
            let waiting = from.as_ref().map(|from| from.take_back(self));
            waiting.into_iter().flatten().for_each(|arrived| to.push(arrived));
            from
        };
        drop(from);
        self.unacknowledged.wait();
    }

    /// Destroys the id with its connection, listener and events (`rdma_destroy_id(3)`).
    pub(crate) fn destroy(self: &Arc<Self>) {
        let (listener, request, qp, lookup) = {
            let mut state = self.state.lock();
            let connected = matches!(state.phase, Phase::Connecting | Phase::Connected);
            state.phase = Phase::Ended;
            let qp = state.qp.take();
            if let Some(qp) = qp {
                self.ids().forget_qp(qp, self);
            }
            let listener = state.listener.take();
            // Also if the device of a listening id has been removed.
            if let Some(listener) = &listener
                && self.ids().is_served(self, listener.id())
            {
                self.ids().forget_listener(listener.id());
                self.ids().allow_reuse(self.service, false, listener);
            }
            (listener, state.request.take(), qp.filter(|_| connected), state.lookup.take())
        };
        // Rejects an undecided request, and ends a lookup.
        drop((listener, request, lookup));
        if let Some(qp) = qp.and_then(|qp| self.find_qp(qp)) {
            // Fails if the connection has already ended.
            let _ = qp.client().abort();
        }
        self.ids().forget_source(self);
        self.ids().wake_pollers();
        // Discards later events.
        let channel = self.channel.lock().take();
        drop(channel.map(|channel| channel.take_back(self)));
        self.unacknowledged.wait();
    }

    /// Handles a connection request. Rejects it if the backlog is full. As in the kernel, the
    /// backlog counts the requests that the program has not fetched.
    pub(super) fn handle_request(self: &Arc<Self>, request: ConnectionRequest) {
        let local = request.addresses().local.ip();
        let device = device_with(&self.device, self.device_kind(), Some(local));
        if self.phase() == Phase::Ended || device.is_err() {
            log::debug(|| format!("rejected {}: no device has {local}", request.peer()));
            return;
        }
        let backlog = self.state.lock().backlog;
        let waiting = self.channel.lock().as_ref().map_or(0, |channel| channel.requests(self));
        if waiting >= backlog {
            log::debug(|| {
                let peer = request.peer();
                format!("rejected {peer}: the backlog of {backlog} is full")
            });
            // Dropping an undecided request rejects it.
            return;
        }
        let mut arrived = CmEvent::new(self, c::RDMA_CM_EVENT_CONNECT_REQUEST, 0);
        arrived.addresses = Some(request.addresses());
        arrived.connection = Some(Parameters {
            private_data: request.private_data().to_vec(),
            // The peer's outbound Reads are inbound here, and vice versa.
            inbound: request.peer_ord().unwrap_or(0),
            outbound: request.peer_ird().unwrap_or(0),
            rc_peer: request.rc_peer().copied(),
            ..Parameters::default()
        });
        arrived.request = Some(request);
        self.push_event(arrived);
    }

    /// Handles the establishment of the connection.
    pub(super) fn established(self: &Arc<Self>, addresses: AddressPair, connection: Parameters) {
        let (kind, own, ends) = {
            let mut state = self.state.lock();
            if state.phase != Phase::Connecting {
                return;
            }
            state.phase = Phase::Connected;
            state.port = None;
            state.source = Some(addresses.local);
            state.peer = Some(addresses.peer);
            // A program that created its QP without the id must move the QP to RTS itself first.
            let kind = match (state.own_qp, state.passive) {
                (None, false) => c::RDMA_CM_EVENT_CONNECT_RESPONSE,
                _ => c::RDMA_CM_EVENT_ESTABLISHED,
            };
            let own = state.own_qp.is_some() && self.service == Service::Iwarp;
            (kind, own, state.ends_at_once)
        };
        // A program that created its QP without the id moves the QP itself.
        if own && let Some(qp) = connection.qp.and_then(|qp| self.find_qp(qp)) {
            qp.states.lock().connected();
        }
        let mut arrived = CmEvent::new(self, kind, 0);
        arrived.addresses = Some(addresses);
        arrived.connection = Some(connection);
        self.push_event(arrived);
        if ends && let Err(errno) = self.disconnect() {
            errno.log();
        }
    }

    /// Handles the reply to a UD lookup: a UD QP serves the peer's port.
    pub(super) fn resolved(self: &Arc<Self>, addresses: AddressPair, found: Parameters) {
        let lookup = {
            let mut state = self.state.lock();
            if state.phase != Phase::Connecting {
                return;
            }
            state.phase = Phase::Connected;
            state.source = Some(addresses.local);
            state.peer = Some(addresses.peer);
            if let Some(qp) = state.qp.take() {
                self.ids().forget_qp(qp, self);
            }
            state.lookup.take()
        };
        drop(lookup);
        let mut arrived = CmEvent::new(self, c::RDMA_CM_EVENT_ESTABLISHED, 0);
        arrived.addresses = Some(addresses);
        arrived.connection = Some(found);
        self.push_event(arrived);
    }

    /// Handles the rejection by the peer's program.
    pub(super) fn rejected(self: &Arc<Self>, qp: QpId, private_data: Vec<u8>) {
        if !self.attempt_ended() {
            return;
        }
        let (kind, status) = if self.is_ud() {
            (c::RDMA_CM_EVENT_UNREACHABLE, SIDR_REJECTED)
        } else {
            (c::RDMA_CM_EVENT_REJECTED, -libc::ECONNREFUSED)
        };
        let mut arrived = CmEvent::new(self, kind, status);
        arrived.connection =
            Some(Parameters { private_data, qp: Some(qp), ..Parameters::default() });
        self.push_event(arrived);
    }

    /// Handles a failed connection attempt.
    pub(super) fn unreachable(self: &Arc<Self>, errno: i32, reason: &str) {
        // The peer of an RC or UC QP refuses with a rejection.
        if errno == libc::ECONNREFUSED && !self.is_rc() && self.can_retry() {
            return self.ids().delays.add(self, Action::ConnectAgain);
        }
        let passive = self.state.lock().passive;
        log::debug(|| format!("no connection: {reason}"));
        if !self.attempt_ended() {
            return;
        }
        if self.is_ud() {
            let status = if errno == libc::ECONNREFUSED { SIDR_UNSUPPORTED } else { -errno };
            return self.push(c::RDMA_CM_EVENT_UNREACHABLE, status);
        }
        let kind = match errno {
            // As in the kernel: if the peer never confirms, only an iWARP id has a CONNECT_ERROR.
            _ if passive && !self.is_rc() => c::RDMA_CM_EVENT_CONNECT_ERROR,
            libc::ECONNREFUSED | libc::ECONNRESET => c::RDMA_CM_EVENT_REJECTED,
            libc::ETIMEDOUT | libc::ENETUNREACH | libc::EHOSTUNREACH => {
                c::RDMA_CM_EVENT_UNREACHABLE
            }
            _ => c::RDMA_CM_EVENT_CONNECT_ERROR,
        };
        self.push(kind, -errno);
    }

    /// Handles a graceful close by the peer: closes this end too, which ends the connection.
    /// Waiting would rarely help, because a program that has not posted receives for the last
    /// messages yet rarely does so later.
    pub(super) fn peer_closed(&self) {
        if self.is_rc() {
            return;
        }
        let qp = self.state.lock().qp;
        if let Some(qp) = qp.and_then(|qp| self.find_qp(qp)) {
            // Fails if the connection has already ended.
            let _ = qp.client().disconnect_within(DISCONNECT_GRACE);
        }
    }

    /// Handles the end of the connection.
    pub(super) fn disconnected(self: &Arc<Self>, reason: &str) {
        log::debug(|| format!("disconnected: {reason}"));
        let (was, qp) = {
            let mut state = self.state.lock();
            (std::mem::replace(&mut state.phase, Phase::Ended), state.qp)
        };
        if let Some(qp) = qp {
            self.ids().release_qp(qp, self);
        }
        if self.is_rc() {
            // As in the kernel, a DREQ that overtakes RTU ends a connection and not an attempt.
            if matches!(was, Phase::Connecting | Phase::Connected) {
                self.ids().delays.add(self, Action::EndTimewait);
                // The program moves its QP to ERR with `rdma_disconnect(3)`.
                self.push(c::RDMA_CM_EVENT_DISCONNECTED, 0);
            }
            return;
        }
        if let Some(qp) = qp.and_then(|qp| self.find_qp(qp)) {
            qp.states.lock().disconnected();
        }
        self.ended(was);
    }

    /// Ends the connection or the attempt because the daemon has exited.
    pub(super) fn daemon_gone(self: &Arc<Self>) {
        if self.is_rc() && self.attempt_ended() {
            return self.push(c::RDMA_CM_EVENT_CONNECT_ERROR, -libc::ENODEV);
        }
        self.disconnected("the daemon is gone");
    }

    /// Ends the id because its device was unplugged. Only destroying it is possible now, as in the
    /// kernel.
    pub(super) fn unplugged(self: &Arc<Self>) {
        self.attempt_ended();
        self.state.lock().phase = Phase::Ended;
        self.push(c::RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
    }

    /// Queues the event for the end of a connection or an attempt.
    fn ended(self: &Arc<Self>, was: Phase) {
        match was {
            Phase::Connected => self.push(c::RDMA_CM_EVENT_DISCONNECTED, 0),
            Phase::Connecting => self.push(c::RDMA_CM_EVENT_CONNECT_ERROR, -libc::ECONNRESET),
            _ => {}
        }
    }

    /// Handles a fatal error of the queue pair.
    pub(super) fn fatal(self: &Arc<Self>, reason: &str) {
        log::debug(|| format!("fatal error of the queue pair: {reason}"));
        if self.is_rc() {
            let qp = self.state.lock().qp;
            if let Some(qp) = qp.and_then(|qp| self.find_qp(qp)) {
                self.connect_error(&qp, libc::EIO);
            }
        } else if self.state.lock().phase == Phase::Connecting && self.attempt_ended() {
            self.push(c::RDMA_CM_EVENT_CONNECT_ERROR, -libc::EIO);
        }
    }

    /// Ends a connection attempt before its event is queued. Returns false if there was none.
    pub(super) fn attempt_ended(&self) -> bool {
        let mut state = self.state.lock();
        if state.phase != Phase::Connecting {
            state.end_missed = true;
            return false;
        }
        state.phase = Phase::Ended;
        if self.is_ud() {
            if let Some(qp) = state.qp.take() {
                self.ids().forget_qp(qp, self);
            }
            let lookup = state.lookup.take();
            // Destroying it calls the daemon, which must not happen under the lock.
            drop(state);
            drop(lookup);
            return true;
        }
        let qp = state.qp;
        let own_qp = state.own_qp;
        if let Some(qp) = qp {
            self.ids().release_qp(qp, self);
        }
        // The daemon must not be called under the lock.
        drop(state);
        if self.service == Service::Iwarp
            && let Some(qp) = qp.and_then(|qp| self.find_qp(qp))
        {
            qp.connect_failed(own_qp == Some(qp.id()));
        }
        true
    }
}

/// Status codes of a failed UD lookup, as SIDR defines them (IBTA specification, volume 1, section
/// 12.11.2.3) and the kernel reports them: no program listens, or the program rejects.
const SIDR_UNSUPPORTED: i32 = 1;
const SIDR_REJECTED: i32 = 2;
