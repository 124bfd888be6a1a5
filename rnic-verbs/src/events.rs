//! The thread that brings events of the daemon to those whom they concern.
//!
//! It is the one thread that this library starts in a program. All signals are blocked in it, and
//! it touches nothing of the program's but the descriptors that were made for it.

use std::sync::{Arc, Weak};

use rnic_client::{Context, Event};

use crate::async_events::AsyncEvent;
use crate::device::Device;
use crate::errno::Errno;
use crate::{c, cm, log, system};

/// Starts to listen to the daemon's events for a device, until it is dropped or the daemon gone.
pub(crate) fn listen(device: &Arc<Device>) -> Result<(), Errno> {
    let context = device.context.clone();
    let device = Arc::downgrade(device);
    let thread = std::thread::Builder::new().name("rnic-events".into());
    let (tell, started) = std::sync::mpsc::channel();
    let run = move || {
        system::is_own_thread();
        // Whoever opens the device waits for this, so that it knows its threads.
        let _ = tell.send(());
        run(&context, &device);
    };
    system::without_signals(|| thread.spawn(run))?;
    let _ = started.recv();
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
            if let Some(cq) = device.cq(cq) {
                cq.tell(c::IBV_EVENT_CQ_ERR);
            }
        }
        Event::SrqLimit { srq, .. } => {
            if let Some(srq) = device.srq(srq) {
                srq.tell(c::IBV_EVENT_SRQ_LIMIT_REACHED);
            }
        }
        Event::SrqError { srq, .. } => {
            if let Some(srq) = device.srq(srq) {
                srq.tell(c::IBV_EVENT_SRQ_ERR);
            }
        }
        Event::LastWqeReached { qp, .. } => {
            if let Some(qp) = device.qp(qp) {
                qp.tell(c::IBV_EVENT_QP_LAST_WQE_REACHED);
            }
        }
        Event::QpFatal { qp, ref reason, .. } => {
            log::debug(|| format!("QP {qp}: {reason}"));
            if let Some(qp) = device.qp(qp) {
                qp.tell(c::IBV_EVENT_QP_FATAL);
            }
            cm::deliver(device, event);
        }
        Event::SrqUnfair { .. } => {}
        Event::EventsLost { count } => log::debug(|| format!("{count} events were lost")),
        Event::Detached { reason } => log::debug(|| format!("memory was detached: {reason}")),
        event => cm::deliver(device, event),
    }
}

/// The daemon is gone: every connection has ended, and the device is of no more use.
fn lost(device: &Arc<Device>) {
    for cq in device.cqs.read().values() {
        cq.context_events().push(AsyncEvent::of_device(c::IBV_EVENT_DEVICE_FATAL));
    }
    cm::lost(device);
}
