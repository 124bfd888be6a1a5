//! Connecting (`rdma_connect(3)`) and disconnecting.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;
use rnic_client::{ConnectOptions, Error, Function, QpId, ResolveOptions};

use super::events::completed;
use super::id::{CmIdBody, cm_id, of_device};
use super::qp::show_state;
use super::service::Service;
use super::state::{Attempt, ConnectParams, IdBody, Phase, State};
use crate::c::{IBV_QPS_ERR, RDMA_MAX_RESP_RES, ibv_event_type, rdma_cm_id, rdma_conn_param};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::Live;
use crate::ffi::pointers::{In, bytes, get};
use crate::verbs::qp::{QpBody, qp};

/// Time allowed for sending outstanding requests after `rdma_disconnect(3)`. An RNIC flushes them
/// at once, so most programs wait for their completions first. Some disconnect right after the last
/// post and rely on its delivery, and the peer may be slow to receive it. Programs that wait for
/// `RDMA_CM_EVENT_DISCONNECTED` rarely wait longer than a few seconds.
pub(super) const DISCONNECT_GRACE: Duration = Duration::from_millis(500);

impl IdBody {
    /// Requests a connection to the peer (`rdma_connect(3)`).
    pub(crate) fn connect(self: &Arc<Self>, mut wanted: ConnectParams) -> Result<(), Errno> {
        // May call the daemon, which must not happen under the lock.
        let path_mtu = if self.is_rc() { self.path_mtu()? } else { 0 };
        {
            let mut state = self.state.lock();
            state.expect(&[Phase::RouteResolved])?;
            wanted.private_data.splice(..0, state.connect_data.iter().copied());
            let qp = if self.is_ud() {
                let lookup = self.ids().lookups.create_qp(&self.device.context)?;
                state.lookup.insert(Arc::new(lookup)).id()
            } else if self.is_rc() {
                self.prepare_request(&mut state, &wanted, path_mtu)?
            } else {
                self.qp_to_connect(&state, &wanted)?.id()
            };
            self.ids().claim_qp(qp, self)?;
            if let Some(qp) = self.find_qp(qp).filter(|_| self.service == Service::Iwarp) {
                qp.allow_sends();
            }
            // Frees the bound port, because the connection uses it.
            drop(state.listener.take());
            state.qp = Some(qp);
            state.phase = Phase::Connecting;
            state.attempt = Some(Attempt::new(&wanted));
            state.ends_at_once = false;
        }
        self.start(&wanted).inspect_err(|_| {
            let (qp, lookup) = {
                let mut state = self.state.lock();
                state.phase = Phase::RouteResolved;
                (state.qp.take(), state.lookup.take())
            };
            drop(lookup);
            let Some(qp) = qp else { return };
            self.ids().forget_qp(qp, self);
            if let Some(qp) = self.find_qp(qp).filter(|_| self.service == Service::Iwarp) {
                qp.refuse_sends();
            }
        })
    }

    /// Repeats a connection request that was refused.
    pub(super) fn connect_again(self: &Arc<Self>) {
        let wanted = {
            let state = self.state.lock();
            let attempt = state.attempt.as_ref().filter(|_| state.phase == Phase::Connecting);
            attempt.map(|attempt| attempt.wanted.clone())
        };
        if let Some(wanted) = wanted
            && let Err(errno) = self.start(&wanted)
        {
            errno.log();
            self.unreachable(errno.number(), "the retry failed");
        }
    }

