//! Undecided requests and resolutions.

use std::net::IpAddr;
use std::time::Duration;

use rnic_abi::roce::ServiceId;
use rnic_abi::roce::mad::{Bytes, Exchange};
use rnic_abi::types::{AddressPair, ListenerId, QpId, RequestId, SessionId, Time};

/// A resolution that waits for its reply.
#[derive(Debug)]
pub struct SidrResolution {
    pub(in crate::cm) session: SessionId,
    pub(in crate::cm) qp: QpId,
    pub(super) exchange: Exchange,
    pub(super) addresses: AddressPair,
    /// Index of the source GID in the device's table.
    pub(super) source: u16,
    pub(super) request: Box<Bytes>,
    /// Pause after the next transmission.
    pub(super) pause: Duration,
    pub(super) until: Time,
}

/// A SIDR request that the program has not decided.
#[derive(Debug)]
pub struct SidrRequest {
    pub(in crate::cm) session: SessionId,
    pub(in crate::cm) listener: ListenerId,
    pub(in crate::cm) request: RequestId,
    pub(in crate::cm) from: IpAddr,
    pub(super) to: IpAddr,
    pub(in crate::cm) exchange: Exchange,
    pub(super) service: ServiceId,
}
