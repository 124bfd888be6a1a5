//! Shared receive queues.

use std::ffi::c_int;
use std::sync::Arc;

use crate::c::*;
use crate::errno::{Errno, pointer, status};
use crate::object::{Foreign, live, publish, withdraw, zeroed};
use crate::pd::PdBody;
use crate::srq::SrqBody;
use crate::system;

use super::context::context;
use super::work::{Chain, nth_receive};
use super::{argument, argument_mut};

/// Makes a shared receive queue, and writes back what was granted.
pub(super) unsafe fn make(
    pd: *mut ibv_pd,
    wanted: *mut ibv_srq_init_attr,
) -> Result<*mut ibv_srq, Errno> {
    // SAFETY: as the module says.
    unsafe {
        let wanted = argument_mut(wanted, "srq_init_attr")?;
        let found = live::<Arc<PdBody>>(pd)?;
        let of = (*pd).context;
        let srq = SrqBody::create(found, context(of)?, &wanted.attr)?;
        wanted.attr = srq.says(0);
        let mut head: ibv_srq = zeroed();
        (head.context, head.srq_context, head.pd) = (of, wanted.srq_context, pd);
        head.handle = srq.id().0;
        head.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
        head.cond = libc::PTHREAD_COND_INITIALIZER;
        let at = publish(head, srq.clone()).as_ptr();
        srq.published(Foreign(at));
        Ok(at)
    }
}

/// ibv_create_srq(3).
pub(crate) unsafe extern "C" fn ibv_create_srq(
    pd: *mut ibv_pd,
    wanted: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    pointer(unsafe { make(pd, wanted) })
}

/// ibv_create_srq_ex(3).
pub(super) unsafe extern "C" fn create_srq_ex(
    _of: *mut ibv_context,
    wanted: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    pointer(unsafe { make_ex(wanted) })
}

/// As [`create_srq_ex`]: the basic kind in a domain, which is all there is.
pub(super) unsafe fn make_ex(wanted: *mut ibv_srq_init_attr_ex) -> Result<*mut ibv_srq, Errno> {
    // SAFETY: as the module says.
    unsafe {
        let w = argument_mut(wanted, "srq_init_attr_ex")?;
        let basic = w.comp_mask & IBV_SRQ_INIT_ATTR_TYPE == 0 || w.srq_type == IBV_SRQT_BASIC;
        if !basic {
            let reason = format_args!("srq_type {}: only IBV_SRQT_BASIC is served", w.srq_type);
            return Err(Errno::unsupported(reason));
        }
        let mask = w.comp_mask & !(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD);
        if mask != 0 {
            let reason = format_args!("comp_mask {mask:#x} of a shared receive queue");
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

/// ibv_modify_srq(3): the limit; the size stays as it was made.
pub(crate) unsafe extern "C" fn ibv_modify_srq(
    of: *mut ibv_srq,
    attributes: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    let mask = mask.cast_unsigned();
    // SAFETY: as the module says.
    status(unsafe {
        live::<Arc<SrqBody>>(of).and_then(|srq| {
            let says = argument(attributes, "srq_attr")?;
            match mask {
                0 => Ok(()),
                IBV_SRQ_LIMIT => srq.arm_limit(says.srq_limit),
                _ => {
                    let reason = format_args!("srq_attr_mask {mask:#x}: only IBV_SRQ_LIMIT");
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
    // SAFETY: as the module says.
    unsafe {
        status(live::<Arc<SrqBody>>(of).and_then(|srq| {
            *argument_mut(attributes, "srq_attr")? = srq.attributes()?;
            Ok(())
        }))
    }
}

/// ibv_destroy_srq(3).
pub(crate) unsafe extern "C" fn ibv_destroy_srq(of: *mut ibv_srq) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    status(unsafe {
        live::<Arc<SrqBody>>(of)
            .and_then(|srq| srq.destroy())
            .and_then(|()| withdraw::<Arc<SrqBody>>(of))
            .map(drop)
    })
}

/// `ibv_get_srq_num(3)`: the number that completions do not name, as they do with XRC.
pub(super) unsafe extern "C" fn get_srq_num(of: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: as the module says.
    unsafe { status(live::<Arc<SrqBody>>(of).map(|srq| number.write(srq.id().0))) }
}

/// ibv_post_srq_recv(3).
pub(super) unsafe extern "C" fn post_srq_recv(
    of: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the module says.
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
