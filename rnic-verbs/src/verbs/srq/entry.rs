//! Shared receive queues.

use std::ffi::c_int;
use std::sync::Arc;

use crate::c::*;
use crate::errno::{Errno, pointer, status};
use crate::ffi::handles::{Foreign, live, publish, withdraw, zeroed};
use crate::system;
use crate::verbs::pd::PdBody;
use crate::verbs::srq::SrqBody;

use crate::ffi::pointers::{argument, argument_mut};
use crate::verbs::context::entry::context;
use crate::verbs::qp::chain::{Chain, nth_receive};

/// Creates a shared receive queue. Writes back the granted attributes.
pub(crate) unsafe fn make(
    pd: *mut ibv_pd,
    wanted: *mut ibv_srq_init_attr,
) -> Result<*mut ibv_srq, Errno> {
    // SAFETY: `wanted` is null or valid, and `live` finds `pd` before it is followed. The caller
    // does not destroy `pd` or close its context during the call (ibv_create_srq(3)).
    unsafe {
        let wanted = argument_mut(wanted, "srq_init_attr")?;
        let found = live::<Arc<PdBody>>(pd)?;
        let of = (*pd).context;
        let srq = SrqBody::create(found, context(of)?, &wanted.attr)?;
        wanted.attr = srq.attr(0);
        let mut head: ibv_srq = zeroed();
        head.context = of;
        head.srq_context = wanted.srq_context;
        head.pd = pd;
        head.handle = srq.id().0;
        head.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
        head.cond = libc::PTHREAD_COND_INITIALIZER;
        let at = publish(head, srq.clone()).as_ptr();
        srq.set_head(Foreign(at));
        Ok(at)
    }
}

/// ibv_create_srq(3).
pub(crate) unsafe extern "C" fn ibv_create_srq(
    pd: *mut ibv_pd,
    wanted: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    let _guard = system::uncancelled();
    // SAFETY: `make` has the contract of this function.
    pointer(unsafe { make(pd, wanted) })
}

/// ibv_create_srq_ex(3).
pub(crate) unsafe extern "C" fn create_srq_ex(
    _of: *mut ibv_context,
    wanted: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    let _guard = system::uncancelled();
    // SAFETY: `make_ex` has the contract of this function.
    pointer(unsafe { make_ex(wanted) })
}

/// Like [`create_srq_ex`]. Only basic SRQs with a PD are supported.
pub(crate) unsafe fn make_ex(wanted: *mut ibv_srq_init_attr_ex) -> Result<*mut ibv_srq, Errno> {
    // SAFETY: `wanted` is null or valid, and the caller does not destroy its PD during the call
    // (ibv_create_srq_ex(3)).
    unsafe {
        let w = argument_mut(wanted, "srq_init_attr_ex")?;
        let basic = w.comp_mask & IBV_SRQ_INIT_ATTR_TYPE == 0 || w.srq_type == IBV_SRQT_BASIC;
        if !basic {
            let reason = format_args!("srq_type {}: only IBV_SRQT_BASIC is supported", w.srq_type);
            return Err(Errno::unsupported(reason));
        }
        let mask = w.comp_mask & !(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD);
        if mask != 0 {
            let reason = format_args!("SRQ comp_mask {mask:#x} is not supported");
            return Err(Errno::unsupported(reason));
        }
        if w.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 {
            let reason = format_args!("comp_mask lacks IBV_SRQ_INIT_ATTR_PD");
            return Err(Errno::invalid(reason));
        }
        let mut plain = ibv_srq_init_attr { srq_context: w.srq_context, attr: w.attr };
        let made = make(w.pd, &mut plain)?;
        w.attr = plain.attr;
        Ok(made)
    }
}

/// ibv_modify_srq(3). Sets the limit only: the size of an SRQ is fixed.
pub(crate) unsafe extern "C" fn ibv_modify_srq(
    of: *mut ibv_srq,
    attributes: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    let mask = mask.cast_unsigned();
    // SAFETY: the caller does not destroy `of` during the call, and `attributes` is null or valid
    // (ibv_modify_srq(3)).
    status(unsafe {
        live::<Arc<SrqBody>>(of).and_then(|srq| {
            let attr = argument(attributes, "srq_attr")?;
            match mask {
                0 => Ok(()),
                IBV_SRQ_LIMIT => srq.arm_limit(attr.srq_limit),
                _ => {
                    let reason =
                        format_args!("srq_attr_mask {mask:#x}: only IBV_SRQ_LIMIT is supported");
                    Err(Errno::unsupported(reason))
                }
            }
        })
    })
}

/// ibv_query_srq(3).
pub(crate) unsafe extern "C" fn ibv_query_srq(
    of: *mut ibv_srq,
    attributes: *mut ibv_srq_attr,
) -> c_int {
    // SAFETY: the caller does not destroy `of` during the call, and `attributes` is null or has
    // room for an `ibv_srq_attr` (ibv_query_srq(3)).
    unsafe {
        status(live::<Arc<SrqBody>>(of).and_then(|srq| {
            *argument_mut(attributes, "srq_attr")? = srq.attributes()?;
            Ok(())
        }))
    }
}

/// ibv_destroy_srq(3).
pub(crate) unsafe extern "C" fn ibv_destroy_srq(of: *mut ibv_srq) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: no other thread uses `of`, now or later (ibv_destroy_srq(3)).
    status(unsafe {
        live::<Arc<SrqBody>>(of)
            .and_then(|srq| srq.destroy())
            .and_then(|()| withdraw::<Arc<SrqBody>>(of))
            .map(drop)
    })
}

/// `ibv_get_srq_num(3)`. Unlike with XRC, completions do not contain the number.
pub(crate) unsafe extern "C" fn get_srq_num(of: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: the caller does not destroy `of` during the call, and `number` has room for a `u32`
    // (ibv_get_srq_num(3)).
    unsafe { status(live::<Arc<SrqBody>>(of).map(|srq| number.write(srq.id().0))) }
}

/// ibv_post_srq_recv(3).
pub(crate) unsafe extern "C" fn post_srq_recv(
    of: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller does not destroy `of` during the call, `wr` is a chain that `Chain::new`
    // accepts, and `bad` is null or has room for a pointer (ibv_post_srq_recv(3)).
    unsafe {
        let (posted, result) = match live::<Arc<SrqBody>>(of) {
            Ok(srq) => srq.post_receive(Chain::<ibv_recv_wr>::new(wr)),
            Err(errno) => (0, Err(errno)),
        };
        if result.is_err() && !bad.is_null() {
            *bad = nth_receive(wr, posted);
        }
        status(result)
    }
}
