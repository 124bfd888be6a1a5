//! Connections of RC and UC QPs (`RDMA_PS_TCP` and `RDMA_PS_IB` on the RoCE device).
//!
//! The daemon exchanges the messages of the connection manager and does not change the QP. The
//! library moves the QP of an id, as librdmacm does: to INIT when `rdma_create_qp(3)` creates it,
//! and to RTR and RTS after the peer's reply, or before the id accepts. A program that created its
//! QP without the id moves the QP itself, with the attributes of `rdma_init_qp_attr(3)`.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::Arc;

use rnic_client::{AddressPair, Error, GidRow, QpId, RcOffer, RcPeer};

use super::connect::no_qp;
use super::delays::Action;
use super::rc_attr::{RcConnection, Reads, gid_of, saturate};
use super::rejection;
use super::state::{Attempt, CmEvent, ConnectParams, IdBody, Parameters, Phase, State};
use crate::c::*;
use crate::errno::Errno;
use crate::ffi::handles::zeroed;
use crate::log;
use crate::verbs::qp::QpBody;

impl IdBody {
    /// Fills in the attributes for the transition of the id's QP to `to.qp_state`. Returns their
    /// mask. `is_uc` gives the QP type if the id has no QP.
    pub(super) fn rc_attributes(&self, to: &mut ibv_qp_attr, is_uc: bool) -> Result<c_int, Errno> {
        let source = match to.qp_state {
            IBV_QPS_RTR => self.state.lock().rc.peer.map(|peer| peer.source),
            _ => None,
        };
        let source = source.map(|source| self.gid_index(source)).transpose()?;
        let mut state = self.state.lock();
        let known = state.own_qp.or(state.qp).and_then(|qp| self.find_qp(qp));
        let is_uc = known.map_or(is_uc, |qp| qp.is_uc());
        let ack_timeout = state.ack_timeout;
        state.rc.attributes(to, is_uc, source.unwrap_or_default(), ack_timeout)
    }

    /// Returns the index, in the table of the id's device, of a GID in the daemon's table.
    pub(super) fn gid_index(&self, of_daemon: u16) -> Result<u16, Errno> {
        let adapter = self.adapter()?;
        let index = adapter.gids(&self.device.tables()?).of_daemon(of_daemon);
        index.ok_or_else(|| invalid!("device {} does not have the local address", adapter.name()))
    }

    /// Moves the QP of the id to `qp_state`.
    pub(super) fn move_qp(&self, qp: &QpBody, qp_state: ibv_qp_state) -> Result<(), Errno> {
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = qp_state;
        let mask = self.rc_attributes(&mut attributes, qp.is_uc())?;
        qp.modify(&attributes, mask)
    }

    /// Moves the QP of the id to RTS. The first step repeats INIT, because the rights of the peer
    /// depend on its parameters.
    fn move_to_rts(&self, qp: &QpBody) -> Result<(), Errno> {
        [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS]
            .into_iter()
            .try_for_each(|state| self.move_qp(qp, state))
    }

    /// Moves the QP that was created for the id to ERR. Does nothing without such a QP.
    pub(super) fn own_qp_to_error(&self) -> Result<(), Errno> {
        let own = self.state.lock().own_qp;
        let Some(qp) = own.and_then(|qp| self.find_qp(qp)) else { return Ok(()) };
        // A repetition would count as a call of `ibv_modify_qp`, which the program has not made.
        if qp.is_in_error() {
            return Ok(());
        }
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = IBV_QPS_ERR;
        qp.modify(&attributes, IBV_QP_STATE)
    }

    /// Returns the path MTU in bytes: that of the connection if it is known, otherwise that of the
    /// interface with the source address, or the smallest of all interfaces. A path of the program
    /// may lower it.
    pub(super) fn path_mtu(&self) -> Result<u16, Errno> {
        let (source, peer, most) = {
            let state = self.state.lock();
            (state.source, state.rc.peer, state.most_mtu.unwrap_or(u16::MAX))
        };
        if let Some(peer) = peer {
            return Ok(peer.path_mtu);
        }
        let tables = self.device.tables()?;
        let used = || tables.gids.iter().filter(|row| !row.gid.is_zero());
        let own = source.and_then(|source| {
            let gid = gid_of(source.ip(), &tables.gids);
            used().find(|row| row.gid == gid)
        });
        let bytes = own.map(GidRow::path_mtu).or_else(|| used().map(GidRow::path_mtu).min());
        Ok(bytes.and_then(|bytes| u16::try_from(bytes).ok()).unwrap_or(1024).min(most))
    }

