//! Datagrams: Sends of one packet, each to the queue pair that it names.
//!
//! A queue pair made with [`QpType::Datagrams`](crate::QpType::Datagrams) has no peer. It goes from
//! Idle to Rtr by [`Qp::receive_datagrams`] and on to Rts by [`Qp::to_rts`](crate::Qp::to_rts).
//! Each request says where it goes ([`SendRequest::to`]). Nothing is acknowledged: a request
//! completes when its packet has left, and what nobody takes in is lost, told to neither end and
//! counted where it came ([`QpCounters::dropped`](crate::QpCounters::dropped)).
//!
//! At the receiver [`GRH_LEN`] bytes stand in the receive's memory before the data;
//! [`route_of`] reads from them who sent it.

use rnic_core::abi::control::QpChange;
use rnic_core::abi::queue::DatagramParams;
use rnic_core::roce::grh;
use rnic_core::types::{Gid, QpId};

use crate::error::Error;
use crate::qp::Qp;
use crate::request::SendRequest;

/// Bytes before the data of a datagram, in the receive's memory.
pub const GRH_LEN: usize = grh::LEN;

/// Where a datagram goes (`ibv_create_ah(3)`, and the `ud` of `ibv_post_send(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramAddress {
    /// Index of the device's own GID that it comes from, of
    /// [`Context::gids`](crate::Context::gids).
    pub source: u16,
    /// GID of the port that it goes to.
    pub gid: Gid,
    /// Number of the queue pair that it goes to, 24 bits.
    pub qp: QpId,
    /// The key that the queue pair has; with the high bit set, that of the sender's own.
    pub q_key: u32,
}

impl SendRequest<'_> {
    /// Sends the message, with its immediate data if it has some, as a datagram to this address: of
    /// queue pairs of [datagrams](crate::QpType::Datagrams), which need it in each request.
    #[must_use]
    pub fn to(mut self, address: &DatagramAddress) -> Self {
        let header = &mut self.header;
        (header.rkey, header.inv_rkey) = (address.qp.0, address.q_key);
        let params = DatagramParams { gid: address.gid, source: address.source };
        header.params = params.to_params(header.params[0]);
        self
    }
}

impl Qp {
    /// Has an Idle QP of datagrams take in those that have this Q_Key (`IBV_QPS_RTR`).
    ///
    /// # Errors
    ///
    /// As of [`to_rtr`](Self::to_rtr).
    pub fn receive_datagrams(&self, q_key: u32) -> Result<(), Error> {
        self.change(QpChange::ReceiveDatagrams { q_key })
    }

    /// Gives a QP of datagrams in Rtr, Rts or Sqd another Q_Key (`IBV_QP_QKEY`).
    ///
    /// # Errors
    ///
    /// As of [`to_rtr`](Self::to_rtr).
    pub fn set_q_key(&self, q_key: u32) -> Result<(), Error> {
        self.change(QpChange::QKey(q_key))
    }
}

/// Sender and receiver of the datagram with these bytes before its data; none if they are no
/// header.
pub fn route_of(header: &[u8; GRH_LEN]) -> Option<(Gid, Gid)> {
    grh::parse(header)
}
