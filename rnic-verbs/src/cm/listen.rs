//! Listening (`rdma_listen(3)`), accepting and rejecting.

use std::net::SocketAddr;
use std::sync::Arc;

use rnic_client::AcceptOptions;

use super::{ConnectWanted, IdBody, Phase};
use crate::errno::Errno;

/// The largest backlog, and that of programs that leave it open.
const BACKLOG: u32 = 1024;

impl IdBody {
    /// Takes connection requests from now on (`rdma_listen(3)`).
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
        // The daemon counts the requests that the program has fetched and not decided as well.
        let undecided = BACKLOG.min(self.device.attributes.max_backlog);
        self.device.ids.listens(listener.id(), self)?;
        if let Err(error) = listener.listen(undecided) {
            self.device.ids.forget_listener(listener.id());
            return Err(error.into());
        }
        state.phase = Phase::Listening;
        Ok(())
    }

    /// Accepts the peer that asked (`rdma_accept(3)`).
    pub(crate) fn accept(self: &Arc<Self>, wanted: &ConnectWanted) -> Result<(), Errno> {
        let (request, qp) = {
            let mut state = self.state.lock();
            state.expect(&[Phase::Asked])?;
            self.check(wanted)?;
            let qp = self.qp_to_connect(&state, wanted)?;
            if !self.is_of_datagrams() {
                // Before the request is spent: the program may name another QP.
                self.device.ids.claim_qp(qp.id(), self)?;
            }
            let Some(request) = state.request.take() else {
                return Err(no_longer("has no connection request"));
            };
            if self.is_of_datagrams() {
                // There is nothing to be waited for.
                state.phase = Phase::Connected;
            } else {
                qp.begins_to_connect();
                (state.qp, state.phase) = (Some(qp.id()), Phase::Connecting);
            }
            (request, qp)
        };
        // Without the lock: what comes of it may be told before this returns.
        let accepted = if self.is_of_datagrams() {
            let answered = request.accept_datagrams(qp.client(), &wanted.private_data);
            answered.inspect_err(|_| self.state.lock().phase = Phase::Ended)
        } else {
            let most = self.device.attributes.max_ird;
            let options = AcceptOptions {
                private_data: wanted.private_data.clone(),
                // As the request has it, unless the program says otherwise.
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

    /// The request no longer needs its listener.
    fn decided(&self, answered: Result<(), rnic_client::Error>) -> Result<(), Errno> {
        let listener = self.state.lock().listener.take();
        drop(listener);
        answered.map_err(|error| match Errno::from(error) {
            // The peer has given up meanwhile.
            errno if errno.number() == libc::ENOENT => errno.with_number(libc::ECONNRESET),
            errno => errno,
        })
    }

    /// Refuses parameters that could not be granted, so that the request can still be decided.
    fn check(&self, wanted: &ConnectWanted) -> Result<(), Errno> {
        let has = &self.device.attributes;
        if self.is_of_datagrams() {
            return self.check_answer(&wanted.private_data);
        }
        for (name, wanted, most) in [
            ("responder_resources", wanted.inbound, has.max_ird),
            ("initiator_depth", wanted.outbound, has.max_ord),
        ] {
            if let Some(wanted) = wanted.filter(|&wanted| wanted > most) {
                let reason = format_args!("{name} {wanted} is above the device's {most}");
                return Err(Errno::invalid(reason));
            }
        }
        Ok(())
    }

    fn check_answer(&self, private_data: &[u8]) -> Result<(), Errno> {
        let length = private_data.len();
        match self.is_of_datagrams() && length > MOST_IN_ANSWER {
            true => {
                let reason = format_args!("private_data_len {length} is above {MOST_IN_ANSWER}");
                Err(Errno::invalid(reason))
            }
            false => Ok(()),
        }
    }

    /// Turns the peer away that asked (`rdma_reject(3)`).
    pub(crate) fn reject(&self, private_data: &[u8]) -> Result<(), Errno> {
        let request = {
            let mut state = self.state.lock();
            state.expect(&[Phase::Asked])?;
            self.check_answer(private_data)?;
            state.phase = Phase::Ended;
            state.request.take()
        };
        let request = request.ok_or_else(|| no_longer("has no connection request"))?;
        self.decided(request.reject(private_data))
    }
}

/// The most private data that an answer to a lookup of datagrams carries (rdma_accept(3)).
const MOST_IN_ANSWER: usize = 136;

fn no_longer(what: &str) -> Errno {
    Errno::invalid(format_args!("the id {what}"))
}
