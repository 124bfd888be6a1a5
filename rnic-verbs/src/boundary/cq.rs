//! Completion channels and queues.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::c::*;
use crate::channel::ChannelBody;
use crate::cq::CqBody;
use crate::errno::{Errno, minus_one, pointer, status};
use crate::object::{Foreign, body, publish, withdraw, zeroed};
use crate::system;

use super::context::context;
use super::cq_ex;

/// Makes a completion channel.
pub(super) unsafe fn make_channel(of: *mut ibv_context) -> Result<*mut ibv_comp_channel, Errno> {
    // SAFETY: as the module says.
    let channel = ChannelBody::create(unsafe { context(of) }.ok_or(Errno::INVALID)?)?;
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
    let (context, of_channel) = unsafe { (context(of), body::<Arc<ChannelBody>>(channel)) };
    let cq = CqBody::create(context.ok_or(Errno::INVALID)?, entries, of_channel, vector)?;
    let mut head: ibv_cq_ex = zeroed();
    let base = &mut head.cq_base;
    (base.context, base.channel, base.cq_context) = (of, channel, program);
    (base.handle, base.cqe) = cq.size();
    base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    base.cond = libc::PTHREAD_COND_INITIALIZER;
    cq_ex::operations(&mut head);
    let at = publish(head, cq.clone()).as_ptr();
    cq.published(Foreign(at.cast()));
    Ok(at)
}

/// The queue behind a pointer of C's.
pub(super) unsafe fn cq<'a>(cq: *mut ibv_cq) -> Option<&'a Arc<CqBody>> {
    // SAFETY: as the module says; every queue is the head of an extended one.
    unsafe { body::<Arc<CqBody>>(cq.cast()) }
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
    unsafe {
        match body::<Arc<ChannelBody>>(channel) {
            None => status(Err(Errno::INVALID)),
            Some(found) if !found.is_unused() => status(Err(Errno(libc::EBUSY))),
            Some(_) => {
                drop(withdraw::<Arc<ChannelBody>>(channel));
                0
            }
        }
    }
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
    let (entries, vector) = (u32::try_from(entries).ok(), u32::try_from(vector).ok());
    let made = entries.zip(vector).ok_or(Errno::INVALID).and_then(|(entries, vector)| {
        // SAFETY: as the module says.
        unsafe { make_cq(of, entries, program, channel, vector) }
    });
    pointer(made).cast()
}

/// ibv_resize_cq(3).
pub(crate) unsafe extern "C" fn ibv_resize_cq(of: *mut ibv_cq, entries: c_int) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    unsafe {
        let found = cq(of).zip(u32::try_from(entries).ok()).ok_or(Errno::INVALID);
        let resized = found.and_then(|(cq, entries)| cq.resize(entries));
        status(resized.map(|entries| (*of).cqe = entries))
    }
}

/// ibv_destroy_cq(3).
pub(crate) unsafe extern "C" fn ibv_destroy_cq(of: *mut ibv_cq) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    unsafe {
        match cq(of).ok_or(Errno::INVALID).and_then(|cq| cq.destroy()) {
            Ok(()) => {
                drop(withdraw::<Arc<CqBody>>(of.cast()));
                0
            }
            Err(errno) => status(Err(errno)),
        }
    }
}

/// ibv_get_cq_event(3). A thread may be cancelled in it: nothing is held meanwhile.
pub(crate) unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    of: *mut *mut ibv_cq,
    program: *mut *mut c_void,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let next = match body::<Arc<ChannelBody>>(channel) {
            Some(channel) => channel.next(),
            None => Err(Errno::INVALID),
        };
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
    if let Some(cq) = unsafe { cq(of) } {
        cq.completion_events.acknowledge(events);
    }
}

/// ibv_poll_cq(3).
pub(super) unsafe extern "C" fn poll_cq(of: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    let room = usize::try_from(room).unwrap_or(0);
    // SAFETY: as the module says: there is room for so many, which the program may not have
    // initialised; `ibv_wc` has no invalid values but its padding, which nobody reads.
    unsafe {
        let Some(cq) = cq(of) else { return -libc::EINVAL };
        if room == 0 {
            return 0;
        }
        match cq.poll(std::slice::from_raw_parts_mut(to, room)) {
            Ok(taken) => taken as c_int,
            Err(errno) => -errno.0,
        }
    }
}

/// ibv_req_notify_cq(3).
pub(super) unsafe extern "C" fn req_notify_cq(of: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as the module says.
    let found = unsafe { cq(of) }.ok_or(Errno::INVALID);
    status(found.and_then(|cq| cq.arm(solicited_only != 0)))
}
