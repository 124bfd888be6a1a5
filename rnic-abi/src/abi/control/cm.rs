//! Parameters of connections of RC and UC QPs (rdma_cm on the RoCE device).

use serde::{Deserialize, Serialize};

use crate::types::*;

/// Parameters that this end sends to its peer in REQ or REP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RcOffer {
    /// Starting PSN, 24 bits: the PSN of the peer's first packet
    /// ([`Wiring::rq_psn`](super::Wiring::rq_psn) of this end).
    pub psn: u32,
    /// Outstanding RDMA Reads and atomic operations of the peer that this end accepts.
    pub responder_resources: u8,
    /// Outstanding RDMA Reads and atomic operations that this end requests.
    pub initiator_depth: u8,
    /// Retries after an ACK timeout, 0 to 7. REP has no such field.
    pub retry_count: u8,
    /// Retries of the peer after an RNR NAK of this end, 0 to 7.
    pub rnr_retry: u8,
    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096. REP has no such field.
    pub path_mtu: u16,
    /// Traffic class of the path. REP has no such field.
    pub traffic_class: u8,
    /// The QP has an SRQ.
    pub srq: bool,
}

/// The peer's QP and its parameters, as received in REQ or REP. Fields that REP does not have are
/// those of this end's REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RcPeer {
    /// Index of this end's GID in the device's table.
    pub source: u16,
    /// The peer's GID.
    pub gid: Gid,
    /// The peer's QP, 24 bits.
    pub qp: QpId,
    /// Starting PSN, 24 bits: the PSN of this end's first packet
    /// ([`Sending::sq_psn`](super::Sending::sq_psn) of this end).
    pub psn: u32,
    /// Outstanding RDMA Reads and atomic operations that the peer accepts.
    pub responder_resources: u8,
    /// Outstanding RDMA Reads and atomic operations that the peer requests.
    pub initiator_depth: u8,
    /// Retries after an ACK timeout, 0 to 7.
    pub retry_count: u8,
    /// Retries after an RNR NAK of the peer, 0 to 7.
    pub rnr_retry: u8,
    /// ACK timeout: 4.096 us times 2 to the power of this value, 5 bits.
    pub ack_timeout: u8,
    /// Path MTU in bytes.
    pub path_mtu: u16,
    /// Traffic class of the path.
    pub traffic_class: u8,
    /// The peer's QP has an SRQ.
    pub srq: bool,
}
