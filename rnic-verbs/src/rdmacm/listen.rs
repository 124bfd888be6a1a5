//! Listening (`rdma_listen(3)`), accepting and rejecting.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::Arc;

use rnic_client::{AcceptOptions, Error, Function};

use super::ack::{CmEventBody, acknowledge, acknowledge_own};
use super::connect::{adopt_qp, wanted};
use super::events::{self, completed};
use super::id::{self, CmIdBody, cm_id, show_addresses};
use super::qp::{self, show_state};
use super::rc::{REJECT_DATA, check_private_data};
use super::service::Service;
use super::state::{ConnectParams, IdBody, Phase};
use crate::c::{
    IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RTS, RDMA_CM_EVENT_CONNECT_REQUEST, rdma_cm_event,
    rdma_cm_id, rdma_conn_param,
};
use crate::errno::{self, Errno};
use crate::ffi::entry::entry;
use crate::ffi::handles::{Live, live};
use crate::ffi::pointers::{Argument as _, In, InOut, Out, bytes, get, set};
use crate::system;

/// The largest backlog, and the default.
const BACKLOG: u32 = 1024;

impl IdBody {
    /// Starts to listen (`rdma_listen(3)`).
    pub(crate) fn listen(self: &Arc<Self>, backlog: i32) -> Result<(), Errno> {
        if self.phase() == Phase::Idle {
            self.bind(SocketAddr::from(([0; 4], 0)))?;
        }
        let mut state = self.state.lock();
        state.expect(&[Phase::Bound])?;
        state.backlog = match u32::try_from(backlog) {
            Ok(backlog @ 1..=BACKLOG) => backlog as usize,
            _ => BACKLOG as usize,
        };
        let Some(listener) = &state.listener else { return Err(no_longer("is not bound")) };
        // The daemon's backlog also counts requests that were fetched but neither accepted nor
        // rejected.
        let undecided = BACKLOG.min(self.device.attributes.max_backlog);
        self.ids().claim_listener(listener.id(), self)?;
        if let Err(error) = listener.listen(undecided) {
            self.ids().forget_listener(listener.id());
            return Err(error.into());
        }
        state.phase = Phase::Listening;
        Ok(())
    }

    /// Accepts the connection request (`rdma_accept(3)`).
    pub(crate) fn accept(self: &Arc<Self>, wanted: &ConnectParams) -> Result<(), Errno> {
        if self.is_rc() {
            return self.accept_rc(wanted);
        }
        let (request, qp) = {
            let mut state = self.state.lock();
            state.expect(&[Phase::Undecided])?;
            self.check(wanted)?;
            let qp = self.qp_to_connect(&state, wanted)?;
            if !self.is_ud() {
                // Before the request is taken: on failure, the program may retry with another QP.
                self.ids().claim_qp(qp.id(), self)?;
            }
            let Some(request) = state.request.take() else {
                return Err(no_longer("has no connection request"));
            };
            if self.is_ud() {
                // A UD lookup has no connection to wait for.
                state.phase = Phase::Connected;
            } else {
                qp.allow_sends();
                state.qp = Some(qp.id());
                state.phase = Phase::Connecting;
            }
            (request, qp)
        };
        // Called without the lock, because events may arrive before this returns.
        let accepted = if self.is_ud() {
            let answered = request.accept_datagrams(qp.client(), &wanted.private_data);
            answered.inspect_err(|_| self.state.lock().phase = Phase::Ended)
        } else {
            let most = self.device.attributes.max_ird;
            let options = AcceptOptions {
                private_data: wanted.private_data.clone(),
                // Use the value of the request unless the program gives a value.
                ird: wanted.inbound.or(request.peer_ord().map(|wanted| wanted.min(most))),
                ord: wanted.outbound,
                timeout: None,
            };
            request.start_accept(qp.client(), &options).inspect_err(|_| {
                self.attempt_ended();
                self.ids().forget_qp(qp.id(), self);
            })
        };
        self.decided(accepted)
    }

    /// Releases the listener, which the request no longer needs.
    pub(super) fn decided(&self, answered: Result<(), rnic_client::Error>) -> Result<(), Errno> {
        let listener = self.state.lock().listener.take();
        drop(listener);
        answered.map_err(|error| match Errno::from(error) {
            // The peer has already given up.
            errno if errno.number() == libc::ENOENT => errno.with_number(libc::ECONNRESET),
            errno => errno,
        })
    }

    /// Checks the parameters first, so that a request whose parameters are refused stays undecided.
    fn check(&self, wanted: &ConnectParams) -> Result<(), Errno> {
        if self.is_ud() {
            return self.check_answer(&wanted.private_data);
        }
        self.check_reads(wanted)
    }

    /// Checks the numbers of Reads against the maxima of the device.
    pub(super) fn check_reads(&self, wanted: &ConnectParams) -> Result<(), Errno> {
        let has = &self.device.attributes;
        for (name, wanted, most) in [
            ("responder_resources", wanted.inbound, has.max_ird),
            ("initiator_depth", wanted.outbound, has.max_ord),
        ] {
            if let Some(wanted) = wanted.filter(|&wanted| wanted > most) {
                return Err(invalid!("{name} {wanted} is above the maximum, {most}"));
            }
        }
        Ok(())
    }

