//! Acknowledging events of ids.

use std::ptr::null_mut;
use std::sync::Arc;

use rnic_client::Function;

use super::state::IdBody;
use crate::c::{rdma_cm_event, rdma_cm_id};
use crate::errno::{self, Errno};
use crate::ffi::handles::{Body, Kind, live, withdraw};
use crate::ffi::pointers::{Fields, get, set};
use crate::system;

/// The body of an event that a program has fetched.
pub(super) struct CmEventBody {
    /// The id of the event, or the listener of a connection request.
    pub(super) id: Arc<IdBody>,
    /// Valid until the program acknowledges the event.
    pub(super) _private_data: Vec<u8>,
}

impl Body for CmEventBody {
    type Head = rdma_cm_event;
    const KIND: Kind = Kind::CmEvent;
}

/// Acknowledges an event (`rdma_ack_cm_event(3)`).
pub(super) fn acknowledge(event: *mut rdma_cm_event) -> Result<(), Errno> {
    // SAFETY: no thread uses `event`, now or later (rdma_ack_cm_event(3)).
    let fetched = unsafe { withdraw::<CmEventBody>(event) }?;
    fetched.id.unacknowledged.acknowledge(1);
    Ok(())
}

pub(super) fn acknowledge_by_program(event: *mut rdma_cm_event) -> Result<(), Errno> {
    live::<CmEventBody>(event)?.id.admit_call(Function::AckCmEvent)?;
    acknowledge(event)
}

/// Acknowledges the event in the C structure of a synchronous id.
pub(super) fn acknowledge_own(id: impl Fields<C = rdma_cm_id>) {
    let _guard = system::uncancelled();
    let event = get!(id.event);
    set!(id.event = null_mut());
    if !event.is_null() {
        errno::nothing(acknowledge(event));
    }
}
