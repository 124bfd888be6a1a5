//! Fetching and acknowledging asynchronous events.

use std::sync::Arc;

use rnic_client::Function;

use super::{AsyncEvent, Unacknowledged};
use crate::c::*;
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{live, zeroed};
use crate::ffi::pointers::{In, Out, add};
use crate::verbs::context::any_context;
use crate::verbs::cq::CqBody;
use crate::verbs::device::PORT;
use crate::verbs::qp::QpBody;
use crate::verbs::srq::SrqBody;

fn get(of: *mut ibv_context, to: Out<ibv_async_event>) -> Result<(), Errno> {
    let counted = |event: &AsyncEvent| {
        if let Some(element) = Element::of(event.kind) {
            // The object exists: destroying it removes its queued events, and waits for fetched
            // ones.
            let _ = element.with(event.element.0, |unacknowledged, _| unacknowledged.handed_out());
        }
    };
    let to = to.required("event")?;
    let context = any_context(of)?;
    context.device().admit(Function::GetAsyncEvent.call())?;
    let event = context.async_events().next(counted)?;
    let element = event.element.0;
    let mut head: ibv_async_event = zeroed();
    head.event_type = event.kind;
    match Element::of(event.kind) {
        Some(_) => head.element.cq = element.cast(),
        None => head.element.port_num = i32::from(PORT),
    }
    to.write(head);
    Ok(())
}

fn ack(event: In<ibv_async_event>) -> Result<(), Errno> {
    let Some(event) = event.optional() else { return Ok(()) };
    let Some(element) = Element::of(event.event_type) else { return Ok(()) };
    // SAFETY: a kind with an `Element` has a pointer in the union.
    let at = unsafe { event.element.cq };
    element.with(at.cast(), |unacknowledged, count| {
        count();
        unacknowledged.acknowledge(1);
    })
}

/// The kind of object that an asynchronous event concerns.
#[derive(Clone, Copy)]
enum Element {
    Cq,
    Qp,
    Srq,
}

impl Element {
    /// Returns the kind of object of an event, or `None` for events of the device or its port.
    fn of(kind: ibv_event_type) -> Option<Element> {
        match kind {
            IBV_EVENT_CQ_ERR => Some(Element::Cq),
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_SQ_DRAINED => Some(Element::Qp),
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => Some(Element::Srq),
            _ => None,
        }
    }

    /// Calls `does` with the counter of the object's unacknowledged events, and a function that
    /// counts an acknowledgement in the C structure.
    fn with(
        self,
        at: *mut libc::c_void,
        does: impl FnOnce(&Unacknowledged, &dyn Fn()),
    ) -> Result<(), Errno> {
        match self {
            Element::Cq => {
                let cq = live::<Arc<CqBody>>(at.cast())?;
                does(&cq.events.unacknowledged, &|| add!(cq.cq_base.async_events_completed += 1));
            }
            Element::Qp => {
                let qp = live::<Arc<QpBody>>(at.cast())?;
                does(&qp.events.unacknowledged, &|| add!(qp.qp_base.events_completed += 1));
            }
            Element::Srq => {
                let srq = live::<Arc<SrqBody>>(at.cast())?;
                does(&srq.events.unacknowledged, &|| add!(srq.events_completed += 1));
            }
        }
        Ok(())
    }
}

entry! {
    /// ibv_get_async_event(3). Holds no resources while it waits.
    cancellable ibv_get_async_event(of: *mut ibv_context, to: Out<ibv_async_event>) -> minus_one
        = get;
    plain ibv_ack_async_event(event: In<ibv_async_event>) -> nothing = ack;
}
