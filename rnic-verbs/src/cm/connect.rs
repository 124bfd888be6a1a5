//! Connecting (`rdma_connect(3)`) and disconnecting.

use std::sync::Arc;

use parking_lot::MutexGuard;
use rnic_client::{ConnectOptions, QpId, ResolveOptions};

use super::id::State;
use super::retry::Attempt;
use super::{IdBody, LAST_SENDS, Phase};
use crate::device::DeviceKind;
use crate::errno::Errno;
use crate::qp::QpBody;

/// What a program wants of a connection (`struct rdma_conn_param`).
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectWanted {
    pub(crate) private_data: Vec<u8>,
    /// Reads that the peer may have outstanding; `None` for as many as possible.
    pub(crate) inbound: Option<u16>,
    /// Reads that this end may have outstanding; `None` for as many as possible.
    pub(crate) outbound: Option<u16>,
    /// The program's own queue pair, if the id has none.
    pub(crate) qp: Option<QpId>,
}

impl IdBody {
    /// Asks the peer for a connection (`rdma_connect(3)`).
    pub(crate) fn connect(self: &Arc<Self>, mut wanted: ConnectWanted) -> Result<(), Errno> {
        {
            let mut state = self.state.lock();
            state.expect(&[Phase::RouteResolved])?;
            wanted.private_data.splice(..0, state.connect_data.iter().copied());
            let qp = if self.is_of_datagrams() {
                let lookup = self.device.ids.lookups.create_qp(&self.device.context)?;
                state.lookup.insert(Arc::new(lookup)).id()
            } else {
                self.qp_to_connect(&state, &wanted)?.id()
            };
            self.device.ids.claim_qp(qp, self)?;
            if let Some(qp) = self.device.qp(qp) {
                qp.begins_to_connect();
            }
            // A port that was bound for it is free for its connection.
            drop(state.listener.take());
            (state.qp, state.phase) = (Some(qp), Phase::Connecting);
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
                qp.awaits_no_connection();
            }
        })
    }

    /// Asks once more, nobody having listened.
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

    /// Without the lock: what comes of it may be told before this returns.
    fn start(&self, wanted: &ConnectWanted) -> Result<(), Errno> {
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
            // The daemon may run where the reserved port is another one's: any other will do.
            if errno.number() != libc::EADDRINUSE || !self.state.lock().release_port() {
                return Err(errno);
            }
            let local = self.state.lock().local();
            connect(local)
        })
    }

    /// The program has moved its own queue pair on (`rdma_establish(3)`).
    pub(crate) fn establish(&self) -> Result<(), Errno> {
        self.state.lock().expect(&[Phase::Connected])
    }

    /// Ends the connection (`rdma_disconnect(3)`). Posted requests are sent for at most
    /// [`LAST_SENDS`]. A connection that is being made ends once it is established. An undecided
    /// request stays undecided. Ids of datagrams have no connection to end.
    pub(crate) fn disconnect(&self) -> Result<(), Errno> {
        let qp = {
            let mut state: MutexGuard<'_, State> = self.state.lock();
            match state.phase {
                Phase::Connected => state.qp,
                Phase::Connecting => {
                    state.ends_at_once = true;
                    return Ok(());
                }
                Phase::Asked | Phase::Ended => return Ok(()),
                phase => {
                    let reason = format_args!("the id has no connection: its phase is {phase:?}");
                    return Err(Errno::invalid(reason));
                }
            }
        };
        match qp.filter(|_| !self.is_of_datagrams()).and_then(|qp| self.device.qp(qp)) {
            // Refused if it has ended meanwhile, which is told by its event.
            Some(qp) => match qp.client().disconnect_within(LAST_SENDS) {
                Ok(()) | Err(rnic_client::Error::Refused { .. }) => Ok(()),
                Err(error) => Err(error.into()),
            },
            None => Ok(()),
        }
    }

    /// The queue pair that `rdma_create_qp(3)` made, or the one that the program names: an iWARP QP
    /// for an id of `RDMA_PS_TCP`, a UD QP for one of `RDMA_PS_UDP`.
    pub(super) fn qp_to_connect(
        &self,
        state: &State,
        wanted: &ConnectWanted,
    ) -> Result<Arc<QpBody>, Errno> {
        let qp = state.own_qp.or(wanted.qp).ok_or_else(no_qp)?;
        let found = self.device.qp(qp).ok_or_else(|| {
            Errno::invalid(format_args!(
                "the id has no queue pair, and conn_param.qp_num {qp} is none"
            ))
        })?;
        let (serves, wanted) = match self.kind() {
            DeviceKind::Iwarp => (!found.is_wired(), "an iWARP QP"),
            DeviceKind::Roce => (found.sends_datagrams().is_some(), "a UD QP"),
        };
        if !serves {
            let reason =
                format_args!("QP {qp} is not {wanted}, which the port space of the id needs");
            return Err(Errno::invalid(reason));
        }
        Ok(found)
    }
}

fn no_qp() -> Errno {
    Errno::invalid(format_args!("the id has no queue pair, and conn_param names none"))
}