    /// Checks the private data of a rejection, or of any reply to a UD lookup.
    fn check_answer(&self, private_data: &[u8]) -> Result<(), Errno> {
        match self.service {
            // The daemon checks them.
            Service::Iwarp => Ok(()),
            Service::Rc(_) => check_private_data(private_data, REJECT_DATA),
            Service::Ud => check_private_data(private_data, MAX_ANSWER_DATA),
        }
    }

    /// Rejects the connection request (`rdma_reject(3)`).
    pub(crate) fn reject(&self, private_data: &[u8]) -> Result<(), Errno> {
        let request = {
            let mut state = self.state.lock();
            state.expect(&[Phase::Undecided])?;
            self.check_answer(private_data)?;
            state.phase = Phase::Ended;
            state.request.take()
        };
        let mut request = request.ok_or_else(|| no_longer("has no connection request"))?;
        let rejected = request.try_reject(private_data);
        if rejected.as_ref().is_err_and(Error::has_no_effect) {
            let mut state = self.state.lock();
            state.phase = Phase::Undecided;
            state.request = Some(request);
            drop(state);
            return Ok(rejected?);
        }
        self.decided(rejected)
    }
}

/// Maximum private data in the reply to a UD lookup (rdma_accept(3)), in bytes.
const MAX_ANSWER_DATA: usize = 136;

fn no_longer(what: &str) -> Errno {
    invalid!("the id {what}")
}

fn listen(id: *mut rdma_cm_id, backlog: c_int) -> Result<(), Errno> {
    let found = cm_id(id)?;
    found.id.listen(backlog)?;
    show_addresses(found)
}

fn accept(id: *mut rdma_cm_id, parameters: In<rdma_conn_param>) -> Result<(), Errno> {
    let accept = |id: Live<CmIdBody>, of: &Arc<IdBody>| {
        adopt_qp(id);
        if !of.is_rc() || of.phase() != Phase::Undecided {
            return of.accept(&wanted(parameters));
        }
        // Before the call, after which another thread may destroy the id.
        show_state(id, IBV_QPS_RTS);
        of.accept(&wanted(parameters)).inspect_err(|_| {
            // The daemon has refused it, or the request stays undecided.
            let ended = of.phase() != Phase::Undecided;
            show_state(id, if ended { IBV_QPS_ERR } else { IBV_QPS_INIT });
        })
    };
    let found = cm_id(id)?;
    if found.id.is_ud() {
        // No event follows.
        accept(found, &found.id)?;
        decided(found);
        Ok(())
    } else {
        completed(id, accept)
    }
}

/// Acknowledges the event that `rdma_get_request(3)` has left in a synchronous id. Otherwise the
/// listener could not be destroyed.
fn decided(id: Live<CmIdBody>) {
    if id.is_synchronous() {
        acknowledge_own(id);
    }
}

fn reject(id: *mut rdma_cm_id, private_data: *const c_void, length: u8) -> Result<(), Errno> {
    let found = cm_id(id)?;
    // SAFETY: `private_data` is null or points to `length` bytes (rdma_reject(3)).
    found.id.reject(unsafe { bytes(private_data, length.into()) })?;
    decided(found);
    Ok(())
}

fn get_request(listener: *mut rdma_cm_id, to: Out<*mut rdma_cm_id>) -> Result<(), Errno> {
    let to = to.required("id")?;
    let found = cm_id(listener)?;
    if !found.is_synchronous() {
        return Err(invalid!("rdma_get_request: the id has an event channel"));
    }
    found.admit(Function::GetRequest)?;
    acknowledge_own(found);
    let event = events::fetch(get!(found.channel))?;
    let _guard = system::uncancelled();
    let id = accepted_id(found, event).inspect_err(|_| errno::nothing(acknowledge(event)))?;
    to.write(id);
    Ok(())
}

/// Returns the id of a connection request, with a queue pair if the listener is an endpoint.
fn accepted_id(listener: Live<CmIdBody>, at: *mut rdma_cm_event) -> Result<*mut rdma_cm_id, Errno> {
    let event = live::<CmEventBody>(at)?;
    let kind = get!(event.event);
    match get!(event.status) {
        0 if kind == RDMA_CM_EVENT_CONNECT_REQUEST => {}
        0 => {
            return Err(invalid!("event {kind} is not a connection request"));
        }
        status => return Err(events::failed_event(kind, status)),
    }
    let new = get!(event.id);
    let endpoint = listener.endpoint.lock().as_ref().map(|e| (e.pd, e.wanted));
    if let Some((pd, mut wanted)) = endpoint {
        // SAFETY: the local structure outlives the call.
        let made = qp::create(new, pd.0, unsafe { InOut::from_c(&raw mut wanted) });
        made.inspect_err(|_| errno::nothing(id::destroy(new)))?;
    }
    let id = cm_id(new)?;
    set!(id.event = at);
    Ok(new)
}

entry! {
    plain rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> minus_one = listen;
    cancellable rdma_accept(id: *mut rdma_cm_id, parameters: In<rdma_conn_param>) -> minus_one
        = accept;
    uncancelled rdma_reject(id: *mut rdma_cm_id, private_data: *const c_void, length: u8)
        -> minus_one = reject;
    cancellable rdma_get_request(listener: *mut rdma_cm_id, to: Out<*mut rdma_cm_id>) -> minus_one
        = get_request;
}
