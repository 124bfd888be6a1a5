//! Protection domains, memory regions and windows.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use rnic_client::ProgramRange;

use crate::c::*;
use crate::errno::{Errno, pointer, status};
use crate::ffi::handles::{Kind, live, publish, withdraw, zeroed};
use crate::system;
use crate::verbs::mr::{MrBody, MrParams};
use crate::verbs::mw::MwBody;
use crate::verbs::pd::PdBody;

use crate::verbs::context::entry::{check_same, context};

/// Allocates a protection domain.
pub(crate) unsafe fn allocate_pd(of: *mut ibv_context) -> Result<*mut ibv_pd, Errno> {
    // SAFETY: the caller does not close `of` during the call.
    let pd = PdBody::allocate(unsafe { context(of) }?)?;
    let mut head: ibv_pd = zeroed();
    head.context = of;
    head.handle = pd.client().id().0;
    Ok(publish(head, pd).as_ptr())
}

/// ibv_alloc_pd(3).
pub(crate) unsafe extern "C" fn ibv_alloc_pd(of: *mut ibv_context) -> *mut ibv_pd {
    let _guard = system::uncancelled();
    // SAFETY: `allocate_pd` has the contract of this function.
    pointer(unsafe { allocate_pd(of) })
}

/// ibv_dealloc_pd(3).
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: no other thread uses `pd`, now or later (ibv_dealloc_pd(3)).
    status(unsafe {
        live::<Arc<PdBody>>(pd)
            .and_then(|found| found.check_unused())
            .and_then(|()| withdraw::<Arc<PdBody>>(pd))
            .map(drop)
    })
}

/// Registers a memory range.
unsafe fn register(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: Option<u64>,
    access: c_uint,
) -> Result<*mut ibv_mr, Errno> {
    // SAFETY: the caller does not destroy `pd` during the call.
    let found = unsafe { live::<Arc<PdBody>>(pd) }?;
    let mr = MrBody::register(found, &MrParams { range: range(address, length)?, iova, access })?;
    let mut head: ibv_mr = zeroed();
    fill(&mut head, &mr, address, length);
    // SAFETY: `live` has found `pd`.
    head.context = unsafe { (*pd).context };
    head.pd = pd;
    Ok(publish(head, mr).as_ptr())
}

fn range(address: *mut c_void, length: usize) -> Result<ProgramRange, Errno> {
    // SAFETY: by registering the range, the program lets others write to it; the memory is the
    // program's, not this library's.
    unsafe { ProgramRange::new(address as u64, length as u64) }.ok_or_else(|| {
        let reason = format_args!("{length} bytes at {address:p} are not a valid memory range");
        Errno::invalid(reason)
    })
}

fn fill(head: &mut ibv_mr, mr: &MrBody, address: *mut c_void, length: usize) {
    head.addr = address;
    head.length = length;
    let (handle, key) = mr.numbers();
    head.handle = handle;
    head.lkey = key;
    head.rkey = key;
}

/// ibv_reg_mr(3).
pub(crate) unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let _guard = system::uncancelled();
    // SAFETY: `register` has the contract of this function.
    pointer(unsafe { register(pd, address, length, None, access.cast_unsigned()) })
}

/// ibv_reg_mr_iova(3).
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    let _guard = system::uncancelled();
    // SAFETY: `register` has the contract of this function.
    pointer(unsafe { register(pd, address, length, Some(iova), access.cast_unsigned()) })
}

/// The `ibv_reg_mr` macros call this if `access` may have optional flags.
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    let _guard = system::uncancelled();
    // SAFETY: `register` has the contract of this function.
    pointer(unsafe { register(pd, address, length, Some(iova), access) })
}

