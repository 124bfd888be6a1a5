//! What has happened to an id, until the program fetches it.

use std::sync::Arc;

use rnic_client::{AddressPair, ConnectionRequest, DatagramAddress, QpId};

use super::IdBody;
use crate::c;

/// One event (`rdma_get_cm_event(3)`).
pub(crate) struct Arrived {
    /// The id it is about; of a connection request, the listener's.
    pub(crate) id: Arc<IdBody>,
    pub(crate) kind: c::rdma_cm_event_type,
    /// 0, or a negative number of `errno(3)`.
    pub(crate) status: i32,
    pub(crate) connection: Option<Parameters>,
    /// Both ends, once they are known.
    pub(crate) addresses: Option<AddressPair>,
    /// The peer that waits.
    pub(crate) request: Option<ConnectionRequest>,
}

/// What two ends tell each other.
#[derive(Default)]
pub(crate) struct Parameters {
    pub(crate) private_data: Vec<u8>,
    /// Reads that the peer may have outstanding.
    pub(crate) inbound: u16,
    /// Reads that this end may have outstanding.
    pub(crate) outbound: u16,
    /// The queue pair, once there is one.
    pub(crate) qp: Option<QpId>,
    /// Where datagrams go, of an id of datagrams that knows it.
    pub(crate) address: Option<DatagramAddress>,
}

impl Arrived {
    pub(super) fn new(id: &Arc<IdBody>, kind: c::rdma_cm_event_type, status: i32) -> Self {
        Arrived { id: id.clone(), kind, status, connection: None, addresses: None, request: None }
    }
}
