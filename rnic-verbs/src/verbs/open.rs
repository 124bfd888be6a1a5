//! Opening and closing a device.

use std::sync::Arc;

use rnic_client::Function;

use crate::c::{VERBS_ABI_IS_EXTENDED, ibv_context, ibv_device, ibv_pd, verbs_context};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Foreign, OfContext, all_of, live, publish, withdraw, zeroed};
use crate::verbs::adapter::Adapter;
use crate::verbs::ah::AhBody;
use crate::verbs::context::{ContextBody, any_context, start};
use crate::verbs::cq::CqBody;
use crate::verbs::device::{Device, VECTORS};
use crate::verbs::mr::MrBody;
use crate::verbs::mw::MwBody;
use crate::verbs::pd::{self, PdBody};
use crate::verbs::qp::QpBody;
use crate::verbs::srq::SrqBody;
use crate::verbs::{device_list, ops, session};

/// Opens a context of a device.
fn open(device: &Arc<Device>, adapter: &Arc<Adapter>) -> Result<*mut ibv_context, Errno> {
    let opened = ContextBody::open(device.clone(), adapter.clone(), &ops::SERVED)?;
    let mut head: verbs_context = zeroed();
    (ops::SERVED.context)(&mut head);
    head.sz = size_of::<verbs_context>();
    let context = &mut head.context;
    context.device = adapter.head().0;
    context.cmd_fd = opened.async_events().fd();
    context.async_fd = context.cmd_fd;
    context.num_comp_vectors = VECTORS.cast_signed();
    context.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    context.abi_compat = VERBS_ABI_IS_EXTENDED;
    let head = publish(head, opened).as_ptr();
    // SAFETY: the structure has just been published.
    Ok(unsafe { &raw mut (*head).context })
}

/// Returns the context shared by all ids of a device. Context and device stay open until the
/// process ends, because programs keep objects of them.
pub(crate) fn default_context(
    device: &Arc<Device>,
    adapter: &Arc<Adapter>,
) -> Result<*mut ibv_context, Errno> {
    let mut kept = adapter.defaults.context.lock();
    if kept.is_null() {
        *kept = Foreign(open(device, adapter)?);
    }
    Ok(kept.0)
}

/// Returns the PD of QPs that a program creates without one. It also lasts until the process ends.
pub(crate) fn default_pd(
    device: &Arc<Device>,
    adapter: &Arc<Adapter>,
) -> Result<*mut ibv_pd, Errno> {
    let context = default_context(device, adapter)?;
    let mut kept = adapter.defaults.pd.lock();
    if kept.is_null() {
        *kept = Foreign(pd::alloc(context)?);
    }
    Ok(kept.0)
}

fn open_device(device: *mut ibv_device) -> Result<*mut ibv_context, Errno> {
    let found = session::with_head(device).ok_or_else(|| device_list::no_device(device))?;
    found.1.check().map_err(|errno| errno.with_number(libc::ENODEV))?;
    found.0.admit(Function::OpenDevice.call())?;
    open(&found.0, &found.1)
}

/// Closes a context. The context that ids share stays open.
fn close_device(of: *mut ibv_context) -> Result<(), Errno> {
    let found = any_context(of)?;
    let device = found.device();
    device.admit(Function::CloseDevice.call())?;
    if found.adapter().defaults.context.lock().0 == of {
        // Current and later ids of the process use it.
        return Ok(());
    }
    // SAFETY: no thread uses the context or its objects, now or later (ibv_close_device(3)).
    unsafe {
        // A forked child must not destroy objects of its parent.
        if device.is_ours() {
            destroy_objects(of);
        }
        withdraw::<ContextBody>(start(of)).map(drop)
    }
}

/// Destroys the objects of a context, as the kernel does when the descriptor of the context is
/// closed. Destroys each object before the objects that it uses, and does not wait for
/// unacknowledged events. Completion channels remain: each has its own descriptor.
///
/// # Safety
///
/// No thread uses the objects, now or later.
unsafe fn destroy_objects(of: *mut ibv_context) {
    // SAFETY: the caller guarantees it.
    unsafe {
        destroy_each::<Arc<QpBody>>(of, |qp| qp.detach());
        destroy_each::<Arc<SrqBody>>(of, |srq| srq.detach());
        destroy_each::<MwBody>(of, |_| {});
        destroy_each::<MrBody>(of, |mr| mr.deregister().unwrap_or_else(|errno| errno.log()));
        destroy_each::<Arc<CqBody>>(of, |cq| {
            cq.detach();
            cq.leave_channel();
        });
        destroy_each::<AhBody>(of, |_| {});
        destroy_each::<Arc<PdBody>>(of, |_| {});
    }
}

/// # Safety
///
/// The same as for [`destroy_objects`].
unsafe fn destroy_each<B: OfContext>(of: *mut ibv_context, detach: impl Fn(&B)) {
    for head in all_of::<B>(of) {
        live::<B>(head).map_or_else(|errno| errno.log(), |body| detach(&body));
        // SAFETY: the caller guarantees it.
        unsafe { withdraw::<B>(head) }.map_or_else(|errno| errno.log(), drop);
    }
}

entry! {
    uncancelled ibv_open_device(device: *mut ibv_device) -> pointer<ibv_context> = open_device;
    uncancelled ibv_close_device(of: *mut ibv_context) -> status = close_device;
}
