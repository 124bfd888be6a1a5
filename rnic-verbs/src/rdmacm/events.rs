//! Fetching and acknowledging events of ids and devices.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::c::*;
use crate::errno::{Errno, minus_one};
use crate::ffi::handles::{Body, Kind, live, publish, withdraw, zeroed};
use crate::rdmacm::{CmEvent, IdBody};
use crate::strings::rdma_event_str;
use crate::system;
use crate::verbs::ah::attributes_to;
use crate::verbs::async_events::{AsyncEvent, Unacknowledged};
use crate::verbs::cq::CqBody;
use crate::verbs::device::DeviceKind;
use crate::verbs::qp::QpBody;
use crate::verbs::srq::SrqBody;

use crate::ffi::pointers::argument_mut;
use crate::rdmacm::id::entry::{self as id, channel, cm_id};
use crate::verbs::context::entry::context;

/// The body of an event that a program has fetched.
struct CmEventBody {
    /// The id of the event, or the listener of a connection request.
    id: Arc<IdBody>,
    /// Valid until the program acknowledges the event.
    _private_data: Vec<u8>,
}

impl Body for CmEventBody {
    type Head = rdma_cm_event;
    const KIND: Kind = Kind::CmEvent;
}

/// rdma_get_cm_event(3). A cancellation point: the call holds no resources while it waits.
pub(crate) unsafe extern "C-unwind" fn rdma_get_cm_event(
    from: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_event,
) -> c_int {
    // SAFETY: `to` is null or has room for a pointer, and the caller does not destroy `from` during
    // the call (rdma_get_cm_event(3)).
    minus_one(unsafe {
        argument_mut(to, "event").and_then(|to| fetch(from).map(|event| *to = event))
    })
}

/// Like [`rdma_get_cm_event`].
pub(crate) unsafe fn fetch(from: *mut rdma_event_channel) -> Result<*mut rdma_cm_event, Errno> {
    // SAFETY: the caller does not destroy `from` during the call. `next` has counted the event.
    unsafe {
        let arrived = channel(from)?.next()?;
        let listener = arrived.id.clone();
        show(arrived).inspect_err(|_| listener.unacknowledged.acknowledge(1))
    }
}

/// Turns an event into its C structure, and updates the C structure of its id.
unsafe fn show(mut arrived: CmEvent) -> Result<*mut rdma_cm_event, Errno> {
    let mut head: rdma_cm_event = zeroed();
    head.event = arrived.kind;
    head.status = arrived.status;
    let of = arrived.id.head().0;
    // SAFETY: `of` is live, because `IdBody::destroy` waits until the event that `next` has counted
    // is acknowledged. No other thread has the new id yet.
    unsafe {
        match arrived.request.take() {
            Some(request) => {
                let synchronous = cm_id(of)?.is_synchronous();
                let channel = if synchronous { null_mut() } else { (*of).channel };
                let body = |on| IdBody::with_request(&arrived.id, on, request);
                head.listen_id = of;
                head.id = id::make(arrived.id.device(), channel, (*of).context, (*of).ps, body)?;
                id::show_addresses(head.id, &cm_id(head.id)?.id)?;
            }
            None => {
                head.id = of;
                id::show_addresses(of, &arrived.id)?;
                if arrived.kind == RDMA_CM_EVENT_ROUTE_RESOLVED {
                    id::show_path(of)?;
                }
            }
        }
    }
    let connection = arrived.connection.unwrap_or_default();
    let private_data = connection.private_data;
    let small = |n: u16| u8::try_from(n).unwrap_or(u8::MAX);
    let length = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
    // SAFETY: zeros are numbers and a null pointer.
    let mut conn: rdma_conn_param = unsafe { std::mem::zeroed() };
    if length > 0 {
        conn.private_data = private_data.as_ptr().cast();
    }
    conn.private_data_len = length;
    conn.responder_resources = small(connection.inbound);
    conn.initiator_depth = small(connection.outbound);
    head.param = match arrived.id.kind() {
        DeviceKind::Iwarp => rdma_cm_event_param { conn },
        DeviceKind::Roce => {
            let private_data = conn.private_data;
            let private_data_len = conn.private_data_len;
            rdma_cm_event_param {
                ud: match connection.address {
                    Some(to) => rdma_ud_param {
                        private_data,
                        private_data_len,
                        ah_attr: attributes_to(to.source, to.gid)?,
                        qp_num: to.qp.0,
                        qkey: to.q_key,
                    },
                    None => rdma_ud_param { private_data, private_data_len, ..zeroed() },
                },
            }
        }
    };
    Ok(publish(head, CmEventBody { id: arrived.id, _private_data: private_data }).as_ptr())
}

/// rdma_ack_cm_event(3).
pub(crate) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: no other thread uses `event`, now or later (rdma_ack_cm_event(3)).
    let fetched = unsafe { withdraw::<CmEventBody>(event) };
    minus_one(fetched.map(|event| event.id.unacknowledged.acknowledge(1)))
}

/// Acknowledges the event in the C structure of a synchronous id.
pub(crate) unsafe fn acknowledge_own(id: *mut rdma_cm_id) {
    // SAFETY: callers have found `id` with `cm_id`, and no other thread uses the event in it.
    unsafe {
        let event = std::mem::replace(&mut (*id).event, null_mut());
        if !event.is_null() {
            rdma_ack_cm_event(event);
        }
    }
}

