//! Completion channels and queues.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::c::*;
use crate::channel::ChannelBody;
use crate::cq::CqBody;
use crate::errno::{Errno, minus_one, negative, pointer, status};
use crate::object::{Foreign, Kind, live, live_or_null, publish, withdraw, zeroed};
use crate::system;

use super::context::{check_same, context};
use super::cq_ex;
use super::events::count;

/// Makes a completion channel.
pub(super) unsafe fn make_channel(of: *mut ibv_context) -> Result<*mut ibv_comp_channel, Errno> {
    // SAFETY: as the module says.
    let channel = ChannelBody::create(unsafe { context(of) }?)?;
    let mut head: ibv_comp_channel = zeroed();
    (head.context, head.fd) = (of, channel.fd());
    Ok(publish(head, channel).as_ptr())
}

/// Makes a completion queue.
pub(super) unsafe fn make_cq(
    of: *mut ibv_context,
    entries: u32,
    program: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: u32,
) -> Result<*mut ibv_cq_ex, Errno> {
    // SAFETY: as the module says.
    let of_channel = unsafe { live_or_null::<Arc<ChannelBody>>(channel)? };
    if of_channel.is_some() {
        // SAFETY: as the module says.
        check_same(Kind::CompletionChannel, unsafe { (*channel).context }, of)?;
    }
    // SAFETY: as the module says.
    let cq = CqBody::create(unsafe { context(of) }?, entries, of_channel, vector)?;
    let mut head: ibv_cq_ex = zeroed();
    let base = &mut head.cq_base;
    (base.context, base.channel, base.cq_context) = (of, channel, program);
    (base.handle, base.cqe) = cq.size();
    base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    base.cond = libc::PTHREAD_COND_INITIALIZER;
    cq_ex::operations(&mut head);
    let at = publish(head, cq.clone()).as_ptr();
    cq.published(Foreign(at.cast()));
    if of_channel.is_some() {
        // SAFETY: as the module says.
        unsafe { count((&raw mut (*channel).refcnt).cast(), 1) };
    }
    Ok(at)
}

/// The queue that C names.
pub(super) unsafe fn cq<'a>(cq: *mut ibv_cq) -> Result<&'a Arc<CqBody>, Errno> {
    // SAFETY: as the module says; every queue is the head of an extended one.
    unsafe { live::<Arc<CqBody>>(cq.cast()) }
}

/// ibv_create_comp_channel(3).
pub(crate) unsafe extern "C" fn ibv_create_comp_channel(
    of: *mut ibv_context,
) -> *mut ibv_comp_channel {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    pointer(unsafe { make_channel(of) })
}

/// ibv_destroy_comp_channel(3).
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    status(unsafe {
        live::<Arc<ChannelBody>>(channel)
            .and_then(|found| found.check_unused())
            .and_then(|()| withdraw::<Arc<ChannelBody>>(channel))
            .map(drop)
    })
}

/// ibv_create_cq(3).
pub(crate) unsafe extern "C" fn ibv_create_cq(
    of: *mut ibv_context,
    entries: c_int,
    program: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    let _whole = system::uncancelled();
    // A negative number is refused as 0 entries, and as a vector beyond the last one.
    let entries = u32::try_from(entries).unwrap_or(0);
    let vector = u32::try_from(vector).unwrap_or(u32::MAX);
    // SAFETY: as the module says.
    pointer(unsafe { make_cq(of, entries, program, channel, vector) }).cast()
}

/// ibv_resize_cq(3).
pub(crate) unsafe extern "C" fn ibv_resize_cq(of: *mut ibv_cq, entries: c_int) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    unsafe {
        let resized = cq(of).and_then(|cq| cq.resize(u32::try_from(entries).unwrap_or(0)));
        status(resized.map(|entries| (*of).cqe = entries))
    }
}

/// ibv_destroy_cq(3).
pub(crate) unsafe extern "C" fn ibv_destroy_cq(of: *mut ibv_cq) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    status(unsafe {
        cq(of).and_then(|cq| cq.destroy()).and_then(|()| {
            let channel = (*of).channel;
            withdraw::<Arc<CqBody>>(of.cast())?;
            if let Ok(Some(_)) = live_or_null::<Arc<ChannelBody>>(channel) {
                // Minus one.
                count((&raw mut (*channel).refcnt).cast(), u32::MAX);
            }
            Ok(())
        })
    })
}

/// ibv_get_cq_event(3). A thread may be cancelled in it: nothing is held meanwhile.
pub(crate) unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    of: *mut *mut ibv_cq,
    program: *mut *mut c_void,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let next = live::<Arc<ChannelBody>>(channel).and_then(|channel| channel.next());
        minus_one(next.map(|cq| {
            let head = cq.head().0;
            *of = head;
            *program = (*head).cq_context;
        }))
    }
}

/// ibv_ack_cq_events(3).
pub(crate) unsafe extern "C" fn ibv_ack_cq_events(of: *mut ibv_cq, events: u32) {
    // SAFETY: as the module says.
    match unsafe { cq(of) } {
        Ok(cq) => {
            // SAFETY: as the module says.
            unsafe { count(&raw mut (*of).comp_events_completed, events) };
            cq.completion_events.acknowledge(events);
        }
        Err(errno) => errno.log(),
    }
}

/// ibv_poll_cq(3).
pub(super) unsafe extern "C" fn poll_cq(of: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    let room = usize::try_from(room).unwrap_or(0);
    // SAFETY: as the module says: there is room for so many, which the program may not have
    // initialised; `ibv_wc` has no invalid values but its padding, which nobody reads.
    unsafe {
        negative(cq(of).and_then(|cq| match room {
            0 => Ok(0),
            _ => cq.poll(std::slice::from_raw_parts_mut(to, room)),
        })) as c_int
    }
}

/// ibv_req_notify_cq(3).
pub(super) unsafe extern "C" fn req_notify_cq(of: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as the module says.
    status(unsafe { cq(of) }.and_then(|cq| cq.arm(solicited_only != 0)))
}
