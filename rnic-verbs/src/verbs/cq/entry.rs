//! Completion channels and queues.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::c::*;
use crate::errno::{Errno, minus_one, negative, pointer, status};
use crate::ffi::handles::{Foreign, Kind, live, live_or_null, publish, withdraw, zeroed};
use crate::system;
use crate::verbs::channel::ChannelBody;
use crate::verbs::cq::CqBody;

use crate::rdmacm::events::count;
use crate::verbs::context::entry::{check_same, context};
use crate::verbs::cq::extended as cq_ex;

/// Creates a completion channel.
pub(crate) unsafe fn make_channel(of: *mut ibv_context) -> Result<*mut ibv_comp_channel, Errno> {
    // SAFETY: the caller does not close `of` during the call.
    let channel = ChannelBody::create(unsafe { context(of) }?)?;
    let mut head: ibv_comp_channel = zeroed();
    head.context = of;
    head.fd = channel.fd();
    Ok(publish(head, channel).as_ptr())
}

/// Creates a completion queue.
pub(crate) unsafe fn make_cq(
    of: *mut ibv_context,
    entries: u32,
    program: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: u32,
) -> Result<*mut ibv_cq_ex, Errno> {
    // SAFETY: the caller does not destroy `channel` during the call.
    let of_channel = unsafe { live_or_null::<Arc<ChannelBody>>(channel)? };
    if of_channel.is_some() {
        // SAFETY: `live_or_null` has found `channel`.
        check_same(Kind::CompletionChannel, unsafe { (*channel).context }, of)?;
    }
    // SAFETY: the caller does not close `of` during the call.
    let cq = CqBody::create(unsafe { context(of) }?, entries, of_channel, vector)?;
    let mut head: ibv_cq_ex = zeroed();
    let base = &mut head.cq_base;
    base.context = of;
    base.channel = channel;
    base.cq_context = program;
    (base.handle, base.cqe) = cq.size();
    base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    base.cond = libc::PTHREAD_COND_INITIALIZER;
    cq_ex::operations(&mut head);
    let at = publish(head, cq.clone()).as_ptr();
    cq.set_head(Foreign(at.cast()));
    if of_channel.is_some() {
        // SAFETY: `live_or_null` has found `channel`, which is not destroyed during the call.
        unsafe { count((&raw mut (*channel).refcnt).cast(), 1) };
    }
    Ok(at)
}

/// Returns the queue of a C pointer.
pub(crate) unsafe fn cq<'a>(cq: *mut ibv_cq) -> Result<&'a Arc<CqBody>, Errno> {
    // SAFETY: each queue is an `ibv_cq_ex`, and it is not destroyed while the result is in use.
    unsafe { live::<Arc<CqBody>>(cq.cast()) }
}

/// ibv_create_comp_channel(3).
pub(crate) unsafe extern "C" fn ibv_create_comp_channel(
    of: *mut ibv_context,
) -> *mut ibv_comp_channel {
    let _guard = system::uncancelled();
    // SAFETY: `make_channel` has the contract of this function.
    pointer(unsafe { make_channel(of) })
}

/// ibv_destroy_comp_channel(3).
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: no other thread uses `channel`, now or later (ibv_destroy_comp_channel(3)).
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
    let _guard = system::uncancelled();
    // Negative arguments are refused like 0 entries and like a vector out of range.
    let entries = u32::try_from(entries).unwrap_or(0);
    let vector = u32::try_from(vector).unwrap_or(u32::MAX);
    // SAFETY: `make_cq` has the contract of this function.
    pointer(unsafe { make_cq(of, entries, program, channel, vector) }).cast()
}

/// ibv_resize_cq(3).
pub(crate) unsafe extern "C" fn ibv_resize_cq(of: *mut ibv_cq, entries: c_int) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: `cq` finds `of`, which is not destroyed during the call (ibv_resize_cq(3)).
    unsafe {
        let resized = cq(of).and_then(|cq| cq.resize(u32::try_from(entries).unwrap_or(0)));
        status(resized.map(|entries| (*of).cqe = entries))
    }
}

/// ibv_destroy_cq(3).
pub(crate) unsafe extern "C" fn ibv_destroy_cq(of: *mut ibv_cq) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: `cq` finds `of` and `live_or_null` its channel before they are followed, and no other
    // thread uses `of`, now or later (ibv_destroy_cq(3)).
    status(unsafe {
        cq(of).and_then(|cq| cq.destroy()).and_then(|()| {
            let channel = (*of).channel;
            withdraw::<Arc<CqBody>>(of.cast())?;
            if let Ok(Some(_)) = live_or_null::<Arc<ChannelBody>>(channel) {
                // Subtracts 1.
                count((&raw mut (*channel).refcnt).cast(), u32::MAX);
            }
            Ok(())
        })
    })
}

/// ibv_get_cq_event(3). A cancellation point: the call holds no resources while it waits.
pub(crate) unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    of: *mut *mut ibv_cq,
    program: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller does not destroy `channel` during the call, and `of` and `program` have
    // room for pointers (ibv_get_cq_event(3)). `CqBody::destroy` waits for the counted event.
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
    // SAFETY: the caller does not destroy `of` before it has acknowledged its events
    // (ibv_ack_cq_events(3)).
    match unsafe { cq(of) } {
        Ok(cq) => {
            // SAFETY: `cq` has found `of`.
            unsafe { count(&raw mut (*of).comp_events_completed, events) };
            cq.completion_events.acknowledge(events);
        }
        Err(errno) => errno.log(),
    }
}

/// ibv_poll_cq(3).
pub(crate) unsafe extern "C" fn poll_cq(of: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    let room = usize::try_from(room).unwrap_or(0);
    // SAFETY: `of` is not destroyed during the call. `to` has room for `room` entries
    // (ibv_poll_cq(3)), maybe uninitialised: fields accept every value, and padding is never read.
    unsafe {
        negative(cq(of).and_then(|cq| match room {
            0 => Ok(0),
            _ => cq.poll(std::slice::from_raw_parts_mut(to, room)),
        })) as c_int
    }
}

/// ibv_req_notify_cq(3).
pub(crate) unsafe extern "C" fn req_notify_cq(of: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller does not destroy `of` during the call (ibv_req_notify_cq(3)).
    status(unsafe { cq(of) }.and_then(|cq| cq.arm(solicited_only != 0)))
}
