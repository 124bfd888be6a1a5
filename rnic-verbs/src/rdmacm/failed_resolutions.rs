//! Resolutions of addresses and routes that fault rules fail.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rnic_client::LibraryCall;

use super::state::IdBody;
use crate::c::{RDMA_CM_EVENT_ADDR_ERROR, RDMA_CM_EVENT_ROUTE_ERROR, rdma_cm_event_type};
use crate::errno::Errno;
use crate::log;
use crate::strings::cm_event;

/// Ids whose resolution a fault rule may fail, by the number in the daemon's event.
#[derive(Default)]
pub(super) struct FailedResolutions(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    last: u64,
    ids: HashMap<u64, (Weak<IdBody>, rdma_cm_event_type)>,
}

impl Waiting {
    fn add(&mut self, id: &Arc<IdBody>, kind: rdma_cm_event_type) -> u64 {
        self.last += 1;
        self.ids.insert(self.last, (Arc::downgrade(id), kind));
        self.last
    }
}

impl FailedResolutions {
    /// Queues the event of a failed resolution, unless the id is destroyed.
    pub(super) fn failed(&self, number: u64, errno: i32) {
        let waiting = self.0.lock().ids.remove(&number);
        let Some((id, kind)) = waiting else { return };
        log::debug(|| format!("{}: injected by a fault rule", cm_event(kind).to_string_lossy()));
        if let Some(id) = id.upgrade() {
            id.push(kind, -errno);
        }
    }
}

impl FailedResolutions {
    /// Queues the events of all failed resolutions, because no more events arrive.
    pub(super) fn fail_all(&self) {
        let waiting: Vec<u64> = self.0.lock().ids.keys().copied().collect();
        waiting.into_iter().for_each(|number| self.failed(number, libc::ENODEV));
    }
}

impl IdBody {
    /// Evaluates the fault rules of `rdma_resolve_addr(3)`. Returns false if an event reports the
    /// failure later. The id is then unchanged.
    pub(super) fn admit_address(self: &Arc<Self>, peer: SocketAddr) -> Result<bool, Errno> {
        self.admit(RDMA_CM_EVENT_ADDR_ERROR, |context| LibraryCall::ResolveAddr { context, peer })
    }

    /// Like [`admit_address`](Self::admit_address), for `rdma_resolve_route(3)`.
    pub(super) fn admit_route(self: &Arc<Self>, peer: SocketAddr) -> Result<bool, Errno> {
        self.admit(RDMA_CM_EVENT_ROUTE_ERROR, |context| LibraryCall::ResolveRoute { context, peer })
    }

    fn admit(
        self: &Arc<Self>,
        kind: rdma_cm_event_type,
        call: impl FnOnce(u64) -> LibraryCall,
    ) -> Result<bool, Errno> {
        let resolutions = &self.ids().failed_resolutions;
        // Before the request, because the event may precede its reply.
        let number = resolutions.0.lock().add(self, kind);
        let admitted = self.device.context.admit(call(number));
        if !matches!(admitted, Ok(false)) {
            resolutions.0.lock().ids.remove(&number);
        }
        Ok(admitted?)
    }
}