/// Begins an operation. If the id is synchronous, waits for its event, which stays in the id until
/// the next one. Otherwise the id is not accessed after `begin`, because another thread may fetch
/// the event and destroy the id. The wait is a cancellation point.
pub(crate) unsafe fn completed(
    id: *mut rdma_cm_id,
    begin: impl FnOnce(&Arc<IdBody>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    // SAFETY: `cm_id` finds `id`, which the caller does not destroy before its event follows. A
    // synchronous id gets its event in this call and is not destroyed during it.
    unsafe {
        let found = cm_id(id)?;
        let guard = system::uncancelled();
        let of = found.id.clone();
        let waits = found.is_synchronous();
        begin(&of)?;
        // No resources may be held during the wait.
        drop(of);
        drop(guard);
        if waits { complete(id) } else { Ok(()) }
    }
}

/// Waits for the next event of a synchronous id.
unsafe fn complete(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: `completed` has found `id`, which is synchronous and not destroyed during the call.
    // No other thread has the new event yet.
    unsafe {
        acknowledge_own(id);
        (*id).event = fetch((*id).channel)?;
        match (*(*id).event).status {
            0 => Ok(()),
            status => Err(failed_event((*(*id).event).event, status)),
        }
    }
}

/// Returns the error of a synchronous call with this event status.
pub(crate) fn failed_event(kind: rdma_cm_event_type, status: c_int) -> Errno {
    let number = if status < 0 { -status } else { libc::ECONNREFUSED };
    // SAFETY: the names of events are static strings of C.
    let name = unsafe { std::ffi::CStr::from_ptr(rdma_event_str(kind)) }.to_string_lossy();
    Errno::new(number, format_args!("{name} with status {status}"))
}

/// ibv_get_async_event(3). A cancellation point: the call holds no resources while it waits.
pub(crate) unsafe extern "C-unwind" fn ibv_get_async_event(
    of: *mut ibv_context,
    to: *mut ibv_async_event,
) -> c_int {
    // SAFETY: the caller does not close `of` during the call, and `to` has room for an event
    // (ibv_get_async_event(3)). An object with a queued event is live (see `detach`).
    unsafe {
        let counted = |event: &AsyncEvent| {
            if let Some(element) = Element::of(event.kind) {
                // Destroying an object removes its queued events, and waits for fetched ones.
                let _ = element.unacknowledged(event.element.0).map(|events| events.handed_out());
            }
        };
        let next = context(of)
            .and_then(|context| context.async_events().next(counted).map_err(Errno::from));
        minus_one(next.map(|event| {
            let element = event.element.0;
            let mut head: ibv_async_event = zeroed();
            head.event_type = event.kind;
            match Element::of(event.kind) {
                Some(_) => head.element.cq = element.cast(),
                None => head.element.port_num = i32::from(crate::verbs::context::PORT),
            }
            to.write(head);
        }))
    }
}

/// ibv_ack_async_event(3).
pub(crate) unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: `event` is null or valid, and the caller has not acknowledged it before
    // (ibv_ack_async_event(3)). A kind with an `Element` has a pointer in the union.
    unsafe {
        if let Some(event) = event.as_ref()
            && let Some(element) = Element::of(event.event_type)
            && let Err(errno) = element.acknowledge(event.element.cq.cast())
        {
            errno.log();
        }
    }
}

/// The kind of object that an asynchronous event is about.
#[derive(Clone, Copy)]
enum Element {
    Cq,
    Qp,
    Srq,
}

impl Element {
    /// Returns the kind of object of an event, or `None` for events about the device.
    fn of(kind: ibv_event_type) -> Option<Element> {
        match kind {
            IBV_EVENT_CQ_ERR => Some(Element::Cq),
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED => Some(Element::Qp),
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => Some(Element::Srq),
            _ => None,
        }
    }

    /// Returns the counter of the object's unacknowledged events.
    unsafe fn unacknowledged<'a>(
        self,
        element: *mut libc::c_void,
    ) -> Result<&'a Unacknowledged, Errno> {
        // SAFETY: the caller does not destroy the object while the result is in use.
        unsafe {
            Ok(match self {
                Element::Cq => &live::<Arc<CqBody>>(element.cast())?.async_events,
                Element::Qp => &live::<Arc<QpBody>>(element.cast())?.async_events,
                Element::Srq => &live::<Arc<SrqBody>>(element.cast())?.async_events,
            })
        }
    }

    /// Counts an acknowledgement, in the library and in the C structure.
    unsafe fn acknowledge(self, element: *mut libc::c_void) -> Result<(), Errno> {
        // SAFETY: `unacknowledged` finds a live object of this kind, which is not destroyed before
        // this event is acknowledged.
        unsafe {
            let unacknowledged = self.unacknowledged(element)?;
            let counter = match self {
                Element::Cq => &raw mut (*element.cast::<ibv_cq>()).async_events_completed,
                Element::Qp => &raw mut (*element.cast::<ibv_qp>()).events_completed,
                Element::Srq => &raw mut (*element.cast::<ibv_srq>()).events_completed,
            };
            count(counter, 1);
            unacknowledged.acknowledge(1);
        }
        Ok(())
    }
}

/// Adds to a counter in a C structure, which the program may read at any time.
///
/// # Safety
///
/// The counter is part of a live object.
pub(crate) unsafe fn count(counter: *mut u32, more: u32) {
    // SAFETY: a live object is valid for writes, and `u32` has the alignment of `AtomicU32`.
    unsafe { AtomicU32::from_ptr(counter) }.fetch_add(more, Ordering::Relaxed);
}