    /// Starts to connect. Called without the lock, because events may arrive before this returns.
    fn start(&self, wanted: &ConnectParams) -> Result<(), Errno> {
        let (qp, lookup, peer, local, offer, form) = {
            let state = self.state.lock();
            let offer = state.rc.offer();
            (state.qp, state.lookup.clone(), state.peer, state.local(), offer, state.ib)
        };
        let peer = peer.ok_or_else(|| invalid!("the id has no peer"))?;
        let connect = |local| {
            if let Some(lookup) = &lookup {
                let private_data = wanted.private_data.clone();
                let options = ResolveOptions { private_data, local, timeout: None };
                return lookup.start_resolve(peer, &options).map_err(Errno::from);
            }
            let qp = qp.and_then(|qp| self.find_qp(qp)).ok_or_else(no_qp)?;
            if let (Service::Rc(space), Some(offer)) = (self.service, &offer) {
                let space = form.map_or(space, |form| form.peer);
                let data = &wanted.private_data;
                let requested = qp.client().start_connect_rc(space, peer, local, offer, data);
                return requested.map_err(Errno::from);
            }
            let options = ConnectOptions {
                private_data: wanted.private_data.clone(),
                ird: wanted.inbound,
                ord: wanted.outbound,
                local,
                timeout: None,
            };
            qp.client().start_connect(peer, &options).map_err(Errno::from)
        };
        connect(local).or_else(|errno| {
            // The reserved port may be in use where the daemon runs. Any other port will do.
            if errno.number() != libc::EADDRINUSE || !self.state.lock().release_port() {
                return Err(errno);
            }
            let local = self.state.lock().local();
            connect(local)
        })
    }

    /// Completes the connection after the program has moved its own QP (`rdma_establish(3)`). An
    /// iWARP connection is already established.
    pub(crate) fn establish(self: &Arc<Self>) -> Result<(), Errno> {
        if self.is_rc() {
            return self.establish_rc();
        }
        self.state.lock().expect(&[Phase::Connected])?;
        self.admit_call(Function::Establish)
    }

    /// Ends the connection (`rdma_disconnect(3)`). Posted requests of an iWARP QP are sent for at
    /// most [`DISCONNECT_GRACE`]. An RC or UC QP of the id is first moved to ERR, which sends the
    /// posted requests and flushes the rest. A connection in progress ends once it is established.
    /// An undecided request stays undecided. Ids of `RDMA_PS_UDP` have no connection to end.
    pub(crate) fn disconnect(&self) -> Result<(), Errno> {
        if self.is_rc() && self.may_disconnect() {
            self.own_qp_to_error()?;
        }
        let qp = {
            let mut state: MutexGuard<'_, State> = self.state.lock();
            match state.phase {
                Phase::Connected => state.qp,
                Phase::Connecting => {
                    state.ends_at_once = true;
                    return Ok(());
                }
                Phase::Undecided | Phase::Ended => return Ok(()),
                phase => {
                    return Err(invalid!("the id has no connection: its phase is {phase:?}"));
                }
            }
        };
        match qp.filter(|_| !self.is_ud()).and_then(|qp| self.find_qp(qp)) {
            Some(qp) => match qp.client().disconnect_within(DISCONNECT_GRACE) {
                Err(error) if error.has_no_effect() => Err(error.into()),
                // Refused if the connection has already ended. Its event reports that.
                Ok(()) | Err(Error::Refused { .. }) => Ok(()),
                Err(error) => Err(error.into()),
            },
            None => Ok(()),
        }
    }

    /// Returns true if [`disconnect`](Self::disconnect) makes a request to the daemon.
    fn has_connected_qp(&self) -> bool {
        let state = self.state.lock();
        state.phase == Phase::Connected && state.qp.is_some() && !self.is_ud()
    }

    /// Returns true if the id has or had a connection or a connection request.
    fn may_disconnect(&self) -> bool {
        match self.phase() {
            Phase::Undecided | Phase::Connecting | Phase::Connected | Phase::Ended => true,
            Phase::Idle
            | Phase::Bound
            | Phase::AddressResolved
            | Phase::RouteResolved
            | Phase::Listening => false,
        }
    }

    /// Returns the QP created by `rdma_create_qp(3)`, or else the QP of `conn_param`. Its type must
    /// be that of the id's service.
    pub(super) fn qp_to_connect(
        &self,
        state: &State,
        wanted: &ConnectParams,
    ) -> Result<Arc<QpBody>, Errno> {
        let qp = state.own_qp.or(wanted.qp).ok_or_else(no_qp)?;
        let found = self.find_qp(qp).ok_or_else(|| {
            invalid!("the id has no queue pair, and conn_param.qp_num {qp} does not exist")
        })?;
        let is_connected = found.is_roce() && found.ud_pd().is_none();
        let (serves, wanted) = match self.service {
            Service::Iwarp => (!found.is_roce(), "an iWARP QP"),
            // The program connects its QPs itself and may pass the number of any of them: UCX
            // passes a UD QP.
            Service::Rc(_) if state.own_qp.is_none() => (found.is_roce(), "a QP of its device"),
            Service::Rc(_) if self.service.allows_uc() => (is_connected, "an RC or UC QP"),
            Service::Rc(_) => (is_connected && !found.is_uc(), "an RC QP"),
            Service::Ud => (found.ud_pd().is_some(), "a UD QP"),
        };
        if !serves {
            return Err(invalid!(
                "QP {qp} is not {wanted}, which the port space of the id requires"
            ));
        }
        Ok(found)
    }
}