    /// Returns the traffic class of the path, which the REQ contains: that of the connection if it
    /// is known, otherwise that of the resolved route.
    pub(super) fn traffic_class(&self) -> u8 {
        let state = self.state.lock();
        state.rc.peer.map_or(state.traffic_class, |peer| peer.traffic_class)
    }

    /// Checks the parameters of a connection request, and sets this end's parameters. Returns the
    /// QP to connect. Sends nothing.
    pub(super) fn prepare_request(
        &self,
        state: &mut State,
        wanted: &ConnectParams,
        path_mtu: u16,
    ) -> Result<QpId, Errno> {
        self.check_reads(wanted)?;
        check_private_data(&wanted.private_data, REQUEST_DATA)?;
        let qp = self.qp_to_connect(state, wanted)?;
        let reads = reads_of(wanted, Reads::most(&self.device.attributes));
        let srq = if state.own_qp.is_some() { qp.has_srq() } else { wanted.srq };
        let psn = state.rc.psn()?;
        let offer =
            offer(psn, reads, wanted, Path { path_mtu, traffic_class: state.traffic_class }, srq);
        state.rc =
            RcConnection { psn: Some(psn), reads: Some(reads), offer: Some(offer), peer: None };
        Ok(qp.id())
    }

    /// Handles the peer's reply (REP). Moves the QP of the id to RTS and confirms the connection. A
    /// program that created its QP without the id must do both itself.
    pub(super) fn replied(
        self: &Arc<Self>,
        addresses: AddressPair,
        peer: RcPeer,
        private_data: Vec<u8>,
    ) {
        let (qp, own) = {
            let mut state = self.state.lock();
            if state.phase != Phase::Connecting || state.passive {
                return;
            }
            state.port = None;
            state.attempt = None;
            state.source = Some(addresses.local);
            state.peer = Some(addresses.peer);
            state.rc.replied(peer, Reads::most(&self.device.attributes));
            (state.qp, state.qp.is_some() && state.own_qp == state.qp)
        };
        // The daemon must not be called under the lock.
        let kind = if own {
            let Some(qp) = qp.and_then(|qp| self.find_qp(qp)) else { return };
            if let Err(errno) = self.complete_request(&qp) {
                errno.log();
                return self.connect_error(&qp, errno.number());
            }
            RDMA_CM_EVENT_ESTABLISHED
        } else {
            RDMA_CM_EVENT_CONNECT_RESPONSE
        };
        let ends = {
            let mut state = self.state.lock();
            if state.phase != Phase::Connecting {
                return;
            }
            if own {
                state.phase = Phase::Connected;
            }
            own && state.ends_at_once
        };
        let mut arrived = CmEvent::new(self, kind, 0);
        arrived.addresses = Some(addresses);
        arrived.connection = Some(Parameters::of_rc_peer(private_data, &peer));
        self.push_event(arrived);
        if ends && let Err(errno) = self.disconnect() {
            errno.log();
        }
    }

    /// Moves the QP to RTS and confirms the connection (RTU).
    fn complete_request(&self, qp: &QpBody) -> Result<(), Errno> {
        self.move_to_rts(qp)?;
        Ok(qp.client().establish_rc()?)
    }

    /// Ends the attempt because the QP could not be connected.
    pub(super) fn connect_error(self: &Arc<Self>, qp: &QpBody, number: i32) {
        if self.phase() != Phase::Connecting {
            return;
        }
        // Fails if the daemon has ended the attempt already. Called while the id still holds the
        // QP, which may then connect for another id.
        let _ = qp.client().abort();
        if !self.attempt_ended() {
            return;
        }
        self.own_qp_to_error().unwrap_or_else(|errno| errno.log());
        self.push(RDMA_CM_EVENT_CONNECT_ERROR, -number);
    }

    /// Confirms the connection after the peer's reply (`rdma_establish(3)`). The program has moved
    /// its QP to RTS. No event follows.
    pub(super) fn establish_rc(self: &Arc<Self>) -> Result<(), Errno> {
        let qp = {
            let mut state = self.state.lock();
            state.expect(&[Phase::Connecting])?;
            if state.passive || state.rc.peer.is_none() {
                return Err(invalid!("the peer has not replied to the connection request yet"));
            }
            let qp = state.qp.and_then(|qp| self.find_qp(qp)).ok_or_else(no_qp)?;
            // Before the call, because the connection may end before the call returns.
            state.phase = Phase::Connected;
            state.end_missed = false;
            qp
        };
        let confirmed = qp.client().establish_rc();
        let (ends, failed) = {
            let mut state = self.state.lock();
            let failed = confirmed.is_err() && state.phase == Phase::Connected;
            if failed {
                state.phase = Phase::Connecting;
            }
            let undone = confirmed.as_ref().is_err_and(Error::has_no_effect);
            let has_ended = state.end_missed || !undone;
            (confirmed.is_ok() && state.ends_at_once, failed && has_ended)
        };
        if failed {
            // The event for the end of the attempt may have arrived while the id was connected.
            self.connect_error(&qp, libc::ECONNRESET);
        }
        confirmed?;
        if ends { self.disconnect() } else { Ok(()) }
    }

