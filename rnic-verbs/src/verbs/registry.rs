//! The objects of a session, as other objects and the event thread see them.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use rnic_client::{Completion, Context, CqId, Event, QpId, SrqId};

use crate::c::{ibv_cq, ibv_event_type, ibv_wc};
use crate::ffi::handles::Foreign;
use crate::verbs::adapter::Adapter;

/// A completion queue.
pub(crate) trait AnyCq: Send + Sync {
    /// Queues an asynchronous event.
    fn push_event(&self, kind: ibv_event_type);

    /// Counts a completion event that the program fetches. Returns the program's pointer.
    fn hand_out_event(&self) -> Foreign<ibv_cq>;
}

/// A shared receive queue.
pub(crate) trait AnySrq: Send + Sync {
    /// Queues an asynchronous event.
    fn push_event(&self, kind: ibv_event_type);

    /// Frees the slot of a completed receive. Returns its `wr_id`.
    fn receive_done(&self, completion: &Completion) -> u64;
}

/// A queue pair.
pub(crate) trait AnyQp: Any + Send + Sync {
    /// Queues an asynchronous event.
    fn push_event(&self, kind: ibv_event_type);

    /// Handles the end of draining: all requests begun before SQD have completed.
    fn drained(&self);

    fn uses_cq(&self, cq: CqId) -> bool;

    fn uses_srq(&self, srq: SrqId) -> bool;

    /// Frees the request of a completion, and the requests before it. Returns the completion in C.
    fn complete(&self, completion: &Completion) -> ibv_wc;
}

/// Connection management. A session has one once the program has created an id.
pub(crate) trait ConnectionManager: Any + Send + Sync {
    /// Waits until the QP is no longer connecting: the program can then read its
    /// `RDMA_CM_EVENT_ESTABLISHED`. Call it only with a completion that requires an established
    /// connection: the daemon has sent the event before the completion, so the wait ends.
    fn await_established(&self, qp: QpId);

    /// Ends the connection of a QP that is being destroyed.
    fn qp_destroyed(&self, qp: QpId);

    /// Returns true if the events of this QP are routed to an id.
    fn holds_qp(&self, qp: QpId) -> bool;

    /// Counts a call of `rdma_init_qp_attr(3)` for the transition to RTR of a QP that the program
    /// created without the id. The library learns which QP it is when the id connects.
    fn count_rtr_attrs(&self);

    /// Decrements the count for one transition to RTR. Returns false if it is already zero.
    fn uncount_rtr_attrs(&self) -> bool;

    /// Passes an event to the id of its listener or QP.
    fn deliver(&self, context: &Context, event: Event);

    /// Ends all waits, because the daemon has dropped events, possibly an awaited one.
    fn events_lost(&self);

    /// Ends all connections, because the daemon is gone.
    fn daemon_gone(&self);

    /// Ends all use of a device that was unplugged.
    fn unplugged(&self, device: &Arc<Adapter>);

    /// Returns the time until the next connection attempt is due, or `None` if there are none.
    fn due_in(&self) -> Option<Duration>;

    /// Repeats the connection attempts that are due.
    fn run_due(&self);
}