pub(super) fn no_qp() -> Errno {
    invalid!("the id has no queue pair, and conn_param specifies none")
}

fn connect(id: *mut rdma_cm_id, parameters: In<rdma_conn_param>) -> Result<(), Errno> {
    completed(id, |id, of| {
        adopt_qp(id);
        of.connect(wanted(parameters))
    })
}

/// Makes `id->qp` the QP of the id, also if the program has set this field.
pub(super) fn adopt_qp(id: Live<CmIdBody>) {
    if let Ok(found) = qp(get!(id.qp)) {
        id.id.set_qp(&found);
    }
}

/// Returns the parameters of a connection. A null pointer requests the maximum number of Reads.
pub(super) fn wanted(parameters: In<rdma_conn_param>) -> ConnectParams {
    let Some(parameters) = parameters.optional() else { return ConnectParams::default() };
    let reads = |n: u8| (n != RDMA_MAX_RESP_RES).then_some(u16::from(n));
    // SAFETY: `private_data` is null or points to `private_data_len` bytes (rdma_connect(3)).
    let private_data =
        unsafe { bytes(parameters.private_data, parameters.private_data_len.into()) };
    ConnectParams {
        private_data: private_data.to_vec(),
        inbound: reads(parameters.responder_resources),
        outbound: reads(parameters.initiator_depth),
        qp: Some(QpId(parameters.qp_num)),
        retry_count: parameters.retry_count,
        rnr_retry: parameters.rnr_retry_count,
        srq: parameters.srq != 0,
    }
}

/// Ends a connection. Queues no event for an id with an undecided request, for a UD id, or after
/// the program has fetched the event for the end of the connection.
fn disconnect(id: *mut rdma_cm_id) -> Result<(), Errno> {
    let found = cm_id(id)?;
    if !found.id.has_connected_qp() {
        found.admit(Function::Disconnect)?;
    }
    match found.id.phase() {
        Phase::Undecided => found.id.disconnect(),
        Phase::Ended if !found.id.has_events() => found.id.disconnect(),
        _ if found.id.is_ud() => found.id.disconnect(),
        _ => completed(id, |id, of| {
            // Before the call, after which another thread may destroy the id.
            if of.is_rc() && of.may_disconnect() {
                show_state(id, IBV_QPS_ERR);
            }
            of.disconnect()
        }),
    }
}

fn establish(id: *mut rdma_cm_id) -> Result<(), Errno> {
    let id = cm_id(id)?;
    if !get!(id.qp).is_null() {
        return Err(invalid!("rdma_establish: the id has a queue pair of its own"));
    }
    id.id.establish()
}

/// Handles an event of the id's QP. On the iWARP device the daemon has already handled it. As in
/// the kernel, the call fails for an id that neither listens nor has begun to connect.
fn notify(id: *mut rdma_cm_id, event: ibv_event_type) -> Result<(), Errno> {
    let id = of_device(id)?;
    id.admit(Function::Notify)?;
    if id.id.is_rc() {
        return id.id.notify_rc(event);
    }
    match id.id.phase() {
        phase @ (Phase::Idle | Phase::Bound | Phase::AddressResolved | Phase::RouteResolved) => {
            Err(invalid!("rdma_notify of an id in phase {phase:?}"))
        }
        Phase::Listening
        | Phase::Undecided
        | Phase::Connecting
        | Phase::Connected
        | Phase::Ended => Ok(()),
    }
}

entry! {
    cancellable rdma_connect(id: *mut rdma_cm_id, parameters: In<rdma_conn_param>) -> minus_one
        = connect;
    cancellable rdma_disconnect(id: *mut rdma_cm_id) -> minus_one = disconnect;
    plain rdma_establish(id: *mut rdma_cm_id) -> minus_one = establish;
    plain rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> minus_one = notify;
}