    /// Handles an event of the QP (`rdma_notify(3)`). A message of the peer's QP establishes an
    /// accepted connection.
    ///
    /// # Errors
    ///
    /// As in the kernel: `EISCONN` if the connection is already established, `EINVAL` for other
    /// phases and events.
    pub(super) fn notify_rc(&self, event: ibv_event_type) -> Result<(), Errno> {
        let (phase, passive, qp) = {
            let state = self.state.lock();
            (state.phase, state.passive, state.qp)
        };
        match (event, phase) {
            (IBV_EVENT_COMM_EST, Phase::Connecting) if passive => {
                let qp = qp.and_then(|qp| self.find_qp(qp)).ok_or_else(no_qp)?;
                Ok(qp.client().establish_rc()?)
            }
            (IBV_EVENT_COMM_EST, Phase::Connected) => {
                Err(errno!(libc::EISCONN, "rdma_notify: the connection is already established"))
            }
            (IBV_EVENT_PATH_MIG, Phase::Connected) => Ok(()),
            (event, phase) => Err(invalid!("rdma_notify of event {event} in phase {phase:?}")),
        }
    }

    /// Accepts the connection request (`rdma_accept(3)`). Moves the QP of the id to RTS first. If
    /// that fails, the request stays undecided.
    pub(super) fn accept_rc(self: &Arc<Self>, wanted: &ConnectParams) -> Result<(), Errno> {
        let (qp, own, offer) = {
            let mut state = self.state.lock();
            state.expect(&[Phase::Undecided])?;
            self.check_reads(wanted)?;
            check_private_data(&wanted.private_data, REPLY_DATA)?;
            let qp = self.qp_to_connect(&state, wanted)?;
            let peer = state.rc.peer()?;
            let psn = state.rc.psn()?;
            self.ids().claim_qp(qp.id(), self)?;
            let most = Reads::most(&self.device.attributes);
            let reads = reads_of(wanted, Reads::of_peer(&peer, most));
            state.rc.reads = Some(reads);
            let own = state.own_qp == Some(qp.id());
            let srq = if own { qp.has_srq() } else { wanted.srq };
            let RcPeer { path_mtu, traffic_class, .. } = peer;
            (qp, own, offer(psn, reads, wanted, Path { path_mtu, traffic_class }, srq))
        };
        // The daemon must not be called under the lock.
        if own {
            self.move_to_rts(&qp).inspect_err(|_| self.ids().forget_qp(qp.id(), self))?;
        }
        let request = {
            let mut state = self.state.lock();
            let request = state.request.take();
            if request.is_some() {
                state.qp = Some(qp.id());
                state.phase = Phase::Connecting;
            }
            request
        };
        let Some(request) = request else {
            self.ids().forget_qp(qp.id(), self);
            return Err(invalid!("the id no longer has a connection request"));
        };
        // Called without the lock, because events may arrive before this returns.
        let accepted = request.accept_rc(qp.client(), &offer, &wanted.private_data);
        let accepted = accepted.inspect_err(|_| {
            self.attempt_ended();
            self.ids().forget_qp(qp.id(), self);
            self.own_qp_to_error().unwrap_or_else(|errno| errno.log());
        });
        self.decided(accepted)
    }

    /// Handles a rejection (REJ) by the peer's program or connection manager.
    pub(super) fn rc_rejected(self: &Arc<Self>, reason: u16, private_data: Vec<u8>) {
        if reason == rejection::NO_LISTENER && self.can_retry() {
            return self.ids().delays.add(self, Action::ConnectAgain);
        }
        self.log_rejection(reason);
        if !self.attempt_ended() {
            return;
        }
        self.own_qp_to_error().unwrap_or_else(|errno| errno.log());
        let mut arrived = CmEvent::new(self, RDMA_CM_EVENT_REJECTED, reason.into());
        arrived.connection = Some(Parameters { private_data, ..Parameters::default() });
        self.push_event(arrived);
    }

