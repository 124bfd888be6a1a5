//! Address handles.

use std::ffi::c_int;
use std::sync::Arc;

use super::context::context;
use crate::address_handle::AhBody;
use crate::c::*;
use crate::errno::{Errno, pointer, status};
use crate::object::{body, publish, withdraw, zeroed};
use crate::pd::PdBody;
use crate::system;

/// ibv_create_ah(3).
pub(crate) unsafe extern "C" fn ibv_create_ah(
    pd: *mut ibv_pd,
    attributes: *mut ibv_ah_attr,
) -> *mut ibv_ah {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    pointer(unsafe { create(pd, attributes) })
}

unsafe fn create(pd: *mut ibv_pd, attributes: *mut ibv_ah_attr) -> Result<*mut ibv_ah, Errno> {
    // SAFETY: as the module says.
    let (found, attributes, of) = unsafe {
        let found = body::<Arc<PdBody>>(pd).ok_or(Errno::INVALID)?;
        (found, attributes.as_ref().ok_or(Errno::INVALID)?, (*pd).context)
    };
    // SAFETY: as the module says: a domain has the context that it was made of.
    let gids = unsafe { context(of) }.ok_or(Errno::INVALID)?.gids();
    let ah = AhBody::new(found.user(), attributes, gids)?;
    let mut head: ibv_ah = zeroed();
    (head.context, head.pd) = (of, pd);
    Ok(publish(head, ah).as_ptr())
}

/// ibv_destroy_ah(3).
pub(crate) unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    let _whole = system::uncancelled();
    if ah.is_null() {
        return status(Err(Errno::INVALID));
    }
    // SAFETY: as the module says: it came from `ibv_create_ah`.
    drop(unsafe { withdraw::<AhBody>(ah) });
    0
}
