//! Protection domains, memory regions and windows.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use rnic_client::ProgramRange;

use crate::c::*;
use crate::errno::{Errno, pointer, status};
use crate::mr::{MrBody, MrWanted};
use crate::mw::MwBody;
use crate::object::{body, publish, withdraw, zeroed};
use crate::pd::PdBody;
use crate::system;

use super::context::context;

/// Makes a protection domain of a context.
pub(super) unsafe fn allocate_pd(of: *mut ibv_context) -> Result<*mut ibv_pd, Errno> {
    // SAFETY: as the module says.
    let pd = PdBody::allocate(unsafe { context(of) }.ok_or(Errno::INVALID)?)?;
    let mut head: ibv_pd = zeroed();
    head.context = of;
    head.handle = pd.client().id().0;
    Ok(publish(head, pd).as_ptr())
}

/// ibv_alloc_pd(3).
pub(crate) unsafe extern "C" fn ibv_alloc_pd(of: *mut ibv_context) -> *mut ibv_pd {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    pointer(unsafe { allocate_pd(of) })
}

/// ibv_dealloc_pd(3).
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    unsafe {
        match body::<Arc<PdBody>>(pd) {
            None => status(Err(Errno::INVALID)),
            Some(found) if !found.is_unused() => status(Err(Errno(libc::EBUSY))),
            Some(_) => {
                drop(withdraw::<Arc<PdBody>>(pd));
                0
            }
        }
    }
}

/// Registers a range for a program.
unsafe fn register(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: Option<u64>,
    access: c_uint,
) -> Result<*mut ibv_mr, Errno> {
    // SAFETY: as the module says.
    let found = unsafe { body::<Arc<PdBody>>(pd) }.ok_or(Errno::INVALID)?;
    let mr = MrBody::register(found, &MrWanted { range: range(address, length)?, iova, access })?;
    let mut head: ibv_mr = zeroed();
    fill(&mut head, &mr, address, length);
    // SAFETY: as the module says.
    head.context = unsafe { (*pd).context };
    head.pd = pd;
    Ok(publish(head, mr).as_ptr())
}

fn range(address: *mut c_void, length: usize) -> Result<ProgramRange, Errno> {
    // SAFETY: the program says that others may write there, by registering it; the bytes are its
    // own and not this library's.
    unsafe { ProgramRange::new(address as u64, length as u64) }.ok_or(Errno::INVALID)
}

fn fill(head: &mut ibv_mr, mr: &MrBody, address: *mut c_void, length: usize) {
    (head.addr, head.length) = (address, length);
    let (handle, key) = mr.numbers();
    (head.handle, head.lkey, head.rkey) = (handle, key, key);
}

/// ibv_reg_mr(3).
pub(crate) unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
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
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    pointer(unsafe { register(pd, address, length, Some(iova), access.cast_unsigned()) })
}

/// ibv_reg_mr(3), as programs call it that were built since 2020 and know hints.
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    pointer(unsafe { register(pd, address, length, Some(iova), access) })
}

/// ibv_rereg_mr(3): the region keeps its keys.
pub(crate) unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let _whole = system::uncancelled();
    let flags = flags.cast_unsigned();
    // SAFETY: as the module says.
    unsafe {
        let Some(old) = body::<MrBody>(mr) else { return IBV_REREG_MR_ERR_INPUT };
        let new_pd = if flags & IBV_REREG_MR_CHANGE_PD != 0 { pd } else { (*mr).pd };
        let (address, length, iova) = match flags & IBV_REREG_MR_CHANGE_TRANSLATION {
            0 => ((*mr).addr, (*mr).length, Some(old.iova())),
            _ => (address, length, None),
        };
        let access = match flags & IBV_REREG_MR_CHANGE_ACCESS {
            0 => old.access(),
            _ => access.cast_unsigned(),
        };
        let (Some(found), Ok(range), true) = (
            body::<Arc<PdBody>>(new_pd),
            range(address, length),
            flags != 0 && flags & !IBV_REREG_MR_FLAGS_SUPPORTED == 0,
        ) else {
            status(Err(Errno::INVALID));
            return IBV_REREG_MR_ERR_INPUT;
        };
        let wanted = MrWanted { range, iova, access };
        match old.replace(found, &wanted) {
            Ok(()) => {
                fill(&mut *mr, old, address, length);
                (*mr).pd = new_pd;
                0
            }
            Err(errno) => {
                status(Err(errno));
                IBV_REREG_MR_ERR_INPUT
            }
        }
    }
}

/// ibv_dereg_mr(3).
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    unsafe {
        let Some(found) = body::<MrBody>(mr) else { return status(Err(Errno::INVALID)) };
        match found.deregister() {
            Ok(()) => {
                drop(withdraw::<MrBody>(mr));
                0
            }
            Err(errno) => status(Err(errno)),
        }
    }
}

/// `ibv_advise_mr(3)`: advice is for devices with page tables of their own.
pub(super) unsafe extern "C" fn advise_mr(
    _pd: *mut ibv_pd,
    _advice: c_uint,
    _flags: u32,
    _list: *mut ibv_sge,
    _count: u32,
) -> c_int {
    status(Err(Errno::UNSUPPORTED))
}

/// ibv_alloc_mw(3).
pub(super) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    let allocated = unsafe { body::<Arc<PdBody>>(pd) }
        .ok_or(Errno::INVALID)
        .and_then(|pd| MwBody::allocate(pd, kind));
    let Ok(mw) = allocated else {
        pointer::<ibv_mw>(allocated.map(|_| null_mut()));
        return null_mut();
    };
    let mut head: ibv_mw = zeroed();
    // SAFETY: as the module says.
    head.context = unsafe { (*pd).context };
    head.pd = pd;
    (head.handle, head.rkey) = mw.numbers();
    head.type_ = kind;
    publish(head, mw).as_ptr()
}

/// ibv_dealloc_mw(3).
pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    let _whole = system::uncancelled();
    if mw.is_null() {
        return status(Err(Errno::INVALID));
    }
    // SAFETY: as the module says.
    drop(unsafe { withdraw::<MwBody>(mw) });
    0
}
