//! Queue pairs that are wired by hand: the program tells each of two which GID and number the other
//! one has, by whatever way it has to bring them there, and needs no connection request.
//!
//! Made with [`QpType::Wired`](crate::QpType::Wired), such a queue pair goes from Idle to Rtr
//! ([`Qp::to_rtr`]) and on to Rts ([`Qp::to_rts`]), as `ibv_modify_qp(3)` has it; the states before
//! are this one's Idle. There is no connection to be seen: the daemons find each other when both
//! ends have been wired, and as long as they have not, what was posted waits. Requests complete
//! when the peer has acknowledged them, and the one that failed says so by its own status; one that
//! nobody acknowledges fails with `TransportRetryExceeded` after the time of [`Sending`].

use rnic_core::abi::control::{GidRow, QpChange, ReplyBody, RequestBody, Sending, Wiring};
use rnic_core::types::Access;

use crate::context::Context;
use crate::error::Error;
use crate::qp::Qp;
use crate::session::unexpected;

impl Context {
    /// The device's GIDs, by index (`ibv_query_gid_table(3)`).
    pub fn gids(&self) -> Result<Vec<GidRow>, Error> {
        match self.session.request(RequestBody::QueryGids)? {
            ReplyBody::Gids(rows) => Ok(rows),
            other => Err(unexpected(&other)),
        }
    }
}

impl Qp {
    /// Tells an Idle QP who its peer is; from now on it receives (`IBV_QPS_RTR`).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] names what is wrong: the state, a GID that is none of the device's, a
    /// number that cannot be, a limit, or a rule that forbids the address.
    pub fn to_rtr(&self, wiring: &Wiring) -> Result<(), Error> {
        self.change(QpChange::ReadyToReceive(*wiring))
    }

    /// Lets a QP in Rtr, Sqd or Sqe begin to send, or tells one in Rts something else
    /// (`IBV_QPS_RTS`).
    ///
    /// # Errors
    ///
    /// As of [`to_rtr`](Self::to_rtr).
    pub fn to_rts(&self, sending: &Sending) -> Result<(), Error> {
        self.change(QpChange::ReadyToSend(*sending))
    }

    /// Has a QP in Rts begin no more requests (`IBV_QPS_SQD`);
    /// [`Event::SendQueueDrained`](crate::Event::SendQueueDrained) says when all it had begun are
    /// done.
    ///
    /// # Errors
    ///
    /// As of [`to_rtr`](Self::to_rtr).
    pub fn drain_send_queue(&self) -> Result<(), Error> {
        self.change(QpChange::DrainSendQueue)
    }

    /// Lets a QP in Rtr, Rts or Sqd give its peer other rights to memory
    /// (`IBV_QP_ACCESS_FLAGS`).
    ///
    /// # Errors
    ///
    /// As of [`to_rtr`](Self::to_rtr).
    pub fn set_rights(&self, rights: Access) -> Result<(), Error> {
        self.change(QpChange::Rights(rights))
    }

    /// Has the peer of a QP in Rtr, Rts or Sqd wait another time for a receive, by the code of
    /// [`Wiring::min_rnr_timer`] (`IBV_QP_MIN_RNR_TIMER`).
    ///
    /// # Errors
    ///
    /// As of [`to_rtr`](Self::to_rtr).
    pub fn set_min_rnr_timer(&self, code: u8) -> Result<(), Error> {
        self.change(QpChange::MinRnrTimer(code))
    }

    /// Makes a QP that is wired by hand Idle again, from any state (`IBV_QPS_RESET`): what was
    /// posted is gone without a completion, and its peer is told as if it were gone. Completions
    /// that have been written can still be polled.
    ///
    /// # Errors
    ///
    /// As of [`to_rtr`](Self::to_rtr).
    pub fn reset(&self) -> Result<(), Error> {
        // Whoever posts waits: the queues begin anew.
        self.begin_anew(|| self.change(QpChange::Reset))
    }

    pub(crate) fn change(&self, change: QpChange) -> Result<(), Error> {
        self.session().command(RequestBody::ModifyQp { qp: self.id(), change })
    }
}
