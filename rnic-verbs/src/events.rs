//! The thread that brings events of the daemon to those whom they concern.
//!
//! The library starts this thread in a program, and those that copy for a daemon of another user.
//! It blocks all signals and uses no object of the program except the descriptors created for it.

use std::sync::{Arc, Weak};

use rnic_client::{Context, Event};

use crate::device::Device;
use crate::errno::Errno;
use crate::{c, cm, log};

/// Starts to listen to the daemon's events for a device, until it is dropped or the daemon gone.
pub(crate) fn listen(device: &Arc<Device>) -> Result<(), Errno> {
    let context = device.context.clone();
    let device = Arc::downgrade(device);
    let thread = std::thread::Builder::new().name("rnic-events".into());
    rnic_client::without_signals(|| thread.spawn(move || run(&context, &device)))?;
    Ok(())
}

fn run(context: &Context, device: &Weak<Device>) {
    loop {
        let due = device.upgrade().and_then(|device| device.ids.retries.due_in());
        let event = context.next_event(due);
        let Some(device) = device.upgrade() else { return };
        device.ids.retries.run();
        match event {
            Ok(Some(event)) => deliver(&device, event),
            Ok(None) => {}
            Err(error) => {
                log::debug(|| format!("no more events: {error}"));
                return lost(&device);
            }
        }
    }
}

fn deliver(device: &Arc<Device>, event: Event) {
    match event {
        Event::CqError { cq, .. } => {
            device.with_cq(cq, |cq| cq.tell(c::IBV_EVENT_CQ_ERR));
        }
        Event::SrqLimit { srq, .. } => {
            device.with_srq(srq, |srq| srq.tell(c::IBV_EVENT_SRQ_LIMIT_REACHED));
        }
        Event::SrqError { srq, .. } => {
            device.with_srq(srq, |srq| srq.tell(c::IBV_EVENT_SRQ_ERR));
        }
        Event::LastWqeReached { qp, .. } => {
            device.with_qp(qp, |qp| qp.tell(c::IBV_EVENT_QP_LAST_WQE_REACHED));
        }
        Event::QpFatal { qp, ref reason, .. } => {
            log::debug(|| format!("QP {qp}: {reason}"));
            device.with_qp(qp, |qp| qp.tell(c::IBV_EVENT_QP_FATAL));
            cm::deliver(device, event);
        }
        Event::CommunicationEstablished { qp, .. } => {
            device.with_qp(qp, |qp| qp.tell(c::IBV_EVENT_COMM_EST));
        }
        Event::AccessError { qp, .. } => {
            device.with_qp(qp, |qp| qp.tell(c::IBV_EVENT_QP_ACCESS_ERR));
        }
        Event::RequestError { qp, .. } => {
            device.with_qp(qp, |qp| qp.tell(c::IBV_EVENT_QP_REQ_ERR));
        }
        Event::SendQueueDrained { qp, .. } => {
            device.with_qp(qp, |qp| qp.drained());
        }
        Event::SrqUnfair { .. } => {}
        Event::GidsChanged => device.gids_changed(),
        Event::EventsLost { count } => {
            log::debug(|| format!("{count} events were lost"));
            device.ids.events_lost();
            // A change of the table may have been among them.
            device.gids.invalidate();
        }
        Event::Detached { reason } => log::debug(|| format!("memory was detached: {reason}")),
        event => cm::deliver(device, event),
    }
}

/// The daemon is gone: every connection has ended, and the device is of no more use.
fn lost(device: &Arc<Device>) {
    // Asking makes it known to those who poll.
    let _ = device.is_usable();
    device.has_died();
    cm::lost(device);
}
