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
        self.device.ids.listens(listener.id(), self);
        if let Err(error) = listener.listen(undecided) {
            self.device.ids.forget_listener(listener.id());
            return Err(error.into());
        }
        state.phase = Phase::Listening;
        Ok(())
    }

    /// Accepts the peer that asked (`rdma_accept(3)`).
    pub(crate) fn accept(self: &Arc<Self>, wanted: &ConnectWanted) -> Result<(), Errno> {
        let request = {
            let mut state = self.state.lock();
            state.expect(&[Phase::Asked])?;
            let qp = self.qp_to_connect(&state, wanted)?;
            let Some(request) = state.request.take() else {
                return Err(no_longer("has no connection request"));
            };
            if self.is_of_datagrams() {
                // There is nothing to be waited for.
                state.phase = Phase::Connected;
                drop(state);
                let answered = request.accept_datagrams(qp.client(), &wanted.private_data);
                return answered.map_err(|error| {
                    self.state.lock().phase = Phase::Ended;
                    error.into()
                });
            }
            qp.begins_to_connect();
            (state.qp, state.phase) = (Some(qp.id()), Phase::Connecting);
            self.device.ids.connects(qp.id(), self);
            (request, qp)
        };
        let (request, qp) = request;
        let options = AcceptOptions {
            private_data: wanted.private_data.clone(),
            ird: wanted.inbound,
            ord: wanted.outbound,
            timeout: None,
        };
        // Without the lock: what comes of it may be told before this returns.
        request.start_accept(qp.client(), &options).map_err(|error| {
            self.device.ids.forget_qp(qp.id());
            self.state.lock().phase = Phase::Ended;
            error.into()
        })
    }

    /// Turns the peer away that asked (`rdma_reject(3)`).
    pub(crate) fn reject(&self, private_data: &[u8]) -> Result<(), Errno> {
        let request = {
            let mut state = self.state.lock();
            state.expect(&[Phase::Asked])?;
            state.phase = Phase::Ended;
            state.request.take()
        };
        let request = request.ok_or_else(|| no_longer("has no connection request"))?;
        Ok(request.reject(private_data)?)
    }
}

fn no_longer(what: &str) -> Errno {
    Errno::invalid(format_args!("the id {what}"))
}
