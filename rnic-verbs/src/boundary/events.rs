//! Fetching and acknowledging events, of ids and of devices.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

use crate::address_handle::attributes_to;
use crate::async_events::AsyncEvent;
use crate::c::*;
use crate::cm::{Arrived, IdBody};
use crate::cq::CqBody;
use crate::device::DeviceKind;
use crate::errno::{Errno, minus_one};
use crate::object::{Body, body, publish, withdraw, zeroed};
use crate::qp::QpBody;
use crate::srq::SrqBody;

use super::context::context;
use super::id::{self, channel, shown};

/// What stands behind an event that a program has fetched.
struct EventShown {
    /// Whose it is: of a connection request, the listener.
    id: Arc<IdBody>,
    /// The program may look at it until it acknowledges.
    _private_data: Vec<u8>,
}

impl Body for EventShown {
    type Head = rdma_cm_event;
}

/// rdma_get_cm_event(3). A thread may be cancelled in it: nothing is held meanwhile.
pub(crate) unsafe extern "C-unwind" fn rdma_get_cm_event(
    from: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_event,
) -> c_int {
    // SAFETY: as the module says.
    minus_one(unsafe { fetch(from).map(|event| to.write(event)) })
}

/// As [`rdma_get_cm_event`].
pub(super) unsafe fn fetch(from: *mut rdma_event_channel) -> Result<*mut rdma_cm_event, Errno> {
    // SAFETY: as the module says.
    unsafe {
        let arrived = channel(from)?.next()?;
        let listener = arrived.id.clone();
        show(arrived).inspect_err(|_| listener.unacknowledged.acknowledge(1))
    }
}

/// Makes an event into a structure of C, and its id look as it is since.
unsafe fn show(mut arrived: Arrived) -> Result<*mut rdma_cm_event, Errno> {
    let mut head: rdma_cm_event = zeroed();
    (head.event, head.status) = (arrived.kind, arrived.status);
    let of = arrived.id.head().0;
    // SAFETY: as the module says: an id is not destroyed while its events are fetched.
    unsafe {
        match arrived.request.take() {
            Some(request) => {
                let synchronous = shown(of)?.is_synchronous();
                let channel = if synchronous { null_mut() } else { (*of).channel };
                let (device, kind) = (arrived.id.device(), arrived.id.kind());
                let body = |on| IdBody::with_request(device.clone(), kind, on, Some(request));
                head.listen_id = of;
                head.id = id::make(device, channel, (*of).context, (*of).ps, body)?;
                id::show_addresses(head.id, &shown(head.id)?.id)?;
            }
            None => {
                head.id = of;
                id::show_addresses(of, &arrived.id)?;
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
    conn.qp_num = connection.qp.map_or(0, |qp| qp.0);
    head.param = match arrived.id.kind() {
        DeviceKind::Iwarp => rdma_cm_event_param { conn },
        DeviceKind::Roce => {
            let (private_data, private_data_len) = (conn.private_data, conn.private_data_len);
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
    Ok(publish(head, EventShown { id: arrived.id, _private_data: private_data }).as_ptr())
}

/// rdma_ack_cm_event(3).
pub(crate) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return minus_one(Err(Errno::INVALID));
    }
    // SAFETY: as the module says.
    let shown = unsafe { withdraw::<EventShown>(event) };
    shown.id.unacknowledged.acknowledge(1);
    0
}

/// Acknowledges the event that a synchronous id shows.
pub(super) unsafe fn acknowledge_own(id: *mut rdma_cm_id) {
    // SAFETY: as the module says.
    unsafe {
        let event = std::mem::replace(&mut (*id).event, null_mut());
        if !event.is_null() {
            rdma_ack_cm_event(event);
        }
    }
}

/// Begins something, and if the id is synchronous waits for what comes of it; the event stands in
/// the id until the next one. An id that is not synchronous is not looked at once it has begun:
/// whoever fetches the event may destroy it.
pub(super) unsafe fn completed(
    id: *mut rdma_cm_id,
    begin: impl FnOnce(&Arc<IdBody>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    // SAFETY: as the module says.
    unsafe {
        let found = shown(id)?;
        let (of, waits) = (found.id.clone(), found.is_synchronous());
        begin(&of)?;
        if waits { complete(id) } else { Ok(()) }
    }
}

/// Waits for the next event of a synchronous id.
unsafe fn complete(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: as the module says.
    unsafe {
        acknowledge_own(id);
        (*id).event = fetch((*id).channel)?;
        match (*(*id).event).status {
            0 => Ok(()),
            status => Err(Errno(status.abs())),
        }
    }
}

/// ibv_get_async_event(3). A thread may be cancelled in it: nothing is held meanwhile.
pub(crate) unsafe extern "C-unwind" fn ibv_get_async_event(
    of: *mut ibv_context,
    to: *mut ibv_async_event,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let counted = |event: &AsyncEvent| {
            if let Some(count) = unacknowledged_of(event.kind) {
                count(event.element.0, 1);
            }
        };
        let next = match context(of) {
            Some(context) => context.async_events().next(counted).map_err(Errno::from),
            None => Err(Errno::INVALID),
        };
        minus_one(next.map(|event| {
            let element = event.element.0;
            let mut head: ibv_async_event = zeroed();
            head.event_type = event.kind;
            match unacknowledged_of(event.kind) {
                Some(_) => head.element.cq = element.cast(),
                None => head.element.port_num = i32::from(crate::context::PORT),
            }
            to.write(head);
        }))
    }
}

/// ibv_ack_async_event(3).
pub(crate) unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: as the module says.
    unsafe {
        if let Some(event) = event.as_ref()
            && let Some(count) = unacknowledged_of(event.event_type)
        {
            count(event.element.cq.cast(), -1);
        }
    }
}

/// How events of a kind are counted, by the object that they are about; `None` if they are about
/// the device.
fn unacknowledged_of(kind: ibv_event_type) -> Option<unsafe fn(*mut libc::c_void, i32)> {
    /// One more handed out, or acknowledged.
    fn counted(events: &crate::async_events::Unacknowledged, more: i32) {
        if more > 0 { events.handed_out() } else { events.acknowledge(1) }
    }
    unsafe fn of_cq(element: *mut libc::c_void, more: i32) {
        // SAFETY: as the module says; the kind of the event says what it is about.
        if let Some(cq) = unsafe { body::<Arc<CqBody>>(element.cast()) } {
            counted(&cq.async_events, more);
        }
    }
    unsafe fn of_qp(element: *mut libc::c_void, more: i32) {
        // SAFETY: as above.
        if let Some(qp) = unsafe { body::<Arc<QpBody>>(element.cast()) } {
            counted(&qp.async_events, more);
        }
    }
    unsafe fn of_srq(element: *mut libc::c_void, more: i32) {
        // SAFETY: as above.
        if let Some(srq) = unsafe { body::<Arc<SrqBody>>(element.cast()) } {
            counted(&srq.async_events, more);
        }
    }
    match kind {
        IBV_EVENT_CQ_ERR => Some(of_cq),
        IBV_EVENT_QP_FATAL
        | IBV_EVENT_QP_REQ_ERR
        | IBV_EVENT_QP_ACCESS_ERR
        | IBV_EVENT_QP_LAST_WQE_REACHED
        | IBV_EVENT_COMM_EST
        | IBV_EVENT_SQ_DRAINED => Some(of_qp),
        IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => Some(of_srq),
        _ => None,
    }
}
