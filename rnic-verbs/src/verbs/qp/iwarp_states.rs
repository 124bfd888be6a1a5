//! State of an iWARP queue pair, as the program sees it (`ibv_modify_qp(3)`).
//!
//! Establishing the connection moves the QP to RTS. Programs that use `rdma_init_qp_attr(3)`
//! nevertheless call `ibv_modify_qp(3)` for each transition, and expect a query to return the state
//! that they have set.

use crate::c;
use crate::errno::Errno;

/// Attributes that a program has set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IwarpStates {
    /// `IBV_QPS_...`.
    pub(crate) state: u32,
    pub(crate) access: u32,
    pub(crate) min_rnr_timer: u8,
    /// Acknowledgement timeout of other transports. Stored but not used: TCP has its own timeout.
    pub(crate) timeout: u8,
    pub(crate) inbound_reads: u8,
    pub(crate) outbound_reads: u8,
    /// The transition to RTR used the attributes of an id (`rdma_init_qp_attr(3)`).
    pub(crate) by_attributes: bool,
}

impl Default for IwarpStates {
    fn default() -> Self {
        IwarpStates {
            // iWARP QPs start in INIT: receives may be posted at once.
            state: c::IBV_QPS_INIT,
            // The same as in siw.
            access: c::IBV_ACCESS_LOCAL_WRITE
                | c::IBV_ACCESS_REMOTE_WRITE
                | c::IBV_ACCESS_REMOTE_READ,
            min_rnr_timer: 0,
            timeout: 0,
            inbound_reads: 0,
            outbound_reads: 0,
            by_attributes: false,
        }
    }
}

/// Action on the device that a modification requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceAction {
    /// No action: only the attributes change.
    Nothing,
    /// Ends the connection and flushes all posted requests.
    ToError,
    /// Closes the connection gracefully.
    Disconnect,
}

impl IwarpStates {
    /// Applies `ibv_modify_qp(3)`.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` for unknown attributes, otherwise `EINVAL`: for example for a transition to RTR
    /// or RTS if `has_id` is false or the attributes specify a peer, because an iWARP QP gets its
    /// peer only from the connection of an id.
    pub(crate) fn modify(
        &mut self,
        attributes: &c::ibv_qp_attr,
        mask: i32,
        has_id: bool,
    ) -> Result<DeviceAction, Errno> {
        let mut consequence = DeviceAction::Nothing;
        let unknown = mask & !c::IBV_QP_ATTR_STANDARD_BITS;
        if unknown != 0 {
            return Err(unsupported!("attr_mask {unknown:#x}: the device has no such attribute"));
        }
        let current = attributes.cur_qp_state;
        if mask & c::IBV_QP_CUR_STATE != 0 && current != self.state {
            let current = state_name(current);
            let state = state_name(self.state);
            return Err(invalid!("cur_qp_state {current}: the queue pair is in {state}"));
        }
        let port = attributes.port_num;
        if mask & c::IBV_QP_PORT != 0 && port != crate::verbs::device::PORT {
            return Err(invalid!("port_num {port}: the device has only port 1"));
        }
        if mask & c::IBV_QP_STATE != 0 {
            let next = attributes.qp_state;
            if matches!(next, c::IBV_QPS_RTR | c::IBV_QPS_RTS) && (!has_id || mask & PEER != 0) {
                return Err(invalid!(
                    "an iWARP queue pair gets its peer from rdma_connect or rdma_accept, not from \
                     ibv_modify_qp to {}: use the RoCE device, or rdma_cm (perftest: -R)",
                    state_name(next)
                ));
            }
            consequence = self.transition(next)?;
            self.state = attributes.qp_state;
        }
        if mask & c::IBV_QP_ACCESS_FLAGS != 0 {
            self.access = attributes.qp_access_flags;
        }
        if mask & c::IBV_QP_MIN_RNR_TIMER != 0 {
            self.min_rnr_timer = attributes.min_rnr_timer;
        }
        if mask & c::IBV_QP_TIMEOUT != 0 {
            self.timeout = attributes.timeout;
        }
        if mask & c::IBV_QP_MAX_DEST_RD_ATOMIC != 0 {
            self.inbound_reads = attributes.max_dest_rd_atomic;
        }
        if mask & c::IBV_QP_MAX_QP_RD_ATOMIC != 0 {
            self.outbound_reads = attributes.max_rd_atomic;
        }
        Ok(consequence)
    }

    /// Records that the connection is established.
    pub(crate) fn connected(&mut self) {
        self.state = c::IBV_QPS_RTS;
    }

    /// Records that the connection has ended.
    pub(crate) fn disconnected(&mut self) {
        self.state = c::IBV_QPS_ERR;
    }

    fn transition(&self, next: u32) -> Result<DeviceAction, Errno> {
        use c::{IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD};
        match (self.state, next) {
            (_, IBV_QPS_ERR) => Ok(DeviceAction::ToError),
            (IBV_QPS_RESET | IBV_QPS_INIT, IBV_QPS_RESET | IBV_QPS_INIT)
            | (IBV_QPS_INIT, IBV_QPS_RTR)
            | (IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD, IBV_QPS_RTS) => Ok(DeviceAction::Nothing),
            // As in siw: the RDMAC verbs have Closing where InfiniBand has SQD.
            (IBV_QPS_RTS, IBV_QPS_SQD) => Ok(DeviceAction::Disconnect),
            (from, to) => Err(no_transition(from, to)),
        }
    }
}

/// Attributes that specify a peer or set up packets to it.
const PEER: i32 =
    c::IBV_QP_AV | c::IBV_QP_DEST_QPN | c::IBV_QP_RQ_PSN | c::IBV_QP_SQ_PSN | c::IBV_QP_PATH_MTU;

/// Returns the error for an invalid transition.
pub(crate) fn no_transition(from: u32, to: u32) -> Errno {
    let from = state_name(from);
    let to = state_name(to);
    invalid!("cannot be moved from {from} to {to}")
}

/// Returns the name of a state, `IBV_QPS_...`.
pub(crate) fn state_name(state: u32) -> &'static str {
    match state {
        c::IBV_QPS_RESET => "RESET",
        c::IBV_QPS_INIT => "INIT",
        c::IBV_QPS_RTR => "RTR",
        c::IBV_QPS_RTS => "RTS",
        c::IBV_QPS_SQD => "SQD",
        c::IBV_QPS_SQE => "SQE",
        c::IBV_QPS_ERR => "ERR",
        _ => "an unknown state",
    }
}
