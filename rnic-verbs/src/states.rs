//! The state of a queue pair as a program moves it (`ibv_modify_qp(3)`).
//!
//! An RNIC's queue pair is moved by its connection. Programs that wire their own move it step by
//! step all the same, as `rdma_init_qp_attr(3)` tells them to, and those that ask want to see the
//! step they made.

use crate::c;
use crate::errno::Errno;

/// What a program has said of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct States {
    /// `IBV_QPS_...`.
    pub(crate) state: u32,
    pub(crate) access: u32,
    pub(crate) min_rnr_timer: u8,
    /// What other transports wait for an acknowledgement; TCP has its own.
    pub(crate) timeout: u8,
    pub(crate) inbound_reads: u8,
    pub(crate) outbound_reads: u8,
}

impl Default for States {
    fn default() -> Self {
        States {
            // An RNIC has nothing before: receives may be posted at once.
            state: c::IBV_QPS_INIT,
            access: 0,
            min_rnr_timer: 0,
            timeout: 0,
            inbound_reads: 0,
            outbound_reads: 0,
        }
    }
}

/// What a change asks of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Consequence {
    /// Nothing: it was noted.
    Noted,
    /// The connection ends, and everything posted is flushed.
    ToError,
}

impl States {
    /// Takes what a program says (`ibv_modify_qp(3)`).
    pub(crate) fn modify(
        &mut self,
        attributes: &c::ibv_qp_attr,
        mask: i32,
    ) -> Result<Consequence, Errno> {
        let mut consequence = Consequence::Noted;
        let other_state = attributes.cur_qp_state != self.state;
        let other_port = attributes.port_num != crate::context::PORT;
        if mask & c::IBV_QP_CUR_STATE != 0 && other_state
            || mask & c::IBV_QP_PORT != 0 && other_port
        {
            return Err(Errno::INVALID);
        }
        if mask & c::IBV_QP_STATE != 0 {
            consequence = self.may_become(attributes.qp_state)?;
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

    /// A connection has moved it.
    pub(crate) fn connected(&mut self) {
        self.state = c::IBV_QPS_RTS;
    }

    /// Its connection has ended.
    pub(crate) fn disconnected(&mut self) {
        self.state = c::IBV_QPS_ERR;
    }

    fn may_become(&self, next: u32) -> Result<Consequence, Errno> {
        use c::{IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD};
        match (self.state, next) {
            (_, IBV_QPS_ERR) => Ok(Consequence::ToError),
            (IBV_QPS_RESET | IBV_QPS_INIT, IBV_QPS_RESET | IBV_QPS_INIT)
            | (IBV_QPS_INIT, IBV_QPS_RTR)
            | (IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD, IBV_QPS_RTS)
            | (IBV_QPS_RTS, IBV_QPS_SQD) => Ok(Consequence::Noted),
            _ => Err(Errno::INVALID),
        }
    }
}
