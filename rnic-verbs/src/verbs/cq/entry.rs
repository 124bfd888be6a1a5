//! The C functions of completion queues.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use rnic_client::{CallObject, Function};

use super::{CqBody, cq};
use crate::c::*;
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Kind, live, live_or_null, publish, withdraw, zeroed};
use crate::ffi::pointers::{InOut, Out, add, get, set};
use crate::verbs::channel::ChannelBody;
use crate::verbs::context::{check_same, context};

pub(crate) fn create(
    of: *mut ibv_context,
    entries: u32,
    program: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: u32,
) -> Result<*mut ibv_cq_ex, Errno> {
    let of_channel = live_or_null::<Arc<ChannelBody>>(channel)?;
    if let Some(channel) = of_channel {
        check_same(Kind::CompletionChannel, get!(channel.context), of)?;
    }
    let context = context(of)?;
    let cq = CqBody::create(&context, entries, of_channel.as_deref(), vector)?;
    let mut head: ibv_cq_ex = zeroed();
    let base = &mut head.cq_base;
    base.context = of;
    base.channel = channel;
    base.cq_context = program;
    base.handle = cq.number();
    base.cqe = c_int::try_from(entries).unwrap_or(c_int::MAX);
    base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    base.cond = libc::PTHREAD_COND_INITIALIZER;
    (context.operations().cq)(&mut head);
    let at = publish(head, cq.clone()).as_ptr();
    cq.events.set_head(at.cast());
    if let Some(channel) = of_channel {
        add!(channel.refcnt += 1);
    }
    Ok(at)
}

fn create_basic(
    of: *mut ibv_context,
    entries: c_int,
    program: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> Result<*mut ibv_cq, Errno> {
    // Negative arguments are refused like 0 entries and like a vector out of range.
    let entries = u32::try_from(entries).unwrap_or(0);
    let vector = u32::try_from(vector).unwrap_or(u32::MAX);
    create(of, entries, program, channel, vector).map(<*mut ibv_cq_ex>::cast)
}

/// Completion fields that a program can request.
const READABLE: u64 = IBV_WC_EX_WITH_BYTE_LEN
    | IBV_WC_EX_WITH_IMM
    | IBV_WC_EX_WITH_QP_NUM
    | IBV_WC_EX_WITH_SRC_QP
    | IBV_WC_EX_WITH_SLID
    | IBV_WC_EX_WITH_SL
    | IBV_WC_EX_WITH_DLID_PATH_BITS;

/// Hints about the use of a queue, which have no effect.
const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;

fn create_ex(
    of: *mut ibv_context,
    wanted: InOut<ibv_cq_init_attr_ex>,
) -> Result<*mut ibv_cq_ex, Errno> {
    let w = wanted.required("cq_attr")?;
    let fields = get!(w.wc_flags) & !READABLE;
    if fields != 0 {
        return Err(unsupported!("wc_flags {fields:#x} are not supported"));
    }
    let mask = get!(w.comp_mask);
    // Without IBV_CQ_INIT_ATTR_MASK_FLAGS the field is not set.
    let has_flags = mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0;
    let flags = if has_flags { get!(w.flags) & !FLAGS } else { 0 };
    if flags != 0 {
        return Err(unsupported!("completion queue flags {flags:#x} are not supported"));
    }
    // Parent domains (IBV_CQ_INIT_ATTR_MASK_PD) are not supported.
    let mask = mask & !IBV_CQ_INIT_ATTR_MASK_FLAGS;
    if mask != 0 {
        return Err(unsupported!("completion queue comp_mask {mask:#x} is not supported"));
    }
    create(of, get!(w.cqe), get!(w.cq_context), get!(w.channel), get!(w.comp_vector))
}

fn resize(of: *mut ibv_cq, entries: c_int) -> Result<(), Errno> {
    let cq = cq(of)?;
    cq.resize(u32::try_from(entries).unwrap_or(0))?;
    set!(cq.cq_base.cqe = entries);
    Ok(())
}

pub(crate) fn destroy(of: *mut ibv_cq) -> Result<(), Errno> {
    let cq = cq(of)?;
    cq.destroy()?;
    let channel = get!(cq.cq_base.channel);
    // SAFETY: no thread uses `of`, now or later (ibv_destroy_cq(3)).
    drop(unsafe { withdraw::<Arc<CqBody>>(of.cast()) }?);
    if let Ok(channel) = live::<Arc<ChannelBody>>(channel) {
        // Subtracts 1.
        add!(channel.refcnt += u32::MAX);
    }
    Ok(())
}

fn destroy_by_program(of: *mut ibv_cq) -> Result<(), Errno> {
    let body = cq(of)?;
    body.device.admit(Function::DestroyCq.of(CallObject::Cq(body.cq.id())))?;
    destroy(of)
}

fn get_event(
    channel: *mut ibv_comp_channel,
    of: Out<*mut ibv_cq>,
    program: Out<*mut c_void>,
) -> Result<(), Errno> {
    let of = of.required("cq")?;
    let program = program.required("cq_context")?;
    let channel = live::<Arc<ChannelBody>>(channel)?;
    let head = channel.next()?.0;
    // `CqBody::destroy` waits for the counted event.
    let cq = cq(head)?;
    of.write(head);
    program.write(get!(cq.cq_base.cq_context));
    Ok(())
}

fn ack_events(of: *mut ibv_cq, events: u32) -> Result<(), Errno> {
    let cq = cq(of)?;
    add!(cq.cq_base.comp_events_completed += events);
    cq.completion_events.acknowledge(events);
    Ok(())
}

fn poll(of: *mut ibv_cq, room: c_int, to: Out<ibv_wc>) -> Result<usize, Errno> {
    let cq = cq(of)?;
    match usize::try_from(room).unwrap_or(0) {
        0 => Ok(0),
        // SAFETY: `to` has room for `room` entries (ibv_poll_cq(3)).
        room => cq.poll(unsafe { to.required("wc")?.slots(room) }),
    }
}

fn req_notify(of: *mut ibv_cq, solicited_only: c_int) -> Result<(), Errno> {
    cq(of)?.arm(solicited_only != 0)
}

entry! {
    uncancelled ibv_create_cq(
        of: *mut ibv_context, entries: c_int, program: *mut c_void, channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> pointer<ibv_cq> = create_basic;
    uncancelled create_cq_ex(
        of: *mut ibv_context, wanted: InOut<ibv_cq_init_attr_ex>,
    ) -> pointer<ibv_cq_ex> = create_ex;
    uncancelled ibv_resize_cq(of: *mut ibv_cq, entries: c_int) -> status = resize;
    uncancelled ibv_destroy_cq(of: *mut ibv_cq) -> status = destroy_by_program;
    /// ibv_get_cq_event(3). Holds no resources while it waits.
    cancellable ibv_get_cq_event(
        channel: *mut ibv_comp_channel, of: Out<*mut ibv_cq>, program: Out<*mut c_void>,
    ) -> minus_one = get_event;
    plain ibv_ack_cq_events(of: *mut ibv_cq, events: c_uint) -> nothing = ack_events;
    plain poll_cq(of: *mut ibv_cq, room: c_int, to: Out<ibv_wc>) -> negative<c_int> = poll;
    plain req_notify_cq(of: *mut ibv_cq, solicited_only: c_int) -> status = req_notify;
}