/// ibv_rereg_mr(3). The region keeps its keys. Returns `IBV_REREG_MR_ERR_INPUT` if `mr` is invalid
/// or [`check_change`] fails, and `IBV_REREG_MR_ERR_CMD` for all other errors. After either, the
/// old region is unchanged.
pub(crate) unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let _guard = system::uncancelled();
    let flags = flags.cast_unsigned();
    // SAFETY: `live` finds `mr` and `new_pd` before any dereference, and the caller destroys
    // neither during the call (ibv_rereg_mr(3)).
    unsafe {
        let checked = live::<MrBody>(mr).and_then(|old| {
            check_change(flags, address, length, access)?;
            Ok(old)
        });
        let old = match checked {
            Ok(old) => old,
            Err(errno) => {
                errno.report();
                return IBV_REREG_MR_ERR_INPUT;
            }
        };
        let new_pd = if flags & IBV_REREG_MR_CHANGE_PD != 0 { pd } else { (*mr).pd };
        let (address, length, iova) = match flags & IBV_REREG_MR_CHANGE_TRANSLATION {
            0 => ((*mr).addr, (*mr).length, Some(old.iova())),
            _ => (address, length, None),
        };
        let access = match flags & IBV_REREG_MR_CHANGE_ACCESS {
            0 => old.access(),
            _ => access.cast_unsigned(),
        };
        let replaced = live::<Arc<PdBody>>(new_pd).and_then(|found| {
            check_same(Kind::Pd, (*new_pd).context, (*mr).context)?;
            if flags == 0 {
                return Err(Errno::invalid(format_args!("ibv_rereg_mr flags are 0")));
            }
            let range = range(address, length)?;
            old.replace(found, &MrParams { range, iova, access })
        });
        match replaced {
            Ok(()) => {
                fill(&mut *mr, old, address, length);
                (*mr).pd = new_pd;
                0
            }
            Err(errno) => {
                errno.report();
                IBV_REREG_MR_ERR_CMD
            }
        }
    }
}

/// Performs the checks that libibverbs itself performs before it calls the driver.
fn check_change(
    flags: c_uint,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> Result<(), Errno> {
    let unknown = flags & !IBV_REREG_MR_FLAGS_SUPPORTED;
    if unknown != 0 {
        let reason = format_args!("ibv_rereg_mr flags {flags:#x}: {unknown:#x} is unknown");
        return Err(Errno::invalid(reason));
    }
    if flags & IBV_REREG_MR_CHANGE_TRANSLATION != 0 && (address.is_null() || length == 0) {
        let reason = format_args!("CHANGE_TRANSLATION with {length} bytes at {address:p}");
        return Err(Errno::invalid(reason));
    }
    if flags & IBV_REREG_MR_CHANGE_ACCESS == 0 && access != 0 {
        let reason = format_args!("access {access:#x}, but flags lack IBV_REREG_MR_CHANGE_ACCESS");
        return Err(Errno::invalid(reason));
    }
    Ok(())
}

/// ibv_dereg_mr(3).
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: no other thread uses `mr`, now or later (ibv_dereg_mr(3)).
    status(unsafe {
        live::<MrBody>(mr)
            .and_then(|found| found.deregister())
            .and_then(|()| withdraw::<MrBody>(mr))
            .map(drop)
    })
}

/// `ibv_advise_mr(3)`, which is for devices with their own page tables.
pub(crate) unsafe extern "C" fn advise_mr(
    _pd: *mut ibv_pd,
    _advice: c_uint,
    _flags: u32,
    _list: *mut ibv_sge,
    _count: u32,
) -> c_int {
    status(Err(Errno::unsupported(format_args!("ibv_advise_mr: no on-demand paging"))))
}

/// ibv_alloc_mw(3).
pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    let _guard = system::uncancelled();
    // SAFETY: the caller does not destroy `pd` during the call (ibv_alloc_mw(3)).
    let found = unsafe { live::<Arc<PdBody>>(pd) };
    pointer(found.and_then(|found| MwBody::allocate(found, kind)).map(|mw| {
        let mut head: ibv_mw = zeroed();
        // SAFETY: `live` has found `pd`.
        head.context = unsafe { (*pd).context };
        head.pd = pd;
        (head.handle, head.rkey) = mw.numbers();
        head.type_ = kind;
        publish(head, mw).as_ptr()
    }))
}

/// ibv_dealloc_mw(3).
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: no other thread uses `mw`, now or later (ibv_dealloc_mw(3)).
    status(unsafe { withdraw::<MwBody>(mw) }.map(drop))
}
