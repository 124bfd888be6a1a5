//! Listening (`rdma_listen(3)`), accepting and rejecting.

use std::net::SocketAddr;
use std::sync::Arc;

use rnic_client::AcceptOptions;

use super::{ConnectParams, IdBody, Phase};
use crate::errno::Errno;

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
        self.device.ids.claim_listener(listener.id(), self)?;
        if let Err(error) = listener.listen(undecided) {
            self.device.ids.forget_listener(listener.id());
            return Err(error.into());
        }
        state.phase = Phase::Listening;
        Ok(())
    }

    /// Accepts the connection request (`rdma_accept(3)`).
    pub(crate) fn accept(self: &Arc<Self>, wanted: &ConnectParams) -> Result<(), Errno> {
        let (request, qp) = {
            let mut state = self.state.lock();
            state.expect(&[Phase::Undecided])?;
            self.check(wanted)?;
            let qp = self.qp_to_connect(&state, wanted)?;
            if !self.is_ud() {
                // Before the request is taken: on failure, the program may retry with another QP.
                self.device.ids.claim_qp(qp.id(), self)?;
            }
            let Some(request) = state.request.take() else {
                return Err(no_longer("has no connection request"));
            };
            if self.is_ud() {
                // There is no connection to wait for.
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
                // The value of the request, unless the program gives one.
                ird: wanted.inbound.or(request.peer_ord().map(|wanted| wanted.min(most))),
                ord: wanted.outbound,
                timeout: None,
            };
            request.start_accept(qp.client(), &options).inspect_err(|_| {
                self.attempt_ended();
                self.device.ids.forget_qp(qp.id(), self);
            })
        };
        self.decided(accepted)
    }

    /// Releases the listener, which the request no longer needs.
    fn decided(&self, answered: Result<(), rnic_client::Error>) -> Result<(), Errno> {
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
        let has = &self.device.attributes;
        if self.is_ud() {
            return self.check_answer(&wanted.private_data);
        }
        for (name, wanted, most) in [
            ("responder_resources", wanted.inbound, has.max_ird),
            ("initiator_depth", wanted.outbound, has.max_ord),
        ] {
            if let Some(wanted) = wanted.filter(|&wanted| wanted > most) {
                let reason = format_args!("{name} {wanted} is above the maximum, {most}");
                return Err(Errno::invalid(reason));
            }
        }
        Ok(())
    }

    fn check_answer(&self, private_data: &[u8]) -> Result<(), Errno> {
        let length = private_data.len();
        if self.is_ud() && length > MAX_ANSWER_DATA {
            let reason = format_args!("private_data_len {length} is above {MAX_ANSWER_DATA}");
            return Err(Errno::invalid(reason));
        }
        Ok(())
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
        let request = request.ok_or_else(|| no_longer("has no connection request"))?;
        self.decided(request.reject(private_data))
    }
}

/// Maximum private data in the reply to a UD lookup (rdma_accept(3)), in bytes.
const MAX_ANSWER_DATA: usize = 136;

fn no_longer(what: &str) -> Errno {
    Errno::invalid(format_args!("the id {what}"))
}