    fn log_rejection(&self, reason: u16) {
        log::debug(|| {
            let (source, peer, passive) = {
                let state = self.state.lock();
                (state.source, state.peer, state.passive)
            };
            let function = if passive { "rdma_accept" } else { "rdma_connect" };
            let shown =
                |end: Option<SocketAddr>| end.map(|end| end.to_string()).unwrap_or_default();
            let (from, to) = (shown(source), shown(peer));
            let words = rejection::text(reason);
            format!("{function}: {from} to {to}: rejected: {words} (reason {reason})")
        });
    }

    /// Returns true if the id is connecting and it is too early to report a refusal.
    pub(super) fn can_retry(&self) -> bool {
        let state = self.state.lock();
        state.phase == Phase::Connecting && state.attempt.as_ref().is_some_and(Attempt::can_retry)
    }

    /// Reports that the connection has left the timewait state.
    pub(super) fn end_timewait(self: &Arc<Self>) {
        if self.phase() == Phase::Ended {
            self.push(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
        }
    }
}

/// Returns the values that the program has given, and those of `reads` for missing values.
fn reads_of(wanted: &ConnectParams, reads: Reads) -> Reads {
    Reads {
        inbound: wanted.inbound.map_or(reads.inbound, saturate),
        outbound: wanted.outbound.map_or(reads.outbound, saturate),
    }
}

impl Parameters {
    /// Returns the parameters of an event with the peer's parameters, as this end sees them: the
    /// peer's outbound Reads are inbound here, and vice versa.
    pub(super) fn of_rc_peer(private_data: Vec<u8>, peer: &RcPeer) -> Self {
        Parameters {
            private_data,
            inbound: peer.initiator_depth.into(),
            outbound: peer.responder_resources.into(),
            rc_peer: Some(*peer),
            ..Parameters::default()
        }
    }
}

/// The fields of a path that a connection request contains.
struct Path {
    path_mtu: u16,
    traffic_class: u8,
}

fn offer(psn: u32, reads: Reads, wanted: &ConnectParams, path: Path, srq: bool) -> RcOffer {
    RcOffer {
        psn,
        responder_resources: reads.inbound,
        initiator_depth: reads.outbound,
        retry_count: wanted.retry_count.min(MAX_RETRIES),
        rnr_retry: wanted.rnr_retry.min(MAX_RETRIES),
        path_mtu: path.path_mtu,
        traffic_class: path.traffic_class,
        srq,
    }
}

/// Checks the length of private data.
///
/// # Errors
///
/// `EINVAL` if the message has no room for them.
pub(super) fn check_private_data(private_data: &[u8], most: usize) -> Result<(), Errno> {
    match private_data.len() {
        length if length > most => Err(invalid!("private_data_len {length} is above {most}")),
        _ => Ok(()),
    }
}

/// Maximum private data of a request (REQ), in bytes.
const REQUEST_DATA: usize = 56;
/// Maximum private data of a reply (REP), in bytes.
const REPLY_DATA: usize = 196;
/// Maximum private data of a rejection (REJ), in bytes.
pub(super) const REJECT_DATA: usize = 148;

/// Maximum of a field with 3 bits.
const MAX_RETRIES: u8 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Reads = Reads { inbound: 16, outbound: 8 };

    #[test]
    fn offer_has_given_or_default_parameters() {
        let offered = |wanted: &ConnectParams| {
            let path = Path { path_mtu: 1024, traffic_class: 0x28 };
            offer(9, reads_of(wanted, MOST), wanted, path, true)
        };
        let default = offered(&ConnectParams::default());
        assert_eq!((default.responder_resources, default.initiator_depth), (16, 8));
        assert_eq!((default.retry_count, default.rnr_retry), (7, 7));
        assert_eq!((default.psn, default.path_mtu, default.srq), (9, 1024, true));
        assert_eq!(default.traffic_class, 0x28);
        let given = offered(&ConnectParams {
            inbound: Some(0),
            outbound: Some(2),
            retry_count: 9,
            rnr_retry: 3,
            ..ConnectParams::default()
        });
        assert_eq!((given.responder_resources, given.initiator_depth), (0, 2));
        assert_eq!((given.retry_count, given.rnr_retry), (7, 3));
    }

    #[test]
    fn private_data_have_a_maximum() {
        for most in [REQUEST_DATA, REPLY_DATA, REJECT_DATA] {
            assert_eq!(check_private_data(&vec![0; most], most), Ok(()));
            let longer = check_private_data(&vec![0; most + 1], most);
            assert_eq!(longer.map_err(|errno| errno.number()), Err(libc::EINVAL));
        }
    }
}
