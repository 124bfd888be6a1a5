//! Connecting (`rdma_connect(3)`) and disconnecting.

use std::sync::Arc;

use parking_lot::MutexGuard;
use rnic_client::{ConnectOptions, QpId, ResolveOptions};

use super::id::State;
use super::retry::Attempt;
use super::{DISCONNECT_GRACE, IdBody, Phase};
use crate::errno::Errno;
use crate::verbs::device::DeviceKind;
use crate::verbs::qp::QpBody;

/// Parameters of a connection, given by the program (`struct rdma_conn_param`).
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectParams {
    pub(crate) private_data: Vec<u8>,
    /// Maximum number of outstanding Reads from the peer; `None` for the device's maximum.
    pub(crate) inbound: Option<u16>,
    /// Maximum number of outstanding Reads to the peer; `None` for the device's maximum.
    pub(crate) outbound: Option<u16>,
    /// A QP that the program created without the id. Used if the id has none.
    pub(crate) qp: Option<QpId>,
}

impl IdBody {
    /// Requests a connection to the peer (`rdma_connect(3)`).
    pub(crate) fn connect(self: &Arc<Self>, mut wanted: ConnectParams) -> Result<(), Errno> {
        {
            let mut state = self.state.lock();
            state.expect(&[Phase::RouteResolved])?;
            wanted.private_data.splice(..0, state.connect_data.iter().copied());
            let qp = if self.is_ud() {
                let lookup = self.device.ids.lookups.create_qp(&self.device.context)?;
                state.lookup.insert(Arc::new(lookup)).id()
            } else {
                self.qp_to_connect(&state, &wanted)?.id()
            };
            self.device.ids.claim_qp(qp, self)?;
            if let Some(qp) = self.device.qp(qp) {
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
            self.device.ids.forget_qp(qp, self);
            if let Some(qp) = self.device.qp(qp) {
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
        let (qp, lookup, peer, local) = {
            let state = self.state.lock();
            (state.qp, state.lookup.clone(), state.peer, state.local())
        };
        let peer = peer.ok_or_else(|| Errno::invalid(format_args!("the id has no peer")))?;
        if let Some(lookup) = lookup {
            let private_data = wanted.private_data.clone();
            let options = ResolveOptions { private_data, local, timeout: None };
            return Ok(lookup.start_resolve(peer, &options)?);
        }
        let qp = qp.and_then(|qp| self.device.qp(qp)).ok_or_else(no_qp)?;
        let connect = |local| {
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

    /// Checks that the id is connected (`rdma_establish(3)`). The program has moved its own QP.
    pub(crate) fn establish(&self) -> Result<(), Errno> {
        self.state.lock().expect(&[Phase::Connected])
    }

    /// Ends the connection (`rdma_disconnect(3)`). Posted requests are sent for at most
    /// [`DISCONNECT_GRACE`]. A connection in progress ends once it is established. An undecided
    /// request stays undecided. Ids of `RDMA_PS_UDP` have no connection to end.
    pub(crate) fn disconnect(&self) -> Result<(), Errno> {
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
                    let reason = format_args!("the id has no connection: its phase is {phase:?}");
                    return Err(Errno::invalid(reason));
                }
            }
        };
        match qp.filter(|_| !self.is_ud()).and_then(|qp| self.device.qp(qp)) {
            // Refused if the connection has already ended. Its event reports that.
            Some(qp) => match qp.client().disconnect_within(DISCONNECT_GRACE) {
                Ok(()) | Err(rnic_client::Error::Refused { .. }) => Ok(()),
                Err(error) => Err(error.into()),
            },
            None => Ok(()),
        }
    }

    /// Returns the QP created by `rdma_create_qp(3)`, or else the QP of `conn_param`. It must be an
    /// iWARP QP for an id of `RDMA_PS_TCP`, and a UD QP for an id of `RDMA_PS_UDP`.
    pub(super) fn qp_to_connect(
        &self,
        state: &State,
        wanted: &ConnectParams,
    ) -> Result<Arc<QpBody>, Errno> {
        let qp = state.own_qp.or(wanted.qp).ok_or_else(no_qp)?;
        let found = self.device.qp(qp).ok_or_else(|| {
            Errno::invalid(format_args!(
                "the id has no queue pair, and conn_param.qp_num {qp} does not exist"
            ))
        })?;
        let (serves, wanted) = match self.kind() {
            DeviceKind::Iwarp => (!found.is_roce(), "an iWARP QP"),
            DeviceKind::Roce => (found.ud_pd().is_some(), "a UD QP"),
        };
        if !serves {
            let reason =
                format_args!("QP {qp} is not {wanted}, which the port space of the id requires");
            return Err(Errno::invalid(reason));
        }
        Ok(found)
    }
}

fn no_qp() -> Errno {
    Errno::invalid(format_args!("the id has no queue pair, and conn_param specifies none"))
}
