//! UD QPs: Sends of one packet, each with its own destination.
//!
//! A QP of type [`QpType::Ud`](crate::QpType::Ud) has no peer. It moves from Idle to Rtr
//! ([`Qp::receive_datagrams`]) and then to Rts ([`Qp::to_rts`](crate::Qp::to_rts)). Each request
//! has a destination ([`SendRequest::to`]). Datagrams are not acknowledged: a request completes
//! when its packet has been sent. A packet that cannot be received is lost without notice to either
//! end, and the receiver counts it ([`QpCounters::dropped`](crate::QpCounters::dropped)).
//!
//! A receive contains [`GRH_LEN`] bytes of GRH before the data; [`route_of`] returns the sender's
//! and the receiver's GID from it.

use rnic_abi::abi::control::QpChange;
use rnic_abi::abi::queue::DatagramParams;
use rnic_abi::roce::grh;
use rnic_abi::types::{Gid, QpId};

use crate::error::Error;
use crate::qp::Qp;
use crate::request::SendRequest;

/// Length of the GRH area before the data of a datagram, in bytes.
pub const GRH_LEN: usize = grh::LEN;

/// Destination of a datagram (`ibv_create_ah(3)`, and `ud` of `ibv_post_send(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramAddress {
    /// Index of the sender's GID in [`Context::gids`](crate::Context::gids).
    pub source: u16,
    /// GID of the destination port.
    pub gid: Gid,
    /// QP number of the destination, 24 bits.
    pub qp: QpId,
    /// Q_Key of the destination QP. If the high bit is set, the sending QP's own Q_Key is used.
    pub q_key: u32,
}

impl SendRequest<'_> {
    /// Sets the destination of a Send, with or without immediate data. Required for each request of
    /// a [UD](crate::QpType::Ud) QP.
    #[must_use]
    pub fn to(mut self, address: &DatagramAddress) -> Self {
        let header = &mut self.header;
        header.rkey = address.qp.0;
        header.inv_rkey = address.q_key;
        let params = DatagramParams { gid: address.gid, source: address.source };
        header.params = params.to_params(header.params[0]);
        self
    }
}

impl Qp {
    /// Moves an Idle UD QP to Rtr. It then receives datagrams with this Q_Key (`IBV_QPS_RTR`).
    ///
    /// # Errors
    ///
    /// Same as [`to_rtr`](Self::to_rtr).
    pub fn receive_datagrams(&self, q_key: u32) -> Result<(), Error> {
        self.change(QpChange::ReceiveDatagrams { q_key })
    }

    /// Changes the Q_Key of a UD QP in Rtr or later (`IBV_QP_QKEY`).
    ///
    /// # Errors
    ///
    /// Same as [`to_rtr`](Self::to_rtr).
    pub fn set_q_key(&self, q_key: u32) -> Result<(), Error> {
        self.change(QpChange::QKey(q_key))
    }
}

/// Returns the GIDs of the sender and the receiver of a datagram; `None` if its GRH is invalid.
pub fn route_of(header: &[u8; GRH_LEN]) -> Option<(Gid, Gid)> {
    grh::parse(header)
}
