//! The thread that receives events from the daemon and passes them to the objects concerned.
//!
//! Apart from this thread, the library starts only the copier threads for a daemon that cannot
//! access the program's memory. The event thread blocks all signals, and accesses no objects of the
//! program except descriptors created for it.

use std::sync::{Arc, Weak};

use rnic_client::{AsyncObject, Context, Event};

use crate::errno::Errno;
use crate::verbs::device::Device;
use crate::{c, log};

/// Starts the thread for a device. It ends when the device is dropped or the daemon is gone.
pub(crate) fn listen(device: &Arc<Device>) -> Result<(), Errno> {
    let context = device.context.clone();
    let device = Arc::downgrade(device);
    let thread = std::thread::Builder::new().name("rnic-events".into());
    rnic_client::without_signals(|| thread.spawn(move || run(&context, &device)))?;
    Ok(())
}

fn run(context: &Context, device: &Weak<Device>) {
    loop {
        let due = device.upgrade().and_then(|device| device.connections()?.due_in());
        let event = context.next_event(due);
        let Some(device) = device.upgrade() else { return };
        if let Some(connections) = device.connections() {
            connections.run_due();
        }
        match event {
            Ok(Some(event)) => deliver(&device, event),
            Ok(None) => {}
            Err(error) => {
                log::debug(|| format!("no more events: {error}"));
                return daemon_gone(&device);
            }
        }
    }
}

fn deliver(device: &Arc<Device>, event: Event) {
    match event {
        Event::CqError { cq, .. } => device.push_cq_event(cq, c::IBV_EVENT_CQ_ERR),
        Event::SrqLimit { srq, .. } => device.push_srq_event(srq, c::IBV_EVENT_SRQ_LIMIT_REACHED),
        Event::SrqError { srq, .. } => device.push_srq_event(srq, c::IBV_EVENT_SRQ_ERR),
        Event::LastWqeReached { qp, .. } => {
            device.push_qp_event(qp, c::IBV_EVENT_QP_LAST_WQE_REACHED)
        }
        Event::QpFatal { qp, ref reason, .. } => {
            log::debug(|| format!("QP {qp}: {reason}"));
            device.push_qp_event(qp, c::IBV_EVENT_QP_FATAL);
            manage(device, event);
        }
        Event::CommunicationEstablished { qp, .. } => {
            device.push_qp_event(qp, c::IBV_EVENT_COMM_EST)
        }
        Event::AccessError { qp, .. } => device.push_qp_event(qp, c::IBV_EVENT_QP_ACCESS_ERR),
        Event::RequestError { qp, .. } => device.push_qp_event(qp, c::IBV_EVENT_QP_REQ_ERR),
        Event::SendQueueDrained { qp, .. } => {
            if let Some(qp) = device.qps.read().get(&qp) {
                qp.drained();
            }
        }
        Event::Async { event, object } => {
            let kind = event;
            match object {
                AsyncObject::Device(name) => device.push_device_event(&name, kind),
                AsyncObject::Qp(qp) => device.push_qp_event(qp, kind),
                AsyncObject::Cq(cq) => device.push_cq_event(cq, kind),
                AsyncObject::Srq(srq) => device.push_srq_event(srq, kind),
            }
        }
        Event::SrqUnfair { .. } => {}
        Event::DatagramLost { qp, reason, .. } => log::debug(|| format!("QP {qp}: {reason}")),
        Event::GidsChanged => device.gids_changed(),
        Event::DevicesChanged => device.tables_changed(),
        Event::DeviceRemoved { device: name } => {
            let gone = device.unplugged(&name);
            if let Some(connections) = device.connections() {
                gone.iter().for_each(|gone| connections.unplugged(gone));
            }
        }
        Event::EventsLost { count } => {
            log::debug(|| format!("{count} events were lost"));
            if let Some(connections) = device.connections() {
                connections.events_lost();
            }
            // The lost events may have included a change of the devices.
            device.tables_changed();
        }
        Event::Detached { reason } => log::debug(|| format!("memory was detached: {reason}")),
        event => manage(device, event),
    }
}

/// Passes an event to connection management.
fn manage(device: &Device, event: Event) {
    if let Some(connections) = device.connections() {
        connections.deliver(&device.context, event);
    }
}

/// Handles the end of the daemon: all connections have ended, and the device is unusable.
fn daemon_gone(device: &Arc<Device>) {
    // The check sets the state that polling threads read.
    let _ = device.is_usable();
    device.push_device_fatal();
    if let Some(connections) = device.connections() {
        connections.daemon_gone();
    }
}
