//! State transitions of RC and UC QPs, as in `ibv_modify_qp(3)`.
//!
//! There is no connection request: the program exchanges GID and QP number with its peer by other
//! means. A QP of type [`QpType::Rc`](crate::QpType::Rc) moves from Idle, which includes the verbs
//! states before Rtr, to Rtr ([`Qp::to_rtr`]) and then to Rts ([`Qp::to_rts`]). The daemons connect
//! when both ends are in Rtr. Posted requests wait until then. A request completes when the peer
//! has acknowledged it, and a failed request has its own status. A request that is never
//! acknowledged fails with `TransportRetryExceeded` after the timeout and retries of [`Sending`].

use rnic_abi::abi::control::{Function, GidRow, QpChange, ReplyBody, RequestBody, Sending, Wiring};
use rnic_abi::types::Access;

use crate::context::Context;
use crate::error::Error;
use crate::qp::Qp;
use crate::session::unexpected;

impl Context {
    /// Queries the device's GIDs, in order of their index (`ibv_query_gid_table(3)`).
    pub fn gids(&self) -> Result<Vec<GidRow>, Error> {
        self.admit(Function::QueryGid.call())?;
        self.gids_unruled()
    }

    /// Same as [`gids`](Self::gids), without fault rules.
    pub fn gids_unruled(&self) -> Result<Vec<GidRow>, Error> {
        match self.session.request(RequestBody::QueryGids)? {
            ReplyBody::Gids(rows) => Ok(rows),
            other => Err(unexpected(&other)),
        }
    }
}

impl Qp {
    /// Moves an Idle QP to Rtr and sets its peer. It then receives messages (`IBV_QPS_RTR`).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with the cause: the state, a GID that is not the device's, an invalid
    /// number, a limit, or a rule that forbids the address.
    pub fn to_rtr(&self, wiring: &Wiring) -> Result<(), Error> {
        self.change(QpChange::ReadyToReceive(*wiring))
    }

    /// Moves a QP in Rtr, Sqd or Sqe to Rts, so that it may send. In Rts, changes its attributes
    /// (`IBV_QPS_RTS`).
    ///
    /// # Errors
    ///
    /// Same as [`to_rtr`](Self::to_rtr).
    pub fn to_rts(&self, sending: &Sending) -> Result<(), Error> {
        self.change(QpChange::ReadyToSend(*sending))
    }

    /// Moves a QP from Rts to Sqd (`IBV_QPS_SQD`). It starts no more requests.
    /// [`Event::SendQueueDrained`](crate::Event::SendQueueDrained) reports that all started
    /// requests have completed.
    ///
    /// # Errors
    ///
    /// Same as [`to_rtr`](Self::to_rtr).
    pub fn drain_send_queue(&self) -> Result<(), Error> {
        self.change(QpChange::DrainSendQueue)
    }

    /// Changes the peer's memory access rights on a QP in Rtr or later (`IBV_QP_ACCESS_FLAGS`).
    ///
    /// # Errors
    ///
    /// Same as [`to_rtr`](Self::to_rtr).
    pub fn set_rights(&self, rights: Access) -> Result<(), Error> {
        self.change(QpChange::Rights(rights))
    }

    /// Changes the minimum RNR NAK timer of a QP in Rtr or later, coded as
    /// [`Wiring::min_rnr_timer`] (`IBV_QP_MIN_RNR_TIMER`).
    ///
    /// # Errors
    ///
    /// Same as [`to_rtr`](Self::to_rtr).
    pub fn set_min_rnr_timer(&self, code: u8) -> Result<(), Error> {
        self.change(QpChange::MinRnrTimer(code))
    }

    /// Moves a QP of the RoCE device from any state to Idle (`IBV_QPS_RESET`). Posted requests are
    /// discarded without completions, and the peer is notified as if the QP were destroyed.
    /// Completions that are already written can still be polled.
    ///
    /// # Errors
    ///
    /// Same as [`to_rtr`](Self::to_rtr).
    pub fn reset(&self) -> Result<(), Error> {
        // Other threads cannot post until both queues are reset.
        self.reset_queues(|| self.change(QpChange::Reset))
    }

    pub(crate) fn change(&self, change: QpChange) -> Result<(), Error> {
        self.session().command(RequestBody::ModifyQp { qp: self.id(), change })
    }
}
