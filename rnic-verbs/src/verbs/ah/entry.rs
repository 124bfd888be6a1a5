//! Address handles.

use std::ffi::c_int;
use std::sync::Arc;

use rnic_client::PdId;

use crate::c::*;
use crate::errno::{Errno, minus_one, pointer, status};
use crate::ffi::handles::{live, publish, withdraw, zeroed};
use crate::ffi::pointers::{argument, argument_mut};
use crate::system;
use crate::verbs::ah::{AhBody, Route, back_to_sender};
use crate::verbs::context::PORT;
use crate::verbs::context::entry::context;
use crate::verbs::pd::PdBody;

/// ibv_create_ah(3).
pub(crate) unsafe extern "C" fn ibv_create_ah(
    pd: *mut ibv_pd,
    attributes: *mut ibv_ah_attr,
) -> *mut ibv_ah {
    let _guard = system::uncancelled();
    // SAFETY: `create` has the contract of this function.
    pointer(unsafe { create(pd, attributes) })
}

unsafe fn create(pd: *mut ibv_pd, attributes: *mut ibv_ah_attr) -> Result<*mut ibv_ah, Errno> {
    // SAFETY: the caller does not destroy `pd` during the call, and `live` finds it before its
    // context is read. `attributes` is null or valid (ibv_create_ah(3)).
    let (found, attributes, of) = unsafe {
        let found = live::<Arc<PdBody>>(pd)?;
        (found, argument(attributes, "attr")?, (*pd).context)
    };
    // SAFETY: the caller does not close the context of `pd` during the call.
    let gids = unsafe { context(of) }?.gids();
    let ah = AhBody::new(found.user(), attributes, &gids)?;
    let mut head: ibv_ah = zeroed();
    head.context = of;
    head.pd = pd;
    Ok(publish(head, ah).as_ptr())
}

/// ibv_init_ah_from_wc(3). Unlike most of libibverbs, it fails with -1 and `errno`.
pub(crate) unsafe extern "C" fn ibv_init_ah_from_wc(
    of: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attributes: *mut ibv_ah_attr,
) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: `attributes_of` has the contract of this function.
    let found = unsafe { attributes_of(of, port, wc, grh) };
    // SAFETY: `attributes` is null or has room for an `ibv_ah_attr` (ibv_init_ah_from_wc(3)).
    let to = unsafe { argument_mut(attributes, "ah_attr") };
    minus_one(found.and_then(|found| to.map(|to| *to = found)))
}

/// ibv_create_ah_from_wc(3).
pub(crate) unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    let _guard = system::uncancelled();
    // SAFETY: `attributes_of` and `create` have the contract of this function, and `live` finds
    // `pd` before its context is read.
    pointer(unsafe {
        live::<Arc<PdBody>>(pd)
            .and_then(|_| attributes_of((*pd).context, port, wc, grh))
            .and_then(|mut attributes| create(pd, &raw mut attributes))
    })
}

/// Returns the attributes of a handle to the sender of a completed receive.
unsafe fn attributes_of(
    of: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
) -> Result<ibv_ah_attr, Errno> {
    // SAFETY: `wc` and `grh` are null or valid (ibv_create_ah_from_wc(3)). With `IBV_WC_GRH`, `grh`
    // has 40 bytes. The caller does not close `of` during the call.
    let (context, header) = unsafe {
        let wc = argument(wc, "wc")?;
        if wc.wc_flags & IBV_WC_GRH == 0 {
            return Err(Errno::invalid(format_args!("the completion has no GRH (IBV_WC_GRH)")));
        }
        if port != PORT {
            let reason = format_args!("port {port}: the device has port {PORT} only");
            return Err(Errno::invalid(reason));
        }
        (context(of)?, argument(grh, "grh")?.bytes)
    };
    back_to_sender(&header, &context.gids())
}

/// Returns the route of a handle, for a queue pair in this PD.
pub(crate) unsafe fn route(ah: *mut ibv_ah, pd: PdId) -> Result<Route, Errno> {
    // SAFETY: the caller does not destroy `ah` during the call.
    unsafe { live::<AhBody>(ah) }.and_then(|ah| ah.route(pd))
}

/// ibv_destroy_ah(3).
pub(crate) unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: no other thread uses `ah`, now or later (ibv_destroy_ah(3)).
    status(unsafe { withdraw::<AhBody>(ah) }.map(drop))
}
