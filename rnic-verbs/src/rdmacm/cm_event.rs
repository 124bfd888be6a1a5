//! Events of an id that wait to be fetched.

use std::sync::Arc;

use rnic_client::{AddressPair, ConnectionRequest, DatagramAddress, QpId};

use super::IdBody;
use crate::c;

/// An event (`rdma_get_cm_event(3)`).
pub(crate) struct CmEvent {
    /// The id of the event, or the listener of a connection request.
    pub(crate) id: Arc<IdBody>,
    pub(crate) kind: c::rdma_cm_event_type,
    /// 0, a negative `errno(3)` number, or the positive SIDR status of a failed UD lookup.
    pub(crate) status: i32,
    pub(crate) connection: Option<Parameters>,
    /// The addresses of both ends, if known.
    pub(crate) addresses: Option<AddressPair>,
    /// The connection request.
    pub(crate) request: Option<ConnectionRequest>,
}

/// Parameters of a connection, or the result of a UD lookup.
#[derive(Default)]
pub(crate) struct Parameters {
    pub(crate) private_data: Vec<u8>,
    /// Maximum number of outstanding Reads from the peer.
    pub(crate) inbound: u16,
    /// Maximum number of outstanding Reads to the peer.
    pub(crate) outbound: u16,
    /// The queue pair, if known.
    pub(crate) qp: Option<QpId>,
    /// Destination of datagrams, for an id of `RDMA_PS_UDP`.
    pub(crate) address: Option<DatagramAddress>,
}

impl CmEvent {
    pub(super) fn new(id: &Arc<IdBody>, kind: c::rdma_cm_event_type, status: i32) -> Self {
        CmEvent { id: id.clone(), kind, status, connection: None, addresses: None, request: None }
    }
}
